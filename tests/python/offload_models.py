"""Models and loops for tests of ballast.offload(), and the comparison with the plain model. Needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import fake_device

WIDTH = 32


class Differs(AssertionError):
    pass


def same(plain: Any, ours: Any, what: str = "result") -> None:
    """Raises Differs unless both are equal, tensors in every bit."""
    if isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor):
        if plain.shape != ours.shape or plain.dtype != ours.dtype:
            raise Differs(f"{what}: {plain.dtype} {tuple(plain.shape)} and {ours.dtype} {tuple(ours.shape)}")
        plain, ours = plain.detach().cpu(), ours.detach().cpu()
        if not torch.equal(plain, ours):
            raise Differs(f"{what}: off by {(plain.float() - ours.float()).abs().max():g}")
    elif isinstance(plain, (list, tuple)):
        if len(plain) != len(ours):
            raise Differs(f"{what}: {len(plain)} and {len(ours)} values")
        for i, (one, other) in enumerate(zip(plain, ours)):
            same(one, other, f"{what}[{i}]")
    elif isinstance(plain, dict):
        if plain.keys() != ours.keys():
            raise Differs(f"{what}: keys {sorted(plain.keys() ^ ours.keys())}")
        for key, value in plain.items():
            same(value, ours[key], f"{what}.{key}")
    elif plain != ours:
        raise Differs(f"{what}: {plain!r} and {ours!r}")


def state(model: nn.Module) -> dict[str, Any]:
    """Copies of weights, gradients and buffers."""
    weights = {name: (p.detach().clone(), None if p.grad is None else p.grad.clone())
               for name, p in model.named_parameters()}
    return weights | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def compare(make: Callable[[], nn.Module], loop: Callable[[nn.Module, Any], Any], blocks: float = 3,
            strict: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    """Runs `loop(model, handle)` with the plain model and with an offloaded one that has room for this number of
    blocks. `names`: the argument `blocks` of offload(). Raises Differs if results or states differ, or if the device would have refused something."""
    plain, ours = make(), make()
    expected = loop(plain, None), state(plain)
    if "names" in options:
        options["blocks"] = options.pop("names")
    options.setdefault("device_bytes", fake_device.budget_of(ours, blocks))
    budget = options.pop("device_bytes")
    handle = fake_device.offload(ours, budget, **options)
    with fake_device.strict(handle) if strict else contextlib.nullcontext() as mode:
        got = loop(ours, handle), state(ours)
    same(expected[0], got[0])
    same(expected[1], got[1], "state")
    if strict and mode.faults:
        raise Differs("the device would refuse: " + mode.faults[0])
    if handle.report().peak_bytes > budget:
        raise Differs(f"{handle.report().peak_bytes} bytes in use, {budget} allowed")
    return ours, handle


# Models

class LoRA(nn.Module):
    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """A block of a diffusion transformer: attention and MLP, modulated by the condition."""

    def __init__(self, width: int = WIDTH, ratio: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, elementwise_affine=False), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        s1, b1, g1, s2, b2, g2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, -1)
        x = x + g1 * self.attn(self.norm1(x) * (1 + s1) + b1)
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    """`checkpoint`: None, or whether checkpointing is reentrant."""

    def __init__(self, layers: int = 8, checkpoint: bool | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.time, self.out = nn.Linear(8, width), nn.Linear(16, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(layers))
        self.checkpoint = checkpoint

    def condition(self, t: torch.Tensor) -> torch.Tensor:
        return self.time(torch.cos(t[:, None] * torch.arange(16, device=t.device)).to(t.dtype))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = self.condition(t)
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpoint is None or not self.training or not torch.is_grad_enabled():
                x = block(x, c)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, c, use_reentrant=self.checkpoint)
        return self.out(x)


def dit(lora: bool = False, checkpoint: bool | None = None, dtype: torch.dtype = torch.float32,
        layers: int = 8) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = DiT(layers, checkpoint)
        if lora:
            model.requires_grad_(False)
            for block in model.blocks:
                for name in "qkv":
                    setattr(block.attn, name, LoRA(getattr(block.attn, name)))
            model.embed.requires_grad_(True)  # reentrant checkpointing needs an input with a gradient
        return model.to(dtype)
    return make


def llama(layers: int = 6, tied: bool = True, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, **more))


# Loops

def data(step: int, tokens: int = 6, batch: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(step)
    return torch.randn(batch, tokens, 8, generator=g).to(dtype), torch.rand(batch, generator=g).to(dtype)


def tokens(step: int, count: int = 16) -> torch.Tensor:
    return torch.randint(0, 128, (2, count), generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(model: nn.Module, steps: int, optimizer: Any = None, each: Any = None,
          shape: Callable[[int], dict[str, int]] = lambda step: {},
          number: Callable[[int], int] = lambda step: step) -> list[Any]:
    """Trains a DiT. `each(step)`: called after each step; its result belongs to the losses. `number`: that of a
    step's data."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        x, t = data(number(step), dtype=next(model.parameters()).dtype, **shape(step))
        optimizer.zero_grad()
        loss = (model(x, t) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if each:
            losses.append(each(step))
    return losses


def train_on_text(model: nn.Module, optimizer: Any, steps: Any) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
