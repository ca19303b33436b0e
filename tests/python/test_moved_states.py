"""States that move to other parameters, as programs for Gaussian splatting and for growing models do. torch.optim
is the oracle. Needs torch."""

import gc
import tempfile
import unittest
import weakref

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from torch import nn

from ballast import OffloadAdagrad, OffloadAdamW, OffloadLion, OffloadSGD
from support import same_rules

PAIRS = tuple(same_rules(momentum=0.9))


def longer(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor.detach(), torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)])


def moment_names(state) -> list:
    return [name for name in state if name not in ("step", "master")]


def take_first(optimizer, old: nn.Parameter, rows: int) -> nn.Parameter:
    """The state is taken away and deleted, changed, and put under the new parameter (gsplat)."""
    state = optimizer.state[old]
    del optimizer.state[old]
    for name in moment_names(state):
        state[name] = longer(state[name], rows)
    new = nn.Parameter(longer(old, rows))
    optimizer.param_groups[0]["params"] = [new]
    optimizer.state[new] = state
    return new


def assign_first(optimizer, old: nn.Parameter, rows: int) -> nn.Parameter:
    """The state gets longer tensors while it still belongs to the old parameter (3D Gaussian splatting)."""
    state = optimizer.state.get(old)
    for name in moment_names(state):
        state[name] = longer(state[name], rows)
    del optimizer.state[old]
    optimizer.param_groups[0]["params"][0] = nn.Parameter(longer(old, rows))
    optimizer.state[optimizer.param_groups[0]["params"][0]] = state
    return optimizer.param_groups[0]["params"][0]


def pop(optimizer, old: nn.Parameter, rows: int) -> nn.Parameter:
    state = optimizer.state.pop(old)
    new = optimizer.param_groups[0]["params"][0] = nn.Parameter(longer(old, rows))
    optimizer.state[new] = {name: longer(value, rows) if name in moment_names(state) else value
                            for name, value in state.items()}
    return new


def with_master(optimizer, old: nn.Parameter, rows: int) -> nn.Parameter:
    """All tensors of the state get rows, also the master of a 16-bit parameter."""
    state = optimizer.state[old]
    del optimizer.state[old]
    for name in state.keys():
        if name != "step":
            state[name] = longer(state[name], rows)
    new = nn.Parameter(torch.cat([old.detach(), torch.ones(rows, *old.shape[1:], dtype=old.dtype)]))
    optimizer.param_groups[0]["params"] = [new]
    optimizer.state[new] = state
    return new


def run(make, move, options: dict, steps: int = 12) -> tuple:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(20, 3))
    optimizer = make([parameter], lr=1e-2, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if step % 4 == 2:
            parameter = move(optimizer, parameter, 5)
    return parameter.detach(), dict(optimizer.state[parameter])


class MovedStates(unittest.TestCase):
    def test_every_order_gives_the_states_of_torch(self) -> None:
        for ours, theirs, options in PAIRS:
            for move in (take_first, assign_first, pop):
                with self.subTest(rule=theirs.__name__, move=move.__name__):
                    mine, state = run(ours, move, options)
                    right, its = run(theirs, move, options)
                    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
                    for name, value in its.items():
                        torch.testing.assert_close(state[name], value, check_dtype=False)

    def test_a_state_that_is_held_outlives_its_parameter(self) -> None:
        first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        optimizer = OffloadAdamW([first, second])
        for parameter in (first, second):
            parameter.grad = torch.full((4,), 2.0)
        optimizer.step()
        state = optimizer.state[first]
        self.assertIs(optimizer.state[first], state)
        before = state["exp_avg"]
        del optimizer.state[first]
        self.assertNotIn(first, optimizer.state)
        self.assertTrue(torch.equal(state["exp_avg"], before))
        optimizer.load_state_dict(optimizer.state_dict())
        other = optimizer.state[second]
        optimizer.state[second] = state
        self.assertIs(optimizer.state[second], state)
        self.assertEqual(other["step"].item(), 1)
        state["step"] = torch.tensor(5.0)  # it is the state of a parameter again
        self.assertEqual(optimizer.state_dict()["state"][1]["step"].item(), 5)

    def test_a_state_of_another_shape_is_refused_at_the_step(self) -> None:
        parameter = nn.Parameter(torch.ones(4))
        optimizer = OffloadAdamW([parameter])
        parameter.grad = torch.ones(4)
        optimizer.step()
        optimizer.state[parameter]["exp_avg"] = torch.ones(6)
        kept = parameter.detach().clone()
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, r"params\[0\]\[0\].*exp_avg.*\(4,\).*\(6,\)"):
                optimizer.step()
        self.assertTrue(torch.equal(parameter, kept))
        optimizer.state[parameter]["exp_avg"] = torch.zeros(4)
        optimizer.step()
        self.assertEqual(optimizer.state[parameter]["step"].item(), 2)


    def test_new_rows_of_16_bit_parameters_keep_their_weights(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            parameter = nn.Parameter(torch.randn(20, 3).to(dtype))
            optimizer = OffloadAdamW([parameter], lr=1e-3)
            for move in (with_master, assign_first):
                for _ in range(3):
                    parameter.grad = torch.randn(parameter.shape).to(dtype)
                    optimizer.step()
                before = optimizer.state[parameter]["master"]
                self.assertFalse(torch.equal(before, parameter.float()))
                parameter = move(optimizer, parameter, 5)
                weights = parameter.detach().float()
                rows = len(before)
                expected = torch.cat([before, weights[rows:]]) if move is with_master else weights
                self.assertTrue(torch.equal(weights[rows:], torch.full((5, 3), float(move is with_master))))
                self.assertTrue(torch.equal(optimizer.state[parameter]["master"], expected))

    def test_a_state_that_is_empty_moves(self) -> None:
        for rule, _, options in PAIRS:
            old, new = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6))
            optimizer = rule([old], **options)
            state = optimizer.state[old]
            del optimizer.state[old]
            optimizer.param_groups[0]["params"] = [new]
            optimizer.state[new] = {} if rule is OffloadAdagrad else state
            new.grad = torch.ones(6)
            optimizer.step()
            self.assertEqual(len(optimizer.state_dict()["state"]), 1)
        with self.assertRaises(KeyError):
            del optimizer.state[old]

    def test_a_parameter_that_joins_again_keeps_its_state(self) -> None:
        results = []
        for make in (OffloadAdamW, torch.optim.AdamW):
            parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
            optimizer = make(parameters, lr=0.1)
            for step in range(6):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, 1.0 - step)
                optimizer.step()
                if step == 2:
                    optimizer.param_groups.clear()
                    optimizer.add_param_group({"params": parameters[::-1], "lr": 0.05})
            results.append(torch.cat([p.detach() for p in parameters]))
        torch.testing.assert_close(*results)

    def test_states_on_nvme_survive_larger_parameters(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            parameters = [nn.Parameter(torch.ones(64, 32).bfloat16()), nn.Parameter(torch.ones(32))]
            optimizer = OffloadAdamW(parameters, device="nvme", path=folder, any_file_system=True)
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 2.0)
            optimizer.step()
            optimizer.state[parameters[0]]["exp_avg"] = torch.full((64, 32), 3.0)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(200, 100))]})
            self.assertTrue(bool((optimizer.state[parameters[0]]["exp_avg"] == 3).all()))
            self.assertAlmostEqual(optimizer.state[parameters[1]]["exp_avg"][0].item(), 0.2, delta=1e-6)


class DroppedParameters(unittest.TestCase):
    def test_memory_of_replaced_parameters_is_freed(self) -> None:
        size = 50_000
        parameter = nn.Parameter(torch.zeros(size))
        alive = []
        optimizer = OffloadAdamW([parameter])
        for _ in range(12):
            parameter.grad = torch.ones(size)
            optimizer.step()
            state = dict(optimizer.state[parameter])
            del optimizer.state[parameter]
            alive.append(weakref.ref(parameter))
            parameter = optimizer.param_groups[0]["params"][0] = nn.Parameter(parameter.detach().clone())
            optimizer.state[parameter] = state
        gc.collect()
        self.assertEqual([reference() for reference in alive if reference() is not None], [])
        self.assertLess(optimizer.host_bytes, 3 * 8 * size)
        self.assertEqual(optimizer.state[parameter]["step"].item(), 12)

    def test_the_states_of_others_stay_when_memory_is_freed(self) -> None:
        kept, large = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(5000))
        optimizer = OffloadLion([{"params": [kept]}, {"params": [large]}])
        kept.grad, large.grad = torch.full((100,), 3.0), torch.ones(5000)
        optimizer.step()
        before = optimizer.state[kept]["exp_avg"]
        del optimizer.state[large]
        del optimizer.param_groups[1]
        del large
        optimizer.step()  # the gradient of the kept one again
        self.assertEqual(optimizer.state[kept]["step"].item(), 2)
        self.assertTrue(torch.equal(optimizer.state[kept]["exp_avg"].sign(), before.sign()))
        self.assertLess(optimizer.host_bytes, 3 * 4 * 1024)


class FrozenParameters(unittest.TestCase):
    def test_they_may_be_of_any_kind(self) -> None:
        def inference() -> torch.Tensor:
            with torch.inference_mode():
                return torch.zeros(3)

        kinds = (torch.zeros(4, dtype=torch.uint8), torch.zeros(4).to(torch.float8_e4m3fn),
                 torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.complex64),
                 torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool),
                 torch.zeros(1, 4).expand(3, 4), torch.zeros(4, device="meta"), inference(),
                 torch.zeros(3, 3).to_sparse())
        for frozen in kinds:
            for ours, theirs, options in PAIRS:
                if ours is OffloadAdagrad:  # torch's makes states at once
                    continue
                with self.subTest(kind=str(frozen.dtype), layout=str(frozen.layout)):
                    trained = [], []
                    for make, weights in zip((ours, theirs), trained):
                        weight = nn.Parameter(torch.ones(4))
                        one = nn.Parameter(frozen, requires_grad=False)
                        optimizer = make([weight, one], lr=0.1, **options)
                        weight.grad = torch.ones(4)
                        optimizer.step()
                        self.assertEqual(list(optimizer.state_dict()["state"]), [0])
                        weights.append(weight.detach())
                    torch.testing.assert_close(*trained)

    def test_they_may_have_a_state(self) -> None:
        for ours, theirs, options in PAIRS:
            for frozen in (torch.zeros(4, dtype=torch.uint8), torch.zeros(1, 4).expand(3, 4)):
                weight, one = nn.Parameter(torch.ones(4)), nn.Parameter(frozen, requires_grad=False)
                first = theirs([weight, one], **options)
                first.state[one] = {"step": torch.tensor(2.0), "sum": torch.zeros(frozen.shape)}
                weight.grad = torch.ones(4)
                first.step()
                optimizer = ours([weight, one], **options)
                optimizer.load_state_dict(first.state_dict())
                optimizer.state[one]["note"] = 1
                optimizer.step()
                state = ours([weight, one], **options)
                state.load_state_dict(optimizer.state_dict())
                self.assertEqual(float(state.state[one]["step"]), 2)
                self.assertEqual(state.state[one]["note"], 1)

    def test_arguments_without_effect_pass(self) -> None:
        for options in ({"fused": True}, {"foreach": True}, {"amsgrad": False}, {"maximize": False},
                        {"capturable": True}, {"differentiable": False}):
            self.assertEqual(len(OffloadAdamW([torch.ones(2)], **options).param_groups), 1)
        self.assertEqual(len(OffloadSGD([torch.ones(2)], foreach=False, maximize=False).param_groups), 1)
        for name in ("amsgrad", "maximize", "differentiable"):
            with self.assertRaisesRegex(ValueError, name):
                OffloadAdamW([torch.ones(2)], **{name: True})


class ForeignStates(unittest.TestCase):
    def test_the_step_may_be_in_the_group(self) -> None:
        parameter = nn.Parameter(torch.ones(4))
        state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
        optimizer = OffloadAdamW([parameter])
        groups = [{**optimizer.state_dict()["param_groups"][0], "step": 1000, "bias_correction": True}]
        optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
        self.assertEqual(optimizer.state[parameter]["step"].item(), 1000)
        self.assertNotIn("step", optimizer.param_groups[0])
        own = {**state, "step": torch.tensor(7.0)}  # a state's own step counts
        optimizer.load_state_dict({"state": {0: own}, "param_groups": groups})
        self.assertEqual(optimizer.state[parameter]["step"].item(), 7)

    def test_a_step_that_is_nowhere_is_refused(self) -> None:
        parameter = nn.Parameter(torch.ones(4))
        state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
        for rule, changes, message in ((OffloadAdamW, {}, r"state\[0\] has no 'step'"),
                                       (OffloadAdamW, {"step": 3, "bias_correction": False},
                                        "bias_correction")):
            optimizer = rule([parameter])
            groups = [{**optimizer.state_dict()["param_groups"][0], **changes}]
            with self.assertRaisesRegex(ValueError, message):
                optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
            self.assertFalse(optimizer.state)

    def test_states_without_a_step_are_refused(self) -> None:
        """torch's optimizers raise KeyError at the next step."""
        def whole(optimizer, parameter, state):
            optimizer.state[parameter] = state

        def entry_by_entry(optimizer, parameter, state):
            optimizer.state.pop(parameter, None)
            for name, value in state.items():
                optimizer.state[parameter][name] = value

        cases = [(kind, whole) for pair in PAIRS[:2] for kind in pair[:2]]
        cases += [(kind, entry_by_entry) for kind in PAIRS[0][:2]]
        for kind, assign in cases:
            with self.subTest(kind=kind.__name__, assign=assign.__name__):
                first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
                optimizer = kind([first, second], lr=0.1)
                first.grad = torch.ones(4)
                optimizer.step()
                first.grad, second.grad = None, torch.ones(4)
                state = {name: value.clone() for name, value in optimizer.state[first].items()}
                step = state.pop("step")
                assign(optimizer, second, state)
                with self.assertRaisesRegex((ValueError, KeyError), "'step'"):
                    optimizer.step()
                self.assertTrue(torch.equal(second, torch.ones(4)))
                assign(optimizer, second, {**state, "step": step})
                optimizer.step()
                self.assertEqual(float(optimizer.state[second]["step"]), 2.0)

    def test_a_deleted_step_is_refused(self) -> None:
        for kind in PAIRS[0][:2]:
            parameter = nn.Parameter(torch.ones(4))
            optimizer = kind([parameter], lr=0.1)
            for _ in range(2):
                parameter.grad = torch.ones(4)
                optimizer.step()
            del optimizer.state[parameter]["step"]
            with self.assertRaisesRegex((ValueError, KeyError), "'step'"):
                optimizer.step()
            optimizer.state[parameter]["step"] = torch.tensor(2.0)
            optimizer.step()
            self.assertEqual(float(optimizer.state[parameter]["step"]), 3.0)

    def test_the_step_of_the_group_is_read_in_each_form(self) -> None:
        """apex and Transformer Engine have it in the group, as an int or a tensor."""
        for step in (7, torch.tensor(7), torch.tensor([7], dtype=torch.int32), 7.0):
            parameter = nn.Parameter(torch.ones(4))
            optimizer = OffloadAdamW([parameter], lr=0.1)
            moments = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
            saved = optimizer.state_dict()
            saved["state"] = {0: dict(moments)}
            saved["param_groups"][0]["step"] = step
            optimizer.load_state_dict(saved)
            self.assertEqual(float(optimizer.state[parameter]["step"]), 7.0)
            self.assertNotIn("step", optimizer.param_groups[0])
            saved["state"][0]["step"] = 9  # DeepSpeed has it here, as an int
            optimizer.load_state_dict(saved)
            self.assertEqual(float(optimizer.state[parameter]["step"]), 9.0)
            del saved["state"][0]["step"], saved["param_groups"][0]["step"]
            with self.assertRaisesRegex(ValueError, "has no 'step'"):
                optimizer.load_state_dict(saved)
            saved["state"][0] = {"step": 9, "state1": torch.ones(4), "state2": torch.ones(4)}
            with self.assertRaisesRegex(ValueError, "has no 'exp_avg'"):  # bitsandbytes
                optimizer.load_state_dict(saved)


if __name__ == "__main__":
    unittest.main()
