"""Overlapped updates: every use of a weight gets the updated one. Needs torch."""

import copy
import gc
import io
import subprocess
import sys
import textwrap
import unittest
import weakref

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW, OffloadSGD
from small_gpt import bits, make_model, train

SIZE = 200


class Wrapper(torch.nn.Module):
    """Replaces DistributedDataParallel and other wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def in_flight(overlap="check") -> tuple:
    """A model during an update that moves each weight by about 1."""
    torch.manual_seed(0)
    model = Wrapper(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)))
    right = copy.deepcopy(model)
    for one, kind in ((right, False), (model, overlap)):
        optimizer = OffloadAdamW(one.parameters(), lr=1.0, threads=1, overlap=kind)
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, right, optimizer


def save_and_load(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS = {
    "state_dict": lambda m: m.state_dict()["module.0.weight"],
    "state_dict of a part": lambda m: m.module.state_dict()["0.weight"],
    "state_dict of a layer": lambda m: m.module[0].state_dict()["weight"],
    "state_dict that keeps variables": lambda m: m.state_dict(keep_vars=True)["module.0.weight"] + 0,
    "clone": lambda m: m.module[0].weight.clone(),
    "data": lambda m: m.module[0].weight.data,
    "detach": lambda m: m.module[0].weight.detach(),
    "numpy": lambda m: torch.from_numpy(m.module[0].weight.detach().numpy()),
    "dlpack": lambda m: torch.from_dlpack(m.module[0].weight.detach()),
    "list": lambda m: torch.tensor(m.module[0].weight.tolist()),
    "deepcopy": lambda m: copy.deepcopy(m).module[0].weight,
    "deepcopy of a parameter": lambda m: copy.deepcopy(m.module[0].weight),
    "pickle": lambda m: save_and_load(m).module[0].weight,
    "pickle of a parameter": lambda m: save_and_load(m.module[0].weight),
    "parameters_to_vector": lambda m: torch.nn.utils.parameters_to_vector(
        m.parameters())[: SIZE * SIZE].view(SIZE, SIZE),
    "averaged model": lambda m: averaged(m).module.module[0].weight,
    "foreach": lambda m: torch._foreach_add(list(m.parameters()), 0.0)[0],
    "out": lambda m: torch.add(m.module[0].weight, 0, out=torch.empty(SIZE, SIZE)),
    "functional": lambda m: torch.func.functional_call(
        m.module[0], dict(m.module[0].named_parameters()), torch.eye(SIZE)).t()
    - m.module[0].bias[:, None],
    "linear": lambda m: torch.nn.functional.linear(torch.eye(SIZE), m.module[0].weight).t(),
    "storage": lambda m: torch.tensor([]).set_(m.module[0].weight.untyped_storage(), 0, (SIZE, SIZE)),
    "new type": lambda m: m.double().module[0].weight,
}


def averaged(model: torch.nn.Module) -> torch.optim.swa_utils.AveragedModel:
    twin = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    twin.update_parameters(model)
    return twin


class Reads(unittest.TestCase):
    def test_each_way_to_read_a_weight_waits(self) -> None:
        for name, read in READS.items():
            with self.subTest(name), torch.no_grad():
                # With "check", memory that is read too early has NaNs.
                model, right, optimizer = in_flight()
                self.assertTrue(optimizer.updating)
                torch.testing.assert_close(read(model).detach().float(), right.module[0].weight.detach(),
                                           rtol=0, atol=1e-6 if name == "functional" else 0)

    def test_forward_passes_wait(self) -> None:
        x = torch.ones(1, SIZE)
        for mode in (True, False):
            for overlap in (True, "check"):
                model, right, optimizer = in_flight(overlap)
                out = model.train(mode)(x)
                self.assertTrue(torch.equal(out, right(x)))
                optimizer.synchronize()
                self.assertIs(type(model.module[0].weight), torch.nn.Parameter)

    def test_attention_in_evaluation_takes_its_fast_path(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        right = copy.deepcopy(model)
        x = torch.randn(2, 5, 16)
        for one, overlap in ((model, "check"), (right, False)):
            optimizer = OffloadAdamW(one.parameters(), lr=0.1, overlap=overlap)
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        with torch.no_grad():
            self.assertTrue(torch.equal(model(x), right(x)))

    def test_questions_about_a_weight_do_not_wait(self) -> None:
        model, _, optimizer = in_flight()
        weight = model.module[0].weight
        self.assertIsInstance(weight, torch.nn.Parameter)
        self.assertEqual((weight.shape, weight.numel(), weight.dtype, weight.requires_grad),
                         (torch.Size([SIZE, SIZE]), SIZE * SIZE, torch.float32, True))
        self.assertIsNone(weight.grad)
        optimizer.zero_grad()
        model.zero_grad()
        self.assertTrue(optimizer.updating)
        self.assertIn("Parameter containing", repr(weight))
        self.assertNotIn("nan", repr(weight))

    def test_a_write_that_does_not_wait_is_found(self) -> None:
        model, _, optimizer = in_flight()
        optimizer.synchronize()
        alias = model.module[0].weight.detach()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        self.assertTrue(alias.isnan().all())  # so that a read is noticed as well
        alias.fill_(0.0)
        with self.assertRaisesRegex(RuntimeError, r"params\[0\]\[0\].*synchronize"):
            optimizer.synchronize()

    def test_code_that_was_compiled_earlier(self) -> None:
        for overlap in (True, "check"):
            torch._dynamo.reset()
            model, right = (torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)) for _ in range(2))
            right.load_state_dict(model.state_dict())
            compiled = torch.compile(model, backend="eager")
            x = torch.ones(1, SIZE)
            compiled(x)
            for one, kind in ((right, False), (model, overlap)):
                optimizer = OffloadAdamW(one.parameters(), lr=1.0, threads=1, overlap=kind)
                for parameter in one.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            self.assertTrue(torch.equal(compiled(x), right(x)))
            torch._dynamo.reset()

    def test_code_that_is_compiled_in_flight(self) -> None:
        torch._dynamo.reset()
        model, right, _ = in_flight()
        x = torch.ones(1, SIZE)
        self.assertTrue(torch.equal(torch.compile(model, backend="eager")(x), right(x)))
        torch._dynamo.reset()


class Life(unittest.TestCase):
    def test_results_have_the_same_bits(self) -> None:
        torch._dynamo.reset()
        for dtype in (torch.float32, torch.bfloat16):
            runs = []
            for overlap in (False, True, "check"):
                model = make_model(dtype)
                optimizer = OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, overlap=overlap)
                losses = train(model, optimizer, range(4), micro=2)
                optimizer.synchronize()
                runs.append((losses, bits(model)))
            self.assertEqual(runs[0], runs[1])
            self.assertEqual(runs[0], runs[2])

    def test_a_dropped_optimizer_ends_its_step(self) -> None:
        for overlap in (True, "check"):
            model, right, optimizer = in_flight(overlap)
            del optimizer
            gc.collect()
            self.assertEqual(bits(model), bits(right))

    def test_nothing_of_a_deleted_optimizer_stays(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16()
        weight = model[0].weight
        for _ in range(3):
            optimizer = OffloadAdamW(model, overlap=True, gradient_hooks=True)
            model(torch.ones(1, 4).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.state[weight]["exp_avg"].add_(1)
            engine = weakref.ref(optimizer._engine)
            gone = weakref.ref(optimizer)
            gc.disable()
            try:
                del optimizer
                self.assertIsNone(gone())
                self.assertIsNone(engine())
            finally:
                gc.enable()
        self.assertEqual(len(model[0]._forward_pre_hooks), 0)
        self.assertEqual(len(weight._post_accumulate_grad_hooks or {}), 0)
        self.assertEqual(len(torch.nn.modules.module._global_forward_pre_hooks), 0)

    def test_the_interpreter_ends_during_a_step(self) -> None:
        program = """
            import torch, ballast
            model = torch.nn.Linear(3000, 3000)
            optimizer = ballast.OffloadAdamW(model, overlap=True)
            model(torch.ones(1, 3000)).sum().backward()
            optimizer.step()
            print("end")
        """
        result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True,
                                text=True, timeout=120, check=False)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "end\n", ""))


class GradientHooks(unittest.TestCase):
    def test_clipping_is_true_or_refused(self) -> None:
        for hooks in (False, True):
            model = torch.nn.Linear(8, 8).bfloat16()
            optimizer = OffloadSGD(model.parameters(), lr=1.0, gradient_hooks=hooks)
            (model(torch.ones(1, 8).bfloat16()) * 1e4).sum().backward()
            if hooks:
                for use in (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                            lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
                            lambda: model.weight.grad.sum(), lambda: model.weight.grad.mul_(0.5)):
                    with self.assertRaisesRegex(RuntimeError, "max_grad_norm"):
                        use()
                for foreach in (True, False):
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), foreach=foreach)
                self.assertEqual(norm.item(), torch.nn.utils.get_total_norm(
                    [p.grad for p in model.parameters()]).item())
                optimizer.step()
                self.assertAlmostEqual(optimizer.grad_norm / norm.item(), 1.0, delta=1e-2)
                self.assertIn("TakenGradient", repr(model.weight.grad))
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                self.assertAlmostEqual(optimizer.grad_norm, 1.0, delta=0.02)

    def test_gradients_are_dropped_as_with_torch(self) -> None:
        for drop in (lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad(),
                     lambda m, o: o.zero_grad(set_to_none=False),
                     lambda m, o: m.zero_grad(set_to_none=False),
                     lambda m, o: setattr(m.weight, "grad", None)):
            for hooks, foreach in ((False, None), (True, None), (True, True)):
                model = torch.nn.Linear(4, 1, bias=False).bfloat16()
                torch.nn.init.zeros_(model.weight)
                optimizer = OffloadSGD(model.parameters(), lr=1.0, gradient_hooks=hooks, foreach=foreach)
                x = torch.ones(1, 4).bfloat16()
                (100 * model(x)).sum().backward()
                drop(model, optimizer)
                for _ in range(2):
                    model(x).sum().backward()
                optimizer.step()
                self.assertEqual(model.weight.tolist(), [[-2.0] * 4])
                drop(model, optimizer)
                has_gradient = model.weight.grad is not None
                optimizer.step()
                steps = optimizer.state[model.weight]["step"].item()
                self.assertEqual(steps, 2 if has_gradient else 1)

    def test_sparse_gradients_are_refused_by_name(self) -> None:
        for hooks in (False, True):
            model = torch.nn.Embedding(5, 3, sparse=True)
            optimizer = OffloadAdamW(model, gradient_hooks=hooks)
            model(torch.tensor([1])).sum().backward()
            with self.assertRaisesRegex(TypeError, r"params\[0\]\[0\] \(weight\)"):
                optimizer.step()
            self.assertEqual(optimizer.state_dict()["state"], {})


if __name__ == "__main__":
    unittest.main()
