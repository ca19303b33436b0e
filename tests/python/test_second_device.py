"""Tests the emulated second device (see the package second_device), in processes that have it."""

import unittest

import second_device


class SecondDevice(unittest.TestCase):
    def test_memory_streams_copies_and_operators(self):
        second_device.in_own_process(self, "device_cases")

    def test_training(self):
        second_device.in_own_process(self, "training_cases")


if __name__ == "__main__":
    unittest.main()
