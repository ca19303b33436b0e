"""Fine-tunes a model with optimizer states on NVMe, and continues after an interruption.

    python nvme_finetune.py RUN_DIRECTORY [STEPS]

RUN_DIRECTORY gets a checkpoint every 10 steps: weights (model.pt) and optimizer
(optimizer.safetensors). Started again, the program continues from it, with the same bits as a run
that was not interrupted. The states lie in an unnamed file in RUN_DIRECTORY, which disappears with
the process.
"""

import argparse
import os
import sys

import ballast
import torch

SEQUENCE, BATCH, MICRO_BATCHES = 64, 4, 2


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True, bias=False)
        self.mlp = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width),
                                       torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, width)
        self.positions = torch.nn.Embedding(SEQUENCE, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(text: torch.Tensor, number: int) -> torch.Tensor:
    """The batch depends on its number alone, so a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE + 1] for start in starts])


def save(folder: str, step: int, model: torch.nn.Module, optimizer: ballast.OffloadAdamW) -> None:
    """Both files are complete under other names before the old checkpoint is replaced."""
    new = os.path.join(folder, f"step-{step}")
    os.makedirs(new, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(new, "model.pt"))
    optimizer.save(new)
    pointer = os.path.join(folder, "newest.tmp")
    with open(pointer, "w", encoding="utf-8") as file:
        file.write(str(step))
    os.replace(pointer, os.path.join(folder, "newest"))


def load(folder: str, model: torch.nn.Module, optimizer: ballast.OffloadAdamW) -> int:
    """Returns the number of steps of the checkpoint; 0 without one."""
    try:
        with open(os.path.join(folder, "newest"), encoding="utf-8") as file:
            step = int(file.read())
    except FileNotFoundError:
        return 0
    newest = os.path.join(folder, f"step-{step}")
    model.load_state_dict(torch.load(os.path.join(newest, "model.pt")))
    optimizer.load(newest)
    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("steps", nargs="?", type=int, default=30)
    arguments = parser.parse_args()
    os.makedirs(arguments.folder, exist_ok=True)
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    optimizer = ballast.OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, device="nvme",
                                     path=arguments.folder, overlap=True, gradient_hooks=True)
    text = torch.tensor(list(open(__file__, "rb").read()))
    for step in range(load(arguments.folder, model, optimizer), arguments.steps):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            batch = batch_of(text, step * MICRO_BATCHES + micro)
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(),
                                                     batch[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(f"step {step}: loss {total!r}", flush=True)
        if (step + 1) % 10 == 0:
            save(arguments.folder, step + 1, model, optimizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
