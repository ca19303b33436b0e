"""16-bit weights that other code changes and puts back keep their fp32 masters, and changed weights
become the master. The reference is torch's AdamW with fp32 masters by hand. Needs torch."""

import copy
import tempfile
import unittest
import warnings

try:
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW

SMALL = 2e-6  # a step that changes few 16-bit weights, but every master
INPUTS = [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def make_model(dtype: torch.dtype, seed: int = 0, strided: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)
    if strided:  # weights in other memory than their shape's
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def backward(model: nn.Module, number: int) -> None:
    x = INPUTS[number % len(INPUTS)].to(next(model.parameters()).dtype)
    model(x).float().pow(2).mean().backward()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


class ByHand:
    """torch's AdamW on fp32 masters of a 16-bit model. A changed weight becomes its master."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.model]
        self.own = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for p, master in zip(self.model, self.masters):
            changed = (p != master.to(p.dtype)) & (p != self._away(master, p.dtype))
            master[changed] = p[changed].float()
            master.grad = p.grad.float()
        self.own.step()
        for p, master in zip(self.model, self.masters):
            p.copy_(master)

    def _away(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rounded to nearest, ties away from zero."""
        return (master + torch.sign(master) * 2.0**-24 * master.abs()).to(dtype)


def load_another(model: nn.Module) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(make_model(next(model.parameters()).dtype, seed=1).state_dict())
    model.load_state_dict(kept)


@torch.no_grad()
def swap_data(model: nn.Module) -> None:
    for p in model.parameters():
        kept = p.data
        p.data = torch.randn_like(kept)
        p.data = kept


@torch.no_grad()
def move_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


@torch.no_grad()
def overwrite_memory(model: nn.Module) -> None:
    for p in model.parameters():
        memory = p.detach().view(torch.int16).numpy()
        kept = memory.copy()
        memory[...] = 7
        memory[...] = kept


@torch.no_grad()
def through_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())


@torch.no_grad()
def foreach_copies(model: nn.Module) -> None:
    kept = weights_of(model)
    torch._foreach_zero_(list(model.parameters()))
    torch._foreach_copy_(list(model.parameters()), kept)


def change_type(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.float().to(dtype)


DETOURS = (load_another, swap_data, move_data, overwrite_memory, through_vector, foreach_copies,
           change_type)


class PutBack(unittest.TestCase):
    def run_with(self, detour, dtype, strided=False, steps=6, **options) -> list[torch.Tensor]:
        """The weights and masters at the end. Detours are taken before each backward pass."""
        model = make_model(dtype, strided=strided)
        optimizer = OffloadAdamW(model.parameters(), lr=SMALL, weight_decay=0.0, **options)
        for number in range(steps):
            if detour is not None:
                detour(model)
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [*weights_of(model), *(optimizer.state[p]["master"] for p in model.parameters())]

    def assert_same(self, detours=DETOURS, dtype=torch.bfloat16, **setup) -> None:
        right = self.run_with(None, dtype, **setup)
        for detour in detours:
            with self.subTest(detour=detour.__name__, dtype=dtype, **setup):
                for a, b in zip(self.run_with(detour, dtype, **setup), right):
                    self.assertTrue(torch.equal(a, b))

    def test_each_way(self) -> None:
        self.assert_same()
        self.assert_same(dtype=torch.float16)

    def test_with_overlap(self) -> None:
        self.assert_same(overlap=True)
        self.assert_same([load_another, swap_data], overlap="check")

    def test_each_place_and_format(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            some = [load_another, overwrite_memory]
            self.assert_same(some, device="nvme", path=folder, any_file_system=True,
                             _sub_group=512)
            self.assert_same(some, optimizer_states="8bit", minimal_size=0)
            self.assert_same([load_another, swap_data, foreach_copies], strided=True)

    def test_the_masters_are_those_of_torch_by_hand(self) -> None:
        model, right = make_model(torch.bfloat16), make_model(torch.bfloat16)
        optimizer = OffloadAdamW(model.parameters(), lr=SMALL, weight_decay=0.0)
        by_hand = ByHand(right, SMALL)
        for number in range(6):
            for one, steps in ((model, optimizer), (right, by_hand)):
                load_another(model)
                one.zero_grad()
                backward(one, number)
                steps.step()
        for p, master in zip(model.parameters(), by_hand.masters):
            self.assertTrue(torch.allclose(optimizer.state[p]["master"], master.detach(),
                                           rtol=0.0, atol=1e-7))

    def test_reading_states_meanwhile(self) -> None:
        readers = {"state_dict": lambda o, _: o.state_dict(), "save": lambda o, f: o.save(f),
                   "moments": lambda o, _: o.state_dict()["state"][0]["exp_avg"].zero_()}
        with tempfile.TemporaryDirectory() as folder:
            for name, read in readers.items():
                with self.subTest(name):
                    model = make_model(torch.bfloat16)
                    optimizer = OffloadAdamW(model.parameters(), lr=SMALL)
                    backward(model, 0)
                    optimizer.step()
                    before = [optimizer.state[p]["master"] for p in model.parameters()]
                    kept = copy.deepcopy(model.state_dict())
                    model.load_state_dict(make_model(torch.bfloat16, seed=1).state_dict())
                    read(optimizer, folder)
                    for p in model.parameters():
                        self.assertTrue(torch.equal(optimizer.state[p]["master"], p.float()))
                        optimizer.state[p]["exp_avg"] = torch.zeros(p.shape)
                    model.load_state_dict(kept)
                    for p, master in zip(model.parameters(), before):
                        self.assertTrue(torch.equal(optimizer.state[p]["master"], master))
                        self.assertFalse(torch.equal(master, p.float()))


class Perturbed(unittest.TestCase):
    def moved(self, kind: str, restore: str) -> float:
        """Distance of the masters from the start after steps of sharpness-aware minimisation."""
        model = make_model(torch.bfloat16)
        start = [p.float() for p in weights_of(model)]
        optimizer = (ByHand(model, 1e-5) if kind == "torch" else
                     OffloadAdamW(model.parameters(), lr=1e-5, weight_decay=0.0))
        for number in range(40):
            model.zero_grad()
            backward(model, number)
            with torch.no_grad():
                changes = [0.05 * p.grad for p in model.parameters()]
                kept = weights_of(model)
                torch._foreach_add_(list(model.parameters()), changes)
            model.zero_grad()
            backward(model, number)
            with torch.no_grad():
                for p, old, change in zip(model.parameters(), kept, changes):
                    p.copy_(old) if restore == "copy" else p.sub_(change)
            optimizer.step()
        masters = (optimizer.masters if kind == "torch" else
                   [optimizer.state[p]["master"] for p in model.parameters()])
        return sum(((m.detach() - s) ** 2).sum() for m, s in zip(masters, start)).sqrt().item()

    def test_weights_that_are_copied_back(self) -> None:
        self.assertAlmostEqual(self.moved("own", "copy") / self.moved("torch", "copy"), 1, places=3)

    def test_weights_that_come_back_inexactly(self) -> None:
        ratio = self.moved("own", "subtract") / self.moved("torch", "subtract")
        self.assertGreater(ratio, 0.8)
        self.assertLess(ratio, 1.1)


class Changed(unittest.TestCase):
    def trained(self, dtype) -> tuple[nn.Module, OffloadAdamW]:
        model = make_model(dtype)
        optimizer = OffloadAdamW(model.parameters(), lr=SMALL, weight_decay=0.0)
        for number in range(2):
            backward(model, number)
            optimizer.step()
        return model, optimizer

    def test_changes_that_pytorch_does_not_count(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            model, optimizer = self.trained(dtype)
            weight = model[0].weight
            before = optimizer.state[weight]["master"]
            weight.data[5, 3] = 3.0
            after = optimizer.state[weight]["master"]
            self.assertEqual(after[5, 3].item(), 3.0)
            kept = (after == before).sum().item()
            self.assertGreaterEqual(kept, weight.numel() - 8)
            self.assertFalse(torch.equal(after, weight.float()))

    def test_every_way_to_change_all(self) -> None:
        changes = {"negate": lambda p: p.data.neg_(), "scale": lambda p: p.data.mul_(2),
                   "fill": lambda p: p.data.fill_(2), "flip": lambda p: p.data.copy_(p.flip(0)),
                   "next": lambda p: p.data.view(torch.int16).add_(1)}
        for dtype in (torch.bfloat16, torch.float16):
            for name, change in changes.items():
                with self.subTest(name, dtype=dtype):
                    model, optimizer = self.trained(dtype)
                    change(model[0].weight)
                    same = optimizer.state[model[0].weight]["master"] == model[0].weight.float()
                    self.assertTrue(same.all())

    def test_refresh_drops_the_lower_bits(self) -> None:
        model, optimizer = self.trained(torch.bfloat16)
        weight = model[0].weight
        self.assertFalse(torch.equal(optimizer.state[weight]["master"], weight.float()))
        optimizer.refresh_from_model()
        self.assertTrue(torch.equal(optimizer.state[weight]["master"], weight.float()))


class LoadedInAnyOrder(unittest.TestCase):
    def trained(self, dtype, seed: int, **options) -> tuple[nn.Module, OffloadAdamW]:
        model = make_model(dtype, seed)
        optimizer = OffloadAdamW(model.named_parameters(), lr=SMALL, weight_decay=0.0, **options)
        for number in range(3):
            self.train(model, optimizer, number)
        return model, optimizer

    def train(self, model, optimizer, number) -> None:
        model.zero_grad()
        backward(model, number)
        optimizer.step()

    def assert_continues(self, model, optimizer, right, right_optimizer) -> None:
        for number in range(5):
            self.train(model, optimizer, number)
            self.train(right, right_optimizer, number)
        for a, b in zip(model.parameters(), right.parameters()):
            self.assertTrue(torch.equal(a, b))
            for name in right_optimizer.state[b]:
                self.assertTrue(torch.equal(optimizer.state[a][name], right_optimizer.state[b][name]))

    def test_state_dict_and_files(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            for first in ("model", "optimizer"):
                for way in ("state_dict", "file"):
                    with self.subTest(dtype=dtype, first=first, way=way), \
                            tempfile.TemporaryDirectory() as folder:
                        right, right_optimizer = self.trained(dtype, 0)
                        saved = copy.deepcopy((right.state_dict(), right_optimizer.state_dict()))
                        right_optimizer.save(folder)
                        model, optimizer = self.trained(dtype, 1)
                        if first == "model":
                            model.load_state_dict(saved[0])
                        before = weights_of(model)
                        if way == "file":
                            optimizer.load(folder)
                        else:
                            optimizer.load_state_dict(saved[1])
                            for a, b in zip(weights_of(model), before):
                                self.assertTrue(torch.equal(a, b))
                        optimizer.state_dict()
                        if first == "optimizer":
                            model.load_state_dict(saved[0])
                        self.assert_continues(model, optimizer, right, right_optimizer)

    def test_a_file_from_before_the_first_step_has_no_masters(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            model = make_model(dtype)
            optimizer = OffloadAdamW(model.named_parameters(), lr=SMALL, weight_decay=0.0)
            with tempfile.TemporaryDirectory() as folder:
                optimizer.save(folder)
                self.train(model, optimizer, 0)
                weight = model[0].weight
                self.assertFalse(torch.equal(optimizer.state[weight]["master"], weight.float()))
                optimizer.load(folder)
                optimizer.param_groups[0]["lr"] = 0.0
                self.train(model, optimizer, 1)
                self.assertTrue(torch.equal(optimizer.state[weight]["master"], weight.float()))

    def test_other_weights_loaded_later_become_the_master(self) -> None:
        right, right_optimizer = self.trained(torch.bfloat16, 0)
        model, optimizer = self.trained(torch.bfloat16, 1)
        optimizer.load_state_dict(right_optimizer.state_dict())
        other = make_model(torch.bfloat16, 2)
        model.load_state_dict(other.state_dict())
        for p in model.parameters():
            self.assertTrue(torch.equal(optimizer.state[p]["master"], p.float()))

    def test_distributed_checkpoint(self) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for overlap in (False, True):
                with self.subTest(dtype=dtype, overlap=overlap), warnings.catch_warnings(), \
                        tempfile.TemporaryDirectory() as folder:
                    warnings.simplefilter("ignore")
                    right, right_optimizer = self.trained(dtype, 0, overlap=overlap)
                    states = dict(zip(("model", "optim"), get_state_dict(right, right_optimizer)))
                    checkpoint.save(states, checkpoint_id=folder, no_dist=True)
                    model, optimizer = self.trained(dtype, 1, overlap=overlap)
                    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
                    checkpoint.load(states, checkpoint_id=folder, no_dist=True)
                    set_state_dict(model, optimizer, model_state_dict=states["model"],
                                   optim_state_dict=states["optim"])
                    self.assert_continues(model, optimizer, right, right_optimizer)


if __name__ == "__main__":
    unittest.main()
