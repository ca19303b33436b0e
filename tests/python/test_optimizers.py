"""The optimizers compared with PyTorch's, with states in every place. Needs torch."""

import copy
import gc
import os
import tempfile
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

import ballast
from ballast import OffloadAdamW, OffloadLion, OffloadSGD
from small_gpt import Model, bits, loss_of, make_model, tokens, train
from support import same_rules

TINY = 1024  # elements per sub-group, so that every test has several


class Parity(unittest.TestCase):
    def test_a_step_from_equal_states_is_within_one_ulp(self) -> None:
        model = make_model()
        other = copy.deepcopy(model)
        ours = OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        theirs = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1)
        step_size = torch.tensor(1e-3)
        infinity = torch.tensor(torch.inf)
        for step in range(5):
            ours.load_state_dict(theirs.state_dict())
            before = [p.detach().clone() for p in other.parameters()]
            for mine, its in zip(model.parameters(), before):
                mine.data.copy_(its)
            train(other, theirs, range(step, step + 1))
            train(model, ours, range(step, step + 1))
            for mine, its, old in zip(model.parameters(), other.parameters(), before):
                larger = torch.maximum(torch.maximum(its.abs(), old.abs()), step_size)
                ulp = torch.nextafter(larger, infinity) - larger
                off = (mine - its).abs() / ulp
                # Where a step changes a weight by much, the roundings of the step itself are
                # visible.
                self.assertLessEqual(off.max().item(), 4.0)
                large = off[old.abs() >= 4 * step_size]
                self.assertLessEqual(large.max().item() if large.numel() else 0.0, 1.0)

    def test_200_steps_have_the_same_losses(self) -> None:
        model = make_model()
        other = copy.deepcopy(model)
        ours = train(model, OffloadAdamW(model, lr=1e-3), range(200))
        theirs = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), range(200))
        self.assertLess(max(abs(a - b) for a, b in zip(ours, theirs)), 1e-6)
        self.assertLess(ours[-1], ours[0])

    def test_clipping_and_accumulation_are_those_of_torch(self) -> None:
        model = make_model()
        other = copy.deepcopy(model)
        optimizer = OffloadAdamW(model, lr=1e-3, max_grad_norm=0.01)
        ours = train(model, optimizer, range(20), micro=3)
        theirs = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), range(20), clip=0.01,
                       micro=3)
        self.assertGreater(optimizer.grad_norm, 0.01)
        self.assertLess(max(abs(a - b) for a, b in zip(ours, theirs)), 1e-6)

    def test_the_other_rules_are_those_of_torch(self) -> None:
        pairs = [*same_rules(lr=1e-2, momentum=0.9, nesterov=True),
                 *same_rules(lr=1e-2, weight_decay=0.1)]
        for our_class, their_class, options in pairs:
            with self.subTest(our_class.__name__, **options):
                model = make_model()
                other = copy.deepcopy(model)
                optimizer = our_class(model, **options)
                reference = their_class(other.parameters(), **options)
                ours = train(model, optimizer, range(20))
                theirs = train(other, reference, range(20))
                self.assertLess(max(abs(a - b) for a, b in zip(ours, theirs)), 2e-6)
                reference.load_state_dict(optimizer.state_dict())
                optimizer.load_state_dict(reference.state_dict())

    def test_lion_is_its_paper(self) -> None:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = OffloadLion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
        moment = torch.zeros(3)
        expected = weight.detach().clone()
        for step in range(3):
            gradient = torch.tensor([0.5, -1.0, (-1.0) ** step])
            weight.grad = gradient.clone()
            optimizer.step()
            expected = expected * (1 - 0.1 * 0.5) - 0.1 * torch.sign(0.9 * moment + 0.1 * gradient)
            moment = 0.99 * moment + 0.01 * gradient
            torch.testing.assert_close(weight.detach(), expected)

    def test_16_bit_weights_follow_their_masters(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                model = make_model(dtype)
                optimizer = OffloadAdamW(model, lr=1e-6)
                train(model, optimizer, range(30))
                state = optimizer.state_dict()["state"]
                for number, parameter in enumerate(dict.fromkeys(model.parameters())):
                    master = state[number]["master"]
                    # A step of 1e-6 is far below half an ulp of most weights.
                    self.assertGreater((master != parameter.float()).float().mean().item(), 0.5)
                    torch.testing.assert_close(master, parameter.float(), rtol=2**-7, atol=1e-6)


class SameBits(unittest.TestCase):
    def run_with(self, dtype: torch.dtype = torch.bfloat16, **options) -> tuple:
        model = make_model(dtype)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, _sub_group=TINY,
                                 **options)
        losses = train(model, optimizer, range(6), micro=2)
        optimizer.synchronize()
        return losses, bits(model), model, optimizer

    def test_overlap_threads_and_place_change_nothing(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            losses, weights, _, _ = self.run_with(dtype)
            self.assertEqual((losses, weights), self.run_with(dtype, threads=1)[:2])
            torch.manual_seed(0)
            model = Model(dtype)
            overlapped = OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, _sub_group=TINY,
                                      overlap=True)
            self.assertEqual(losses, train(model, overlapped, range(6), micro=2))
            overlapped.synchronize()
            self.assertEqual(weights, bits(model))
            with tempfile.TemporaryDirectory() as path:
                on_nvme = {"device": "nvme", "path": path, "any_file_system": True}
                self.assertEqual((losses, weights), self.run_with(dtype, **on_nvme)[:2])
                some = self.run_with(dtype, host_bytes=100_000, **on_nvme)
                self.assertEqual((losses, weights), some[:2])
                self.assertGreater(some[3].nvme_bytes, 0)
                self.assertLessEqual(some[3].host_bytes, 100_000)

    def test_compressed_moments_on_nvme(self) -> None:
        for moments in ("bf16_first", "8bit"):
            in_memory = self.run_with(optimizer_states=moments)
            with tempfile.TemporaryDirectory() as path:
                on_nvme = self.run_with(optimizer_states=moments, device="nvme", path=path,
                                        any_file_system=True)
                self.assertEqual(in_memory[:2], on_nvme[:2])

    def resumed(self, through_files: bool, **options) -> None:
        losses, weights, model, optimizer = self.run_with(**options)
        state = copy.deepcopy(model.state_dict())
        again = make_model(torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            again.load_state_dict(state)
            other = OffloadAdamW(again.parameters(), lr=7.0, max_grad_norm=1.0, **options)
            if through_files:
                optimizer.save(folder)
                other.load(folder)
            else:
                other.load_state_dict(optimizer.state_dict())
        self.assertEqual(train(model, optimizer, range(6, 9)), train(again, other, range(6, 9)))
        self.assertEqual(bits(model), bits(again))

    def test_a_resumed_run_has_the_same_bits(self) -> None:
        for moments in ("fp32", "bf16_first", "8bit"):
            for through_files in (False, True):
                with self.subTest(moments=moments, through_files=through_files):
                    self.resumed(through_files, optimizer_states=moments)

    def test_accumulation_is_in_fp32(self) -> None:
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        optimizer = OffloadSGD([weight], lr=1.0, gradient_hooks=True)
        for value in (1.0, 2.0**-10, 2.0**-10):
            (weight * value).sum().backward()
        optimizer.step()
        master = optimizer.state_dict()["state"][0]["master"]
        self.assertEqual(master.tolist(), [-(1 + 2.0**-9)] * 4)


class Uses(unittest.TestCase):
    """Usual calls of training programs."""

    def test_schedulers_groups_and_state_dict_of_torch(self) -> None:
        model = make_model()
        groups = [{"params": model.layers.parameters(), "lr": 1e-3},
                  {"params": model.embedding.parameters(), "weight_decay": 0.0}]
        optimizer = OffloadAdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        self.assertEqual(optimizer.state_dict()["state"], {})
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
        state = optimizer.state_dict()
        self.assertEqual([g["lr"] for g in state["param_groups"]],
                         [g["lr"] for g in optimizer.param_groups])
        theirs = torch.optim.AdamW([{"params": model.layers.parameters()},
                                    {"params": model.embedding.parameters()}])
        theirs.load_state_dict(state)
        optimizer.load_state_dict(theirs.state_dict())
        again = optimizer.state_dict()
        for number, entry in state["state"].items():
            for name, value in entry.items():
                self.assertTrue(torch.equal(value, again["state"][number][name]), name)

    def test_steps_with_non_finite_gradients_are_skipped(self) -> None:
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = OffloadAdamW([weight])
        for bad in (float("inf"), float("nan")):
            weight.grad = torch.tensor([1.0, bad, 0.0, 0.0, 0.0])
            optimizer.step()
        self.assertEqual(optimizer.skipped_steps, 2)
        self.assertEqual(weight.tolist(), [1.0] * 5)

    def test_weights_loaded_later_are_the_masters(self) -> None:
        model = make_model(torch.bfloat16)
        optimizer = OffloadAdamW(model, lr=0.0, weight_decay=0.0)
        train(model, optimizer, range(1))
        torch.manual_seed(7)
        other = Model(torch.bfloat16)
        model.load_state_dict(other.state_dict())
        train(model, optimizer, range(1))
        optimizer.synchronize()
        self.assertEqual(bits(model), bits(other))

    def test_parameters_can_be_added_and_frozen(self) -> None:
        model = make_model()
        other = copy.deepcopy(model)
        ours = OffloadAdamW(model.layers[0].parameters(), lr=1e-3)
        theirs = torch.optim.AdamW(other.layers[0].parameters(), lr=1e-3)
        for one, optimizer in ((model, ours), (other, theirs)):
            train(one, optimizer, range(3))
            one.zero_grad()
            optimizer.add_param_group({"params": one.layers[1].parameters(), "lr": 1e-2})
            one.layers[0].mlp.requires_grad_(False)
            train(one, optimizer, range(3, 6))
        for mine, its in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(mine, its, rtol=0, atol=2e-5)

    def test_checkpointing_and_compile(self) -> None:
        plain, weights = make_model(), None
        train(plain, OffloadAdamW(plain.parameters(), lr=1e-3), range(4))

        recomputing = make_model()
        for layer in recomputing.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: torch.utils.checkpoint.checkpoint(
                forward, x, use_reentrant=False)
        optimizer = OffloadAdamW(recomputing, lr=1e-3, overlap=True)
        train(recomputing, optimizer, range(4))
        optimizer.synchronize()
        self.assertEqual(bits(plain), bits(recomputing))

    def test_compiled_models_do_not_read_weights_that_change(self) -> None:
        for compile_first in (False, True):
            model = make_model()
            compiled = torch.compile(model, backend="eager")
            optimizer = OffloadAdamW(model.parameters(), lr=1e-3, overlap=True,
                                     model=compiled if compile_first else model)
            train(compiled, optimizer, range(4))
            optimizer.synchronize()
            plain = make_model()
            train(plain, OffloadAdamW(plain.parameters(), lr=1e-3), range(4))
            for mine, its in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)

    def test_copies_of_the_model_are_whole(self) -> None:
        model = make_model()
        optimizer = OffloadAdamW(model, lr=1e-3, overlap=True)
        train(model, optimizer, range(2))
        twin = copy.deepcopy(model)
        optimizer.synchronize()
        self.assertEqual(bits(model), bits(twin))

    def test_two_optimizers_and_ten_thousand_steps_leak_nothing(self) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3000)) for _ in range(4)]
        optimizers = [OffloadAdamW(parameters[:2]), OffloadLion(parameters[2:])]

        def steps(count: int) -> None:
            for _ in range(count):
                for parameter in parameters:
                    parameter.grad = torch.full((3000,), 0.5)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        steps(1000)
        gc.collect()
        before = resident_kib()
        steps(10_000)
        gc.collect()
        self.assertLess(resident_kib() - before, 4096)

    def test_a_child_of_fork_is_refused(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = OffloadAdamW([weight])
        weight.grad = torch.ones(3)
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                weight.grad = torch.ones(3)
                optimizer.step()
            except RuntimeError as error:
                os._exit(0 if "before fork()" in str(error) else 2)
            os._exit(1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        weight.grad = torch.ones(3)
        optimizer.step()


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3, requires_grad=True)


class Mistakes(unittest.TestCase):
    def test_errors_name_their_argument(self) -> None:
        weight = [torch.nn.Parameter(torch.ones(3))]
        cases = [
            (ValueError, "lr", lambda: OffloadAdamW(weight, lr=-1.0)),
            (ValueError, "betas", lambda: OffloadAdamW(weight, betas=(0.9, 1.0))),
            (ValueError, "device", lambda: OffloadAdamW(weight, device="disk")),
            (ValueError, "path", lambda: OffloadAdamW(weight, device="nvme")),
            (ValueError, "path", lambda: OffloadAdamW(weight, path="/tmp")),
            (OSError, "path", lambda: OffloadAdamW(weight, device="nvme", path="/no/where")),
            (ValueError, "host_bytes", lambda: OffloadAdamW(
                weight, device="nvme", path=tempfile.gettempdir(), host_bytes=1)),
            (ValueError, "optimizer_states", lambda: OffloadAdamW(weight, optimizer_states="4bit")),
            (ValueError, "overlap", lambda: OffloadAdamW(weight, overlap="always")),
            (ValueError, "overlap", lambda: OffloadAdamW(weight, overlap=1)),
            (ValueError, "gradient_hooks", lambda: OffloadAdamW(weight, gradient_hooks="yes")),
            (ValueError, "path", lambda: OffloadAdamW(weight, device="nvme", path=[])),
            (ValueError, "path", lambda: OffloadAdamW(weight, device="nvme", path="")),
            (ValueError, "path", lambda: OffloadAdamW(weight, device="nvme", path="/tmp/a\0b")),
            (TypeError, "path", lambda: OffloadAdamW(weight, device="nvme", path=3)),
            (TypeError, "path", lambda: OffloadAdamW(weight, device="nvme", path=[b"/tmp"])),
            (ValueError, "path", lambda: OffloadAdamW(weight, device="nvme", path=["/tmp", "/tmp/"])),
            (TypeError, "host_bytes", lambda: OffloadAdamW(weight, device="nvme", path="/tmp",
                                                           host_bytes="8GiB")),
            (ValueError, "host_bytes", lambda: OffloadAdamW(weight, device="nvme", path="/tmp",
                                                            host_bytes=-1)),
            (TypeError, "threads", lambda: OffloadAdamW(weight, threads=1.5)),
            (ValueError, "threads", lambda: OffloadAdamW(weight, threads=-1)),
            (TypeError, "minimal_size", lambda: OffloadAdamW(weight, minimal_size="4k")),
            (TypeError, "max_grad_norm", lambda: OffloadAdamW(weight, max_grad_norm="1")),
            (ValueError, "max_grad_norm", lambda: OffloadAdamW(weight, max_grad_norm=float("nan"))),
            (TypeError, "model", lambda: OffloadAdamW(weight, model="x")),
            (TypeError, "lr", lambda: OffloadAdamW(weight, lr="fast")),
            (ValueError, "lr", lambda: OffloadAdamW(weight, lr=torch.ones(2))),
            (TypeError, "betas", lambda: OffloadAdamW(weight, betas=0.9)),
            (TypeError, "params", lambda: OffloadAdamW({"weight": weight[0]})),
            (TypeError, "params", lambda: OffloadAdamW(weight[0])),
            (TypeError, "param_group", lambda: OffloadAdamW([{"params": weight}, weight[0]])),
            (ValueError, "param_group", lambda: OffloadAdamW([{"parameters": weight}])),
            (ValueError, "params[0][1]", lambda: OffloadAdamW([weight[0], weight[0]])),
            (ValueError, "params[0]", lambda: OffloadAdamW([{"params": weight, "amsgrad": True}])),
            (TypeError, "params[0][0]", lambda: OffloadAdamW(torch.nn.LazyLinear(3))),
            (TypeError, "params[0][0]", lambda: OffloadAdamW(
                [torch.ones(2, dtype=torch.complex64, requires_grad=True)])),
            (TypeError, "params[0][0]", lambda: OffloadAdamW(
                [torch.ones(2, device="meta", requires_grad=True)])),
            (ValueError, "params[0][0]", lambda: OffloadAdamW(
                [torch.ones(1, requires_grad=True).expand(3)])),
            (ValueError, "params[0][0]", lambda: OffloadAdamW([inference_tensor()])),
            (OSError, "optimizer.safetensors", lambda: OffloadAdamW(weight).load("/no/where")),
            (TypeError, "directory", lambda: OffloadAdamW(weight).save(3)),
            (TypeError, "state_dict", lambda: OffloadAdamW(weight).load_state_dict(3)),
            (ValueError, "state_dict", lambda: OffloadAdamW(weight).load_state_dict({})),
            (ValueError, "nesterov", lambda: OffloadSGD(weight, nesterov=True)),
            (ValueError, "params[0]", lambda: OffloadAdamW(weight, maximize=True)),
            (TypeError, "params[0][1]", lambda: OffloadAdamW([*weight, 3])),
            (TypeError, "params[0][0]", lambda: OffloadAdamW(
                [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])),
            (TypeError, "state_dict", lambda: copy.deepcopy(OffloadAdamW(weight))),
        ]
        for kind, name, mistake in cases:
            with self.subTest(name=name), self.assertRaises(kind) as caught:
                mistake()
            self.assertIn(name, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    def test_odd_parameters_work(self) -> None:
        for weight in (torch.zeros(()), torch.zeros(0), torch.zeros(3, 0), torch.zeros(1, 1)):
            parameter = torch.nn.Parameter(weight)
            optimizer = OffloadSGD([torch.nn.Parameter(torch.zeros(2)), parameter],
                                   lr=torch.tensor(1.0), momentum=0.9)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            self.assertTrue(torch.equal(parameter.detach(), weight.detach()))
            self.assertTrue(bool((parameter == -1).all()))
            optimizer.load_state_dict(optimizer.state_dict())
            with tempfile.TemporaryDirectory() as folder:
                optimizer.save(folder)
                optimizer.load(folder)

    def test_states_that_do_not_fit_change_nothing(self) -> None:
        model = make_model()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, range(2))
        before = optimizer.state_dict()
        other = copy.deepcopy(before)
        other["state"][3]["exp_avg"] = torch.zeros(7)
        with self.assertRaisesRegex(ValueError, r"state\[3\]\['exp_avg'\]"):
            optimizer.load_state_dict(other)
        with tempfile.TemporaryDirectory() as folder:
            file = optimizer.save(folder)
            with open(file, "r+b") as damaged:
                damaged.truncate(os.path.getsize(file) - 100)
            with self.assertRaisesRegex(RuntimeError, "optimizer.safetensors"):
                optimizer.load(folder)
            lion = OffloadLion(model.parameters())
            optimizer.save(folder)
            with self.assertRaisesRegex(RuntimeError, "adamw"):
                lion.load(folder)
        after = optimizer.state_dict()
        for number, entry in before["state"].items():
            for name, value in entry.items():
                self.assertTrue(torch.equal(value, after["state"][number][name]))


if __name__ == "__main__":
    unittest.main()
