"""LoRA with PEFT under a policy: python peft_lora.py policy.yaml.

The frozen base runs in FP8 in fprop and dgrad (it has no wgrad); the adapters, which learn, stay in bf16.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from toy import batches, make_model

import autoprec

model = get_peft_model(make_model(), LoraConfig(r=8, target_modules=["0", "2"], lora_dropout=0.0))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

policy = autoprec.load(sys.argv[1])  # layers: "*.base_layer" fp8, "*lora_*" bf16
policy.apply(model)  # after get_peft_model: the adapters are layers of their own
optimizer = policy.wrap_optimizer(optimizer, model)

for x, y in batches(60):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

audit = policy.audit(model)
print(audit)
print(f"loss {loss.item():.4f}; executed as asked: {audit.ok}")
