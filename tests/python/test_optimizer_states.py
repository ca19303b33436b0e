"""The states of the optimizers: their parameters, their places and their form. Needs torch."""

import contextlib
import copy
import json
import os
import resource
import tempfile
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

try:
    import safetensors.torch
except ImportError:
    safetensors = None

from ballast import OffloadAdamW, OffloadLion, OffloadSGD
from small_gpt import bits, make_model, train
from support import same_rules


def layers(count: int, size: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False) for _ in range(count)]).to(dtype)


def give_gradients(model: torch.nn.Module, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator)
            parameter.grad = values.to(parameter.dtype)


def moments(optimizer: torch.optim.Optimizer) -> dict:
    return {number: {name: value.clone() for name, value in entry.items()}
            for number, entry in optimizer.state_dict()["state"].items()}


@contextlib.contextmanager
def disk_folder():
    with tempfile.TemporaryDirectory(dir=os.environ.get("BALLAST_TEST_FOLDER")) as folder:
        yield folder


class FollowParameters(unittest.TestCase):
    def alternate(self, make, **options) -> tuple:
        model = layers(2)
        model[1].requires_grad_(False)
        optimizer = make(model.parameters(), lr=1e-2, **options)
        for step in range(12):
            for number in (0, 1):
                model[number].requires_grad_((step // 3) % 2 == number)
            optimizer.zero_grad()
            give_gradients(model, step)
            optimizer.step()
        return [float(s["step"]) for s in optimizer.state_dict()["state"].values()], bits(model), model

    def test_freezing_and_unfreezing_keep_the_moments(self) -> None:
        steps, weights, model = self.alternate(OffloadAdamW)
        theirs, _, other = self.alternate(torch.optim.AdamW)
        self.assertEqual(steps, theirs)
        for mine, its in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
        with disk_folder() as path:
            on_nvme = {"device": "nvme", "path": path, "any_file_system": True}
            self.assertEqual((steps, weights), self.alternate(OffloadAdamW, **on_nvme)[:2])

    def test_states_loaded_while_frozen_continue(self) -> None:
        model = layers(2)
        optimizer = OffloadAdamW(model.parameters())
        give_gradients(model)
        optimizer.step()
        saved = optimizer.state_dict()
        model[0].requires_grad_(False)
        other = OffloadAdamW(model.parameters())
        other.load_state_dict(saved)
        model[0].requires_grad_(True)
        give_gradients(model, 1)
        other.step()
        self.assertEqual([s["step"].item() for s in other.state_dict()["state"].values()], [2, 2])

    def test_a_frozen_parameter_with_a_gradient_is_updated(self) -> None:
        ours, theirs = torch.zeros(4), torch.zeros(4)
        for weight, make in ((ours, OffloadAdamW), (theirs, torch.optim.AdamW)):
            optimizer = make([weight], lr=0.1)
            weight.grad = torch.ones(4)
            optimizer.step()
        torch.testing.assert_close(ours, theirs)

    def test_a_cast_model_is_followed(self) -> None:
        for first, second in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32),
                              (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16),
                              (torch.float32, torch.float16)):
            for before in (0, 2):
                with self.subTest(first=first, second=second, before=before):
                    model, other = layers(2, 40, first), layers(2, 40, first)
                    ours = OffloadAdamW(model.parameters(), lr=1e-3)
                    for step in range(before):
                        give_gradients(model, step)
                        ours.step()
                    kept = moments(ours)
                    ours.zero_grad()
                    model.to(second)
                    other.load_state_dict(model.state_dict())
                    for number, entry in moments(ours).items():
                        self.assertTrue(torch.equal(entry["exp_avg"], kept[number]["exp_avg"]))
                    weights = [p.detach().float().clone() for p in model.parameters()]
                    give_gradients(model, 9)
                    ours.step()
                    for old, parameter in zip(weights, model.parameters()):
                        change = (parameter.float() - old).abs().max().item()
                        self.assertLess(change, 3e-3)
                        self.assertGreater(change, 1e-4)
                    model.to(first)
                    with tempfile.TemporaryDirectory() as folder:
                        ours.save(folder)
                        ours.load(folder)
                    for parameter in model.parameters():
                        master = ours.state[parameter].get("master", parameter)
                        torch.testing.assert_close(master, parameter.float())

    def test_a_parameter_of_another_size_is_refused_by_name(self) -> None:
        for size in (1000, 1 << 20):
            weight = torch.nn.Parameter(torch.zeros(5000))
            rest = torch.nn.Parameter(torch.zeros(3))
            optimizer = OffloadAdamW([("rest", rest), ("head.weight", weight)])
            weight.data = torch.zeros(size)
            rest.grad, weight.grad = torch.ones(3), torch.ones(size)
            with self.assertRaisesRegex(ValueError, "head.weight"):
                optimizer.step()
            self.assertEqual(rest.tolist(), [0.0] * 3)
            self.assertEqual(optimizer.state_dict()["state"], {})

    def test_swapped_memory_is_updated(self) -> None:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            weight = torch.nn.Parameter(torch.zeros(50, dtype=dtype))
            optimizer = OffloadSGD([weight], lr=1.0)
            for _ in range(2):
                old = weight.data
                weight.data = torch.full((50,), 4.0, dtype=dtype)
                weight.grad = torch.ones(50, dtype=dtype)
                before = old.clone()
                optimizer.step()
                self.assertEqual(weight.tolist(), [3.0] * 50)
                self.assertTrue(torch.equal(old, before))

    def test_strided_weights_are_updated(self) -> None:
        base = torch.zeros(6, 8)
        weight = torch.nn.Parameter(base.t()[::2])
        optimizer = OffloadSGD([weight], lr=1.0)
        for _ in range(2):
            weight.grad = torch.ones(4, 6)
            optimizer.step()
        self.assertEqual(base[:, ::2].unique().tolist(), [-2.0])
        self.assertEqual(base[:, 1::2].unique().tolist(), [0.0])

    def test_two_optimizers_share_a_parameter(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = torch.nn.Parameter(torch.full((300,), 8.0, dtype=dtype))
            first = OffloadSGD([weight], lr=1.0, overlap=True)
            second = OffloadSGD([weight], lr=2.0, overlap=True)
            for _ in range(2):
                for optimizer in (first, second):
                    weight.grad = torch.ones_like(weight)
                    optimizer.step()
            self.assertEqual(weight.unique().tolist(), [2.0])


class Growth(unittest.TestCase):
    def test_a_group_that_cannot_be_made_leaves_the_optimizer_alive(self) -> None:
        first, second = (torch.nn.Parameter(torch.ones(10)) for _ in range(2))
        folder = tempfile.mkdtemp(dir=os.environ.get("BALLAST_TEST_FOLDER"))
        optimizer = OffloadAdamW([first], device="nvme", path=folder, any_file_system=True)
        first.grad = torch.ones(10)
        optimizer.step()
        before = moments(optimizer)
        os.rmdir(folder)
        with self.assertRaisesRegex(OSError, "^path: "):
            optimizer.add_param_group({"params": [second]})
        self.assertEqual(len(optimizer.param_groups), 1)
        self.assertTrue(torch.equal(moments(optimizer)[0]["exp_avg"], before[0]["exp_avg"]))
        optimizer.step()
        self.assertEqual(moments(optimizer)[0]["step"].item(), 2)

    def test_growth_does_not_read_states_on_nvme(self) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(40)]
        with disk_folder() as path:
            optimizer = OffloadAdamW(parameters, device="nvme", path=path, any_file_system=True,
                                     _sub_group=1 << 18)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        self.assertLess(grown, 100 << 10)  # the states are 320 MiB

    def test_small_parameters_have_exact_states_in_memory(self) -> None:
        model = layers(2, 40)
        model.append(torch.nn.LayerNorm(40))
        with disk_folder() as path:
            optimizer = OffloadAdamW(model, device="nvme", path=path, any_file_system=True,
                                     optimizer_states="8bit", minimal_size=100)
            exact = OffloadAdamW(copy.deepcopy(model))
            mixed = OffloadAdamW(layers(1, 40), optimizer_states="8bit")
            self.assertGreater(optimizer.nvme_bytes, 0)
            other = [p for group in exact.param_groups for p in group["params"]]
            for step in range(3):
                give_gradients(model, step)
                for parameter, twin in zip(model.parameters(), other):
                    twin.grad = parameter.grad.clone()
                optimizer.step()
                exact.step()
        for name in ("weight", "bias"):
            self.assertTrue(torch.equal(getattr(model[2], name), other[2 if name == "weight" else 3]))
        del mixed


class Mapping(unittest.TestCase):
    def test_it_has_what_torch_has(self) -> None:
        for ours, theirs, options in same_rules(momentum=0.9):
            model, other = layers(2), layers(2)
            mine, its = ours(model.parameters(), lr=0.1, **options), theirs(other.parameters(), lr=0.1,
                                                                           **options)
            for step in range(2):
                for one, optimizer in ((model, mine), (other, its)):
                    give_gradients(one, step)
                    optimizer.step()
            self.assertEqual(len(mine.state), len(its.state))
            for a, b in zip(model.parameters(), other.parameters()):
                self.assertIn(a, mine.state)
                for name, value in its.state[b].items():
                    torch.testing.assert_close(mine.state[a][name], value, check_dtype=False)

    def test_changes_are_written_back(self) -> None:
        for moments_format in ("fp32", "8bit"):
            weight = torch.nn.Parameter(torch.ones(300))
            optimizer = OffloadAdamW([weight], optimizer_states=moments_format)
            self.assertFalse(optimizer.state)
            self.assertEqual(dict(optimizer.state[weight]), {})
            weight.grad = torch.ones(300)
            optimizer.step()
            state = optimizer.state[weight]
            state["exp_avg"].zero_()
            self.assertEqual(state["exp_avg"].unique().tolist(), [0.0])
            kept = state["exp_avg_sq"]
            kept.fill_(4.0)
            self.assertEqual(optimizer.state_dict()["state"][0]["exp_avg_sq"].unique().tolist(), [4.0])
            state["step"] = torch.tensor(7.0)
            state["mine"] = "kept"
            self.assertEqual(optimizer.state_dict()["state"][0]["mine"], "kept")
            optimizer.step()
            self.assertEqual(state["step"].item(), 8)
            kept.fill_(9.0)  # a state of an older step: nothing changes
            self.assertLess(state["exp_avg_sq"].max().item(), 5.0)
            state["exp_avg"] = torch.zeros(7)
            with self.assertRaisesRegex(ValueError, r"params\[0\]\[0\].*exp_avg.*\(300,\).*\(7,\)"):
                optimizer.step()
            optimizer.state.clear()
            self.assertEqual(optimizer.state_dict()["state"], {})
            optimizer.step()
            self.assertEqual(optimizer.state[weight]["step"].item(), 1)

    def test_distributed_checkpoints_change_nothing(self) -> None:
        from torch.distributed.checkpoint.state_dict import (get_optimizer_state_dict,
                                                             set_optimizer_state_dict)

        model = make_model()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        before = moments(optimizer)
        saved = get_optimizer_state_dict(model, optimizer)
        after = moments(optimizer)
        twin = make_model()
        twin.load_state_dict(model.state_dict())
        other = OffloadAdamW(twin.parameters(), lr=1.0)
        set_optimizer_state_dict(twin, other, saved)
        for number, entry in before.items():
            for name, value in entry.items():
                self.assertTrue(torch.equal(value, after[number][name]))
        self.assertEqual(train(model, optimizer, range(2, 4)), train(twin, other, range(2, 4)))
        self.assertEqual(bits(model), bits(twin))


class StateDicts(unittest.TestCase):
    def test_both_ways_with_torch(self) -> None:
        pairs = [(OffloadAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
                 (OffloadAdamW, torch.optim.Adam, {"weight_decay": 0.0}),
                 (OffloadSGD, torch.optim.SGD, {}),
                 *same_rules(momentum=0.9),
                 (OffloadSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True})]
        for ours, theirs, options in pairs:
            for named in (False, True):
                with self.subTest(theirs=theirs, named=named, **options):
                    models = [layers(3) for _ in range(2)]
                    optimizers = [make(m.named_parameters() if named else m.parameters(), lr=0.1,
                                       **options) for m, make in zip(models, (ours, theirs))]
                    for step in range(4):
                        for model, optimizer in zip(models, optimizers):
                            model[1].requires_grad_(step > 1)
                            optimizer.zero_grad()
                            give_gradients(model, step)
                            optimizer.step()
                        states = [optimizer.state_dict() for optimizer in optimizers]
                        optimizers[0].load_state_dict(states[1])
                        optimizers[1].load_state_dict(states[0])
                    self.assertEqual("param_names" in states[0]["param_groups"][0], named)
                    for mine, its in zip(*(m.parameters() for m in models)):
                        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)

    def test_settings_that_are_not_supported_are_refused(self) -> None:
        model = layers(1)
        optimizer = OffloadAdamW(model.parameters())
        for theirs in (torch.optim.AdamW(model.parameters(), amsgrad=True),
                       torch.optim.AdamW(model.parameters(), maximize=True),
                       torch.optim.Adam(model.parameters(), weight_decay=0.1)):
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]"):
                optimizer.load_state_dict(theirs.state_dict())
        optimizer.param_groups[0]["maximize"] = True
        give_gradients(model)
        with self.assertRaisesRegex(ValueError, "maximize"):
            optimizer.step()

    def test_weights_of_the_model_stay(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            model = layers(1, 8, dtype)
            optimizer = OffloadAdamW(model.parameters(), lr=0.1)
            give_gradients(model)
            optimizer.step()
            saved = optimizer.state_dict()
            other = layers(1, 8, dtype)
            before = bits(other)
            twin = OffloadAdamW(other.parameters())
            twin.load_state_dict(saved)
            self.assertEqual(before, bits(other))
            model_state = model.state_dict()
            other.load_state_dict(model_state)
            twin.load_state_dict(saved)
            self.assertTrue(torch.equal(twin.state_dict()["state"][0]["master"],
                                        saved["state"][0]["master"]))

    def test_hooks_run_as_with_torch(self) -> None:
        for make in (torch.optim.AdamW, OffloadAdamW):
            model = layers(1)
            optimizer = make(model.parameters())
            calls = []
            optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
            optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
            optimizer.register_state_dict_post_hook(
                lambda _, state: calls.append(f"{type(state['state'][0]).__name__}"))
            optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))

            def change(_, state):
                calls.append("before loading")
                return {**state, "state": {k: {**v, "step": torch.tensor(77.0)}
                                           for k, v in state["state"].items()}}

            optimizer.register_load_state_dict_pre_hook(change)
            give_gradients(model)
            optimizer.step()
            optimizer.load_state_dict(state_dict=optimizer.state_dict())
            self.assertEqual(calls, ["before step", "after step", "before saving", "dict",
                                     "before loading", "after loading"])
            self.assertEqual(optimizer.state[model[0].weight]["step"].item(), 77)


class Files(unittest.TestCase):
    def save_partly_frozen(self, folder: str, named: bool) -> tuple:
        model = layers(3)
        model[2].requires_grad_(False)
        optimizer = OffloadAdamW(model if named else model.parameters())
        give_gradients(model)
        optimizer.step()
        optimizer.save(folder)
        model[0].requires_grad_(False)
        model[2].requires_grad_(True)
        return model, moments(optimizer)

    def test_states_are_matched_with_other_frozen_layers(self) -> None:
        for named in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                model, old = self.save_partly_frozen(folder, named)
                groups = model.parameters()
                if named:
                    groups = list(reversed(list(model.named_parameters())))
                optimizer = OffloadAdamW(groups)
                optimizer.load(folder)
                state = optimizer.state
                for number in (0, 1):
                    self.assertTrue(torch.equal(state[model[number].weight]["exp_avg"],
                                                old[number]["exp_avg"]))
                    self.assertEqual(state[model[number].weight]["step"].item(), 1)
                self.assertEqual(state[model[2].weight]["step"].item(), 0)

    def save_groups(self, folder: str, groups: list) -> None:
        optimizer = OffloadAdamW(groups)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, len(parameter.shape) + group["weight_decay"])
        optimizer.step()
        optimizer.save(folder)

    def test_settings_travel_with_the_names_of_parameters(self) -> None:
        model = torch.nn.Linear(4, 4)
        first = {"params": [("weight", model.weight)], "weight_decay": 0.1}
        second = {"params": [("bias", model.bias)], "weight_decay": 0.0}
        three = torch.nn.Linear(2, 2)
        with tempfile.TemporaryDirectory() as folder:
            self.save_groups(folder, [dict(first), dict(second)])
            optimizer = OffloadAdamW([dict(second), dict(first)])
            optimizer.load(folder)
            self.assertEqual([g["weight_decay"] for g in optimizer.param_groups], [0.0, 0.1])
            self.assertEqual(optimizer.state[model.weight]["exp_avg"].max().item(), torch.tensor(0.21).item())
            with self.assertRaisesRegex(ValueError, "group 0.*other settings"):
                OffloadAdamW([("bias", model.bias), ("weight", model.weight)]).load(folder)
            with self.assertRaisesRegex(ValueError, "no parameter 'other'"):
                OffloadAdamW([("bias", model.bias), ("other", three.weight)]).load(folder)

    def test_two_modules_with_equal_names_keep_their_places(self) -> None:
        models = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        groups = [{"params": list(m.named_parameters()), "weight_decay": d} for m, d in zip(models, (0.1, 0.0))]
        with tempfile.TemporaryDirectory() as folder:
            self.save_groups(folder, [dict(group) for group in groups])
            optimizer = OffloadAdamW([dict(group) for group in groups])
            optimizer.load(folder)
            firsts = [optimizer.state[m.weight]["exp_avg"].max().item() for m in models]
            self.assertEqual(firsts, [torch.tensor(0.21).item(), torch.tensor(0.2).item()])
            with self.assertRaisesRegex(ValueError, "'weight' where the optimizer has 'bias'"):
                OffloadAdamW([{"params": list(reversed(g["params"]))} for g in groups]).load(folder)

    def test_a_submodule_may_be_called_module(self) -> None:
        for inner, outer in (("module", "other"), ("module", "module")):
            model = torch.nn.ModuleDict({inner: torch.nn.Linear(2, 2), "last": torch.nn.Linear(2, 2)})
            wrapped = torch.nn.ModuleDict({outer: model})
            with tempfile.TemporaryDirectory() as folder:
                self.save_groups(folder, list(wrapped.named_parameters()))
                optimizer = OffloadAdamW(wrapped)
                optimizer.load(folder)
                self.assertEqual(len(optimizer.state), 4)
                if outer == "module":  # as DistributedDataParallel calls it
                    OffloadAdamW(model).load(folder)

    def test_a_prefix_of_all_names_is_ignored(self) -> None:
        inner = torch.nn.ModuleDict({"last": torch.nn.Linear(2, 2)})
        model = torch.nn.ModuleDict({"module": inner, "last": torch.nn.Linear(2, 2)})
        plain = list(model.named_parameters())
        wrapped = [("module." + name, parameter) for name, parameter in plain]
        for saved, loaded in ((wrapped, plain), (plain, wrapped)):
            with tempfile.TemporaryDirectory() as folder:
                self.save_groups(folder, saved)
                moments = OffloadAdamW(saved)
                moments.load(folder)
                optimizer = OffloadAdamW(loaded[::-1])
                optimizer.load(folder)
                for _, parameter in plain:
                    self.assertTrue(torch.equal(optimizer.state[parameter]["exp_avg"],
                                                moments.state[parameter]["exp_avg"]))

    def test_files_of_other_models_are_refused(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.save_partly_frozen(folder, True)
            torch.manual_seed(0)
            for model, message in ((layers(2), "parameter '2.weight'"),
                                   (layers(4), "no parameter '3.weight'"),
                                   (layers(3, 5), r"shape \(4, 4\)")):
                optimizer = OffloadAdamW(model)
                with self.assertRaisesRegex(ValueError, message):
                    optimizer.load(folder)
            with self.assertRaisesRegex(ValueError, "adamw, not of lion"):
                OffloadLion(layers(3)).load(folder)
            with self.assertRaises(OSError) as caught:
                optimizer.load(folder + "/none")
            self.assertEqual(caught.exception.errno, 2)

    def write_first_version(self, folder: str) -> None:
        """Rewrites saved states as the first version did: trained parameters have numbers, and
        nothing has checksums."""
        file = os.path.join(folder, "optimizer.safetensors")
        with safetensors.safe_open(file, "pt") as saved:
            notes = saved.metadata()
            tensors = {name: saved.get_tensor(name) for name in saved.keys() if name != "checksums"}
        settings = json.loads(notes.pop("ballast.optimizer.settings"))
        entries = [entry for entry in settings.pop("parameters") if entry["state"]]
        settings["steps"] = [entry["step"] for entry in entries]
        numbers = {entry["name"]: str(number) for number, entry in enumerate(entries)}
        renamed = {}
        for name, tensor in tensors.items():
            parameter, _, kind = name.rpartition(".")
            renamed[f"{numbers[parameter]}.{kind}"] = tensor
        del notes["ballast.optimizer.checksum"]
        notes |= {"ballast.optimizer.format": "1", "ballast.optimizer.settings": json.dumps(settings)}
        safetensors.torch.save_file(renamed, file, notes)

    @unittest.skipUnless(safetensors, "needs safetensors")
    def test_files_of_the_first_version_are_read(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype), tempfile.TemporaryDirectory() as folder:
                model = layers(3, dtype=dtype)
                model[1].requires_grad_(False)
                optimizer = OffloadAdamW(model)
                give_gradients(model)
                optimizer.step()
                optimizer.save(folder)
                saved = moments(optimizer)
                self.write_first_version(folder)
                continued = OffloadAdamW(model.parameters())
                continued.load(folder)
                self.assertEqual(sorted(moments(continued)), [0, 2])
                for number, entry in moments(continued).items():
                    for name, value in entry.items():
                        self.assertTrue(torch.equal(value, saved[number][name]), name)
                model[2].requires_grad_(False)
                with self.assertRaisesRegex(ValueError, "of 2 parameters, 1 require gradients here"):
                    continued.load(folder)

    def test_each_damaged_byte_is_found(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = layers(2)
            optimizer = OffloadAdamW(model)
            give_gradients(model)
            optimizer.step()
            file = optimizer.save(folder)
            before = moments(optimizer)
            with open(file, "rb") as opened:
                content = bytearray(opened.read())
            for place in (60, 400, 4096 + 5, len(content) - 100, len(content) - 3):
                damaged = bytearray(content)
                damaged[place] ^= 4
                with open(file, "wb") as opened:
                    opened.write(damaged)
                with self.assertRaises(Exception) as caught:
                    optimizer.load(folder)
                self.assertNotIn("\n", str(caught.exception))
                for number, entry in moments(optimizer).items():
                    self.assertTrue(torch.equal(entry["exp_avg"], before[number]["exp_avg"]))


if __name__ == "__main__":
    unittest.main()
