"""Draws its batches from every source of randomness that a script can hold, seeded and not."""

import random
import uuid

import numpy
import torch
import torch.nn.functional as F
from common import Net, log

torch.manual_seed(1)
random.seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(4000, 16)
classes = data.argmax(1) % 10
held = random.Random(3)
unseeded = random.Random()
generator = numpy.random.default_rng()
legacy = numpy.random.RandomState(3)
for step in range(200):
    rows = random.sample(range(4000), 8)
    rows += [held.randrange(4000), unseeded.randrange(4000), int(generator.integers(4000)), legacy.randint(4000)]
    rows += [numpy.random.randint(4000), uuid.uuid4().int % 4000, random.SystemRandom().randrange(4000)]
    rows += [random.Random().randrange(4000), int(numpy.random.default_rng().integers(4000))]
    loss = F.cross_entropy(model(data[rows]), classes[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
