"""The two sides of random_actions.py: a model with optimizers of Ballast, and the same model with those of
torch.optim. 16-bit weights have an fp32 master on the side of torch, as in mixed-precision training. Needs
torch."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ballast

# Name of the rule, with its arguments.
RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 1e-2}), ("AdamW", {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("AdamW", {"lr": 1e-2, "eps": 1e-4}), ("SGD", {"lr": 1e-2}), ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("SGD", {"lr": 1e-2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.05}),
    ("Adagrad", {"lr": 1e-2}), ("Adagrad", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}),
]
for row in ballast._ballast.optimizer_rows().values():
    if row["in_torch"] and row["title"] not in {rule for rule, _ in RULES}:
        RULES += [(row["title"], {"lr": 1e-2}), (row["title"], {"lr": 1e-2, "weight_decay": 0.1})]




def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


# Frozen tensors of kinds that cannot be trained, and of those that can.
FROZEN: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: torch.ones(4, dtype=torch.uint8), "int8": lambda: torch.ones(4, dtype=torch.int8),
    "fp8": lambda: torch.ones(4).to(torch.float8_e4m3fn), "fp64": lambda: torch.ones(4, dtype=torch.float64),
    "complex": lambda: torch.ones(2, 2, dtype=torch.complex64), "int64": lambda: torch.ones((), dtype=torch.int64),
    "bool": lambda: torch.ones(4, dtype=torch.bool), "meta": lambda: torch.ones(4, device="meta"),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4), "inference": _inference,
    "fp32": lambda: torch.ones(5), "bf16": lambda: torch.ones(5, dtype=torch.bfloat16),
}


# Largest difference of a weight from its fp32 master, relative to weights above 1.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


class Refused(Exception):
    """Ballast has refused an action with a clear message, which is allowed."""


@dataclass(frozen=True)
class Setup:
    rule: str
    options: dict[str, Any]
    dtype: torch.dtype
    overlap: bool
    hooks: bool
    max_grad_norm: float | None
    nvme: bool
    host_bytes: int | None
    optimizers: int
    named: bool  # parameters are given with their names
    parts: int  # groups per optimizer
    without_effect: dict[str, Any]  # arguments of ours that change nothing
    frozen: tuple[str, ...]  # kinds of frozen parameters in the first group
    ranks: int = 1


def draw_setup(seed: int) -> Setup:
    rng = random.Random(f"setup {seed}")
    rule, options = rng.choice(RULES)
    dtype = rng.choice((torch.float32,) * 3 + (torch.bfloat16, torch.float16))
    nvme = rng.random() < 0.3
    return Setup(rule, options, dtype, overlap=rng.random() < 0.5,
                 hooks=dtype != torch.float32 and rng.random() < 0.3,
                 max_grad_norm=rng.choice((None, None, 0.5)), nvme=nvme,
                 host_bytes=1 << 20 if nvme and rng.random() < 0.5 else None,
                 optimizers=rng.choice((1, 1, 2)), named=rng.random() < 0.3, parts=rng.choice((1, 2)),
                 without_effect=rng.choice(({}, {}, {"fused": True}, {"foreach": True}, {"foreach": False},
                                            {"amsgrad": False}, {"maximize": False})),
                 frozen=tuple(rng.sample(sorted(FROZEN), rng.choice((0, 0, 1, 3)))))


class Block(torch.nn.Module):
    """Parameters of several shapes. The gradient of each is the value that `forward` gets for
    it."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.randn(shape) * 0.5))
        self.adapter_a = torch.nn.Parameter(torch.randn(4, 3))
        self.adapter_b = torch.nn.Parameter(torch.zeros(4, 3))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [(self.get_parameter(name) * gradient).sum(dtype=torch.float32)
                 for name, gradient in gradients.items()]
        return torch.stack(terms).sum()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block((67, 31), (31,))
        self.second = Block((5, 7), (), (3, 1, 2))
        self.late = Block((9, 4), (0,))  # joins the optimizers by add_param_group

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        losses = []
        for part, block in self.named_children():
            own = {name.split(".")[1]: g for name, g in gradients.items() if name.startswith(part + ".")}
            if own:
                losses.append(block(own))
        return torch.stack(losses).sum()


def new_model(setup: Setup) -> Model:
    return Model().to(setup.dtype)


def random_values(like: torch.Tensor, seed: int, scale: float = 0.5) -> torch.Tensor:
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to(like.dtype)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether they differ by at most `tolerance`, relative to the largest element if that is above
    1."""
    if a.shape != b.shape or not b.numel():
        return a.shape == b.shape
    finite = b[torch.isfinite(b)]
    scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def difference(name: str, mine: torch.Tensor, its: torch.Tensor) -> str:
    off = (mine - its).abs()
    return (f"{name} {tuple(its.shape)}: differs by up to {off.max().item():.3g} in "
            f"{int((off > 1e-6).sum())} of {off.numel()} elements")


@dataclass
class Saved:
    groups: list[list[list[tuple[str, torch.Size]]]]  # parameters of each group of each optimizer
    model: dict[str, torch.Tensor]
    states: list[Any]


class Side:
    """A model with its optimizers. `names` has the parameters of each group of each optimizer, those of
    `frozen` included, which are in no module."""

    def __init__(self, setup: Setup, model: Model, folder: str) -> None:
        self.setup, self.model, self.folder = setup, model, folder
        self.wrapped: Callable[[Model], torch.nn.Module] = lambda model: model  # for the forward pass
        self.own_seed = 0  # differs between ranks
        # By names, since zip() ends with the shorter one. The parts are dealt in turn.
        early = [name for name, _ in model.named_parameters() if not name.startswith("late.")]
        self.late = [name for name, _ in model.named_parameters() if name.startswith("late.")]
        count, parts = setup.optimizers, setup.parts
        self.names = [[early[n::count][part::parts] for part in range(parts)] for n in range(count)]
        self.optimizers: list[Any] = []
        self.schedulers: dict[int, Any] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        for number, kind in enumerate(setup.frozen):
            self.names[number % count][0].insert(number, self.add_frozen(kind))
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def trained(self, name: str) -> torch.Tensor:
        """The tensor that is in the optimizer's group."""
        return self.frozen[name] if name in self.frozen else self.model.get_parameter(name)

    def own_names(self, number: int) -> list[str]:
        """The parameters of an optimizer without those of `frozen`."""
        return [name for group in self.names[number] for name in group if name not in self.frozen]

    def add_frozen(self, kind: str) -> str:
        name = f"frozen{len(self.frozen)}_{kind}"
        self.frozen[name] = torch.nn.Parameter(FROZEN[kind](), requires_grad=False)
        return name

    def replace(self, name: str, values: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes another Parameter of the model, as user code does. `master`: its exact values. Returns
        the tensors that were and that will be in the optimizer's group."""
        old = self.trained(name)
        module, _, last = name.rpartition(".")
        new = torch.nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)
        setattr(self.model.get_submodule(module), last, new)
        return old, new

    def place_of(self, name: str) -> tuple[int, int, int]:
        """Numbers of the optimizer, the group and the parameter."""
        return next((number, part, group.index(name)) for number, groups in enumerate(self.names)
                    for part, group in enumerate(groups) if name in group)

    def shapes(self) -> list[list[list[tuple[str, torch.Size]]]]:
        return [[[(name, self.trained(name).shape) for name in group] for group in groups]
                for groups in self.names]

    def groups(self, number: int) -> list[dict[str, Any]]:
        """Sets a different learning rate for each group."""
        lr = self.setup.options["lr"]
        return [{"params": [(name, self.trained(name)) if self.setup.named else self.trained(name)
                            for name in names], "lr": lr / (part + 1)}
                for part, names in enumerate(self.names[number])]

    def backward(self, names: list[str], scale: float, seed: int, bad: float | None) -> tuple[float, float]:
        """Gives these parameters random gradients. Returns the loss and the size of its terms."""
        if self.setup.hooks:
            self.zero_grad()
        gradients = {name: self.gradient(name, scale, seed) for name in names}
        if bad is not None:
            flat = gradients[names[0]].view(-1)
            flat[flat.numel() // 2:] = bad
        loss = self.wrapped(self.model)(gradients)
        loss.backward()
        return loss.item(), sum(g.float().abs().sum().item() for g in gradients.values())

    def gradient(self, name: str, scale: float, seed: int) -> torch.Tensor:
        parameter = self.model.get_parameter(name)
        return random_values(parameter, seed + self.own_seed + sum(map(ord, name)), scale)

    def zero_grad(self, number: int | None = None, set_to_none: bool = True) -> None:
        for one in self.optimizers if number is None else [self.optimizers[number]]:
            one.zero_grad(set_to_none=set_to_none)

    def step(self, number: int, closure: Callable[[], float] | None = None) -> Any:
        raise NotImplementedError

    def add_group(self, number: int, options: dict[str, Any]) -> None:
        if not self.late:
            return
        names, self.late = self.late[:2], self.late[2:]
        params = [(name, self.trained(name)) if self.setup.named else self.trained(name) for name in names]
        self.optimizers[number].add_param_group({"params": params, **options})
        self.names[number].append(names)
        self.schedulers.clear()  # torch's schedulers do not accept another group

    def schedule(self, kind: int) -> None:
        for number, optimizer in enumerate(self.optimizers):
            if number in self.schedulers:
                self.schedulers[number].step()
            elif kind == 0:
                self.schedulers[number] = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            elif kind == 1:
                self.schedulers[number] = torch.optim.lr_scheduler.LambdaLR(
                    optimizer, lambda step: 1 / (step + 1))
            else:
                cycles = {"betas", "momentum"} & {k for k, v in optimizer.defaults.items() if v}
                self.schedulers[number] = torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, max_lr=0.02, total_steps=1000, cycle_momentum=bool(cycles))

    def saved(self, states: list[Any]) -> Saved:
        return Saved(self.shapes(), copy.deepcopy(self.model.state_dict()), states)

    def load(self, saved: Saved, anew: bool) -> None:
        if anew:
            self.drop()
            self.make()
        self.schedulers.clear()  # replaces what they left in the groups
        self.before_writing()
        self.model.load_state_dict(saved.model)
        self.weights_changed(saved.model)
        for number, state in enumerate(saved.states):
            self.load_one(number, state)

    def load_one(self, number: int, state: Any) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        self.schedulers.clear()
        self.optimizers.clear()

    def before_writing(self) -> None:
        """Called before other code writes the weights."""

    def set_data(self, name: str, values: torch.Tensor) -> None:
        self.model.get_parameter(name).data = values
        self.weights_changed({name: values})

    def assign(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.model.get_parameter(name).copy_(value)
        self.weights_changed(values)

    def weights_changed(self, values: dict[str, torch.Tensor]) -> None:
        """Called when the weights of the model have been set to these values."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def moments(self, number: int) -> dict[str, dict[str, Any]]:
        """State of each parameter that has one, by name."""
        names = [name for group in self.names[number] for name in group]
        return {names[n]: entry for n, entry in self.optimizers[number].state_dict()["state"].items()
                if names[n] not in self.frozen}


class Ours(Side):
    def make(self) -> None:
        setup = self.setup
        options: dict[str, Any] = {"gradient_hooks": setup.hooks if setup.ranks == 1 else "auto",
                                   "max_grad_norm": setup.max_grad_norm, **setup.without_effect}
        if setup.overlap:
            options.update(overlap=True, model=self.model)
        if setup.nvme:
            options.update(device="nvme", path=self.folder, any_file_system=True, host_bytes=setup.host_bytes)
        kind = getattr(ballast, "Offload" + setup.rule)
        self.optimizers = [kind(self.groups(n), **setup.options, **options) for n in range(len(self.names))]

    def step(self, number: int, closure: Callable[[], float] | None = None) -> Any:
        return self.optimizers[number].step() if closure is None else self.optimizers[number].step(closure)

    def save(self) -> Saved:
        folders = []
        for optimizer in self.optimizers:
            folders.append(os.path.join(self.folder, f"saved-{len(os.listdir(self.folder))}"))
            optimizer.save(folders[-1])
        return self.saved(folders)

    def load_one(self, number: int, state: Any) -> None:
        self.optimizers[number].load(state)

    def exported(self, number: int) -> dict[str, Any]:
        return copy.deepcopy(self.optimizers[number].state_dict())

    def imported(self, number: int, state: dict[str, Any]) -> None:
        self.optimizers[number].load_state_dict(copy.deepcopy(state))

    def deepcopied(self) -> None:
        try:
            self.model, self.optimizers = copy.deepcopy((self.model, self.optimizers))
        except TypeError as error:
            raise Refused(str(error)) from None
        self.schedulers.clear()

    def before_writing(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()

    def read_weights(self, reader: str) -> dict[str, torch.Tensor]:
        """Reads in one of the ways that wait for a running step."""
        if reader == "part":
            return {f"{part}.{name}": value.detach().clone() for part, block in self.model.named_children()
                    for name, value in block.state_dict().items()}
        if reader == "copy":
            return {name: p.detach() for name, p in copy.deepcopy(self.model).named_parameters()}
        if reader == "wait":
            self.before_writing()
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self.weights()

    def masters(self) -> dict[str, torch.Tensor]:
        """Masters of 16-bit parameters that have been updated."""
        return {name: entry["master"] for number in range(len(self.optimizers))
                for name, entry in self.moments(number).items() if "master" in entry}


class Theirs(Side):
    def __init__(self, setup: Setup, model: Model, folder: str) -> None:
        self.fp32: dict[str, torch.Tensor] = {}
        self.exact: dict[str, torch.Tensor] = {}  # gradients for the next step, of another type
                                                  # than the weights
        if setup.dtype != torch.float32:
            self.fp32 = {name: p.detach().float() for name, p in model.named_parameters()}
        super().__init__(setup, model, folder)

    def trained(self, name: str) -> torch.Tensor:
        return self.fp32[name] if name in self.fp32 else super().trained(name)

    def replace(self, name: str, values: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old, new = super().replace(name, values, master)
        if self.fp32:
            new = self.fp32[name] = master.detach().clone()
        return old, new

    def make(self) -> None:
        kind = getattr(torch.optim, self.setup.rule)
        self.optimizers = [kind(self.groups(n), **self.setup.options) for n in range(len(self.names))]

    def zero_grad(self, number: int | None = None, set_to_none: bool = True) -> None:
        for one in range(len(self.names)) if number is None else [number]:
            for name in self.own_names(one):
                parameter = self.model.get_parameter(name)
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def step(self, number: int, closure: Callable[[], float] | None = None) -> Any:
        """Clips and skips steps as Ballast does. The gradients do not change."""
        names = self.own_names(number)
        kept: dict[str, torch.Tensor | None] = {}

        def evaluate() -> float | None:
            loss = closure() if closure is not None else None
            kept.update({name: self.model.get_parameter(name).grad for name in names})
            for name, gradient in self.to_apply({**kept, **self.exact_of(names)}).items():
                self.trained(name).grad = gradient
            return loss

        try:
            return self.optimizers[number].step(evaluate)
        finally:
            for name, gradient in kept.items():
                self.trained(name).grad = None
                self.model.get_parameter(name).grad = gradient
                if self.fp32:
                    self.model.get_parameter(name).data.copy_(self.fp32[name])

    def exact_of(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: self.exact[name] for name in names if name in self.exact}

    def to_apply(self, kept: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        gradients = {name: None if g is None else g.float().clone() for name, g in kept.items()}
        present = [g for g in gradients.values() if g is not None]
        if not all(bool(torch.isfinite(g).all()) for g in present):
            return dict.fromkeys(gradients)
        if self.setup.max_grad_norm and present:
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in present]).double())
            for gradient in present:
                gradient.mul_(min(1.0, self.setup.max_grad_norm / (norm.item() + 1e-6)))
        return gradients

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: self.trained(name).detach().clone() for name, _ in self.model.named_parameters()}

    def save(self) -> Saved:
        return self.saved([(copy.deepcopy(one.state_dict()), self.masters()) for one in self.optimizers])

    def load_one(self, number: int, state: Any) -> None:
        self.optimizers[number].load_state_dict(copy.deepcopy(state[0]))
        for name in self.own_names(number):
            self.trained(name).data.copy_(state[1][name])
            self.model.get_parameter(name).data.copy_(state[1][name])

    def exported(self, number: int) -> dict[str, Any]:
        state = copy.deepcopy(self.optimizers[number].state_dict())
        names = sum(self.names[number], [])
        if self.fp32:
            for n, entry in state["state"].items():
                if names[n] in self.fp32 and entry:
                    entry["master"] = self.fp32[names[n]].clone()
        return state

    def imported(self, number: int, state: dict[str, Any]) -> None:
        plain = {n: {k: v for k, v in entry.items() if k != "master"} for n, entry in state["state"].items()}
        # torch's fused SGD fails if only some parameters have a momentum.
        groups = [{**group, "fused": None} for group in state["param_groups"]]
        self.optimizers[number].load_state_dict(copy.deepcopy({"state": plain, "param_groups": groups}))

    def deepcopied(self) -> None:
        self.model, self.fp32, self.optimizers = copy.deepcopy((self.model, self.fp32, self.optimizers))
        self.schedulers.clear()

    def assign(self, values: dict[str, torch.Tensor]) -> None:
        super().assign(values)
        for name in self.fp32.keys() & values.keys():
            self.fp32[name].copy_(values[name])

    def weights_changed(self, values: dict[str, torch.Tensor]) -> None:
        """Weights that stay what they were keep their masters: for fp16 one by one."""
        for name, value in values.items():
            if not self.fp32:
                continue
            master = self.fp32[name]
            same = master.to(value.dtype) == value
            if self.setup.dtype == torch.bfloat16:
                same = same.all()
            master.copy_(torch.where(same, master, value.float()))


class Pair:
    """The two sides, for actions."""

    def __init__(self, setup: Setup, folder: str) -> None:
        self.setup = setup
        self.folder = folder
        self.ours = Ours(setup, new_model(setup), folder)
        self.theirs = Theirs(setup, new_model(setup), folder)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.theirs

    def both(self, change: Callable[[Side], object]) -> None:
        for side in self.sides:
            change(side)

    def required_names(self) -> list[str]:
        """The parameters of the model that require gradients."""
        return [name for name, p in self.theirs.model.named_parameters() if p.requires_grad]
