"""Models of many small parameters, whose steps must cost little per parameter. Needs torch."""

import os
import sys
import tempfile
import unittest
import unittest.mock
import zlib

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW, OffloadLion
from support import same_rules

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_parameters(count: int, types: tuple = TYPES, largest: int = 900) -> list[torch.nn.Parameter]:
    """Small parameters, and among them some that several threads share."""
    generator = torch.Generator().manual_seed(count)
    sizes = [1 + i * 97 % largest if i % 60 != 7 else 70_000 for i in range(count)]
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(types[i % len(types)]))
            for i, size in enumerate(sizes)]


def give_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if (number + step) % 9 == 0 else values


def train(make=OffloadAdamW, count: int = 120, types: tuple = TYPES, **options) -> tuple:
    """Returns the bits of weights and states, and the norms of the gradients."""
    parameters = make_parameters(count, types)
    groups = [{"params": parameters[:40], "lr": 1e-2}, {"params": parameters[40:]}]
    optimizer = make(groups, lr=1e-3, weight_decay=0.1, **options)
    norms = []
    for step in range(4):
        give_gradients(parameters, step)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    optimizer.synchronize()
    states = optimizer.state_dict()["state"]
    values = [value for key in sorted(states) for value in states[key].values()]
    return [checksum(tensor) for tensor in (*parameters, *values)], norms


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().flatten().view(torch.uint8).numpy())


class SmallParameters(unittest.TestCase):
    def test_threads_places_and_overlap_change_no_bit(self) -> None:
        for make in (OffloadLion, *(ours for ours, _, _ in same_rules())):
            expected = train(make, threads=1)
            self.assertEqual(train(make, threads=2), expected)
            self.assertEqual(train(make, threads=5, _sub_group=1 << 15), expected)
            self.assertEqual(train(make, threads=2, minimal_size=400), expected)
        expected = train(threads=1)
        self.assertEqual(train(threads=3, overlap=True), expected)
        with tempfile.TemporaryDirectory(dir=os.environ.get("BALLAST_TEST_FOLDER")) as path:
            self.assertEqual(train(threads=2, device="nvme", path=path, any_file_system=True,
                                   _sub_group=1 << 16), expected)
        compressed = train(threads=1, optimizer_states="8bit")
        self.assertEqual(train(threads=4, optimizer_states="8bit"), compressed)

    def test_instruction_sets_change_no_bit(self) -> None:
        expected = train(threads=2)
        with unittest.mock.patch.dict(os.environ, BALLAST_ISA_MASK="scalar"):
            self.assertEqual(train(threads=2), expected)

    def test_results_are_those_of_torch(self) -> None:
        ours, theirs = make_parameters(200, (torch.float32,)), make_parameters(200, (torch.float32,))
        own = OffloadAdamW(ours, lr=1e-3, max_grad_norm=5.0)
        its = torch.optim.AdamW(theirs, lr=1e-3)
        for step in range(4):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            own.step()
            norm = torch.nn.utils.clip_grad_norm_(theirs, 5.0)
            its.step()
            self.assertAlmostEqual(own.grad_norm / norm.item(), 1.0, places=5)
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)

    def test_python_calls_per_parameter_are_few(self) -> None:
        parameters = make_parameters(500, (torch.float32,))
        optimizer = OffloadAdamW(parameters)
        calls = 0

        def count(_, event: str, __) -> None:
            nonlocal calls
            calls += event == "call"

        for step in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            calls = 0
            sys.setprofile(count)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
        # torch.Tensor.__hash__ is a function in Python.
        self.assertLess(calls / len(parameters), 5)


class Changes(unittest.TestCase):
    """Changes by other code since the last step are noticed for each parameter."""

    def setUp(self) -> None:
        self.parameters = make_parameters(30, (torch.float32,))
        self.optimizer = OffloadAdamW(self.parameters, lr=0.1, weight_decay=0.0)
        self.one = self.parameters[11]
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def test_other_memory_is_updated(self) -> None:
        old = self.one.data
        before = old.clone()
        self.one.data = old.clone()
        self.step()
        self.assertTrue(torch.equal(old, before))
        torch.testing.assert_close(self.one.detach(), before - 0.1)
        wide = torch.zeros(2 * before.numel())
        self.one.data = wide[::2]  # not contiguous
        self.step()
        torch.testing.assert_close(wide[::2], torch.full_like(before, -0.1))
        self.assertEqual(wide[1::2].count_nonzero(), 0)

    def test_another_type_is_followed(self) -> None:
        self.one.data = torch.zeros_like(self.one).to(torch.bfloat16)
        self.step()
        torch.testing.assert_close(self.one.float(), torch.full(self.one.shape, -0.1), rtol=0.01, atol=0)
        self.assertIn("master", self.optimizer.state[self.one])

    def assert_refused(self, error: type, text: str, step=None) -> None:
        before = [p.detach().clone() for p in self.parameters]
        self.assertRaisesRegex(error, r"params\[0\]\[11\].*" + text, step or self.step)
        for old, parameter in zip(before, self.parameters):
            self.assertTrue(torch.equal(old, parameter))

    def test_another_size_is_refused(self) -> None:
        self.one.data = torch.zeros(self.one.numel() + 1)
        self.assert_refused(ValueError, "elements now")

    def test_other_types_are_refused(self) -> None:
        self.one.data = self.one.data.double()
        self.assert_refused(TypeError, "float64")

    def test_expanded_memory_is_refused(self) -> None:
        self.one.data = torch.zeros(1).expand(self.one.numel())
        self.assert_refused(ValueError, "expanded")

    def test_memory_of_inference_mode_is_refused(self) -> None:
        with torch.inference_mode():
            made = torch.nn.Parameter(torch.zeros(self.one.shape), requires_grad=False)
        torch.utils.swap_tensors(self.one, made)
        with torch.inference_mode():
            self.one.grad = torch.ones(self.one.shape)
        self.assert_refused(ValueError, "inference", self.optimizer.step)

    def test_other_gradients_are_refused(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.one.grad = torch.ones_like(self.one).to_sparse()
        self.assert_refused(TypeError, "sparse", self.optimizer.step)

    def test_gradients_that_are_not_contiguous_are_used(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        before = self.one.detach().clone()
        self.one.grad = torch.tensor([1.0, -1.0]).repeat(before.numel())[::2]
        self.optimizer.step()
        torch.testing.assert_close(self.one.detach(), before - 0.1)


if __name__ == "__main__":
    unittest.main()
