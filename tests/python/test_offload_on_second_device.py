"""Tests ballast.offload() on the emulated second device (see the package second_device)."""

import importlib.util
import unittest

import second_device


def lacks(*packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


@unittest.skipIf(lacks("ballast.offloading"), "this build has no ballast.offload()")
@unittest.skipIf(lacks("transformers", "peft"), "transformers or peft is not installed")
class OffloadOnSecondDevice(unittest.TestCase):
    def test_passes_optimizers_and_memory(self):
        second_device.in_own_process(self, "offload_cases")

    @unittest.skipIf(lacks("random_offload"), "random_offload.py is missing")
    def test_random_sequences_of_actions(self):
        second_device.in_own_process(self, "random_cases")

    def test_backward_passes_that_raise(self):
        second_device.in_own_process(self, "raising_cases")


if __name__ == "__main__":
    unittest.main()
