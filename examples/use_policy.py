"""Load the policy that a search wrote and train under it: five lines of AutoPrec in an ordinary loop.

autoprec search examples/train_gpt.py          # writes policy.yaml
python examples/use_policy.py policy.yaml
"""

import sys

import torch
from train_gpt import GPT, read_text

import autoprec

policy = autoprec.load(sys.argv[1])  # data only: nothing in the file is run
torch.manual_seed(0)
model = GPT(width=384, depth=3, heads=6, context=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
policy.apply(model)  # in place, before or after the optimizer is built
optimizer = policy.wrap_optimizer(optimizer)  # the same object; its checkpoints carry the policy's state

text, offsets = read_text(1_000_000), torch.arange(65)
for step in range(5):
    window = text[torch.randint(len(text) - 65, (8, 1)) + offsets]
    loss = model(window[:, :-1], window[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}  loss {loss.item():.4f}")

print("executed as asked:", policy.audit(model).ok)
policy.remove(model)  # bit-identical to the model before apply
