"""Actions of random_actions.py that change weights outside of the optimizer. Needs torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from random_sides import TOLERANCE, Pair, Side, close, difference, random_values


class Weights(Pair):
    def swap(self, rng: random.Random) -> None:
        """`.data =` of the same size at another address, which may be not contiguous or not
        aligned."""
        seed, form = rng.getrandbits(30), rng.choice(("new", "offset", "transposed"))

        def run(side: Side) -> None:
            own = random.Random(seed)
            side.before_writing()
            for name, parameter in side.model.named_parameters():
                if own.random() < 0.5:
                    values = random_values(parameter, own.getrandbits(30))
                    if form == "offset":
                        values = torch.cat([values.flatten()[:1], values.flatten()])[1:].view_as(values)
                    elif form == "transposed" and values.dim() == 2:
                        values = values.t().contiguous().t()
                    side.set_data(name, values)

        self.both(run)

    def touch(self, rng: random.Random) -> None:
        """In-place changes: an operation of PyTorch, or load_state_dict of the model."""
        seed, load = rng.getrandbits(30), rng.random() < 0.5

        def run(side: Side) -> None:
            own = random.Random(seed)
            values = {name: random_values(p, own.getrandbits(30))
                      for name, p in side.model.named_parameters() if own.random() < 0.5}
            side.before_writing()
            if load:
                side.model.load_state_dict(values, strict=False)
            else:
                with torch.no_grad():
                    for name, parameter in side.model.named_parameters():
                        if name in values:
                            parameter.copy_(values[name])
            side.weights_changed(values)

        self.both(run)

    def resize(self, rng: random.Random) -> None:
        """`.data =` of another size is refused and changes nothing, or followed without a write outside."""
        number, shrink = rng.randrange(len(self.theirs.optimizers)), rng.random() < 0.5
        name = rng.choice([n for group in self.ours.names[number] for n in group
                           if n != "second.weight1" and n not in self.ours.frozen])
        self.both(lambda side: side.zero_grad())
        self.ours.before_writing()
        state = self.ours.exported(number)
        parameter = self.ours.model.get_parameter(name)
        self.ours.optimizers[number].state[parameter]  # the optimizer has seen its first size
        old = parameter.data
        count = old.numel() // 2 if shrink else 2 * old.numel() + 1
        memory = torch.full((count + 8192,), 7.0, dtype=old.dtype)
        parameter.data = memory[4096:4096 + count]
        parameter.grad = torch.ones_like(parameter.data)
        followed = True
        try:
            self.ours.step(number)
            self.ours.before_writing()
        except (TypeError, ValueError, RuntimeError) as error:
            followed = False
            assert "param" in str(error) or name in str(error), f"refused without a name: {error}"
            assert bool((memory == 7).all()), "refused, but written"
        assert bool((memory[:4096] == 7).all() and (memory[4096 + count:] == 7).all()), "written outside"
        parameter.data = old
        parameter.grad = None
        self.ours.zero_grad()
        if followed:
            self.ours.imported(number, state)

    def cast(self, rng: random.Random) -> None:
        """model.to(another type): the next step follows it, or refuses it and changes nothing. Then
        back again."""
        other = rng.choice([t for t in TOLERANCE if t != self.setup.dtype])
        names = self.required_names()
        seed = rng.getrandbits(30)
        self.both(lambda side: (side.zero_grad(), side.model.zero_grad()))
        self.ours.before_writing()
        self.ours.model.to(other)
        before = self.ours.weights()
        self.theirs.assign(before)
        if names:
            self.ours.backward(names, 1.0, seed, None)
        self.theirs.exact = {name: self.ours.gradient(name, 1.0, seed) for name in names}
        for number in range(len(self.theirs.optimizers)):
            try:
                self.ours.step(number)
                self.theirs.step(number)
            except (TypeError, ValueError) as error:
                assert "param" in str(error) or any(n in str(error) for n in before), error
        self.theirs.exact = {}
        after = self.ours.weights()
        for name, value in self.theirs.masters().items():
            assert close(after[name].float(), value, max(TOLERANCE[other], TOLERANCE[self.setup.dtype])), \
                difference(name, after[name].float(), value)
        self.both(lambda side: (side.zero_grad(), side.model.zero_grad()))
        self.ours.model.to(self.setup.dtype)
        values = {name: random_values(p, seed) for name, p in self.theirs.model.named_parameters()}
        self.both(lambda side: side.assign(values))

    # Weights that come back bit for bit

    def sharpness(self, rng: random.Random) -> None:
        """Sharpness-aware minimisation: the gradient of perturbed weights updates the restored ones."""
        names, way = self.required_names(), rng.choice(("copy_", "data.copy_", "data"))
        if not names:
            return
        first, second = rng.getrandbits(30), rng.getrandbits(30)

        def run(side: Side) -> None:
            side.zero_grad()
            side.backward(names, 1.0, first, None)
            weights = {name: side.model.get_parameter(name) for name in names}
            other = {name: p.detach() + random_values(p, first, 0.05) for name, p in weights.items()}
            with_other_weights(side, way, other, lambda: (
                side.zero_grad(), side.backward(names, 1.0, second, None)))
            for number in range(len(side.optimizers)):
                side.step(number)
            side.zero_grad()

        self.both(run)

    def averaged(self, rng: random.Random) -> None:
        """Evaluates averaged weights, and continues with the trained ones."""
        way = rng.choice(("copy_", "data.copy_", "data", "load_state_dict", "set_data"))
        seed, losses = rng.getrandbits(30), []

        def run(side: Side) -> None:
            weights = dict(side.model.named_parameters())
            other = {name: random_values(p, seed + len(name)) for name, p in weights.items()}
            gradients = {name: side.gradient(name, 1.0, seed) for name in weights}

            @torch.no_grad()
            def evaluate() -> None:
                losses.append(side.model.eval()(gradients).item())
                side.model.train()

            with_other_weights(side, way, other, evaluate)

        self.both(run)
        assert abs(losses[0] - losses[1]) <= 1e-4 * max(1.0, abs(losses[1])), f"losses {losses}"

    # Other Parameters

    def assigned(self, rng: random.Random) -> None:
        """load_state_dict(assign=True) makes other Parameters. Steps do not change these until they have
        taken the places of the old ones in the groups."""
        trained = {name for number in range(len(self.ours.names)) for name in self.ours.own_names(number)}
        chosen = [name for name in sorted(trained) if rng.random() < 0.5]
        seed, pops = rng.getrandbits(30), rng.random() < 0.5

        def run(side: Side) -> None:
            side.zero_grad()
            old = {name: side.model.get_parameter(name) for name in chosen}
            values = {name: random_values(p, seed + len(name)) for name, p in old.items()}
            side.model.load_state_dict({n: v.clone() for n, v in values.items()}, strict=False, assign=True)
            if side is self.ours:
                for name in chosen:
                    side.model.get_parameter(name).grad = torch.ones_like(values[name])
                for number in range(len(side.optimizers)):
                    side.step(number)
            for name in chosen:
                new = side.model.get_parameter(name)
                new.grad = None
                assert new is not old[name] and torch.equal(new, values[name]), f"{name} has changed"
                number, part, at = side.place_of(name)
                optimizer = side.optimizers[number]
                if side.trained(name) is new:
                    optimizer.param_groups[part]["params"][at] = new
                    if pops and old[name] in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(old[name])
                    elif old[name] in optimizer.state:
                        optimizer.state[new] = optimizer.state[old[name]]
                        del optimizer.state[old[name]]
            if side is self.theirs and side.fp32:  # a moved master stays where it rounds to the new weight
                for name, value in values.items():
                    master = side.trained(name)
                    master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))

        self.both(run)


def with_other_weights(side: Side, way: str, values: dict[str, torch.Tensor],
                       inside: Callable[[], object]) -> None:
    """Calls `inside` while the model has these weights. Then the old ones are restored bit for bit."""
    parameters = {name: side.model.get_parameter(name) for name in values}

    @torch.no_grad()
    def give(some: dict[str, torch.Tensor]) -> None:
        for name, parameter in parameters.items():
            if way == "copy_":
                parameter.copy_(some[name])
            elif way == "data.copy_":
                parameter.data.copy_(some[name])
            elif way == "set_data":
                parameter.set_(some[name])
            elif way == "data":
                parameter.data = some[name]
        if way == "load_state_dict":
            side.model.load_state_dict(some, strict=False)

    kept = {name: p.data if way in ("data", "set_data") else p.detach().clone() for name, p in parameters.items()}
    give(values)
    inside()
    give(kept)
