"""Hugging Face Trainer under a policy: python hf_trainer.py policy.yaml.

The unmodified script works too: autoprec run --policy policy.yaml your_trainer_script.py
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from toy import batches, make_model
from transformers import Trainer

from autoprec.integrations.transformers import PolicyCallback, training_arguments


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x, labels):
        out = self.body(x)
        return {"loss": torch.nn.functional.mse_loss(out.float(), labels), "logits": out}


class Samples(Dataset):
    def __init__(self):
        pairs = list(batches(20))
        self.x, self.y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


with tempfile.TemporaryDirectory() as folder:
    arguments = training_arguments(  # TrainingArguments, with the precision left to the policy
        sys.argv[1],
        output_dir=folder,
        max_steps=30,
        per_device_train_batch_size=64,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    callback = PolicyCallback(sys.argv[1])
    trainer = Trainer(Regression(), arguments, train_dataset=Samples(), callbacks=[callback])
    result = trainer.train()

print(f"loss {result.training_loss:.4f}; breaches: {len(callback.guard.breaches)}")
