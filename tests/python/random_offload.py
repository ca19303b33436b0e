"""Random sequences of what users do with a model, on two sides: a model of ballast.offload() on a fake device, and the
plain model as the oracle. Results and states have to be equal in every bit. Needs torch.

    random_offload.py --first 0 --count 2000     # these seeds, one sequence each
    random_offload.py --first 17 --keep 0,3,5    # of the sequence of seed 17 these actions alone

Prints each seed before its sequence, so that a crash can be traced. The first sequence that fails is shortened,
printed with the command that repeats it, and ends the program with exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import io
import pathlib
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ballast
import fake_device
from offload_models import WIDTH, DiT, DiTBlock, LoRA, data, same, state
from random_actions import Action, shorten

LENGTH = 14  # actions of a sequence


WEIGHTS = {"forward": 3, "backward": 3, "twice": 1, "step": 2, "train": 6, "zero": 1, "sample": 2, "skip": 1, "visit": 2,
           "write_in_a_pass": 1, "on_device": 1, "write": 2, "merge": 1, "save": 1, "load": 1, "deepcopied": 1,
           "pickled": 0.5, "averaged": 1, "freeze": 1, "add_adapter": 1, "unload_adapter": 0.7, "replace_parameter": 0.5,
           "new_optimizer": 0.3, "norm": 1, "clip": 1, "fail": 1, "offload_again": 0.7, "drop_graphs": 0.3, "check": 2}


class Stop(Exception):
    """Raised on purpose in the middle of a pass."""


@dataclass(frozen=True)
class Setup:
    lora: bool
    checkpoint: bool | None
    dtype: torch.dtype
    blocks: float  # that fit on the device
    names: Any
    prefetch: int
    trained: str
    delay: float
    strict: bool
    optimizer: str
    hooks: Any
    seed: int


def draw_setup(seed: int) -> Setup:
    rng = random.Random(seed)
    optimizer = rng.choice(("SGD", "AdamW", "AdamW", "OffloadAdamW", "overlap"))
    return Setup(
        lora=rng.random() < 0.5, checkpoint=rng.choice((None, None, False, True)),
        dtype=rng.choice((torch.float32, torch.bfloat16)), blocks=rng.choice((1, 1, 1.6, 2, 3, 9)),
        names=rng.choice(("auto", "auto", ("blocks.?",), ("blocks.?", "blocks.?.mlp"))),
        prefetch=rng.choice((0, 1, 2, 3)), trained=rng.choice(("stream", "stream", "keep", "auto")),
        delay=rng.choice((0.0, 0.0, 0.0003)), strict=rng.random() < 0.3, optimizer=optimizer,
        hooks=rng.choice((False, "auto", True)) if optimizer in ("OffloadAdamW", "overlap") else False, seed=seed)


class Counting(DiTBlock):
    """Changes a large buffer in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(512))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean().expand_as(self.mean), 0.1)
        return super().forward(x, c)


def make_model(setup: Setup) -> nn.Module:
    torch.manual_seed(setup.seed)
    model = DiT(4, setup.checkpoint)
    if setup.checkpoint is None:
        model.blocks[1] = Counting()
    if setup.lora:
        model.requires_grad_(False)
        for block in model.blocks:
            for name in "qv":
                setattr(block.attn, name, LoRA(getattr(block.attn, name)))
    model.embed.requires_grad_(True)
    return model.to(setup.dtype)


class Side:
    """One of the two models, with its optimizer, losses whose backward pass has not run, and results."""

    device = torch.device("cpu")
    weights = WEIGHTS

    def __init__(self, setup: Setup, offloaded: bool) -> None:
        self.setup = setup
        self.model = make_model(setup) if offloaded else make_model(setup).to(self.device)
        self.offloaded = offloaded
        self.handle: Any = None
        self.waiting: list[torch.Tensor] = []
        self.saved: Any = None
        self.average: Any = None
        self.modes = contextlib.ExitStack()
        if offloaded:
            self.offload()
        self.make_optimizer()

    @staticmethod
    def adapt(setup: Setup) -> Setup:
        """The setup as far as this kind of side supports it."""
        return setup

    def offload(self) -> None:
        setup = self.setup
        budget = fake_device.budget_of(self.model, setup.blocks) + 32768  # for what a block gets later
        frozen = any(not p.requires_grad for p in self.model.blocks.parameters())
        self.handle = self.make_handle(budget, setup.trained if frozen else "stream")
        if setup.strict:
            self.mode = self.modes.enter_context(fake_device.Strict(self.handle))

    def make_handle(self, budget: int, trained: str) -> Any:
        setup = self.setup
        return fake_device.offload(self.model, budget, delay=setup.delay, seed=setup.seed, blocks=setup.names,
                                   trained=trained, prefetch=setup.prefetch)

    def remove(self) -> None:
        if self.handle is not None:
            self.check_handle()
            self.modes.close()
            self.handle.remove()
            self.handle = None

    def make_optimizer(self) -> None:
        kind = self.setup.optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if kind in ("SGD", "AdamW"):
            self.optimizer: Any = getattr(torch.optim, kind)(parameters, lr=1e-2)
        else:
            self.optimizer = ballast.OffloadAdamW(
                parameters, lr=1e-2, overlap=kind == "overlap" and self.offloaded, gradient_hooks=self.setup.hooks)

    def check_handle(self) -> None:
        report = self.handle.report()
        assert report.peak_bytes <= report.pool_bytes
        if self.setup.strict:
            assert not self.mode.faults, f"the device would refuse: {self.mode.faults[0]}"

    def data(self, n: int) -> Any:
        return data(n, tokens=3 + n % 4, dtype=self.setup.dtype)

    def block(self, n: int) -> nn.Module:
        return self.model.blocks[n % len(self.model.blocks)]

    def condition(self, n: int) -> torch.Tensor:
        return self.model.condition(self.data(n)[1])

    # Actions; each returns what has to be equal

    def forward(self, n: int) -> Any:
        self.waiting.append(self.model(*self.data(n)).pow(2).mean())

    def backward(self, n: int) -> Any:
        if self.waiting:
            loss = self.waiting.pop(n % len(self.waiting))
            loss.backward()
            return loss.detach()

    def twice(self, n: int) -> Any:
        x, t = self.data(n)
        loss = self.model(x, t).mean() + self.model(x + 1, t).mean()
        if self.setup.checkpoint is not True:
            loss.backward(retain_graph=True)
        loss.backward()

    def step(self, n: int) -> Any:
        self.optimizer.step()
        if self.setup.optimizer == "overlap":
            self.optimizer.zero_grad()

    def train(self, n: int) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(*self.data(n)).pow(2).mean()
        loss.backward()
        self.step(n)
        return loss.detach()

    def zero(self, n: int) -> Any:
        self.optimizer.zero_grad(set_to_none=n % 2 == 0)

    def sample(self, n: int) -> Any:
        self.model.train(n % 3 == 0)
        with torch.inference_mode() if n % 2 else torch.no_grad():
            result = self.model(*self.data(n)).clone()
        self.model.train()
        return result

    def skip(self, n: int) -> Any:
        """Some blocks, in another order."""
        h, c = self.model.embed(self.data(n)[0]), self.condition(n)
        for i in (n, n + 2, n, n // 3):
            h = self.block(i)(h, c)
        h.mean().backward()

    def visit(self, n: int) -> Any:
        """A block's weights are used in the pass of another block."""
        if self.setup.blocks < 2:  # both have to be on the device at once
            return None
        w = self.block(n + 3).attn.k.weight

        def use(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
            view = w.t()
            return F.linear(y, w) + y @ view + (view[0] if n % 5 else w.sum(1))

        hook = self.block(n).register_forward_hook(use)
        try:
            loss = self.model(*self.data(n)).mean()
        finally:
            hook.remove()
        loss.backward()
        return loss.detach()

    def write_in_a_pass(self, n: int) -> Any:
        if self.setup.blocks < 2:
            return None
        w = self.block(n + 1).mlp[2].weight

        def write(module: nn.Module, args: Any, y: torch.Tensor) -> None:
            w.mul_(1.01)

        hook = self.block(n).register_forward_hook(write)
        try:
            with torch.no_grad():
                return self.model(*self.data(n))
        finally:
            hook.remove()

    def on_device(self, n: int) -> Any:
        block = self.block(n)
        with self.handle.on_device(block) if self.handle else contextlib.nullcontext():
            ones = torch.ones(8, WIDTH, dtype=self.setup.dtype, device=self.device)
            loss = F.linear(self.data(n)[0] @ ones, block.mlp[0].weight).mean()
            if n % 2 and loss.requires_grad:
                loss.backward()
        if n % 2 == 0 and loss.requires_grad:
            loss.backward()
        return loss.detach()

    def write(self, n: int) -> Any:
        weight = self.block(n).mlp[0].weight
        if n % 4 == 0:
            weight.data.mul_(1.01)
        elif n % 4 == 1:
            if not self.waiting:  # graphs of the plain model would keep the old memory
                weight.data = weight.detach() + 1e-3
        elif n % 4 == 2:
            with torch.no_grad():
                weight.mul_(0.99)
        else:
            torch._foreach_mul_([weight.data], 1.02)

    def merge(self, n: int) -> Any:
        """Merges an adapter, samples, and unmerges it."""
        layer = self.block(n).attn.q
        if not isinstance(layer, LoRA):
            return None
        before = layer.base.weight.detach().clone()
        with self.handle.on_host() if self.handle else contextlib.nullcontext():
            layer.base.weight.data += layer.b.data @ layer.a.data
        result = self.sample(n)
        layer.base.weight.data.copy_(before)
        return result

    def save(self, n: int) -> Any:
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        return self.saved

    def load(self, n: int) -> Any:
        if self.saved is not None and self.saved.keys() == self.model.state_dict().keys():
            self.model.load_state_dict(self.saved)

    def deepcopied(self, n: int) -> Any:
        twin = copy.deepcopy(self.model)
        assert type(twin) is DiT and all(type(p) is nn.Parameter for p in twin.parameters())
        return twin(*self.data(n))

    def pickled(self, n: int) -> Any:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)(*self.data(n))

    def averaged(self, n: int) -> Any:
        parameters = dict(self.model.named_parameters())
        if self.average is None or self.average.keys() != parameters.keys():
            self.average = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for name, p in parameters.items():
                self.average[name].lerp_(p, 0.1)
        return self.average

    def freeze(self, n: int) -> Any:
        block = self.block(n)
        block.requires_grad_(not block.mlp[2].weight.requires_grad)

    def add_adapter(self, n: int) -> Any:
        attention = self.block(n).attn
        if isinstance(attention.o, LoRA):
            return
        torch.manual_seed(n)
        attention.o = LoRA(attention.o).to(self.setup.dtype)
        if not self.offloaded:
            attention.o.to(self.device)
        self.optimizer.add_param_group({"params": [attention.o.a, attention.o.b], "lr": 1e-3})

    def unload_adapter(self, n: int) -> Any:
        attention = self.block(n).attn
        if isinstance(attention.o, LoRA):
            attention.o = attention.o.base
            self.new_optimizer(n)

    def replace_parameter(self, n: int) -> Any:
        layer = self.block(n).mlp[0]
        layer.weight = nn.Parameter(layer.weight.detach() * 1.1, requires_grad=layer.weight.requires_grad)
        self.new_optimizer(n)

    def new_optimizer(self, n: int) -> Any:
        if self.setup.optimizer in ("OffloadAdamW", "overlap"):
            self.optimizer.synchronize()
            self.model.zero_grad()  # gradients that the old optimizer has taken
        self.make_optimizer()

    def norm(self, n: int) -> Any:
        return [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]

    def clip(self, n: int) -> Any:
        if self.setup.hooks is False:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def fail(self, n: int) -> Any:
        """An exception in the forward or in the backward pass."""
        def raises(*_: Any) -> None:
            raise Stop

        block = self.block(n)
        hook = (block.mlp[1].register_forward_hook(raises) if n % 2 else
                block.mlp[1].register_full_backward_hook(raises))
        try:
            self.model(*self.data(n)).mean().backward()
        except Stop:
            pass
        finally:
            hook.remove()

    def offload_again(self, n: int) -> Any:
        self.waiting.clear()  # their backward passes are refused after remove()
        if self.offloaded:
            self.remove()
        result = self.sample(n)
        if self.offloaded and n % 4:
            self.offload()
        return result

    def drop_graphs(self, n: int) -> Any:
        self.waiting.clear()
        gc.collect()

    def check(self, n: int) -> Any:
        if self.setup.optimizer == "overlap":
            self.optimizer.synchronize()
        if self.handle is not None:
            self.check_handle()
        return state_of(self.model, self.setup.hooks is not False)


def state_of(model: nn.Module, hooks: bool) -> dict[str, Any]:
    """The state of a model. Gradients that hooks have taken cannot be copied."""
    if not hooks:
        return state(model)
    weights: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def draw(seed: int, weights: dict[str, float] = WEIGHTS) -> list[Action]:
    rng = random.Random(seed)
    names = rng.choices(list(weights), list(weights.values()), k=LENGTH)
    return [Action(name, rng.getrandbits(30)) for name in [*names, "check"]]


def attempt(side: Side, action: Action) -> Any:
    """Returns the result of the action, or the error: both sides have to fail in the same way."""
    torch.manual_seed(action.seed)
    try:
        return getattr(side, action.name)(action.seed % 1000)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ballast.OutOfMemoryError) or "offload" in str(error):
            raise
        return f"{type(error).__name__}: {str(error)[:60]}"


def run(seed: int, actions: Iterable[Action], kind: type[Side] = Side) -> str | None:
    """Runs the actions on both sides. Returns the error, or None."""
    done: list[str] = []
    setup = kind.adapt(draw_setup(seed))
    ours = None
    try:
        plain, ours = kind(setup, False), kind(setup, True)
        for action in actions:
            done.append(action.name)
            same(attempt(plain, action), attempt(ours, action), action.name)
    except Exception as error:
        return f"after {', '.join(done)}: {type(error).__name__}: {error}\n{traceback.format_exc().strip()}"
    finally:
        if ours is not None:
            ours.modes.close()
            ours.handle = None
    return None


def describe(seed: int, actions: list[Action], kind: type[Side]) -> str:
    whole = draw(seed, kind.weights)
    numbers = ",".join(str(whole.index(action)) for action in actions)
    return (f"{kind.adapt(draw_setup(seed))}\nactions: {', '.join(a.name for a in actions)}\n"
            f"repeat: {pathlib.Path(sys.argv[0]).name} --first {seed} --keep {numbers}")


def main(kind: type[Side] = Side) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep", help="numbers of actions, with commas")
    words = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faulthandler.enable()
    for seed in range(words.first, words.first + words.count):
        print(f"seed {seed}", flush=True)
        actions = draw(seed, kind.weights)
        if words.keep is not None:
            actions = [actions[int(number)] for number in words.keep.split(",")]
        error = run(seed, actions, kind)
        if error is None:
            continue
        if words.keep is None:
            actions = shorten(actions, lambda some: run(seed, some, kind) is not None)
            error = run(seed, actions, kind) or error
        print(f"{describe(seed, actions, kind)}\n{error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
