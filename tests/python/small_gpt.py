"""A small GPT of torch, and a loop that trains it. Needs torch."""

import torch


class Attention(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True,
                                                     bias=False)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(),
                                       torch.nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Model(torch.nn.Module):
    """A small GPT with a tied embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(Attention(width) for _ in range(2))
        self.head = torch.nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)  # as in GPT-2
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model(dtype)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range,
          clip: float = 0.0, micro: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for number in range(micro):
            loss = loss_of(model, tokens(step * micro + number)) / micro
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * micro)
    return losses


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]
