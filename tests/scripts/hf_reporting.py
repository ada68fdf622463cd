"""Hugging Face Trainer that evaluates every four steps and says nothing of AutoPrec."""

import torch
from common import Net
from transformers import Trainer, TrainingArguments, set_seed

set_seed(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x=None, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


rows = [{"x": torch.randn(16), "labels": i % 10} for i in range(64)]
arguments = TrainingArguments(
    output_dir="hf-out",
    per_device_train_batch_size=4,
    max_steps=40,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model=Model(), args=arguments, train_dataset=rows, eval_dataset=rows[:16]).train()
