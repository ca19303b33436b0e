"""ballast.plan_module(): predictions against what is counted when the model runs. Needs torch."""

import copy
import importlib.util
import resource
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")
if importlib.util.find_spec("ballast.offloading") is None:
    raise unittest.SkipTest("this build has no ballast.offload()")

from torch import nn

import ballast
import fake_device
from offload_models import data, dit, train

MANY = 1 << 40


class Layer(nn.Module):
    def __init__(self, width, factor=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width, bias=False), nn.Linear(factor * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width, count, **more):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, **more) for _ in range(count))
        self.head = nn.Linear(width, 8, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def counted_in_a_step(make, device_bytes, prefetch, **options):
    """Bytes to the device and of gradients to the host in the third step of training."""
    handle = fake_device.offload(model := make(), device_bytes, prefetch=prefetch, small=1 << 20, **options)
    counts = []
    train(model, 3, each=lambda _: counts.append((handle.report().bytes_in, handle.report().bytes_out)))
    report = handle.report()
    return counts[2][0] - counts[1][0], counts[2][1] - counts[1][1], report


class Counted(unittest.TestCase):
    def test_bytes_that_move_and_stay(self):
        for lora, trained in ((True, "auto"), (True, "stream"), (False, "stream")):
            with self.subTest(lora=lora, trained=trained):
                make = dit(lora, layers=5)
                plan = ballast.plan_module(make(), data(0), device_bytes=1 << 30, trained=trained)
                handle = fake_device.offload(make(), plan.pool_bytes, small=1 << 20, trained=trained, prefetch=2)
                report = handle.report()
                self.assertEqual(plan.units, report.units)
                self.assertEqual(plan.device["what stays"], report.staying_bytes)
                self.assertEqual(plan.host["blocks"], report.host_bytes)
                self.assertEqual(plan.pool_bytes, report.pool_bytes)

    def test_copies_in_a_step(self):
        for checkpoint in (None, False):
            for prefetch in (0, 1, 2):
                make = dit(False, checkpoint, layers=7)
                plan = ballast.plan_module(make(), data(0), device_bytes=1 << 30, trained="stream",
                                           prefetch=prefetch)
                self.assertGreater(sum(plan.units.values()), plan.pool_bytes)
                up, down, _ = counted_in_a_step(make, plan.pool_bytes, prefetch)
                with self.subTest(checkpoint=checkpoint, prefetch=prefetch):
                    self.assertEqual((plan.upload_bytes, plan.download_bytes), (up, down))

    def test_a_pool_for_everything_moves_changed_weights_alone(self):
        plan = ballast.plan_module(dit(True, layers=2)().requires_grad_(False), data(0), device_bytes=1 << 30)
        self.assertEqual((plan.upload_bytes, plan.download_bytes), (0, 0))

    def test_states_take_fourteen_bytes_per_bf16_parameter(self):
        for kind, nbytes in ((torch.bfloat16, 14), (torch.float16, 16), (torch.float32, 16)):
            model = Stack(64, 3).to(kind)
            plan = ballast.plan_module(model, device_bytes=MANY, trained="stream")
            count = sum(p.numel() for p in model.layers.parameters())
            head = model.head.weight.numel()
            self.assertEqual(sum(plan.host.values()), nbytes * count + (nbytes - 2 * kind.itemsize) * head)
        frozen = ballast.plan_module(Stack(64, 3).requires_grad_(False), device_bytes=MANY)
        self.assertEqual(sum(frozen.host.values()), 3 * 2 * 64 * 256 * 4)


class Passes(unittest.TestCase):
    def test_operations_and_seconds(self):
        width, tokens, count = 64, 32, 3
        rates = {"link": 1e6, "flops": 1e9}
        plan = ballast.plan_module(Stack(width, count), torch.empty(tokens, width, requires_grad=True),
                                   device_bytes=MANY, rates=rates, trained="stream")
        forward = 2 * tokens * (count * 8 * width * width + 8 * width)
        self.assertEqual(plan.forward_flops, forward)
        self.assertEqual(plan.backward_flops, 2 * forward - 2 * tokens * width * 4 * width)
        self.assertAlmostEqual(plan.compute_seconds, (forward + plan.backward_flops) / 1e9)
        self.assertAlmostEqual(plan.upload_seconds, plan.upload_bytes / 1e6)
        self.assertAlmostEqual(plan.step_seconds, max(plan.upload_seconds, plan.download_seconds))
        self.assertEqual((plan.bound, plan.copy_share), ("link", 1.0))
        fast = ballast.plan_module(Stack(width, count), torch.empty(tokens, width), device_bytes=MANY,
                                   rates={"link": 1e12, "flops": 1e9}, trained="stream")
        self.assertEqual((fast.bound, fast.step_seconds), ("compute", fast.compute_seconds))
        self.assertLess(fast.copy_share, 0.01)

    def test_activations_are_those_that_autograd_saves(self):
        """Each layer saves its input and the result of relu(); the input of the first is the sample."""
        width, tokens, count = 64, 32, 3
        from ballast._fake_pass import measure
        model = Stack(width, count)
        found = measure(model, torch.empty(tokens, width), list(model.layers))
        row = 4 * tokens * width
        self.assertEqual(found.saved_bytes, count * (row + 4 * row) + 4)  # with the loss
        self.assertGreater(found.peak_bytes, found.saved_bytes)
        self.assertEqual(found.order, [0, 1, 2])

    def test_recomputation_saves_less_and_computes_more(self):
        plans = [ballast.plan_module(dit(False, checkpoint, layers=6)(), data(0, tokens=64), device_bytes=MANY,
                                    trained="stream") for checkpoint in (None, False, True)]
        for plan in plans[1:]:
            self.assertLess(plan.device["activations"], plans[0].device["activations"])
            self.assertGreater(plan.backward_flops, plans[0].backward_flops)
            self.assertEqual(plan.forward_flops, plans[0].forward_flops)

    def test_arguments_by_name_and_a_loss(self):
        class Named(Stack):
            def forward(self, *, x, target):
                return {"loss": (super().forward(x) - target).square().mean(), "other": x}
        plan = ballast.plan_module(Named(16, 2), {"x": torch.empty(4, 16), "target": torch.empty(4, 8)},
                                   device_bytes=MANY, trained="stream")
        self.assertGreater(plan.backward_flops, 0)

    def test_the_model_stays_as_it_was(self):
        model = dit(True)()
        before = copy.deepcopy(model.state_dict())
        ballast.plan_module(model, data(0), device_bytes=1 << 30)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(tensor, before[name]))
        self.assertTrue(all(p.grad is None and p._post_accumulate_grad_hooks is None for p in model.parameters()))


class Fits(unittest.TestCase):
    def test_a_model_larger_than_memory(self):
        with torch.device("meta"):
            model = Stack(16384, 40).bfloat16()  # 172 GB
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        plan = ballast.plan_module(model, torch.empty(4096, 16384, dtype=torch.bfloat16, device="meta"),
                                   device_bytes=80 << 30, host_bytes=1 << 40, trained="stream",
                                   rates={"link": 50e9, "flops": 500e12})
        self.assertEqual(plan.host["blocks"], 40 * 8 * 16384**2 * 2)
        self.assertEqual(plan.host["optimizer states"], 10 * (40 * 8 * 16384**2 + 8 * 16384))
        self.assertFalse(plan.fits)
        self.assertRegex(plan.problems[0], r"^host memory: 1\.1 TiB of 1\.0 TiB are needed$")
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 256 << 10)  # KiB
        self.assertIn("does not fit", str(plan))
        roomy = ballast.plan_module(model, device_bytes=80 << 30, host_bytes=2 << 40)
        self.assertTrue(roomy.fits)
        self.assertRegex(str(roomy), r"(?m)^fits +yes$")

    def test_blocks_are_cut_for_a_small_device(self):
        model = Stack(256, 4)  # layers of 2 MiB
        plan = ballast.plan_module(model, device_bytes=6 << 20, trained="stream", prefetch=1)
        self.assertEqual(set(plan.units), {f"layers.{i}" for i in range(4)})
        large = nn.Sequential(nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]), nn.Linear(256, 8))
        plan = ballast.plan_module(large, device_bytes=3 << 20, trained="stream", prefetch=1)
        self.assertEqual(len(plan.units), 17)
        self.assertLessEqual(sum(plan.device.values()), 3 << 20)

    def test_a_block_larger_than_the_device_is_named(self):
        plan = ballast.plan_module(Stack(256, 4), device_bytes=3 << 20, trained="stream", blocks="layers.?")
        self.assertFalse(plan.fits)
        self.assertRegex(plan.problems[0], r"^device: layers\.0 needs 2\.0 MiB, and .* are left for blocks; \d+ bytes do")
        least = int(plan.problems[0].split("; ")[1].split()[0])
        self.assertTrue(ballast.plan_module(Stack(256, 4), device_bytes=least, trained="stream", blocks="layers.?",
                                            prefetch=0).fits)

    def test_activations_that_do_not_fit(self):
        plan = ballast.plan_module(Stack(64, 4), torch.empty(1 << 16, 64, device="meta"),
                                  device_bytes=64 << 20, trained="stream")
        self.assertFalse(plan.fits)
        self.assertEqual(len(plan.problems), 1)


class Refused(unittest.TestCase):
    def refuse(self, error, line, *arguments, **options):
        with self.assertRaisesRegex(error, line) as caught:
            ballast.plan_module(*arguments, **{"device_bytes": MANY, "trained": "stream", **options})
        self.assertNotIn("\n", str(caught.exception))

    def test_each_with_one_line(self):
        model = Stack(16, 2)
        self.refuse(TypeError, "^model: must be", "llama")
        self.refuse(TypeError, "^device_bytes: ", model, device_bytes="24GB")
        self.refuse(ValueError, "^host_bytes: ", model, host_bytes=0)
        self.refuse(TypeError, "^sample: must be", model, 7)
        self.refuse(ballast.UsageError, "^sample: the model cannot be computed", model, torch.empty(3, 17))
        self.refuse(ballast.UsageError, '^rates: must be {"link"', model, rates={"link": 1e9})
        self.refuse(ValueError, r'^rates\["flops"\]: ', model, rates={"link": 1e9, "flops": 0})
        self.refuse(ValueError, "^trained: ", model, trained="yes")
        self.refuse(ballast.UsageError, "^blocks: nothing to offload", nn.Linear(4, 4))
        self.refuse(ballast.UsageError, "^model: a trained parameter is torch.float64", model.double())

    def test_an_offloaded_model(self):
        fake_device.offload(model := dit()(), 1 << 20)
        self.refuse(ballast.UsageError, "^model: is offloaded already", model)

    def test_a_model_that_needs_values(self):
        class Branching(Stack):
            def forward(self, x):
                return super().forward(x) if x.sum() > 0 else x
        self.refuse(ballast.UsageError, "^sample: the model cannot be computed .* without values", Branching(16, 2),
                    torch.empty(2, 16))


if __name__ == "__main__":
    unittest.main()
