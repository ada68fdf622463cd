"""REINFORCE on a pole that is balanced in eight lines of physics."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(1)
policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

for episode in range(40):
    state = (torch.rand(4) - 0.5) * 0.1
    log_probs, rewards = [], []
    while len(rewards) < 60 and state[2].abs() < 0.3:
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        force = 1.0 if action.item() else -1.0
        turn = 0.3 * state[2] - 0.1 * force
        state = state + 0.1 * torch.stack([state[1], torch.tensor(force), state[3], turn * 10])
        rewards.append(1.0)
    returns = torch.tensor([0.98 ** (len(rewards) - t) for t in range(len(rewards))]).flip(0)
    loss = -(torch.stack(log_probs) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(episode, len(rewards))
