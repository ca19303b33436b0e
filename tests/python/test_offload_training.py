"""ballast.offload(): trained weights in host memory, with PyTorch's optimizers and Ballast's. Needs torch."""

import copy
import gc
import io
import subprocess
import sys
import textwrap
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from torch import nn

import ballast
import fake_device
from offload_models import DiT, compare, data, dit, same, sgd, state, train


def groups_of(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def whole_loop(model, make_optimizer):
    """Accumulation, clipping, two groups, and a moving average of all weights."""
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = make_optimizer(groups_of(model))
    seen = []
    for step in range(3):
        for micro in range(3):
            x, t = data(3 * step + micro, dtype=torch.bfloat16)
            loss = (model(x, t) - x).pow(2).mean() / 3
            loss.backward()
            seen.append(loss.detach())
        if getattr(optimizer, "max_grad_norm", None) is None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.1)
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    return seen, state(average)


class WholeLoops(unittest.TestCase):
    def test_adamw_of_torch(self):
        for blocks in (1, 3, 20):
            compare(dit(dtype=torch.bfloat16, layers=5),
                    lambda model, _: whole_loop(model, lambda groups: torch.optim.AdamW(groups, lr=1e-2)), blocks)

    def test_offload_adamw(self):
        for options in ({}, {"gradient_hooks": True, "max_grad_norm": 0.5}):
            for overlap in (False, True):
                with self.subTest(overlap=overlap, **options):
                    compare(dit(dtype=torch.bfloat16, layers=5), lambda model, handle: whole_loop(
                        model, lambda groups: ballast.OffloadAdamW(
                            groups, lr=1e-2, overlap=overlap and handle is not None, **options)), 2)

    def test_overlapped_updates_are_waited_for_block_by_block(self):
        """With overlap="check", each weight is NaN until something has waited for it."""
        def loop(model, handle):
            optimizer = ballast.OffloadAdamW(model.parameters(), lr=1e-2, overlap="check" if handle else False)
            seen = train(model, 3, optimizer)
            optimizer.synchronize()
            optimizer.zero_grad()  # step() has, with overlap
            return seen
        compare(dit(layers=4), loop, 2, strict=False)  # the optimizer fills homes with NaNs

    def test_the_home_is_the_optimizers_weight(self):
        model = dit(dtype=torch.bfloat16, layers=4)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        optimizer = ballast.OffloadAdamW(model, lr=1e-2)
        train(model, 2, optimizer)
        engine = optimizer._engine
        streamed = [member for unit in handle.passes.units for member in unit.members]
        self.assertGreater(len(streamed), 50)
        for member in streamed:
            record = engine.records[member.tensor]
            self.assertIsNone(record.mirror)
            self.assertEqual(engine.weights(record).data_ptr(), member.home.data_ptr())

    def test_gradients_leave_during_the_backward_pass(self):
        model = dit(layers=6)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 8))
        most = 0

        def look(*_):
            nonlocal most
            most = max(most, sum(p.grad is not None for p in model.blocks.parameters()))

        for block in model.blocks:
            block.register_full_backward_pre_hook(look)
        model(*data(0)).mean().backward()
        self.assertLessEqual(most, len(list(model.blocks[0].parameters())))
        self.assertTrue(all(p.grad is not None for p in model.parameters()))
        self.assertEqual(handle.report().bytes_out, sum(p.nbytes for p in model.blocks.parameters()))


class Copies(unittest.TestCase):
    def test_state_dict_is_made_of_the_homes(self):
        model = dit(layers=4)()
        handle = fake_device.offload(model, fake_device.budget_of(model, 2))
        train(model, 1)
        homes = {member.home.data_ptr() for unit in handle.passes.units for member in unit.members}
        pointers = {value.data_ptr() for name, value in model.state_dict().items() if name.startswith("blocks")}
        self.assertEqual(pointers, homes)

    def test_copies_are_ordinary_models(self):
        def loop(model, handle):
            loss = model(*data(0)).mean()  # its graph waits meanwhile
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            read = torch.load(file, weights_only=False)
            one = io.BytesIO()
            torch.save(model.blocks[1].attn.q.weight, one)
            if handle is not None:  # only this weight, not the memory of its block
                self.assertLess(one.tell(), 2 * model.blocks[1].attn.q.weight.nbytes + 4096)
            twins = [copy.deepcopy(model), read]
            for twin in twins:
                self.assertIs(type(twin), DiT)
                self.assertTrue(all(type(p) is nn.Parameter for p in twin.parameters()))
            part = copy.deepcopy(model.blocks[2])
            weight = copy.deepcopy(model.blocks[2].mlp[0].weight)
            loss.backward()
            return ([twin(*data(1)) for twin in twins], state(part), weight, repr(model),
                    repr(model.blocks[0].mlp[0].weight))
        compare(dit(layers=4), loop, 2, strict=False)

    def test_resume_equals_never_stopped(self):
        def loop(model, handle):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            train(model, 2, optimizer)
            states = copy.deepcopy(optimizer.state_dict())
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            more = train(model, 3, optimizer)
            model.load_state_dict(saved)
            optimizer.load_state_dict(states)
            same(more, train(model, 3, optimizer), "resumed")
            return more
        compare(dit(layers=4), loop, 2)


class Memory(unittest.TestCase):
    def test_host_memory_of_training_is_14_bytes_per_parameter(self):
        """Counts the storages of weights, gradients and states."""
        def blocks():
            torch.manual_seed(0)
            return nn.Sequential(*[nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(8)])

        model = blocks()
        handle = fake_device.offload(model, 2 * 512 * 512 * 2, trained="stream")
        optimizer = ballast.OffloadAdamW(model, lr=1e-3, gradient_hooks=False)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 512, dtype=torch.bfloat16)).pow(2).mean().backward()
            optimizer.step()
        gc.collect()
        count = sum(p.numel() for p in model.parameters())
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        pool = handle._residency.pool._memory.untyped_storage().data_ptr()
        with_memory: dict[int, int] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.numel() >= 512 * 512:
                try:
                    address = tensor.data_ptr()
                except RuntimeError:
                    continue  # a block that is not on the device
                with_memory[address] = max(with_memory.get(address, 0), tensor.nbytes)
        homes = {unit.home.memory.bytes.data_ptr(): unit.nbytes for unit in handle.passes.units}
        self.assertEqual(sum(homes.values()), 2 * count)
        device = handle._residency.pool
        extra = {a: n for a, n in with_memory.items()
                 if a not in homes and not pool <= a < pool + device.nbytes}
        gradients = {p.grad.data_ptr() for p in model.parameters()}
        self.assertEqual(set(extra), gradients)
        total = sum(homes.values()) + sum(extra.values()) + optimizer.host_bytes
        # The optimizer takes 10.25 bytes, and some buffers. Another copy of the weights would be 2.
        self.assertLess(total, 14.7 * count)

    def test_resident_memory_grows_by_one_block(self):
        """In another process: 64 MiB of frozen blocks of 4 MiB each."""
        program = """
            import gc, sys
            sys.path.insert(0, FOLDER)
            import torch
            from torch import nn
            import fake_device

            def resident():
                gc.collect()
                with open("/proc/self/status") as lines:
                    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10

            torch.set_num_threads(1)
            small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            fake_device.offload(small, 1 << 16, small=0)
            small(torch.ones(1, 64))
            nn.Linear(1024, 1024)(torch.ones(1, 1024))
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).requires_grad_(False)
            before = resident()
            handle = fake_device.offload(model, 8 << 20)
            made = resident()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.ones(1, 1024))
            values = model.state_dict()
            print(made - before, resident() - before)
        """.replace("FOLDER", repr(str(__file__.rpartition("/")[0])))
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
                              timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        made, used = map(int, done.stdout.split())
        block = 4 << 20
        self.assertLess(made, 8 * 2**20 + block)  # the pool of the fake device is host memory, too
        self.assertLess(used, 8 * 2**20 + block)


if __name__ == "__main__":
    unittest.main()
