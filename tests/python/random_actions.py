"""Random sequences of what users do with a model and its optimizer, on two sides: an optimizer of Ballast,
and the one of torch.optim with the same rule as the oracle. Needs torch.

    random_actions.py --first 0 --count 2000     # these seeds, one sequence each
    random_actions.py --first 17 --keep 0,3,5    # of the sequence of seed 17 these actions alone

Prints each seed before its sequence, so that a crash can be traced. The first sequence that fails is
shortened, printed with the command that repeats it, and ends the program with exit status 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from random_moves import Moves
from random_sides import TOLERANCE, Refused, Setup, Side, close, difference, draw_setup
from random_weights import Weights

LENGTH = 24  # actions of a sequence


@dataclass(frozen=True)
class Action:
    name: str
    seed: int  # seed of its draws, which do not change when other actions are left out


class Stop(Exception):
    """Raised on purpose in the middle of a step."""


class World(Weights, Moves):
    """One model and its optimizers on each of the two sides, and the actions on both."""

    def __init__(self, setup: Setup, folder: str) -> None:
        super().__init__(setup, folder)
        self.saved: Any = None

    # Gradients and steps

    def backward(self, rng: random.Random) -> None:
        names = self.required_names()
        chosen = [name for name in names if rng.random() < 0.8]
        if not chosen:
            return
        scale = rng.choice((1.0, 1.0, 1e-2, 3.0))
        seed = rng.getrandbits(30)
        bad = rng.choice((float("nan"), float("inf"))) if rng.random() < 0.04 else None
        losses = [side.backward(chosen, scale, seed, bad) for side in self.sides]
        if bad is None:
            precise = self.setup.dtype == torch.float32
            size = max(1.0, losses[1][1])
            off = abs(losses[0][0] - losses[1][0])
            assert off <= (1e-5 if precise else 2e-2) * size, f"losses {losses}: weights of forward differ"

    def after_step(self) -> None:
        """With overlap, step() has set gradients to None; with hooks, they are in the optimizer."""
        if self.setup.hooks:
            self.both(lambda side: side.zero_grad())
        elif self.setup.overlap:
            for name, parameter in self.ours.model.named_parameters():
                if parameter.grad is None:
                    self.theirs.model.get_parameter(name).grad = None

    def step(self, rng: random.Random) -> None:
        for number in range(len(self.theirs.optimizers)):
            if rng.random() < 0.8:
                self.both(lambda side: side.step(number))
        self.after_step()

    def train(self, rng: random.Random) -> None:
        for _ in range(rng.choice((1, 1, 2))):
            self.backward(rng)
        self.both(lambda side: [side.step(n) for n in range(len(side.optimizers))])
        self.both(lambda side: side.zero_grad())

    def closure(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.theirs.optimizers))
        names = self.required_names()
        seed, fails = rng.getrandbits(30), rng.random() < 0.3
        if not names:
            return

        def run(side: Side) -> None:
            def closure() -> float:
                side.zero_grad(number)
                loss = side.backward(names, 1.0, seed, None)
                if fails:
                    raise Stop
                return loss[0]

            try:
                returned = side.step(number, closure)
                assert not fails and isinstance(returned, float), f"step() returned {returned!r}"
            except Stop:
                assert fails

        self.both(run)
        self.after_step()

    def failing_hook(self, rng: random.Random) -> None:
        """An exception in a hook before or after the step leaves both sides in the same state."""
        number, before = rng.randrange(len(self.theirs.optimizers)), rng.random() < 0.5

        def fail(*_: object) -> None:
            raise Stop

        def run(side: Side) -> None:
            optimizer = side.optimizers[number]
            handle = (optimizer.register_step_pre_hook(fail) if before
                      else optimizer.register_step_post_hook(fail))
            try:
                side.step(number)
                raise AssertionError("the hook did not run")
            except Stop:
                pass
            handle.remove()

        self.both(run)
        self.after_step()

    def zero_grad(self, rng: random.Random) -> None:
        to_none, of_model = rng.random() < 0.5, rng.random() < 0.3
        if of_model and not self.setup.hooks:  # gradients taken by hooks belong to the optimizer
            self.both(lambda side: side.model.zero_grad(set_to_none=to_none))
        else:
            self.both(lambda side: side.zero_grad(set_to_none=to_none))

    def clip(self, rng: random.Random) -> None:
        if self.setup.hooks or all(p.grad is None for p in self.theirs.model.parameters()):
            return
        limit, norm = rng.choice((0.1, 1.0, 100.0)), rng.random() < 0.7
        change = torch.nn.utils.clip_grad_norm_ if norm else torch.nn.utils.clip_grad_value_
        returned = []
        self.both(lambda side: returned.append(change(list(side.model.parameters()), limit)))
        if norm and bool(torch.isfinite(returned[1])):
            assert close(returned[0].float(), returned[1].float(), 1e-2), f"norms {returned}"

    # Which parameters are trained, and how

    def freeze(self, rng: random.Random) -> None:
        seed, value, clear = rng.getrandbits(30), rng.random() < 0.5, rng.random() < 0.7

        def run(side: Side) -> None:
            own = random.Random(seed)
            for parameter in side.model.parameters():
                if own.random() < 0.4:
                    parameter.requires_grad_(value)
                    if clear:
                        parameter.grad = None

        self.both(run)

    def switch_adapter(self, rng: random.Random) -> None:
        active = rng.choice("ab")

        def run(side: Side) -> None:
            for name, parameter in side.model.named_parameters():
                parameter.requires_grad_(name.endswith("adapter_" + active))

        self.both(run)

    def unfreeze(self, rng: random.Random) -> None:
        self.both(lambda side: side.model.requires_grad_(True))

    def add_group(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.theirs.optimizers))
        options = {"lr": rng.choice((1e-2, 1e-3))}
        self.both(lambda side: side.add_group(number, options))

    def options(self, rng: random.Random) -> None:
        name, value = rng.choice((("lr", 0.02), ("lr", 0.0), ("weight_decay", 0.0), ("weight_decay", 0.2)))
        last = rng.random() < 0.5

        def run(side: Side) -> None:
            for optimizer in side.optimizers:
                for group in optimizer.param_groups[-1:] if last else optimizer.param_groups:
                    group[name] = value

        self.both(run)

    def schedule(self, rng: random.Random) -> None:
        kind = rng.randrange(3)
        self.both(lambda side: side.schedule(kind))

    # States

    def save(self, rng: random.Random) -> None:
        self.saved = [side.save() for side in self.sides]

    def load(self, rng: random.Random) -> None:
        """Loads the saved states into the same optimizers or into new ones, as after a restart."""
        if self.saved is None:
            return
        anew = rng.random() < 0.5
        for side, saved in zip(self.sides, self.saved):
            if side.shapes() != saved.groups:
                return
            side.load(saved, anew)

    def load_of_other_shape(self, rng: random.Random) -> None:
        """A state dict with an additional group is refused and changes nothing."""
        number = rng.randrange(len(self.theirs.optimizers))

        def run(side: Side) -> None:
            optimizer = side.optimizers[number]
            wrong = optimizer.state_dict()
            wrong = {**wrong, "param_groups": [*wrong["param_groups"], wrong["param_groups"][0]]}
            try:
                optimizer.load_state_dict(wrong)
            except (ValueError, TypeError):
                return
            raise AssertionError("a state dict with a group more was loaded")

        self.both(run)

    def exchange(self, rng: random.Random) -> None:
        """Each optimizer gets the state dict of the other side, or its own."""
        to_ours, to_theirs = rng.random() < 0.6, rng.random() < 0.6
        for number in range(len(self.theirs.optimizers)):
            mine, its = self.ours.exported(number), self.theirs.exported(number)
            has_masters = any("master" in entry for entry in its["state"].values())
            if to_ours and has_masters:  # masters that differ by 1e-7 may round to other weights
                self.ours.before_writing()
                names = self.ours.own_names(number)
                self.ours.assign({name: self.theirs.model.get_parameter(name).detach() for name in names})
            self.ours.imported(number, its if to_ours else mine)
            self.theirs.imported(number, mine if to_theirs else its)

    def copied(self, rng: random.Random) -> None:
        """Continues with a deep copy of model and optimizers instead of the originals."""
        try:
            self.ours.deepcopied()
        except Refused:
            return
        self.theirs.deepcopied()
        gc.collect()

    def drop(self, rng: random.Random) -> None:
        """Deletes the optimizers, perhaps during a step, and makes new ones."""
        self.both(lambda side: side.drop())
        gc.collect()  # schedulers make cycles
        weights = {name: p.detach().clone() for name, p in self.ours.model.named_parameters()}
        expected = self.theirs.masters()
        for name, value in weights.items():
            assert close(value.float(), expected[name], TOLERANCE[value.dtype]), \
                difference(name, value.float(), expected[name])
        self.theirs.assign(weights)  # masters begin with the weights
        self.both(lambda side: side.make())

    # Comparison

    def check(self, rng: random.Random) -> None:
        reader = rng.choice(("state_dict", "part", "copy", "wait"))
        seen = self.ours.read_weights(reader)
        masters = self.ours.masters()
        expected = self.theirs.masters()
        for name, value in expected.items():
            mine = masters.get(name, seen[name].float())
            if not close(mine, value, 1e-6):
                assert few_roundings(mine, value, self.setup.dtype), difference(name, mine, value)
                self.theirs.fp32[name].copy_(mine)
            assert rounded(seen[name], mine), f"{name} is not its master"
        for number in range(len(self.theirs.optimizers)):
            compare_states(self.ours.moments(number), self.theirs.moments(number), self.setup)


def rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether the weight is the master rounded to the nearest (in either direction for ties)."""
    off = (weight.float() - master).abs()
    nearest = (master.to(weight.dtype).float() - master).abs()
    return bool(((off == nearest) | ~torch.isfinite(master)).all())


def few_roundings(mine: torch.Tensor, its: torch.Tensor, dtype: torch.dtype,
                  least: float = 2.0**-6) -> bool:
    """Whether the masters of a few 16-bit weights differ by rounding. Changed weights that are by chance
    the old ones, or have their check value, keep the old master. `least`: the difference is relative to
    this if the values are smaller."""
    if dtype == torch.float32 or mine.shape != its.shape:
        return False
    off = (mine - its).abs()
    few = int((off > 1e-6 * its.abs().clamp(min=1)).sum()) <= 8
    return few and bool((off <= TOLERANCE[dtype] * its.abs().clamp(min=least)).all())


def compare_states(mine: dict[str, dict[str, Any]], its: dict[str, dict[str, Any]], setup: Setup) -> None:
    steps = setup.rule != "SGD"  # torch does not count the steps of SGD
    for name, entry in its.items():
        for key, value in entry.items():
            own = mine.get(name, {}).get(key)
            if value is None or (key == "step" and not steps):  # None: the momentum of an SGD without one
                continue
            if own is None:
                assert not value.any(), f"{name}: its {key} is lost"
            elif key == "step":
                assert float(own) == float(value), f"{name}: step {float(own):g}, not {float(value):g}"
            else:
                # A master that differs by rounding also differs in the weight decay.
                assert close(own, value, 2e-6) or few_roundings(own, value, setup.dtype, 1.0), \
                    difference(f"{name}.{key}", own, value)
    for name, entry in mine.items():
        moments = [torch.as_tensor(v) for k, v in entry.items() if k not in ("master", "step") and v is not None]
        assert name in its or not any(moment.any() for moment in moments), f"{name}: has a state"


WEIGHTS = {"train": 8, "backward": 3, "step": 3, "closure": 1, "failing_hook": 1, "zero_grad": 2, "clip": 1,
           "freeze": 2, "unfreeze": 1, "switch_adapter": 1, "add_group": 1, "options": 1, "schedule": 1,
           "save": 1, "load": 2, "load_of_other_shape": 0.3, "exchange": 1, "copied": 0.7, "drop": 0.7,
           "swap": 1, "touch": 1, "resize": 0.5, "cast": 0.7, "sharpness": 1, "averaged": 1, "assigned": 0.7,
           "move_state": 2, "replace_parameter": 0.7, "forget_states": 0.7, "foreign_load": 1,
           "load_by_names": 1, "regroup": 1, "add_frozen": 0.5, "check": 2}


def draw(seed: int) -> list[Action]:
    rng = random.Random(seed)
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=LENGTH)
    return [Action(name, rng.getrandbits(30)) for name in [*names, "check"]]


def run(seed: int, actions: Iterable[Action],
        make: Callable[[Setup, str], World] = World) -> str | None:
    """Runs the actions on both sides. Returns the error, or None."""
    with tempfile.TemporaryDirectory() as folder:
        done: list[str] = []
        try:
            world = make(draw_setup(seed), folder)
            for action in actions:
                done.append(action.name)
                getattr(world, action.name)(random.Random(action.seed))
        except Exception as error:
            where = traceback.format_exc().strip()
            return f"after {', '.join(done)}: {type(error).__name__}: {error}\n{where}"
        return None


def shorten(actions: list[Action], fails: Callable[[list[Action]], bool], tries: int = 200) -> list[Action]:
    """The shortest failing sequence found by leaving out halves, quarters, ... and single
    actions."""
    size = len(actions) // 2
    while size > 0:
        at = 0
        while at < len(actions) and tries > 0:
            shorter = actions[:at] + actions[at + size:]
            tries -= 1
            if shorter and fails(shorter):
                actions = shorter
            else:
                at += size
        size //= 2
    return actions


def describe(seed: int, actions: list[Action], program: str = "random_actions.py") -> str:
    whole = draw(seed)
    numbers = ",".join(str(whole.index(action)) for action in actions)
    return (f"{draw_setup(seed)}\nactions: {', '.join(a.name for a in actions)}\n"
            f"repeat: {program} --first {seed} --keep {numbers}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep", help="numbers of actions, with commas")
    return parser.parse_args()


def main() -> int:
    words = read_arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of schedulers that step before their optimizer
    faulthandler.enable()
    for seed in range(words.first, words.first + words.count):
        print(f"seed {seed}", flush=True)
        actions = draw(seed)
        if words.keep is not None:
            actions = [actions[int(number)] for number in words.keep.split(",")]
        error = run(seed, actions)
        if error is None:
            continue
        if words.keep is None:
            actions = shorten(actions, lambda some: run(seed, some) is not None)
            error = run(seed, actions) or error
        print(f"{describe(seed, actions)}\n{error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
