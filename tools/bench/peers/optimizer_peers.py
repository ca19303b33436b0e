#!/usr/bin/env python3
"""Times OffloadAdamW.step() against other optimizers on the CPU, in turn, for a model in bf16.

    optimizer_peers.py [--params 300 | --small 4000] [--rounds 7] [--peers deepspeed,foreach,fused]
                       [--fp32] [--clip NORM] [--threads N]

Needs ballast, torch and, for their peers, deepspeed with ninja. The parameters are those of
transformer layers of width 1024, or with --small that many of 256 to 1,024 elements. Each peer has fp32 masters and moments. With
bf16 weights, DeepSpeedCPUAdam and torch's optimizers update fp32 masters, so gradients are copied to
fp32 before and weights to bf16 after a step; OffloadAdamW reads and writes both itself. With --clip, the
peers clip by torch.nn.utils.clip_grad_norm_ and OffloadAdamW by max_grad_norm; without it, no one
reads the gradients before the update. Prints medians, and the median of the ratios of each round.
"""

import argparse
import statistics
import time

import ballast
import torch

WIDTH = 1024


def tensors(millions: int, dtype: torch.dtype) -> list[torch.Tensor]:
    layer = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,),
             (WIDTH,)]
    size = sum(torch.Size(shape).numel() for shape in layer)
    count = max(1, round(millions * 1e6 / size))
    return [torch.full(shape, 0.01, dtype=dtype) for _ in range(count) for shape in layer]


def small_tensors(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((256 + i * 97 % 769,), 0.01, dtype=dtype) for i in range(count)]


class Peer:
    """An optimizer over fp32 masters of the parameters; over the parameters if they are fp32."""

    def __init__(self, make, weights: list[torch.Tensor], clip: float) -> None:
        self.weights = weights
        self.clip = clip
        self.copies = weights[0].dtype != torch.float32
        self.masters = [torch.nn.Parameter(w.float() if self.copies else w) for w in weights]
        self.optimizer = make(self.masters)
        if self.copies:
            for master in self.masters:
                master.grad = torch.zeros_like(master)

    def step(self, gradients: list[torch.Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients):
            if self.copies:
                master.grad.copy_(gradient)
            else:
                master.grad = gradient
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip, foreach=True)
        self.optimizer.step()
        if self.copies:
            for weight, master in zip(self.weights, self.masters):
                weight.copy_(master.detach())


class Own:
    def __init__(self, weights: list[torch.Tensor], clip: float) -> None:
        self.parameters = [torch.nn.Parameter(w) for w in weights]
        self.optimizer = ballast.OffloadAdamW(self.parameters, lr=1e-4, skip_non_finite=clip > 0,
                                              max_grad_norm=clip or None,
                                              threads=torch.get_num_threads())

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        self.optimizer.step()


def make_deepspeed(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01, adamw_mode=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=300, help="millions of parameters")
    parser.add_argument("--small", type=int, metavar="COUNT", help="number of small parameters instead")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peers", default="deepspeed,foreach,fused")
    parser.add_argument("--fp32", action="store_true", help="fp32 weights and gradients")
    parser.add_argument("--clip", type=float, default=0.0, metavar="NORM",
                        help="clip gradients to this global norm, as training loops do")
    arguments = parser.parse_args()
    makers = {
        "deepspeed": make_deepspeed,
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    }
    torch.set_num_threads(arguments.threads)
    dtype = torch.float32 if arguments.fp32 else torch.bfloat16
    weights = (small_tensors(arguments.small, dtype) if arguments.small
               else tensors(arguments.params, dtype))
    gradients = [torch.full_like(w, 0.5) for w in weights]
    own = Own([w.clone() for w in weights], arguments.clip)
    count = sum(w.numel() for w in weights)
    print(f"{len(weights)} tensors, {count / 1e6:.1f}M parameters, {dtype}, "
          f"{torch.get_num_threads()} threads")
    for name in arguments.peers.split(","):
        peer = Peer(makers[name], [w.clone() for w in weights], arguments.clip)
        times: dict[str, list[float]] = {"own": [], "peer": []}
        for number in range(arguments.rounds + 1):
            for key, optimizer in (("own", own), ("peer", peer)):
                start = time.perf_counter()
                optimizer.step(gradients)
                if number > 0:  # the first one allocates
                    times[key].append(time.perf_counter() - start)
        ratio = statistics.median(p / o for p, o in zip(times["peer"], times["own"]))
        print(f"{name}: {statistics.median(times['peer']) * 1e3:.1f} ms, OffloadAdamW "
              f"{statistics.median(times['own']) * 1e3:.1f} ms, ratio {ratio:.2f}")
        del peer


if __name__ == "__main__":
    main()
