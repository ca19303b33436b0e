"""Backward passes that raise, of a model that is offloaded to the emulated device. Autograd's thread of the device drops
the pass while the program continues, as on a GPU."""

import unittest

import torch

from ballast import offloading
from second_device import device_test
from second_device.offload_cases import DEVICE, llama, tokens


class Stop(Exception):
    pass


class Raising(device_test()):
    def test_gradients_after_a_backward_pass_that_raised(self):
        def raises(*_):
            raise Stop

        torch.manual_seed(0)
        model, ids = llama(), tokens(0)
        handle = offloading.offload(model, DEVICE, device_bytes=200000, trained="stream", prefetch=1)

        def gradients():
            model.zero_grad()
            model(input_ids=ids, labels=ids)["loss"].backward()
            return [p.grad.cpu() for p in model.parameters()]

        expected = gradients()
        for turn in range(40):
            hook = model.model.layers[2].mlp.act_fn.register_full_backward_hook(raises)
            with self.assertRaises(Stop):
                gradients()
            hook.remove()
            for one, two in zip(expected, gradients(), strict=True):
                self.assertTrue(torch.equal(one, two), f"turn {turn}")
        handle.remove()


if __name__ == "__main__":
    unittest.main()
