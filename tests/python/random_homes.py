"""Random sequences of what users do with a model whose homes are on NVMe, as random_offload.py, in addition with saved
states. Needs torch.

    random_homes.py --first 0 --count 1000
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from typing import Any

import torch

import ballast
import fake_device
import random_offload
from ballast._home_plan import HomePlan


class SomeOnNvme(HomePlan):
    """Puts all blocks on NVMe but the first ones."""

    def __init__(self, folder: str, resident: int) -> None:
        super().__init__(folder, any_file_system=True)
        self.resident = resident

    def _choose(self, sizes: dict[str, int], fixed: set[str], buffers: int, most: int) -> list[str]:
        return [name for name in sizes if name not in fixed][self.resident:]


class NvmeSide(random_offload.Side):
    weights = random_offload.WEIGHTS | {"store": 1.5}

    def make_handle(self, budget: int, trained: str) -> Any:
        setup = self.setup
        folder = tempfile.mkdtemp(prefix="ballast-homes-")
        homes = SomeOnNvme(folder, random.Random(setup.seed).choice((0, 0, 1, 2)))
        handle = fake_device.offload(self.model, budget, delay=setup.delay, seed=setup.seed, blocks=setup.names,
                                     trained=trained, prefetch=setup.prefetch, homes=homes)
        shutil.rmtree(folder)  # the files have no names
        return handle

    def store(self, n: int) -> Any:
        """Saves everything, destroys the weights, and loads. Nothing to do for the plain model."""
        if self.handle is None or self.waiting:  # loading is an in-place change for graphs
            return None
        optimizer = self.optimizer if isinstance(self.optimizer, ballast.OffloadAdamW) else None
        with tempfile.TemporaryDirectory(prefix="ballast-saved-") as folder:
            self.handle.save(folder, optimizer)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(n)
            self.handle.load(folder, optimizer)
        return None


if __name__ == "__main__":
    sys.exit(random_offload.main(NvmeSide))
