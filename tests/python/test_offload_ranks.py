"""ballast.offload() on ranks: homes that the processes of a machine share. Needs torch."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch with ranks: {error}")

from torch import nn

import ballast
import fake_device
from ballast import _shared_homes
from offload_models import DiT, LoRA, data, dit, same, sgd, state, train
from support import OnRanks, join_ranks

MIB = 1 << 20


def offloaded(model, **options):
    return fake_device.offload(model, fake_device.budget_of(model, 2), shared=True, **{"trained": "keep", **options})


def frozen(layers=3):
    return dit(layers=layers)().requires_grad_(False)


def memory():
    """Bytes of this process: its own, and its part of those in shared memory."""
    text = pathlib.Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return tuple(int(re.search(rf"^{name}: *(\d+) kB", text, re.M)[1]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def sum_of(*values):
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def refuses(call, pattern):
    try:
        call()
    except ballast.UsageError as error:
        assert re.search(pattern, str(error)) and "\n" not in str(error), str(error)
        return
    raise AssertionError(f"nothing refused, expected {pattern!r}")


# Cases: each runs on all ranks in the same order.

def adapters_train_as_with_plain_ddp(rank, folder):
    states = []
    for shared in (False, True):
        model = dit(True, False, layers=4)()
        model.embed.requires_grad_(False)
        handle = offloaded(model, delay=0.002, seed=rank) if shared else None
        train(nn.parallel.DistributedDataParallel(model), 3, sgd(model), number=lambda step: 2 * step + rank)
        states.append(state(model))
        if shared:
            assert handle.report().shared_bytes == handle.report().host_bytes > 0
    same(*states)


def blocks_are_in_memory_once(rank, folder):
    before = memory()
    torch.manual_seed(0)
    model = DiT(4, width=384).requires_grad_(False)  # 44 MiB
    handle = offloaded(model)
    model(torch.randn(1, 2, 8), torch.rand(1))
    torch.cat([p.flatten()[:1] for p in model.parameters()])  # reads all at home
    dist.barrier()
    own, common = (now - then for now, then in zip(memory(), before))
    size, pool = handle.report().host_bytes, handle.report().pool_bytes
    own, common = sum_of(own, common)
    ranks = dist.get_world_size()
    assert size > 40 * MIB
    assert 0.95 * size < common < 1.1 * size, common
    assert own < dist.get_world_size() * (pool + size / 3), own


def changes_stay_in_their_process(rank, folder):
    plain, model = frozen(), frozen()
    handle = offloaded(model)
    for change in range(3):
        for one in (plain, model):
            with torch.no_grad():
                if change == 0 and rank == 0:
                    one.blocks[1].mlp[0].weight.add_(1.0)
                if change == 1:
                    one.blocks[2].mlp[0].weight.data.mul_(2.0 + rank)
                if change == 2 and rank == 1:
                    one.blocks[0].attn.q.weight.copy_(one.blocks[0].attn.k.weight)
        dist.barrier()
        same(plain(*data(0)), model(*data(0)), f"change {change}")
    same(state(plain), state(model))
    shared = {unit.name for unit in handle.passes.units if unit.home.shared}
    assert shared == ({"blocks.0"}, {"blocks.1"}, {"blocks.0", "blocks.1"})[rank], shared


def buffers_written_in_passes_stay_in_their_process(rank, folder):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(40000), requires_grad=False)
            self.register_buffer("count", torch.zeros(40000))

        def forward(self, x):
            self.count.add_(x[0])
            return x * self.weight + self.count

    def run(model, seen):
        for step in range(3):
            seen.append(model(torch.full((40000,), float(step + rank))))
            dist.barrier()
        return seen, model[2].count.clone()

    plain, model = (nn.Sequential(*(Counting() for _ in range(4))) for _ in range(2))
    offloaded(model)
    same(run(plain, []), run(model, []))


def trained_blocks_are_not_shared(rank, folder):
    plain, model = dit(layers=3)(), dit(layers=3)()
    for one in (plain, model):
        one.blocks[0].requires_grad_(False)
    handle = offloaded(model, trained="stream")
    same(train(plain, 2), train(model, 2))
    report = handle.report()
    assert 0 < report.shared_bytes == report.units["blocks.0"], report
    plain.blocks[0].requires_grad_(True)  # and one that is trained later
    model.blocks[0].requires_grad_(True)
    same(train(plain, 2), train(model, 2))
    same(state(plain), state(model))
    assert handle.report().shared_bytes == 0


def sharing_nothing_is_refused(rank, folder):
    refuses(lambda: offloaded(dit(layers=2)(), trained="stream"), "^shared: each block has trained parameters")


def other_weights_are_refused(rank, folder):
    model = frozen()
    if rank == 1:
        model.blocks[1].mlp[0].bias.data[3] += 1
    refuses(lambda: offloaded(model), r"blocks\.1\.mlp\.0\.bias: has other values than on rank 0")


def other_models_are_refused(rank, folder):
    for ours in (frozen(2 + rank), frozen(3 - rank)):
        refuses(lambda: offloaded(ours), "^shared: .*(has failed: it has fewer blocks|failed)")
    model = frozen()
    if rank == 1:
        model.blocks[1].mlp[0] = nn.Linear(32, 64).requires_grad_(False)
        model.blocks[1].mlp[2] = nn.Linear(64, 32).requires_grad_(False)
    refuses(lambda: offloaded(model), r"rank 0 has blocks\.1\.mlp\.0\.weight torch\.float32 \[128, 32\]")


def a_rank_that_fails_stops_the_others(rank, folder):
    for failing in range(dist.get_world_size()):
        model = frozen()
        if rank == failing:
            model.blocks[1].register_buffer("table", torch.eye(64).to_sparse())
        refuses(lambda: offloaded(model), r"blocks\.1\.table: is sparse")


def wrappers_made_later_are_known_to_ddp(rank, folder):
    """PEFT, for example, wraps a model after offload()."""
    states = []
    for shared in (False, True):
        model = frozen()
        if shared:
            offloaded(model)
        outer = nn.Sequential()
        outer.add_module("inner", model)
        torch.manual_seed(1)
        for block in model.blocks:
            block.attn.q = LoRA(block.attn.q)
        outer.forward = lambda x, t, model=model: model(x, t)
        wrapped = nn.parallel.DistributedDataParallel(outer)
        assert not shared or "inner.blocks.0.attn.q.base.weight" in wrapped.parameters_to_ignore
        train(wrapped, 2, sgd(model), number=lambda step: 2 * step + rank)
        states.append(state(model))
    same(*states)


def an_equal_state_leaves_weights_shared(rank, folder):
    def private():
        text = pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"memfd:ballast-weights.*?^Anonymous: *(\d+) kB", text, re.M | re.S)
        return len(found), sum(map(int, found))

    model = frozen()
    expected = state(model)
    handle = offloaded(model)
    if rank == 0:
        handle.save(f"{folder}/saved")
    dist.barrier()
    mappings, before = private()
    handle.load(f"{folder}/saved")
    assert mappings >= 6 and private() == (mappings, before), (mappings, before, private())
    with torch.no_grad():
        model.blocks[rank].mlp[0].weight.add_(1.0)
    model(*data(0))
    handle.load(f"{folder}/saved")
    same(expected, state(model))


CASES = [adapters_train_as_with_plain_ddp, blocks_are_in_memory_once, changes_stay_in_their_process,
         an_equal_state_leaves_weights_shared, buffers_written_in_passes_stay_in_their_process,
         trained_blocks_are_not_shared, sharing_nothing_is_refused, other_weights_are_refused, other_models_are_refused, a_rank_that_fails_stops_the_others, wrappers_made_later_are_known_to_ddp]


def wait_to_be_killed(rank, folder):
    join_ranks(rank, 2, folder, seconds=60)
    offloaded(frozen())
    print("ready", flush=True)
    time.sleep(600)


def traces():
    """Lists names that the processes might leave on this machine."""
    sockets = pathlib.Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    return sorted(os.listdir("/dev/shm")), re.findall(r"@ballast-\S+", sockets)


@unittest.skipUnless(sys.platform == "linux" and dist.is_available(), "gloo on the loopback interface")
class Ranks(OnRanks, unittest.TestCase):
    cases, seconds = CASES, 60

    def test_killed_ranks_leave_nothing(self):
        before = traces()
        program = "import sys, test_offload_ranks as t; t.wait_to_be_killed(int(sys.argv[1]), sys.argv[2])"
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([sys.executable, "-B", "-c", program, str(rank), folder], text=True,
                                      stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parent) for rank in (0, 1)]
            try:
                self.assertEqual([rank.stdout.readline() for rank in ranks], ["ready\n"] * 2)
            finally:
                for rank in ranks:
                    rank.kill()
            self.assertEqual([rank.wait() for rank in ranks], [-signal.SIGKILL] * 2)
            for rank in ranks:
                rank.stdout.close()
        self.assertEqual(traces(), before)

    def test_without_ranks(self):
        with self.assertRaisesRegex(ballast.UsageError, r"^shared: True needs the ranks of torch\.distributed"):
            offloaded(frozen())
        for options in ({"weights": "folder"}, {"nvme": "/nowhere"}):
            with self.subTest(options), self.assertRaisesRegex(ballast.UsageError, "^shared: True does not work with"):
                ballast.offload(frozen(), shared=True, **options)
        with self.assertRaisesRegex(ValueError, "^shared: 'yes' is not one of"):
            fake_device.offload(frozen(), MIB, shared="yes")
        with tempfile.TemporaryDirectory() as folder:
            join_ranks(0, 1, folder, seconds=60)
            self.addCleanup(dist.destroy_process_group)
            self.assertEqual(offloaded(frozen()).report().shared_bytes, 0)

    def test_pinning_follows_a_change(self):
        """On a GPU, the device reads pinned memory: that of the process alone after a change."""
        file = os.memfd_create("test")
        self.addCleanup(os.close, file)
        os.ftruncate(file, 8192)
        memory, other = _shared_homes.SharedMemory(file, 8192), _shared_homes.SharedMemory(file, 8192)
        steps = []
        memory.pin = lambda: (steps.append(("pin", memory.bytes.data_ptr())), setattr(memory, "pinned", True))
        memory.unpin = lambda: (steps.append(("unpin", memory.bytes.data_ptr())), setattr(memory, "pinned", False))
        memory.pin()
        memory.settle()
        shared = memory.bytes.data_ptr()
        self.assertEqual(steps, [("pin", shared)])
        home = torch.empty(0, dtype=torch.uint8).set_(memory.part(512, 1024))
        home.fill_(7)
        memory.settle()
        memory.settle()
        self.assertEqual(steps[1:], [("unpin", shared), ("pin", home.data_ptr() - 512)])
        self.assertEqual((int(memory.bytes[600]), int(other.bytes[600]), memory.shared), (7, 0, False))


if __name__ == "__main__":
    unittest.main()
