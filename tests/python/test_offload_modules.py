"""ballast.offload(): compiled blocks, hooks, exceptions, moves, remove(), refusals and the report. Needs torch."""

import copy
import gc
import unittest
import weakref

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

import torch.nn.functional as F
from torch import nn

import ballast
import fake_device
from ballast import _guards, offloading
from offload_models import WIDTH, DiT, DiTBlock, LoRA, compare, data, dit, same, sgd, state, train


class Stop(Exception):
    pass


class Compiled(unittest.TestCase):
    def test_blocks_compiled_before_and_after(self):
        for options in ({"backend": "eager", "fullgraph": True}, {"backend": "aot_eager", "fullgraph": True}):
            for before in (False, True):
                with self.subTest(before=before, **options):
                    torch._dynamo.reset()
                    plain, ours = dit(True, layers=3)(), dit(True, layers=3)()
                    for block in [*plain.blocks, *(ours.blocks if before else ())]:
                        block.compile(**options)
                    fake_device.offload(ours, fake_device.budget_of(ours, 2), delay=0.0003)
                    for block in () if before else ours.blocks:
                        block.compile(**options)
                    same(train(plain, 2), train(ours, 2))
                    same(state(plain), state(ours))
        torch._dynamo.reset()


    def test_a_compiled_model_has_breaks_at_its_blocks(self):
        torch._dynamo.reset()
        plain, ours = dit(True, layers=3)(), dit(True, layers=3)()
        handle = fake_device.offload(ours, fake_device.budget_of(ours, 2))
        with fake_device.strict(handle) as mode:
            for model in (plain, ours):
                compiled = torch.compile(model, backend="eager")
                for step in range(2):
                    compiled(*data(step)).pow(2).mean().backward()
        same(state(plain), state(ours))
        self.assertEqual(mode.faults, [])
        with self.assertRaises(torch._dynamo.exc.Unsupported):
            torch.compile(ours, backend="eager", fullgraph=True)(*data(0, tokens=9))
        torch._dynamo.reset()


class Hooks(unittest.TestCase):
    def test_users_hooks_see_the_weights(self):
        def loop(model, _):
            seen = []
            for block in model.blocks:
                block.register_forward_pre_hook(lambda m, args: seen.append(m.attn.o.weight.sum().detach().clone()))
                block.register_forward_hook(lambda m, args, out: out * m.attn.o.bias.detach().exp().mean())
                block.mlp[0].register_full_backward_hook(
                    lambda m, gi, go: seen.append(m.weight.sum().detach().clone()))
            return train(model, 2), seen
        compare(dit(layers=4), loop, 2, delay=0.0003)

    def test_exceptions_leave_a_model_that_can_be_used(self):
        def loop(model, handle):
            seen = []

            def raises(*_):
                raise Stop

            for hook in (lambda: model.blocks[2].attn.register_forward_hook(raises),
                         lambda: model.blocks[2].attn.o.weight.register_hook(raises)):
                hooked = hook()
                with self.assertRaises(Stop):
                    train(model, 1)
                hooked.remove()
                if handle is not None:
                    self.assertFalse(handle.passes.running)
                seen.append(state(model))  # gradients of the blocks behind are there
                model.zero_grad()
                seen += train(model, 2)
            return seen
        compare(dit(layers=4), loop, 2, delay=0.0003)


class OnDevice(unittest.TestCase):
    def test_code_outside_uses_a_block(self):
        def loop(model, handle):
            for step in range(2):
                x = torch.ones(1, WIDTH)
                with handle.on_device(model.blocks[1]) if handle else torch.enable_grad():
                    loss = F.linear(x, model.blocks[1].mlp[0].weight).pow(2).mean()
                    with torch.no_grad():
                        model.blocks[1].attn.q.bias.add_(0.5)
                loss.backward()
                train(model, 1)
        compare(dit(layers=4), loop, 2)

    def test_modules_of_another_model_are_refused(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        with handle.on_device(model.embed):
            model.embed(data(0)[0])
        with self.assertRaisesRegex(ballast.UsageError, "^on_device: a Linear is not a module of the model"):
            with handle.on_device(nn.Linear(1, 1)):
                pass


class Moves(unittest.TestCase):
    def test_moves_to_the_device_do_nothing_and_others_are_refused(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        pointers = [p.data_ptr() for p in model.parameters()]
        wrapper = nn.Sequential(model)  # as frameworks do
        for module in (model, wrapper, model.blocks[0]):
            module.to(handle.device)
            module.cpu()  # the fake device
            module.to(device=handle.device, non_blocking=True)
            for refused in (lambda: module.half(), lambda: module.to("meta"), lambda: module.to(torch.float64),
                            lambda: module.to(handle.device, torch.bfloat16)):
                with self.assertRaisesRegex(ballast.UsageError, r"^offload: an offloaded model cannot be changed to"):
                    refused()
        self.assertEqual([p.data_ptr() for p in model.parameters()], pointers)

    def test_a_move_to_the_cpu_lasts_until_the_model_is_moved_back(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        handle.device = torch.device("meta")  # another one than the CPU
        moved = []
        handle._move_staying = moved.append
        wrapper = nn.Sequential(model)  # as frameworks do
        wrapper.cpu()
        wrapper.cpu()
        with self.assertRaisesRegex(ballast.UsageError, r"^offload: the model was moved to the CPU; model\.to"):
            model(*data(0))
        with handle.on_host():
            moved.clear()
            model.to(handle.device)
            self.assertEqual(moved, [])
        self.assertEqual(moved, [handle.device])
        model.cpu()
        wrapper.to(handle.device)
        self.assertEqual(moved[1:], [torch.device("cpu"), handle.device])
        with self.assertRaisesRegex(ballast.UsageError, "^offload: an offloaded model cannot be changed to cpu"):
            model.blocks[0].cpu()
        handle._warned_of_casts, handle._changed = True, False
        model.blocks[1].register_forward_hook(lambda *_: wrapper.cpu())
        with self.assertRaisesRegex(ballast.UsageError, "^offload: the model cannot be moved to the CPU in a pass"):
            model(*data(0))

    def test_casts_to_the_type_that_all_have_do_nothing(self):
        model = dit(layers=2, dtype=torch.bfloat16)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        self.assertIs(model.to(handle.device, torch.bfloat16), model)
        model.blocks[1].mlp[2].register_buffer("factor", torch.ones(2))
        with self.assertRaisesRegex(ballast.UsageError, "cannot be changed to torch.bfloat16"):
            model.to(torch.bfloat16)

    def test_data_parallel_is_refused(self):
        model = dit(layers=2)()
        fake_device.offload(model, fake_device.budget_of(model, 2))
        for wrapper in (model, nn.Sequential(model)):
            with self.assertRaisesRegex(ballast.UsageError, r"^offload: torch\.nn\.DataParallel would copy"):
                nn.DataParallel(wrapper)

    def test_wrappers_tell_ddp_what_is_in_host_memory(self):
        class Outer(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self._ddp_params_and_buffers_to_ignore = ["mine"]
                self.inner = inner

        name = "_ddp_params_and_buffers_to_ignore"
        model = dit(True, layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2), trained="keep")
        outer = Outer(nn.Sequential(model))
        model.blocks[0].mlp[0] = LoRA(model.blocks[0].mlp[0])
        ignored = set(getattr(outer, name))
        self.assertIn("mine", ignored)
        self.assertIn("inner.0.blocks.0.mlp.0.base.weight", ignored)
        present = {n for n, _ in [*outer.named_parameters(), *outer.named_buffers()]}
        self.assertEqual(ignored - present, {"mine"})
        self.assertEqual({n for n, p in outer.named_parameters() if p.requires_grad} & ignored, set())
        self.assertEqual(getattr(copy.deepcopy(outer), name), ["mine"])
        handle.remove()
        self.assertEqual(getattr(outer, name), ["mine"])
        self.assertFalse(hasattr(model, name))

    def test_remove_and_offload_again(self):
        plain, model = dit(layers=4)(), dit(layers=4)()
        kinds = [type(module) for module in model.modules()]
        parameters = list(model.parameters())
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        same(train(plain, 2), train(model, 2))
        alive = model(*data(3)).mean()
        handle.remove()
        handle.remove()
        with self.assertRaisesRegex(ballast.UsageError, r"blocks\.3, whose handle was removed"):
            alive.backward()
        model.zero_grad()
        plain.zero_grad()
        self.assertEqual([type(module) for module in model.modules()], kinds)
        self.assertTrue(all(type(p) is nn.Parameter for p in model.parameters()))
        self.assertTrue(all(one is other for one, other in zip(model.parameters(), parameters)))
        self.assertFalse(hasattr(model, "_ddp_params_and_buffers_to_ignore"))
        same(train(plain, 2), train(model, 2))
        fake_device.offload(model, fake_device.budget_of(model, 3), blocks=["blocks.?"])
        same(train(plain, 2), train(model, 2))
        same(state(plain), state(model))


class Later(unittest.TestCase):
    """Tensors that are added or replaced after offload()."""

    def test_adapters(self):
        def loop(model, handle):
            seen = train(model, 1)
            torch.manual_seed(5)
            for block in model.blocks:
                block.attn.o = LoRA(block.attn.o)
            seen += train(model, 2)
            with handle.on_host() if handle else torch.no_grad():
                for block in model.blocks:
                    block.attn.o.base.weight.data += block.attn.o.b.data @ block.attn.o.a.data
            with torch.no_grad():
                seen.append(model(*data(5)))
            return seen + train(model, 1)

        for trained in ("keep", "stream"):
            compare(dit(True, layers=4), loop, 2.5, trained=trained)

    def test_units_of_lost_tensors_end(self):
        model = dit(layers=3)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 4))
        for _ in range(3):
            model.blocks[0].mlp[0].weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))
            model(*data(0)).mean().backward()
        self.assertEqual(len(handle.passes.units), 4)

    def test_the_model_does_not_run_on_the_host(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        with handle.on_host(), self.assertRaisesRegex(ballast.UsageError, r"inside handle\.on_host\(\)"):
            model(*data(0))
        model(*data(0))


class Refused(unittest.TestCase):
    def refuse(self, pattern, change=lambda model: None, error=ballast.UsageError, **options):
        model = dit(layers=2)()
        changed = change(model)
        model = model if changed is None else changed
        before = {name: p.data_ptr() for name, p in model.named_parameters()
                  if type(p) is nn.Parameter and not p.is_meta}
        with self.assertRaisesRegex(error, pattern) as caught:
            fake_device.offload(model, options.pop("device_bytes", 1 << 20), **options)
        self.assertNotIn("\n", str(caught.exception))
        for name, p in model.named_parameters():
            if name in before:
                self.assertEqual(p.data_ptr(), before[name], "the model has changed")

    def test_models(self):
        with self.assertRaisesRegex(TypeError, "^model: must be a torch.nn.Module, not int"):
            fake_device.offload(5, 1)
        model = dit(layers=2)()
        fake_device.offload(model, 1 << 20)
        with self.assertRaisesRegex(ballast.UsageError, "^model: is offloaded already"):
            fake_device.offload(model.blocks, 1 << 20)
        self.refuse("^model: is a DataParallel; offload the module first", nn.DataParallel)
        self.refuse(r"^model: is a result of torch.compile\(\)", lambda m: torch.compile(m, backend="eager"))

    def test_tensors(self):
        def meta(model):
            model.blocks[0].mlp[0].weight = nn.Parameter(torch.empty(128, 32, device="meta"))

        def sparse(model):
            model.blocks[1].register_buffer("table", torch.eye(600).to_sparse())

        def expanded(model):
            model.blocks[1].register_buffer("table", torch.ones(1, 600).expand(600, 600))

        def inference(model):
            with torch.inference_mode():
                weight = torch.ones(64, 64)
            model.blocks[1].register_buffer("table", weight)

        def lazy(model):
            model.blocks[0].extra = nn.LazyLinear(4)

        self.refuse(r"^blocks\.0\.mlp\.0\.weight: is on the device meta", meta)
        self.refuse(r"^blocks\.1\.table: is sparse", sparse)
        self.refuse(r"^blocks\.1\.table: is expanded", expanded)
        self.refuse(r"^blocks\.1\.table: was made in torch\.inference_mode", inference)
        self.refuse(r"^blocks\.0\.extra\.weight: has no shape yet", lazy)

    def test_arguments(self):
        self.refuse("^trained: 'never' is not one of", trained="never", error=ValueError)
        self.refuse("^prefetch: must be from 0", prefetch=-1, error=ValueError)
        self.refuse("^keep: must be a list of str", keep=[1], error=TypeError)
        self.refuse("^blocks: 'layers.*' matches no module", blocks="layers.*")
        self.refuse("^blocks: a Linear is not a module of the model", blocks=[nn.Linear(1, 1)])
        self.refuse("^blocks: 5 is neither", blocks=[5], error=TypeError)
        self.refuse("^device_bytes: must be from 1", device_bytes=0, error=ValueError)
        self.refuse(r"^device_bytes: 1000 bytes cannot hold blocks\.0", device_bytes=1000,
                    error=ballast.OutOfMemoryError)
        self.refuse(r"^blocks: no lists of modules were found; .* The largest modules:",
                    lambda model: DiTBlock().attn)
        self.refuse("^blocks: nothing is left to offload", trained="keep")
        for device, pattern in (("cpu", "^device: cpu is not an accelerator"), ("nonsense", "^device: ")):
            with self.assertRaisesRegex(ballast.UsageError, pattern) as caught:
                ballast.offload(dit(layers=2)(), device)
            self.assertNotIn("\n", str(caught.exception))

    def test_script_modules(self):
        class Scripted(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([torch.jit.script(nn.Linear(32, 32))])
        self.refuse(r"^blocks\.0: is a ScriptModule", lambda model: Scripted())

    def test_replaced_by_another_shape(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        model.blocks[1].mlp[0].bias.data = torch.zeros(7)
        with self.assertRaisesRegex(ballast.UsageError, r"^blocks\.1\.mlp\.0\.bias: was replaced by a tensor"):
            model(*data(0))
        model.blocks[1].mlp[0].bias.data = torch.zeros(4 * WIDTH)
        model(*data(0))
        handle.remove()

    def test_other_processes(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        handle.passes._process += 1
        with self.assertRaisesRegex(ballast.UsageError, "another process"):
            model(*data(0))


class Places(unittest.TestCase):
    def test_auto_size_and_what_stays(self):
        model = dit(True, layers=6)()
        for free, blocks in ((None, 4), (1 << 30, 4), (300000, 2)):
            handle = fake_device.offload(model, "auto", prefetch=2, trained="auto",
                                         device=fake_device.FakeDevice(free=free))
            report = handle.report()
            size = max(report.units.values())
            self.assertGreaterEqual(report.pool_bytes, blocks * size)
            if free != 300000:
                self.assertEqual(report.pool_bytes, 4 * size)
            if free is not None:
                self.assertLessEqual(report.pool_bytes, 0.81 * (free - report.staying_bytes))
            self.assertEqual(report.staying["embed.weight"].reason, "outside of all blocks")
            self.assertIn(report.staying["blocks.0.attn.q.a"].reason, ("trained", "small trained parameter"))
            self.assertEqual(report.host_bytes, sum(u.home.nbytes for u in handle.passes.units))
            train(model, 1)
            self.assertIn("copies to the device", str(handle.report()))
            handle.remove()

    def test_large_blocks_are_searched_inside(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 0.7), prefetch=0)
        self.assertEqual(sorted(handle.report().units),
                         ["blocks.0", "blocks.0.mlp.0", "blocks.0.mlp.2",
                          "blocks.1", "blocks.1.mlp.0", "blocks.1.mlp.2"])
        same(dit(layers=2)()(*data(0)), model(*data(0)))

    def test_keep(self):
        model = dit(layers=2)()
        handle = fake_device.offload(model, 1 << 20, keep="*.norm?.*", small=0)
        staying = handle.report().staying
        self.assertEqual(staying["blocks.1.norm2.weight"].reason, "keep")
        self.assertNotIn("blocks.1.attn.q.weight", staying)

    def test_tensors_that_share_memory_stay(self):
        model = dit(layers=2)()
        matrix = torch.randn(WIDTH, WIDTH)
        for block in model.blocks:
            block.attn.q.weight = nn.Parameter(matrix)
        handle = fake_device.offload(model, 1 << 20)
        self.assertEqual(handle.report().staying["blocks.1.attn.q.weight"].reason,
                         "shares memory with another tensor")

    def test_handles_end_with_their_model(self):
        gc.collect()
        model = dit(layers=2)()
        handle = fake_device.offload(model, 1 << 20)
        train(model, 1)
        with torch.no_grad():
            model(*data(0))
        ends = [weakref.ref(handle), weakref.ref(handle.passes.units[0]), weakref.ref(model)]
        self.assertIn(handle, offloading._handles)
        alive = model.blocks[0].mlp[0].weight
        del model, handle
        gc.collect()
        self.assertFalse(_guards._places)
        self.assertIs(type(copy.deepcopy(alive)), nn.Parameter)
        self.assertIs(type(alive), nn.Parameter)
        self.assertEqual([end() for end in ends], [None] * 3)
        self.assertFalse(offloading._handles)

    def test_handles_that_end_while_a_module_gets_another_one(self):
        ends = [fake_device.offload(dit(layers=2)(), 1 << 20)]

        def end(*_):
            ends.clear()
            gc.collect()
        for hook in (end, lambda *_: None):  # PyTorch notices a change when it comes to another hook
            self.addCleanup(nn.modules.module.register_module_module_registration_hook(hook).remove)
        nn.ModuleList().append(nn.Linear(1, 1))
        self.assertEqual(ends, [])


if __name__ == "__main__":
    unittest.main()
