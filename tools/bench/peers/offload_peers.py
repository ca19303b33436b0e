#!/usr/bin/env python3
"""Times steps of modules whose weights are in host memory: ballast.offload() against others, in turn.

    offload_peers.py [--device cpu] [--widths 64,256,1024] [--blocks 16] [--tokens 128] [--room 4]
                     [--rounds 9] [--peers ballast,resident,accelerate,fsdp2] [--threads N]

Needs ballast and torch, and accelerate for its peer. The model is a stack of blocks (norm, two matrices
of WIDTH x 4 WIDTH, GELU) in fp32. A step is a forward pass without gradients (`forward`), or a forward
and a backward pass through trained blocks without an update (`train`). In every round all peers take
turns. Prints medians of the wall time, and medians over the rounds of the ratio to the plain model and of
the difference to it in CPU time of the calling thread, per block.

- plain: the model on the device, which holds it.
- ballast: `ballast.offload()` with room for --room blocks on the device, two of them ahead.
- resident: the same with room for all. Weights stay while they do not change, so this is Python's cost.
- accelerate: `cpu_offload()`. It is for inference and has no backward pass.
- fsdp2: `fully_shard()` of each block and the model with `CPUOffloadPolicy`, one rank, gloo. On the CPU
  or a CUDA device.

--device cpu needs no accelerator: ballast then has the fake device of its tests, whose copies are
memory copies of a thread. For the others the device is host memory itself, so accelerate copies nothing.
--device second is the emulated device of the tests, and cuda a GPU (not yet run).
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

from peers import NOISY, fail

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/python"))
PEERS = ("ballast", "resident", "accelerate", "fsdp2")
STEPS = ("forward", "train")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def offloaded(width: int, blocks: int, room: int, device: str) -> nn.Module:
    """A model whose blocks come to a device with room for some of them."""
    from ballast import _units

    model = Stack(width, blocks)
    named = list(model.blocks[0].named_parameters())
    device_bytes = room * _units.lay_out(named)[1]
    if device == "cpu":
        import fake_device
        model.handle = fake_device.offload(model, device_bytes, prefetch=2, small=0)
    else:
        import ballast
        model.handle = ballast.offload(model, device, device_bytes=device_bytes, trained="stream")
    return model


def make(peer: str, width: int, arguments: argparse.Namespace) -> nn.Module:
    blocks, device = arguments.blocks, arguments.device
    if peer == "plain":
        return Stack(width, blocks).to(device)
    if peer in ("ballast", "resident"):
        return offloaded(width, blocks, arguments.room if peer == "ballast" else blocks, device)
    if peer == "accelerate":
        from accelerate import cpu_offload
        return cpu_offload(Stack(width, blocks), execution_device=torch.device(device))
    return sharded(Stack(width, blocks), device)


def sharded(model: nn.Module, device: str) -> nn.Module:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if not distributed.is_initialized():
        distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", rank=0, world_size=1,
                                       store=distributed.HashStore())
    mesh = init_device_mesh(device, (1,))
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def step(model: nn.Module, x: torch.Tensor, kind: str) -> float:
    """Returns the sum of the result, when all work has ended."""
    if kind == "forward":
        with torch.no_grad():
            return float(model(x).sum())
    loss = model(x).sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss.detach())


def measure(models: dict[str, nn.Module], x: torch.Tensor, kind: str, rounds: int) -> dict[str, list]:
    """Wall and CPU seconds of each model's steps, by peer. Ends with an error if results differ."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    names = list(models)
    expected = step(models["plain"], x, kind)
    for turn in range(rounds + 3):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            start, cpu = time.perf_counter(), time.thread_time()
            got = step(models[name], x, kind)
            if turn >= 3:  # the order of blocks is learnt in the first ones
                times[name].append((time.perf_counter() - start, time.thread_time() - cpu))
            if got != expected:
                fail(f"{name}: {got!r} instead of {expected!r}")
    return times


def report(times: dict[str, list], width: int, kind: str, blocks: int) -> None:
    plain = times["plain"]
    for name, seconds in times.items():
        ratio = statistics.median(other[0] / one[0] for one, other in zip(plain, seconds))
        more = statistics.median(other[1] - one[1] for one, other in zip(plain, seconds)) / blocks
        per_block = "" if name == "plain" else f"{ratio:8.2f} {1e3 * more:10.3f} ms"
        print(f"{width:5} {kind:8} {name:11} {1e3 * statistics.median(wall for wall, _ in seconds):9.2f} ms {per_block}")
    walls = [wall for wall, _ in plain]
    if statistics.median(walls) > NOISY * min(walls):
        print(f"{width:5} {kind:8} warning: the plain model's median is {statistics.median(walls) / min(walls):.2f} "
              "times its best step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "second", "cuda"), default="cpu")
    parser.add_argument("--widths", default="64,256,1024")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--room", type=int, default=4, help="blocks that the device has room for")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        fail(f"--peers: {', '.join(sorted(unknown))} is not one of {', '.join(PEERS)}")
    torch.set_num_threads(arguments.threads)
    if arguments.device == "second":
        import second_device
        second_device.activate()
    print(f"PyTorch {torch.__version__}, {arguments.blocks} blocks, {arguments.tokens} tokens, room for "
          f"{arguments.room}, device {arguments.device}, {torch.get_num_threads()} threads")
    print("width step     peer               median      ratio   CPU per block")
    for width in map(int, arguments.widths.split(",")):
        x = torch.randn(arguments.tokens, width, generator=torch.Generator().manual_seed(1)).to(arguments.device)
        for kind in STEPS:
            takes_part = [p for p in peers if (p != "accelerate" or kind == "forward")
                          and (p != "fsdp2" or arguments.device != "second")]
            models = {peer: make(peer, width, arguments) for peer in ("plain", *takes_part)}
            report(measure(models, x, kind, arguments.rounds), width, kind, arguments.blocks)
            for model in models.values():
                if hasattr(model, "handle"):
                    model.handle.remove()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
