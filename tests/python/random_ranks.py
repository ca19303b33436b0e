"""The sequences of random_actions.py on two ranks with DistributedDataParallel, which have separate gradients. The
arguments and the output are the same. Needs torch.distributed with gloo."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from random_actions import Action, World, describe, draw, read_arguments, run, shorten
from random_sides import Model, Setup

RANKS = 2
WITHOUT = ("cast",)  # gives gradients without a backward pass


def wrapper() -> Callable[[Model], torch.nn.Module]:
    """Wraps a model anew when its parameters are other ones, or others of them require gradients."""
    kept: list = []

    def wrapped(model: Model) -> torch.nn.Module:
        present = [(p, p.requires_grad) for p in model.parameters()]
        if not kept or [(id(p), trained) for p, trained in present] != [(id(p), t) for p, t in kept[1]]:
            kept.clear()
            gc.collect()  # the hooks of the old wrapper
            kept.extend((DistributedDataParallel(model, find_unused_parameters=True), present))
        return kept[0]

    return wrapped


def make_world(setup: Setup, folder: str) -> World:
    world = World(dataclasses.replace(setup, hooks=False, ranks=RANKS), folder)
    for side in world.sides:
        side.wrapped = wrapper()
        side.own_seed = 1000 * dist.get_rank()
    return world


def agreed(seed: int, actions: list[Action]) -> str | None:
    """Runs the sequence on all ranks. Returns their errors on each rank, or None."""
    worlds: list[World] = []

    def make(setup: Setup, folder: str) -> World:
        worlds.append(make_world(setup, folder))
        return worlds[-1]

    error = run(seed, [action for action in actions if action.name not in WITHOUT], make)
    weights = worlds[0].ours.weights() if worlds else {}
    gathered: list = [None] * RANKS
    dist.all_gather_object(gathered, (error, weights))
    errors = [one for one, _ in gathered if one is not None]
    if errors:
        return "\n".join(errors)
    for name, value in gathered[0][1].items():
        if not torch.equal(value.nan_to_num(), gathered[1][1][name].nan_to_num()):
            return f"{name} differs between ranks"
    return None


def run_rank(rank: int, folder: str, first: int, count: int, keep: str | None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=60))
    status = 0
    for seed in range(first, first + count):
        if rank == 0:
            print(f"seed {seed}", flush=True)
        actions = draw(seed)
        if keep is not None:
            actions = [actions[int(number)] for number in keep.split(",")]
        error = agreed(seed, actions)
        if error is None:
            continue
        if keep is None:
            actions = shorten(actions, lambda some: agreed(seed, some) is not None)
            error = agreed(seed, actions) or error
        if rank == 0:
            print(describe(seed, actions, "random_ranks.py"), error, sep="\n", flush=True)
        status = 1
        break
    dist.destroy_process_group()
    sys.exit(status)


def main() -> int:
    words = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run_rank, args=(rank, folder, words.first, words.count, words.keep))
                 for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
