"""Lightning Trainer under a policy: python lightning_trainer.py policy.yaml."""

import sys

import lightning
import torch
from toy import batches, make_model

from autoprec.integrations.lightning import PolicyTrainerPrecision


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.last = None

    def training_step(self, batch, _index):
        x, y = batch
        self.last = torch.nn.functional.mse_loss(self.model(x), y)
        return self.last

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


plugin = PolicyTrainerPrecision(sys.argv[1], prefix="model")
trainer = lightning.Trainer(
    plugins=[plugin],
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(list(batches(60)), batch_size=None))
print(f"loss {module.last.item():.4f}; executed as asked: {plugin.policy.audit(module.model).ok}")
