"""Transfers of ballast.aio: every offset, length and address, buffers, errors, coherence."""

import asyncio
import errno
import gc
import random
import resource
import sys
import unittest
import weakref

from support import FolderTest, needs_numpy, needs_torch, numpy, torch

import ballast
from ballast import aio


def random_bytes(count, seed=1):
    return random.Random(seed).randbytes(count)


class Transfers(FolderTest):
    def setUp(self):
        super().setUp()
        self.content = random_bytes(300_000)
        self.file = self.path / "file.bin"
        self.file.write_bytes(self.content)

    def test_reads_of_any_range_and_address(self):
        memory = aio.empty(400_000)
        with aio.File(self.file) as file:
            for offset in (0, 1, 512, 4095, 4096, 8192, 299_999):
                for length in (0, 1, 511, 512, 4096, 65_536, 200_000):
                    for shift in (0, 1, 64, 512):
                        if offset + length > len(self.content):
                            continue
                        target = memory[shift:shift + length]
                        self.assertEqual(file.read_into(target, offset).result(), length)
                        self.assertEqual(bytes(target), self.content[offset:offset + length])

    def test_writes_of_any_range_and_address(self):
        expected = bytearray(self.content)
        memory = aio.empty(400_000)
        memory[:] = random_bytes(400_000, seed=2)
        with aio.File(self.file, "r+") as file:
            for offset in (0, 3, 4096, 12_288, 131_072):
                for length in (1, 4096, 65_536, 100_001):
                    for shift in (0, 64):
                        source = memory[shift:shift + length]
                        self.assertEqual(file.write_from(source, offset).result(), length)
                        expected[offset:offset + length] = source
        self.assertEqual(self.file.read_bytes(), bytes(expected))

    def test_transfers_in_flight_together(self):
        page = 4096
        with aio.File(self.path / "many.bin", "w") as file:
            # Neighbouring pages alternate between the page cache and direct I/O: no byte is lost.
            for round_number in range(20):
                memory = aio.empty(129 * page)
                memory[:] = random_bytes(len(memory), seed=round_number)
                futures = []
                for block in range(128):
                    shift = 64 if block % 2 else 0
                    futures.append(file.write_from(memory[block * page + shift:(block + 1) * page + shift],
                                                   block * page))
                self.assertEqual([f.result() for f in futures], [page] * 128)
                shifts = [64 if block % 2 else 0 for block in range(128)]
                expected = b"".join(memory[b * page + s:(b + 1) * page + s] for b, s in enumerate(shifts))
                back = aio.empty(128 * page)
                file.read_into(back).result()
                self.assertEqual(bytes(back), expected)

    def test_files_grow(self):
        with aio.File(self.path / "new.bin", "w") as file:
            self.assertEqual(file.size, 0)
            file.write_from(b"abc", 10).result()
            self.assertEqual(file.size, 13)
            memory = aio.empty(8192)
            file.write_from(memory, 4096).result()
            self.assertEqual(file.size, 4096 + 8192)
            start = bytearray(13)
            file.read_into(start).result()
            self.assertEqual(start, bytes(10) + b"abc")

    def test_growth_of_others_is_not_cut(self):
        with aio.File(self.file, "r+") as file:
            with open(self.file, "ab") as other:
                other.write(b"appended")
            tail = bytearray(8)
            file.read_into(tail, len(self.content)).result()
            self.assertEqual(tail, b"appended")
            with open(self.file, "ab") as other:
                other.write(b"x" * 1000)
            file.write_from(b"y", len(self.content) + 8 + 10).result()
        self.assertEqual(self.file.stat().st_size, len(self.content) + 1008)

    def test_size_allocates_or_sets_the_length(self):
        with aio.File(self.path / "new.bin", "w", size=1_000_000) as file:
            self.assertEqual(file.size, 1_000_000)
        self.assertGreaterEqual((self.path / "new.bin").stat().st_blocks * 512, 1_000_000)
        with aio.File(self.file, "r+", size=100) as file:
            self.assertEqual(file.size, 100)
        self.assertEqual(self.file.read_bytes(), self.content[:100])

    def test_renamed_and_removed_files_stay_open(self):
        with aio.File(self.file, "r+") as file:
            self.file.unlink()
            file.write_from(b"z" * 10, len(self.content)).result()
            back = bytearray(10)
            file.read_into(back, len(self.content)).result()
            self.assertEqual(back, b"z" * 10)
        self.assertFalse(self.file.exists())

    def test_await(self):
        async def read():
            with aio.File(self.file) as file:
                parts = [bytearray(1000) for _ in range(300)]
                sizes = await asyncio.gather(*(one(file.read_into(part, i * 1000))
                                               for i, part in enumerate(parts)))
                self.assertEqual(sizes, [1000] * 300)
                return b"".join(parts)

        async def one(future):
            return await future

        for _ in range(3):  # separate event loops
            self.assertEqual(asyncio.run(read()), self.content)

    def test_await_that_is_cancelled(self):
        async def cancelled():
            with aio.File(self.path / "big.bin", "w") as file:
                memory = aio.empty(1 << 20)
                for i in range(20):
                    future = file.write_from(memory, i << 20)
                    try:
                        await asyncio.wait_for(wait(future), 0)
                    except asyncio.TimeoutError:
                        pass
                self.assertEqual(await file.write_from(b"end"), 3)

        async def wait(future):
            return await future

        asyncio.run(cancelled())

    def test_errors_of_the_disk_have_their_errno(self):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        file = aio.File(self.path / "limited.bin", "w")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
        with self.assertRaises(ballast.FileError) as caught:
            file.write_from(bytes(1 << 17)).result()
        self.assertIsInstance(caught.exception, OSError)
        self.assertEqual(caught.exception.errno, errno.EFBIG)
        self.assertIn("limited.bin", str(caught.exception))
        file.close()

    def test_a_file_that_ends_too_early_is_an_error(self):
        memory = aio.empty(200_000)
        with aio.File(self.file, "r+") as file:
            with open(self.file, "r+b") as other:
                other.truncate(100)
            for target in (memory[:196_608], memory[1:100_000]):
                with self.assertRaisesRegex((ballast.FileError, ValueError), "end.*file.bin|file.bin.*end"):
                    file.read_into(target).result()


class Buffers(FolderTest):
    def setUp(self):
        super().setUp()
        self.content = random_bytes(65_536)
        (self.path / "file.bin").write_bytes(self.content)
        self.file = aio.File("file.bin", "r+")
        self.addCleanup(self.file.close)

    def test_memory_of_empty(self):
        memory = aio.empty(10_000)
        self.assertEqual((len(memory), memory.format, memory.readonly), (10_000, "B", False))
        self.assertEqual(bytes(memory), bytes(10_000))
        self.assertEqual(len(aio.empty(0)), 0)

    def test_buffer_protocol(self):
        for target in (bytearray(1000), memoryview(bytearray(1000)), memoryview(bytearray(1000)).cast("i")):
            self.file.read_into(target, 5).result()
            self.assertEqual(bytes(target), self.content[5:1005])
        for source in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
            self.assertEqual(self.file.write_from(source, 7).result(), 3)

    @needs_numpy
    def test_numpy(self):
        array = numpy.zeros((10, 50), numpy.float32)
        self.file.read_into(array, 3).result()
        self.assertEqual(array.tobytes(), self.content[3:2003])
        read_only = numpy.zeros(4)
        read_only.flags.writeable = False
        self.assert_names("buffer: is read-only", ValueError, lambda: self.file.read_into(read_only))
        self.assertEqual(self.file.write_from(read_only).result(), 32)
        for strided in (array.T, array[:, ::2]):
            self.assert_names("buffer: must be contiguous", ValueError,
                              lambda strided=strided: self.file.read_into(strided))

    @needs_torch
    def test_torch(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool):
            tensor = torch.zeros(1000, dtype=dtype)
            size = tensor.numel() * tensor.element_size()
            source = torch.ones(1000, dtype=dtype)
            self.assertEqual(self.file.write_from(source, 100).result(), size)
            self.assertEqual(self.file.read_into(tensor, 100).result(), size)
            self.assertTrue(torch.equal(tensor, source))
        parameter = torch.nn.Parameter(torch.zeros(4, 4))
        self.file.write_from(torch.eye(4), 64).result()
        self.file.read_into(parameter, 64).result()
        self.assertTrue(torch.equal(parameter.data, torch.eye(4)))
        self.assertEqual(self.file.write_from(torch.tensor(3.0)).result(), 4)
        self.assert_names("buffer: must be contiguous", ValueError,
                          lambda: self.file.read_into(torch.zeros(4, 4).T))
        memory = torch.frombuffer(aio.empty(65_536), dtype=torch.bfloat16)
        self.file.read_into(memory).result()

    @needs_torch
    def test_torch_on_a_device(self):
        self.assert_names("buffer: must", (ValueError, TypeError),
                          lambda: self.file.read_into(torch.zeros(3, device="meta")))

    def test_memory_lives_until_the_end_of_the_transfer(self):
        class Memory(bytearray):
            pass

        memory = Memory(65_536)
        alive = weakref.ref(memory)
        future = self.file.read_into(memory)
        del memory
        gc.collect()
        self.assertTrue(future.result())
        gc.collect()
        self.assertIsNone(alive())

    def test_dropped_futures_release_their_memory(self):
        class Memory(bytearray):
            pass

        alive = []
        for _ in range(100):
            memory = Memory(1000)
            alive.append(weakref.ref(memory))
            self.file.read_into(memory)
        del memory
        self.file.close()
        gc.collect()
        self.assertEqual([ref() for ref in alive], [None] * 100)

    def test_a_bytearray_in_flight_cannot_shrink(self):
        memory = bytearray(1 << 20)
        file = aio.File("other.bin", "w", size=1 << 24)
        futures = [file.write_from(memory, i << 20) for i in range(16)]
        if not futures[-1].done():
            with self.assertRaises(BufferError):
                memory.clear()
        file.close()
        self.assertTrue(all(future.done() for future in futures))
        memory.clear()

    def test_no_reference_is_leaked(self):
        memory = bytearray(100)
        before = sys.getrefcount(memory)
        for _ in range(1000):
            self.file.read_into(memory).result()
        self.assertEqual(sys.getrefcount(memory), before)


class Refusals(FolderTest):
    def test_arguments(self):
        (self.path / "file.bin").write_bytes(bytes(1000))
        file = aio.File("file.bin")
        memory = bytearray(10)
        for argument, error, call in (
                ("path", TypeError, lambda: aio.File(3)),
                ("path", ValueError, lambda: aio.File("")),
                ("mode", TypeError, lambda: aio.File("file.bin", 3)),
                ("mode", ValueError, lambda: aio.File("file.bin", "a")),
                ("size", ValueError, lambda: aio.File("file.bin", "r", size=3)),
                ("size", TypeError, lambda: aio.File("file.bin", "w", size="3")),
                ("cannot open missing.bin", OSError,
                 lambda: aio.File("missing.bin")),
                ("cannot create missing/x", OSError, lambda: aio.File("missing/x", "w")),
                ("buffer", TypeError, lambda: file.read_into(3)),
                ("buffer", TypeError, lambda: file.read_into(None)),
                ("buffer", TypeError, lambda: file.read_into([1, 2])),
                ("buffer: is read-only", ValueError, lambda: file.read_into(b"abc")),
                ("offset", TypeError, lambda: file.read_into(memory, 1.5)),
                ("offset", ValueError, lambda: file.read_into(memory, -1)),
                ("offset", ValueError, lambda: file.read_into(memory, 991)),
                ("offset", ValueError, lambda: file.read_into(memory, 1 << 62)),
                ("mode", ValueError, lambda: file.write_from(b"abc")),
                ("timeout", (TypeError, ValueError), lambda: file.read_into(memory).result(-1)),
                ("nbytes", ValueError, lambda: aio.empty(-1)),
                ("nbytes", TypeError, lambda: aio.empty("3")),
                ("seconds", ValueError, lambda: aio.tune(".", seconds=0)),
                ("depths", ValueError, lambda: aio.bench(".", depths=[0])),
                ("patterns", TypeError, lambda: aio.bench(".", patterns="read")),
        ):
            with self.subTest(argument=argument):
                self.assert_names(argument, error, call)
        with self.assertRaises(MemoryError):
            aio.empty(1 << 61)
        file.close()

    def test_closed_files(self):
        (self.path / "file.bin").write_bytes(bytes(1000))
        with aio.File("file.bin", "r+") as file:
            self.assertIn("1000 bytes", repr(file))
        file.close()
        self.assertTrue(file.closed)
        self.assertIn("closed", repr(file))
        for call in (lambda: file.read_into(bytearray(1)), lambda: file.write_from(b"x"), file.sync,
                     file.__enter__):
            self.assert_names("file.bin: the file is closed", ValueError, call)

    def test_timeout(self):
        with aio.File("file.bin", "w") as file:
            memory = aio.empty(256 << 20)
            future = file.write_from(memory)
            try:
                future.result(0)
            except TimeoutError as error:
                self.assertIn("file.bin", str(error))
            self.assertEqual(future.result(60), len(memory))
            self.assertTrue(future.done())


if __name__ == "__main__":
    unittest.main()
