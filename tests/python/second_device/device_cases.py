"""Tests of the emulated device itself: memory, streams and events, copies, operators."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import unittest

import torch

from second_device import HERE, device_test

DEVICE = "second"


def pinned(*shape, fill):
    tensor = torch.empty(*shape, pin_memory=True)
    return tensor.fill_(fill)


class Memory(device_test()):
    def test_new_and_freed_memory_has_nans(self):
        self.assertTrue(torch.empty(100, device=DEVICE).isnan().all().item())
        first = torch.ones(1000, device=DEVICE)
        self.second.synchronize()
        del first
        for _ in range(20):  # one of them has the same memory
            self.assertTrue(torch.empty(1000, device=DEVICE).isnan().all().item())

    def test_host_code_cannot_touch_it(self):
        program = ("import second_device, torch, ctypes; second_device.activate();"
                   "t = torch.ones(4, device='second'); torch.second.synchronize();"
                   "print('before', flush=True); ctypes.string_at(t.data_ptr(), 4)")
        done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True,
                              check=False, env={**os.environ, "PYTHONPATH": str(HERE.parent)})
        self.assertEqual((done.returncode, done.stdout), (-signal.SIGSEGV, "before\n"), done.stderr)

    def test_allocated_bytes_and_their_peak_are_counted(self):
        before = torch.accelerator.memory_allocated()
        one = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        two = torch.empty(3, 2048, device=DEVICE)
        self.assertEqual(self.second.memory_allocated() - before, 1024 + 4 * 6144)
        del one, two
        self.assertEqual(self.second.memory_allocated(), before)
        self.assertEqual(torch.accelerator.max_memory_allocated() - before, 1024 + 4 * 6144)
        self.second.reset_peak_memory_stats()
        self.assertEqual(self.second.max_memory_allocated(), before)

    def test_a_peak_counts_results_of_late_kernels(self):
        x = torch.ones(1 << 16, device=DEVICE)
        for _ in range(2):  # the second call runs late
            self.second.reset_peak_memory_stats()
            before = self.second.memory_allocated()
            y = (x * 2) + 1
            self.assertEqual(self.second.max_memory_allocated() - before, 2 << 18)
            del y

    def test_the_budget_is_kept(self):
        self.second.set_budget(self.second.memory_allocated() + (1 << 20))
        kept = torch.empty(1 << 19, dtype=torch.uint8, device=DEVICE)
        with self.assertRaisesRegex(torch.OutOfMemoryError, "524800 bytes asked for"):
            torch.empty((1 << 19) + 512, dtype=torch.uint8, device=DEVICE)
        free, total = self.second.mem_get_info()
        self.assertEqual((free, total), (1 << 19, self.second.budget()))
        del kept
        torch.empty((1 << 19) + 512, dtype=torch.uint8, device=DEVICE)

    def test_freed_memory_is_not_found_by_a_view_of_its_address(self):
        owner = torch.ones(128, device=DEVICE)
        storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), owner.device, 512)
        view = torch.empty(0, device=DEVICE).set_(storage, 0, (128,), (1,))
        self.assertEqual(view.sum().item(), 128)
        del owner
        with self.assertRaisesRegex(RuntimeError, "freed|no longer"):
            view.sum()

    def test_use_after_a_free_on_another_stream_is_found(self):
        side = self.second.Stream()
        warm = torch.ones(64, device=DEVICE) * 2
        used = torch.ones(64, device=DEVICE)
        self.second.synchronize()
        self.second.set_delays(kernel=0.05, copy=0.0)
        with self.second.stream(side):
            target = used * 2
        del used  # its stream, the default one, does nothing, so it is free at once
        with self.assertRaisesRegex(RuntimeError, "after its memory was freed"):
            self.second.synchronize()
        used = torch.ones(64, device=DEVICE)
        self.second.synchronize()
        with self.second.stream(side):
            target = used * 2
        used.record_stream(side)
        del used
        self.assertEqual(target.sum().item(), 128)
        del warm


class Streams(device_test()):
    def setUp(self):
        super().setUp()
        self.side = self.second.Stream()

    def test_a_copy_is_late_and_a_missing_wait_gives_wrong_values(self):
        for wait in (True, False):
            source = pinned(256, fill=3.0)
            target = torch.zeros(256, device=DEVICE)
            (target * 2).sum().item()  # shapes of later calls are known
            self.second.synchronize()
            self.second.set_delays(kernel=0.0, copy=0.1)
            with self.second.stream(self.side):
                target.copy_(source, non_blocking=True)
            if wait:
                self.second.current_stream().wait_event(self.side.record_event())
            result = (target * 2).sum()
            self.assertEqual(result.item(), 1536.0 if wait else 0.0)
            self.second.synchronize()
            self.second.set_delays(kernel=0.0, copy=0.0)
            self.assertEqual(target.sum().item(), 768.0)

    def test_a_kernel_is_late_and_memory_given_away_too_early_gives_wrong_values(self):
        """A slot is filled with other weights while a kernel may still read it."""
        other = pinned(64, fill=5.0)
        slot = torch.ones(64, device=DEVICE)
        (slot * 3).sum().item()
        for wait in (True, False):
            slot.fill_(1.0)
            self.second.synchronize()
            self.second.set_delays(kernel=0.1, copy=0.0)
            result = slot * 3
            done = self.second.current_stream().record_event()
            with self.second.stream(self.side):
                if wait:
                    self.side.wait_event(done)
                slot.copy_(other, non_blocking=True)
            self.second.set_delays(kernel=0.0, copy=0.0)
            self.assertEqual(result.sum().item(), 192.0 if wait else 960.0)
            self.second.synchronize()

    def test_events_are_reached_in_order(self):
        start, end = self.second.Event(enable_timing=True), self.second.Event(enable_timing=True)
        source, target = pinned(8, fill=1.0), torch.zeros(8, device=DEVICE)
        self.second.set_delays(kernel=0.0, copy=0.1)
        start.record(self.side)
        with self.second.stream(self.side):
            target.copy_(source, non_blocking=True)
        end.record(self.side)
        self.assertFalse(end.query())
        self.assertFalse(self.side.query())
        end.synchronize()
        self.side.synchronize()
        self.assertTrue(end.query() and self.side.query())
        self.assertGreaterEqual(start.elapsed_time(end), 100.0)

    def test_the_current_stream_is_that_of_the_context(self):
        self.assertNotEqual(self.side.stream_id, 0)
        with self.second.stream(self.side):
            self.assertEqual(torch.accelerator.current_stream(), self.side)
            self.assertEqual(self.second.current_stream().stream_id, self.side.stream_id)
        self.assertEqual(self.second.current_stream().stream_id, 0)

    def test_a_copy_to_pinned_memory_is_late(self):
        source = torch.ones(32, device=DEVICE)
        target = torch.zeros(32, pin_memory=True)
        self.second.synchronize()
        self.second.set_delays(kernel=0.0, copy=0.1)
        target.copy_(source, non_blocking=True)
        self.assertEqual(target.sum().item(), 0.0)
        self.second.synchronize()
        self.assertEqual(target.sum().item(), 32.0)

    def test_other_copies_have_ended_when_they_return(self):
        self.second.set_delays(kernel=0.02, copy=0.02)
        source = torch.arange(32.0).to(DEVICE)
        target = torch.zeros(32)
        target.copy_(source, non_blocking=True)  # not pinned
        self.assertTrue(torch.equal(target, torch.arange(32.0)))
        target = torch.zeros(32, pin_memory=True)
        target.copy_(source)  # not non_blocking
        self.assertTrue(torch.equal(target, torch.arange(32.0)))
        memory = torch.full((32,), 7.0)
        source.copy_(memory, non_blocking=True)
        memory.zero_()
        self.assertEqual(source.sum().item(), 224.0)

    def test_pinned_memory_outlives_a_copy(self):
        self.second.set_delays(kernel=0.0, copy=0.05)
        source = pinned(64, fill=2.0)
        target = torch.empty(64, device=DEVICE)
        target.copy_(source, non_blocking=True)
        del source
        gc.collect()
        self.assertEqual(target.sum().item(), 128.0)

    def test_memory_can_be_registered_as_pinned(self):
        memory = ctypes.create_string_buffer(4096)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        self.assertFalse(tensor.is_pinned())
        self.second.register_pinned(tensor.data_ptr(), 4096)
        self.assertTrue(tensor[100:].is_pinned())
        self.second.unregister_pinned(tensor.data_ptr())
        self.assertFalse(tensor.is_pinned())

    def test_an_error_of_a_late_kernel_is_raised_by_the_next_wait(self):
        table = torch.ones(8, 4, device=DEVICE)
        good, bad = torch.tensor([1, 2], device=DEVICE), torch.tensor([1, 9], device=DEVICE)
        torch.nn.functional.embedding(good, table)
        torch.nn.functional.embedding(bad, table)
        with self.assertRaisesRegex((RuntimeError, IndexError), "index out of range"):
            self.second.synchronize()
        self.second.synchronize()


class Operators(device_test()):
    def same(self, function, *arguments):
        """Compares with the CPU, twice, since the second call runs late."""
        expected = function(*(value.clone() for value in arguments))
        for _ in range(2):
            found = function(*(value.to(DEVICE) for value in arguments))
            self.assertEqual(found.device.type, DEVICE)
            self.assertEqual(found.stride(), expected.stride())
            self.assertTrue(torch.equal(found.cpu(), expected))

    def test_functions_have_the_bits_of_the_cpu(self):
        torch.manual_seed(0)
        a, b = torch.randn(5, 7), torch.randn(7, 3)
        for kind in (torch.float32, torch.bfloat16):
            self.same(torch.matmul, a.to(kind), b.to(kind))
            self.same(lambda x: torch.nn.functional.layer_norm(x, (7,)), a.to(kind))
            self.same(torch.nn.functional.gelu, a.to(kind))
            self.same(lambda x: x.softmax(-1), a.to(kind))
        self.same(lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]), a)
        self.same(lambda x: x[x > 0], a)
        self.same(lambda x: torch.cat([x, x.t().contiguous().t()], 1).sort(1)[0], a)
        self.same(lambda x: torch.nonzero(x > 0), a)
        self.same(lambda x: x.view(7, 5).mT @ x.view(7, 5), a)

    def test_attention_is_that_of_matrix_products(self):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, 5, 8)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self.same(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
                      q, k, v)
        found = torch.nn.functional.scaled_dot_product_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
        torch.testing.assert_close(found.cpu(), torch.nn.functional.scaled_dot_product_attention(q, k, v))

    def test_in_place_and_views(self):
        a = torch.arange(24.0).view(4, 6)
        self.same(lambda x: x.mul_(2).add_(1).t_(), a)
        self.same(lambda x: x[1:3, ::2].fill_(7).expand(2, 2, 3), a)
        self.same(lambda x: x.view(torch.int32).view(2, 12).unfold(1, 3, 2), a)
        self.same(lambda x: torch.as_strided(x, (3, 2), (6, 1), 2).zero_(), a)
        self.same(lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 1j), a)
        x = a.to(DEVICE)
        view = x[2]
        view.zero_()
        self.assertEqual(x.cpu()[2].sum(), 0)
        self.assertEqual(view.data_ptr(), x.data_ptr() + 2 * 24)

    def test_factories(self):
        for make in (lambda d: torch.arange(5, device=d), lambda d: torch.full((2,), 3.0, device=d),
                     lambda d: torch.eye(3, device=d), lambda d: torch.tril_indices(3, 3, device=d),
                     lambda d: torch.tensor([1.5, 2], device=d), lambda d: torch.zeros(0, device=d),
                     lambda d: torch.linspace(0, 1, 5, device=d)):
            self.assertEqual(make(DEVICE).device, torch.device(DEVICE, 0))
            self.assertTrue(torch.equal(make(DEVICE).cpu(), make("cpu")))
        random = []
        for device in (DEVICE, "cpu"):
            torch.manual_seed(3)
            random.append([torch.randn(4, device=device), torch.randperm(6, device=device),
                           torch.rand(3, device=device).bernoulli_(0.5)])
        for one, other in zip(*random, strict=True):
            self.assertTrue(torch.equal(one.cpu(), other))

    def test_lists_and_scalars(self):
        tensors = [torch.arange(3.0), torch.ones(2, 2)]
        mine = [t.to(DEVICE) for t in tensors]
        torch._foreach_add_(tensors, 2)
        torch._foreach_add_(mine, 2)
        torch._foreach_mul_(tensors, torch.tensor(0.3))
        torch._foreach_mul_(mine, torch.tensor(0.3))
        torch._foreach_lerp_(tensors, [t + 1 for t in tensors], 0.25)
        torch._foreach_lerp_(mine, [t + 1 for t in mine], 0.25)
        for one, other in zip(tensors, mine, strict=True):
            self.assertTrue(torch.equal(one, other.cpu()))
        self.assertEqual(torch._foreach_norm(mine)[0].item(), torch._foreach_norm(tensors)[0].item())
        self.assertEqual((mine[0] * torch.tensor(2.0, dtype=torch.float64)).dtype, torch.float32)
        self.assertTrue(torch.equal(mine[0], mine[0].clone()))

    def test_results_given_as_out(self):
        a = torch.arange(6.0, device=DEVICE)
        out = torch.empty(0, device=DEVICE)
        torch.add(a, 1, out=out)
        self.assertTrue(torch.equal(out.cpu(), torch.arange(6.0) + 1))
        torch.mul(a, 2, out=out)
        self.assertTrue(torch.equal(out.cpu(), torch.arange(6.0) * 2))

    def test_tensors_of_two_devices_are_refused(self):
        a, b = torch.ones(3), torch.ones(3, device=DEVICE)
        for call in (lambda: a + b, lambda: b + a, lambda: b.add_(a), lambda: torch.cat([a, b]),
                     lambda: torch.nn.functional.linear(b[None], a[None])):
            with self.assertRaisesRegex(RuntimeError, "same device"):
                call()
        with self.assertRaisesRegex(RuntimeError, "type"):
            torch.nn.Parameter(a).grad = b


class Storages(device_test()):
    """Functions of PyTorch on which `ballast.offload` relies."""

    def test_swapped_memory_is_seen_by_all_views(self):
        storage = torch.UntypedStorage(0, device=DEVICE)
        pool = torch.empty(1024, dtype=torch.uint8, device=DEVICE)
        slot = torch._C._construct_storage_from_data_pointer(pool.data_ptr() + 512, pool.device, 512)
        pool[512:].view(torch.float32).copy_(torch.arange(128.0))
        storage._swap_data_ptr_(slot)
        self.assertEqual((storage.nbytes(), slot.nbytes()), (512, 0))
        weight = torch.empty(0, device=DEVICE).set_(storage, 0, (16, 8), (8, 1))
        turned = weight.t()
        self.assertEqual(turned[0, 15].item(), 120.0)
        storage._swap_data_ptr_(slot)
        other = torch._C._construct_storage_from_data_pointer(pool.data_ptr(), pool.device, 512)
        pool[:512].view(torch.float32).fill_(2.0)
        storage._swap_data_ptr_(other)
        self.assertEqual((turned[0, 15].item(), weight._version), (2.0, weight._version))

    def test_access_of_memory_that_is_away_raises(self):
        tensor = torch.ones(8, device=DEVICE)
        view = tensor[2:]
        address = tensor.untyped_storage()._cdata
        torch._C._set_storage_data_ptr_access_error_msg(address, "block 3 is away")
        for use in (lambda: tensor + 1, lambda: view.sum(), tensor.cpu, tensor.data_ptr,
                    lambda: torch.ones(8, device=DEVICE).copy_(tensor), lambda: tensor.zero_(),
                    lambda: torch.stack([tensor, tensor])):
            with self.assertRaisesRegex(RuntimeError, "block 3 is away"):
                use()
        torch._C._clear_storage_data_ptr_access_error_msg(address)
        self.assertEqual(view.sum().item(), 6.0)

    def test_resized_storage_keeps_its_values(self):
        tensor = torch.arange(8.0, device=DEVICE)
        tensor.untyped_storage().resize_(64)
        self.assertEqual(tensor.sum().item(), 28.0)
        tensor.untyped_storage().resize_(0)
        self.assertEqual(tensor.untyped_storage().nbytes(), 0)
        tensor.untyped_storage().resize_(32)
        tensor.copy_(torch.ones(8))
        self.assertEqual(tensor.sum().item(), 8.0)
        tensor.resize_(4, 4)
        self.assertEqual((tensor.shape, tensor.view(-1)[:8].sum().item()), ((4, 4), 8.0))

    def test_data_of_a_parameter_moves_between_devices(self):
        home = torch.nn.Parameter(torch.arange(4.0))
        away = torch.arange(4.0, device=DEVICE) * 2
        home.data = away
        self.assertEqual((home.device.type, home.sum().item()), (DEVICE, 12.0))
        (home * 2).sum().backward()
        self.assertEqual(home.grad.device.type, DEVICE)
        self.assertEqual(home.untyped_storage()._cdata, away.untyped_storage()._cdata)
        home.data = torch.ones(4)
        home.grad = None
        (home * 2).sum().backward()
        self.assertEqual((home.grad.device.type, home.grad.sum().item()), ("cpu", 8.0))

    def test_a_parameter_that_left_gets_a_new_accumulator(self):
        """A graph made on the device keeps the old one, so hooks of the parameter run twice."""
        parameter, calls = torch.nn.Parameter(torch.ones(4)), []
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.device.type))
        home, away = parameter.data, torch.ones(4, device=DEVICE)
        parameter.data = away
        first = (parameter * 2).sum()
        second = (parameter * 3).sum()
        (first + second).backward()
        self.assertEqual(len(calls), 1)
        parameter.grad = None
        first = (parameter * 2).sum()
        parameter.data = home
        parameter.data = away
        second = (parameter * 3).sum()
        (first + second).backward()
        self.assertEqual(len(calls), 3)

    def test_gradients_and_their_parameter_may_have_two_devices(self):
        parameter = torch.nn.Parameter(torch.ones(4, device=DEVICE))
        (parameter * 2).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "device"):
            parameter.grad = parameter.grad.cpu()

    def test_storages_are_saved_and_loaded(self):
        import io
        file = io.BytesIO()
        torch.save({"a": torch.arange(5.0, device=DEVICE)}, file)
        file.seek(0)
        self.assertEqual(torch.load(file)["a"].device.type, DEVICE)
        file.seek(0)
        self.assertTrue(torch.equal(torch.load(file, map_location="cpu")["a"], torch.arange(5.0)))


if __name__ == "__main__":
    unittest.main()
