"""ballast.offload(): slots of the pool, the order that is learnt, and copies of host memory that cannot be pinned.
Needs torch."""

import random
import threading
import unittest
from unittest import mock

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import _accelerator
from ballast._order import Order
from ballast._slots import Pool


class Slots(unittest.TestCase):
    def setUp(self):
        self.pool = Pool(10 * 512, torch.device("cpu"))
        self.free = lambda owner: 0

    def take(self, start, count, owner):
        return self.pool.take(start * 512, count * 512, owner)

    def find(self, count, cost):
        found = self.pool.find(count * 512, cost)
        return None if found is None else (found[0] // 512, found[1])

    def test_gaps_first_then_what_disturbs_least(self):
        self.take(0, 4, "a")
        self.assertEqual(self.find(4, self.free), (4, []))
        b, _ = self.take(4, 4, "b")
        ages = {"a": 1, "b": 0}
        self.assertEqual(self.find(4, ages.get), (4, ["b"]))
        self.assertEqual(self.find(10, ages.get), (0, ["a", "b"]))
        self.assertIsNone(self.find(11, ages.get))
        self.assertEqual(self.find(6, {"a": None, "b": 5}.get), (4, ["b"]))
        self.assertIsNone(self.find(7, {"a": None, "b": 5}.get))
        self.pool.give(b, [])
        self.assertEqual(self.find(6, ages.get), (4, []))
        self.assertEqual((self.pool.used, self.pool.peak), (4 * 512, 8 * 512))

    def test_a_slot_waits_for_work_in_its_bytes(self):
        a, marks = self.take(0, 4, "a")
        self.assertEqual(marks, [])
        self.pool.give(a, ["done a"])
        b, marks = self.take(4, 4, "b")
        self.assertEqual(marks, [])
        self.pool.give(b, ["done b"])
        _, marks = self.take(2, 4, "c")
        self.assertEqual(marks, ["done a", "done b"])

    def test_slots_never_overlap(self):
        rng = random.Random(1)
        taken = {}
        for number in range(300):
            size = rng.randint(1, 6)
            found = self.find(size, lambda owner: None if owner % 7 == 0 and owner == number - 1 else owner)
            if found is None:
                continue
            for owner in found[1]:
                self.pool.give(taken.pop(owner), [])
            taken[number], _ = self.take(found[0], size, number)
            ends = [(slot.start, slot.end) for slot in self.pool.slots]
            self.assertTrue(all(a[1] <= b[0] for a, b in zip(ends, ends[1:])), ends)
            self.assertLessEqual(ends[-1][1], self.pool.nbytes)
            self.assertEqual(self.pool.used, sum(end - start for start, end in ends))


class Orders(unittest.TestCase):
    def learn(self, order, uses):
        for phase, unit in uses:
            order.note(phase, unit)

    def test_steps_and_sampling_are_learnt(self):
        order = Order()
        step = [("forward", n) for n in range(4)] + [("backward", n) for n in range(3, -1, -1)]
        self.learn(order, step * 2)
        self.learn(order, [("no_grad", n) for n in range(4)] + step)
        wrong = order.wrong
        self.learn(order, step)
        self.assertEqual(order.wrong - wrong, 1)  # the first guess was a sampling pass
        self.learn(order, step * 3)
        self.assertEqual(order.wrong - wrong, 1)
        self.learn(order, step[:3])
        self.assertEqual(list(order.ahead(4)), [3, 3, 2, 1])

    def test_units_that_are_gone_are_forgotten(self):
        order = Order()
        self.learn(order, [("forward", n) for n in (0, 1, 2)] * 3)
        order.forget({1})
        self.assertEqual(list(order.ahead(3)), [0])  # as at the beginning
        self.learn(order, [("forward", n) for n in (0, 2)] * 3)
        self.assertEqual(list(order.ahead(2)), [0, 2])


class Event:
    def __init__(self):
        self.passed = threading.Event()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        if not self.passed.wait(30):
            raise TimeoutError("the event does not pass")

    wait = synchronize


class Stream:
    """A stream whose events pass late."""

    def __init__(self):
        self.waited = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_event(self, event):
        self.waited.append(event)

    def record_event(self):
        event = Event()
        threading.Timer(0.002, event.passed.set).start()
        return event


class Staged(unittest.TestCase):
    """Host memory that cannot be pinned, as in WSL, goes through two pinned buffers."""

    def copies(self, slice_bytes, sizes, pinned=()):
        stream = Stream()
        buffers = []

        def make_buffer(nbytes):
            buffers.append(torch.empty(nbytes, dtype=torch.uint8))
            return buffers[-1]

        staging = _accelerator._Staging(stream, make_buffer, slice_bytes)
        self.addCleanup(staging.end)
        made = []
        for number, size in enumerate(sizes):
            memory = _accelerator.HostMemory(size)
            memory.bytes.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
            memory.pinned = number in pinned
            target = torch.empty(size, dtype=torch.uint8)
            copy = _accelerator.Copy(target, memory.bytes)
            staging.copy(copy, target, memory, [f"mark {number}"])
            made.append((copy, target, memory))
        return stream, buffers, made

    def test_bytes_and_order(self):
        stream, buffers, made = self.copies(1000, [10, 1000, 2500, 4097, 1], pinned=(1,))
        for copy, target, memory in made:
            copy.wait()
            self.assertTrue(torch.equal(target, memory.bytes))
            self.assertTrue(copy.ended())
        self.assertEqual([len(buffer) for buffer in buffers], [1000, 1000])
        self.assertEqual(stream.waited, [f"mark {number}" for number in range(5)])

    def test_a_buffer_is_not_written_while_it_is_read(self):
        """The stream of this test copies at once, so it counts the writes before an event."""
        writes = []
        real = _accelerator._Staging._copy_slice

        def watched(staging, target, source, start):
            following = staging._read[1 - staging._turn]
            real(staging, target, source, start)
            writes.append(following is None or following.query())

        with mock.patch.object(_accelerator._Staging, "_copy_slice", watched):
            _, _, made = self.copies(512, [4096, 4096])
            for copy, _, _ in made:
                copy.finish()
        self.assertEqual(writes, [True] * 16)

    def test_errors_reach_those_who_wait(self):
        stream = Stream()
        staging = _accelerator._Staging(stream, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 512)
        self.addCleanup(staging.end)
        memory = _accelerator.HostMemory(1024)
        copy = _accelerator.Copy(memory.bytes)
        staging.copy(copy, torch.empty(3, dtype=torch.uint8), memory, [])
        with self.assertRaises(RuntimeError):
            copy.wait()
        self.assertFalse(copy.ended())

    def test_pinning_is_tried_until_it_is_refused(self):
        tries = []

        def pin(memory):
            tries.append(memory.nbytes)
            memory.pinned = len(tries) <= 2

        device = _accelerator.Accelerator.__new__(_accelerator.Accelerator)
        device.pinning, device._staging, device._in = True, None, Stream()
        device.pinned = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        device.device = torch.device("cpu")
        with mock.patch.object(_accelerator.HostMemory, "pin", pin):
            made = [device.host_memory(4096 * (n + 1)) for n in range(5)]
        self.addCleanup(device._staging.end)
        self.assertEqual([memory.pinned for memory in made], [True, True, False, False, False])
        self.assertEqual(tries, [4096, 8192, 12288])


if __name__ == "__main__":
    unittest.main()
