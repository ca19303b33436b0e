"""An emulated second device, for tests on machines without a GPU.

`activate()` builds it with the compiler and registers it with PyTorch, as torch.second and
`second:0`. That changes the whole process, so tests that need it run in their own (see
`in_own_process`).

Its memory cannot be accessed by CPU operations: tensors have addresses of a protected mapping.
Memory that is new or freed is full of NaNs. Streams run late, on threads; only events order them.
An operator runs as the CPU's kernel, so results have the CPU's bits. It runs late, too, if a call
with the same shapes was seen before; the first call, random operators and operators whose shapes
depend on values wait for the stream. Random numbers come from the CPU's generator. There is one
device. Copies are as late as with CUDA: only with `non_blocking` and pinned host memory.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = ("autocast", "bindings", "device", "memory", "operators", "shallow_copies", "storage", "streams")


def reason_to_skip():
    """Says why the device cannot be built here, or nothing."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not sys.platform.startswith("linux"):
        return "the emulated device needs Linux"
    if shutil.which("ninja") is None:
        return "ninja is not installed"
    if shutil.which(compiler()) is None:
        return "there is no C++ compiler"
    if not (pathlib.Path(torch.__file__).parent / "include/ATen/core/Tensor.h").exists():
        return "torch has no headers"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return "the emulated device needs torch 2.10"
    return None


def compiler():
    """PyTorch adds ccache, and takes no other prefix."""
    return os.environ.get("CXX", "c++").removeprefix("ccache ").split()[0]


def build():
    """Compiles the device into build-python, which later calls find. Returns the module."""
    import torch
    from torch.utils import cpp_extension

    folder = ROOT / "build-python" / f"second-device-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CXX"] = compiler()
    os.environ.setdefault("MAX_JOBS", str(min(2, os.cpu_count() or 1)))
    return cpp_extension.load("second_device_native", [str(HERE / f"{name}.cpp") for name in SOURCES],
                              build_directory=str(folder),
                              extra_cflags=["-O1", "-std=c++20", "-Wall", "-Wno-unused-variable"],
                              verbose=bool(os.environ.get("SECOND_DEVICE_VERBOSE")))


_native = None


def activate():
    """Registers the device with PyTorch, once. Returns torch.second."""
    global _native
    if _native is not None:
        import torch
        return torch.second
    _native = build()
    from .torch_module import register
    return register(_native)


def in_own_process(test, module):
    """Runs the tests of a module of this folder in a process that has the device. `test` is the
    unittest.TestCase that reports them."""
    reason = reason_to_skip()
    if reason:
        test.skipTest(reason)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-B", "-m", "unittest", f"second_device.{module}"],
                          capture_output=True, text=True, env=environment, check=False)
    test.assertEqual(done.returncode, 0, done.stderr[-20000:])
    last = done.stderr.strip().splitlines()[-1]
    test.assertRegex(last, r"^OK( \(skipped=\d+\))?$")
    if "skipped" in last:
        print(f"second_device.{module}: {last}", file=sys.stderr)


def device_test(base=unittest.TestCase):
    """Returns a class of tests that have the device, its default delays and an empty memory."""

    class DeviceTest(base):
        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            cls.second = activate()

        def setUp(self):
            super().setUp()
            self.second.set_delays(kernel=0.0, copy=0.0)
            self.second.set_budget(2 << 30)
            self.second.reset_peak_memory_stats()

        def tearDown(self):
            self.second.set_delays(kernel=0.0, copy=0.0)
            self.second.synchronize()
            super().tearDown()

    return DeviceTest
