"""Loops of programs for Gaussian splatting, which change the rows of parameters and of their states while they
train. torch.optim.Adam is the oracle. Needs torch."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from torch import nn

from ballast import OffloadAdamW

STEPS, FIRST_ROWS = 200, 40
SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (), "sh0": (1, 3), "shN": (8, 3)}
RATES = {"means": 2e-3, "scales": 5e-3, "quats": 1e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


def torch_adam(params: list, **options):
    return torch.optim.Adam(params, eps=1e-15, **options)


def ours(params: list, **options):
    return OffloadAdamW(params, eps=1e-15, weight_decay=0.0, **options)


def overlapped(params: list, **options):
    return ours(params, overlap=True, **options)


def first_values() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(FIRST_ROWS, *shape, generator=generator))
            for name, shape in SHAPES.items()}


def backward(parameters: dict, step: int) -> None:
    """The loss depends on all rows, and on the step as on the picture that is rendered."""
    generator = torch.Generator().manual_seed(step)
    terms = []
    for p in parameters.values():
        target = torch.randn(p.shape, generator=generator)
        terms.append(((p - target) ** 2).sum() + (p * target).sin().sum())
    sum(terms).backward()


def random_rows(rows: int, share: float, seed: int) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share


class Gsplat:
    """An optimizer for each parameter. Rows change after the step."""

    def __init__(self, make) -> None:
        self.parameters = first_values()
        self.optimizers = {name: make([{"params": p, "lr": RATES[name], "name": name}])
                           for name, p in self.parameters.items()}

    def change(self, of_values, of_state, names=None) -> None:
        for name in names or self.parameters:
            optimizer = self.optimizers[name]
            for group in optimizer.param_groups:
                parameter = group["params"][0]
                state = optimizer.state[parameter]
                del optimizer.state[parameter]
                for key in state.keys():
                    if key != "step":
                        state[key] = of_state(state[key])
                new = nn.Parameter(of_values(name, parameter), requires_grad=parameter.requires_grad)
                group["params"] = [new]
                optimizer.state[new] = state
            self.parameters[name] = new

    def duplicate(self, mask: torch.Tensor) -> None:
        rows = torch.where(mask)[0]
        self.change(lambda name, p: torch.cat([p, p[rows]]),
                    lambda v: torch.cat([v, torch.zeros(len(rows), *v.shape[1:])]))

    def split(self, mask: torch.Tensor, seed: int) -> None:
        rows, rest = torch.where(mask)[0], torch.where(~mask)[0]
        scales = self.parameters["scales"][rows].exp()
        noise = torch.randn(2, len(rows), 3, generator=torch.Generator().manual_seed(seed))

        def of_values(name: str, p: torch.Tensor) -> torch.Tensor:
            if name == "means":
                halves = (p[rows] + 0.1 * noise * scales).reshape(-1, 3)
            elif name == "scales":
                halves = torch.log(scales / 1.6).repeat(2, 1)
            else:
                halves = p[rows].repeat(2, *[1] * (p.dim() - 1))
            return torch.cat([p[rest], halves])

        self.change(of_values, lambda v: torch.cat([v[rest], torch.zeros(2 * len(rows), *v.shape[1:])]))

    def remove(self, mask: torch.Tensor) -> None:
        rest = torch.where(~mask)[0]
        self.change(lambda name, p: p[rest], lambda v: v[rest])

    def reset_opacities(self) -> None:
        self.change(lambda name, p: torch.clamp(p, max=-1.0), torch.zeros_like, ["opacities"])

    @torch.no_grad()
    def densify(self, step: int) -> None:
        rows = len(self.parameters["means"])
        grow, large = random_rows(rows, 0.3, step), random_rows(rows, 0.5, step + 1)
        self.duplicate(grow & ~large)
        self.split(torch.cat([grow & large, torch.zeros(int((grow & ~large).sum()), dtype=torch.bool)]), step)
        self.remove(random_rows(len(self.parameters["means"]), 0.25, step + 2))

    def train(self) -> None:
        for step in range(STEPS):
            if step == 3:  # parameters without a gradient, and so without a state, change as well
                self.add_unused()
            backward({n: p for n, p in self.parameters.items() if n != "unused"}, step)
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if step % 15 == 10:
                self.densify(step)
            if step % 60 == 50:
                with torch.no_grad():
                    self.reset_opacities()

    def add_unused(self) -> None:
        make = type(self.optimizers["means"])
        self.parameters["unused"] = nn.Parameter(torch.zeros(FIRST_ROWS, 2))
        self.optimizers["unused"] = make([{"params": self.parameters["unused"], "lr": 1e-3}])

    def states(self) -> dict:
        return {name: dict(one.state[self.parameters[name]]) for name, one in self.optimizers.items()}


class Inria:
    """One optimizer with a group for each parameter. Rows change between the backward pass and the step,
    which then has no gradients."""

    def __init__(self, make) -> None:
        self.parameters = first_values()
        self.optimizer = make([{"params": [p], "lr": RATES[name], "name": name}
                               for name, p in self.parameters.items()], lr=0.0)

    def move(self, group: dict, values: torch.Tensor, of_state) -> None:
        optimizer = self.optimizer
        state = optimizer.state.get(group["params"][0], None)
        if state is not None:
            state["exp_avg"] = of_state(state["exp_avg"])
            state["exp_avg_sq"] = of_state(state["exp_avg_sq"])
            del optimizer.state[group["params"][0]]
            group["params"][0] = nn.Parameter(values.requires_grad_(True))
            optimizer.state[group["params"][0]] = state
        else:
            group["params"][0] = nn.Parameter(values.requires_grad_(True))
        self.parameters[group["name"]] = group["params"][0]

    def append(self, tensors: dict) -> None:
        for group in self.optimizer.param_groups:
            new = tensors[group["name"]]
            self.move(group, torch.cat((group["params"][0], new), dim=0),
                      lambda v, new=new: torch.cat((v, torch.zeros_like(new)), dim=0))

    def prune(self, keep: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            self.move(group, group["params"][0][keep], lambda v: v[keep])

    def set_values(self, values: torch.Tensor, name: str) -> None:
        for group in self.optimizer.param_groups:
            if group["name"] == name:
                self.move(group, values, lambda v: torch.zeros_like(values))

    @torch.no_grad()
    def densify(self, step: int) -> None:
        rows = random_rows(len(self.parameters["means"]), 0.3, step)
        self.append({name: p[rows] for name, p in self.parameters.items()})  # clones
        split = random_rows(len(self.parameters["means"]), 0.2, step + 1)
        self.append({name: p[split].repeat(2, *[1] * (p.dim() - 1)) for name, p in self.parameters.items()})
        self.prune(~torch.cat([split, torch.zeros(2 * int(split.sum()), dtype=torch.bool)]))
        self.prune(~random_rows(len(self.parameters["means"]), 0.3, step + 2))

    def train(self) -> None:
        for step in range(STEPS):
            for group in self.optimizer.param_groups:
                if group["name"] == "means":
                    group["lr"] = RATES["means"] * 0.99**step
            backward(self.parameters, step)
            if step % 15 == 10 or step == 0:  # at first there are no states yet
                self.densify(step)
            if step % 60 == 50:
                with torch.no_grad():
                    self.set_values(torch.clamp(self.parameters["opacities"], max=-1.0), "opacities")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def states(self) -> dict:
        return {name: dict(self.optimizer.state[p]) for name, p in self.parameters.items()}


class Splatting(unittest.TestCase):
    def test_loops_give_what_adam_of_torch_gives(self) -> None:
        for program in (Gsplat, Inria):
            right = program(torch_adam)
            right.train()
            self.assertNotEqual(len(right.parameters["means"]), FIRST_ROWS)
            for make in (ours, overlapped):
                with self.subTest(program=program.__name__, make=make.__name__):
                    mine = program(make)
                    mine.train()
                    states = mine.states()
                    for name, its in right.states().items():
                        torch.testing.assert_close(mine.parameters[name], right.parameters[name],
                                                   rtol=1e-6, atol=2e-6)
                        self.assertEqual(list(states[name]), list(its))
                        for key, value in its.items():
                            torch.testing.assert_close(states[name][key], value, rtol=1e-5, atol=2e-6)


if __name__ == "__main__":
    unittest.main()
