"""Actions of random_actions.py on parameters and states that user code moves, replaces or brings along.
Needs torch."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import torch

import ballast
from random_sides import FROZEN, Pair, Side, random_values

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a tensor and its new rows to one of other rows


class Moves(Pair):
    def with_rows(self, rng: random.Random) -> str:
        """The name of a parameter of a group."""
        names = [name for number in range(len(self.ours.names)) for name in self.ours.own_names(number)]
        return rng.choice([name for name in names if self.ours.trained(name).dim() > 0])

    def move_state(self, rng: random.Random) -> None:
        """Duplicates, adds or removes rows of a parameter and of its state, as programs for Gaussian
        splatting do. New rows have no moments."""
        name, order = self.with_rows(rng), rng.choice((take_first, assign_first, pop))
        seed, size = rng.getrandbits(30), self.ours.trained(name).shape[0]
        rows = [row for row in range(size) if rng.random() < 0.8]
        copies = rng.choices(range(size), k=rng.choice((0, 1, 5))) if size else []
        fresh = rng.random() < 0.5
        weights = self.ours.model.get_parameter(name).detach().clone()  # theirs may round ties otherwise

        def change(values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat([values.detach()[rows], new]).contiguous()

        def run(side: Side) -> None:
            own = side.model.get_parameter(name).detach() if not self.theirs.fp32 else weights
            new = random_values(own[copies], seed) if fresh else own[copies]
            values = change(own, new)
            old = side.trained(name).detach()
            if order is not assign_first:
                master = change(old, new.float())
            else:  # the old master is in the state, and stays where it rounds to the new weights
                master = values.float()
                if old.shape == values.shape:
                    master = torch.where(old.to(values.dtype) == values, old, master)
            number, part, at = side.place_of(name)
            order(side.optimizers[number], (part, at), lambda: side.replace(name, values, master),
                  lambda value: change(value, torch.zeros(len(copies), *value.shape[1:])), side.trained(name))

        self.both(run)

    def replace_parameter(self, rng: random.Random) -> None:
        """A parameter of another length takes a place in a group, without the old state."""
        name, whole, count = self.with_rows(rng), rng.random() < 0.5, rng.choice((1, 3, 40))
        seed = rng.getrandbits(30)

        def run(side: Side) -> None:
            number, part, at = side.place_of(name)
            optimizer = side.optimizers[number]
            shape = (count, *side.trained(name).shape[1:])
            values = random_values(torch.empty(shape, dtype=self.setup.dtype), seed)
            old, new = side.replace(name, values, values.float())
            optimizer.state.pop(old, None)
            group = optimizer.param_groups[part]
            if whole:
                group["params"] = [new if p is old else p for p in group["params"]]
            else:
                group["params"][at] = new
            begin_adagrad(side, number)

        self.both(run)

    def forget_states(self, rng: random.Random) -> None:
        number, way = rng.randrange(len(self.ours.optimizers)), rng.choice(("one", "clear", "assign", "zero_"))
        name = rng.choice(self.ours.own_names(number))
        if self.setup.dtype != torch.float32:  # a master without a state is not saved
            self.ours.optimizers[number].refresh_from_model()
            weights = self.ours.weights()
            self.theirs.assign({name: weights[name] for name in self.ours.own_names(number)})

        def run(side: Side) -> None:
            optimizer, parameter = side.optimizers[number], side.trained(name)
            if way == "one":
                state = optimizer.state[parameter]
                del optimizer.state[parameter]
                del state
            elif way == "clear":
                optimizer.state.clear()
            elif way == "assign":
                optimizer.state = collections.defaultdict(dict)
            elif optimizer.state.get(parameter):
                for key, value in optimizer.state[parameter].items():
                    if key != "master" and value is not None:
                        value.zero_()
            begin_adagrad(side, number)

        self.both(run)

    def foreign_load(self, rng: random.Random) -> None:
        """States as torch.optim and other packages save them: without masters, with the step as a
        number or in the group, in other types."""
        number = rng.randrange(len(self.ours.optimizers))
        step = rng.choice((int, float, torch.tensor, "group"))
        form = rng.choice(("same", "float64", "bfloat16", "transposed", "requires_grad"))
        right = self.theirs.exported(number)
        for entry in right["state"].values():
            entry.pop("master", None)
            if form == "bfloat16":
                entry.update({k: v.bfloat16().float() for k, v in entry.items() if v is not None and k != "step"})
        foreign = copy.deepcopy(right)
        for entry in foreign["state"].values():
            entry.update({k: in_form(v, form) for k, v in entry.items() if v is not None and k != "step"})
            if "step" in entry and step != "group":
                entry["step"] = step(float(entry["step"]))
        if step == "group":
            step_to_group(foreign)
        self.ours.imported(number, foreign)
        self.theirs.imported(number, right)

    def load_by_names(self, rng: random.Random) -> None:
        """A restart with the groups, and the parameters of each group, in another order."""
        if not self.setup.named:
            return
        seed, file = rng.getrandbits(30), rng.random() < 0.5

        def run(side: Side) -> None:
            saved = [side.exported(number) for number in range(len(side.names))]
            states = side.save().states if file and side is self.ours else None
            side.drop()
            own = random.Random(seed)
            for groups in side.names:
                own.shuffle(groups)
                for group in groups:
                    own.shuffle(group)
            side.make()
            for number, optimizer in enumerate(side.optimizers):
                if states is not None:
                    side.load_one(number, states[number])
                    continue
                handle = optimizer.register_load_state_dict_pre_hook(match_names)
                side.imported(number, saved[number])
                handle.remove()

        self.both(run)

    def regroup(self, rng: random.Random) -> None:
        """Parameters move to another group, which is made by hand or by add_param_group. They keep their
        states."""
        number, way, seed = rng.randrange(len(self.ours.optimizers)), rng.randrange(3), rng.getrandbits(30)

        def run(side: Side) -> None:
            optimizer, names = side.optimizers[number], side.names[number]
            old = optimizer.param_groups[-1]
            order = list(range(len(names[-1])))
            random.Random(seed).shuffle(order)
            names[-1] = [names[-1][n] for n in order]
            params = [old["params"][n] for n in order]
            settings = {key: value for key, value in old.items() if key not in ("params", "param_names")}
            settings["lr"] = 0.004
            side.schedulers.clear()
            if way == 0:
                old.update(settings, params=params)
                if "param_names" in old:
                    old["param_names"] = list(names[-1])
                return
            if way == 1:
                del optimizer.param_groups[-1]
            else:
                optimizer.param_groups = optimizer.param_groups[:-1]
            named = list(zip(names[-1], params)) if self.setup.named else params
            optimizer.add_param_group({"params": named, **settings})

        self.both(run)

    def add_frozen(self, rng: random.Random) -> None:
        """A group of frozen parameters of any kind joins."""
        number = rng.randrange(len(self.ours.optimizers))
        kinds = [rng.choice(sorted(FROZEN)) for _ in range(rng.choice((1, 2)))]

        def run(side: Side) -> None:
            names = [side.add_frozen(kind) for kind in kinds]
            params = [(name, side.trained(name)) if self.setup.named else side.trained(name) for name in names]
            side.optimizers[number].add_param_group({"params": params})
            side.names[number].append(names)
            side.schedulers.clear()

        self.both(run)


# Orders in which programs move a state. `replace` makes the new parameter, `change` the new moments.


def take_first(optimizer: Any, place: tuple[int, int], replace: Callable[[], Any],
               change: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor) -> None:
    """The state is taken and deleted, changed, and put under the new parameter (gsplat)."""
    state = optimizer.state[old]
    del optimizer.state[old]
    for key in state.keys():
        if key != "step" and state[key] is not None:
            state[key] = change(state[key])
    _, new = replace()
    group = optimizer.param_groups[place[0]]
    group["params"] = [new if p is old else p for p in group["params"]]
    optimizer.state[new] = state


def assign_first(optimizer: Any, place: tuple[int, int], replace: Callable[[], Any],
                 change: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor) -> None:
    """The state gets other moments while it is that of the old parameter (3D Gaussian splatting)."""
    state = optimizer.state.get(old, None)
    if state is None:
        _, optimizer.param_groups[place[0]]["params"][place[1]] = replace()
        return
    for key in {name for row in ballast._ballast.optimizer_rows().values() for name in row["moments"]}:
        if key in state and state[key] is not None:
            state[key] = change(state[key])
    del optimizer.state[old]
    _, new = replace()
    optimizer.param_groups[place[0]]["params"][place[1]] = new
    optimizer.state[new] = state


def pop(optimizer: Any, place: tuple[int, int], replace: Callable[[], Any],
        change: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor) -> None:
    """The new parameter gets a dict, before or after it has its place in the group."""
    state = optimizer.state.pop(old, {})
    _, new = replace()
    optimizer.state[new] = {key: value if key == "step" or value is None else change(value)
                            for key, value in state.items()}
    optimizer.param_groups[place[0]]["params"][place[1]] = new


def begin_adagrad(side: Side, number: int) -> None:
    """torch's Adagrad needs a state for each parameter. Ours begins with zeros."""
    optimizer = side.optimizers[number]
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if "sum" not in optimizer.state[parameter]:
                    optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}


def in_form(value: torch.Tensor, form: str) -> torch.Tensor:
    if form in ("float64", "bfloat16"):
        return value.to(getattr(torch, form))
    if form == "transposed" and value.dim() == 2:
        return value.t().contiguous().t()
    return value.clone().requires_grad_() if form == "requires_grad" and value.is_floating_point() else value


def step_to_group(state_dict: dict[str, Any]) -> None:
    """Moves the step from the states to the groups, if the parameters of each group agree."""
    for group in state_dict["param_groups"]:
        entries = [state_dict["state"][n] for n in group["params"] if "step" in state_dict["state"].get(n, {})]
        steps = {float(entry["step"]) for entry in entries}
        if len(steps) == 1:
            group["step"] = int(steps.pop())
            for entry in entries:
                del entry["step"]


def match_names(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Puts saved states and settings into the order of the optimizer's groups."""
    groups = state_dict["param_groups"]
    number_of = {name: n for group in groups for name, n in zip(group["param_names"], group["params"])}
    group_of = {name: group for group in groups for name in group["param_names"]}
    state, ordered, count = {}, [], 0
    for group in optimizer.param_groups:
        names = group["param_names"]
        numbers = range(count, count := count + len(names))
        state.update({n: state_dict["state"][number_of[name]] for n, name in zip(numbers, names)
                      if number_of[name] in state_dict["state"]})
        ordered.append({**group_of[names[0]], "params": list(numbers), "param_names": list(names)})
    return {"state": state, "param_groups": ordered}
