"""Lightning that validates every four steps and says nothing of AutoPrec."""

import warnings

import lightning
import torch
import torch.nn.functional as F
from common import Net
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(1)
data = TensorDataset(torch.randn(640, 16), torch.randint(0, 10, (640,)))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    enable_progress_bar=False,
    log_every_n_steps=1,
    val_check_interval=4,
    enable_checkpointing=False,
    logger=False,
)
trainer.fit(Module(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=160))
