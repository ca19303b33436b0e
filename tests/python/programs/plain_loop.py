"""Trains a small language model in a plain PyTorch loop, with the optimizer in host memory.

    python plain_loop.py [STEPS]
"""

import sys

import ballast
import torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256), torch.nn.GELU(),
                            torch.nn.Linear(256, 256)).to(torch.bfloat16)
text = torch.tensor(list(open(__file__, "rb").read()))

# The only lines that differ from a loop with torch.optim.AdamW.
optimizer = ballast.OffloadAdamW(model, lr=3e-3, max_grad_norm=1.0, overlap=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)

for step in range(steps):
    starts = torch.randint(len(text) - 65, (16,))
    batch = torch.stack([text[start : start + 65] for start in starts])
    loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(),
                                             batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step}: loss {loss.item():.3f}, norm {optimizer.grad_norm:.3f}")
