#!/usr/bin/env python3
"""Compares Ballast's CPU update with DeepSpeed's and PyTorch's, in one run on one machine.

    adam_peers.py [--params 64Mi] [--threads N] [--rounds 5] [--seconds 0.5]
                        [--ballast PATH] [--memory same|torch] [--json]

Needs `torch`, `deepspeed` and `ninja` from PyPI and a C++ compiler: DeepSpeed builds its kernel
when it is first used. Every rate is parameters / median seconds of one update of one flat
parameter, states and gradient in memory:

    ballast adamw-bf16     bf16 gradient in; bf16 weight + 16-bit remainder, fp32 moments: one pass
    ballast adamw-fp32     fp32 gradient, weight and moments
    deepspeed three passes
                           bf16 gradient to fp32 (copy_), DeepSpeedCPUAdam.step() on the fp32
                           master, master to the bf16 weight (copy_): the job of adamw-bf16
    deepspeed with clipping
three passes, but the fp32 gradient is first multiplied by the clip
                           coefficient, as in its ZeRO optimizers; adamw-bf16 always does this
    torch fused three passes, torch foreach three passes
three passes around torch.optim.AdamW.step()
    deepspeed fp32         DeepSpeedCPUAdam.step() alone: the job of adamw-fp32
    torch fused fp32, torch foreach fp32
                           torch.optim.AdamW.step() alone: the job of adamw-fp32

In every round each peer is measured right after Ballast's variant that does the same job, for at
least --seconds each. `ratio` is the median over the rounds of Ballast's rate over the peer's in the
same round; both rates are medians over these rounds. All have the same number of threads. With
--memory same (the default) the peers' arrays are allocated like Ballast's: on huge pages if the
kernel grants them, with skewed starts; with --memory torch PyTorch allocates them. If the machine's
speed changes, the rates suffer more than the ratios: the table then has a warning, and --json has
every round.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from peers import NOISY, fail

SKEW = 7 * 4096 + 13 * 64  # cpu_adam::kArraySkew
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
CLIP_COEFFICIENT = 0.37
WARM_UPS = 2
SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def count(text):
    match = re.fullmatch(r"(\d+)(|k|M|G|Ki|Mi|Gi)", text)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a count; write a number such as 1000 or 64Mi")
    return int(match[1]) * SCALES[match[2]]


def read_arguments():
    parser = argparse.ArgumentParser(
        description="Compares `ballast bench adam` with DeepSpeed's CPU Adam and torch.optim.AdamW")
    root = pathlib.Path(__file__).resolve().parents[3]
    parser.add_argument("--params", type=count, default=count("64Mi"), metavar="N",
                        help="parameters (default 64Mi; each needs about 48 bytes)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S",
                        help="least time of one measurement (default 0.5)")
    parser.add_argument("--ballast", type=pathlib.Path, default=root / "build/tools/ballast",
                        metavar="PATH", help="the program (default: build/tools/ballast)")
    parser.add_argument("--memory", choices=("same", "torch"), default="same",
                        help="allocate the peers' arrays like Ballast (same) or with PyTorch's "
                             "allocator (torch)")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.rounds < 1 or arguments.seconds < 0:
        parser.error("--threads and --rounds must be at least 1, --seconds at least 0")
    return arguments


@contextlib.contextmanager
def captured():
    """A file with all output to stdout and stderr, including that of C++ code and compilers."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in zip((1, 2), saved):
                os.dup2(copy, descriptor)
                os.close(copy)


def load_peers(threads):
    """Returns torch, the class DeepSpeedCPUAdam and the instruction set of its kernel."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's build looks for the ninja of the same environment.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    problem = None
    said = ""
    with captured() as output:
        try:
            import torch
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder
            kernel = CPUAdamBuilder().load()
            kernel.create_adam(10**6, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, True)
            kernel.destroy_adam(10**6)
        except ImportError as error:
            problem = f"{error}; run pip install torch deepspeed ninja"
        except Exception as error:  # whatever a failed build raises
            first = str(error).strip().splitlines() or [type(error).__name__]
            problem = ("DeepSpeed cannot build its CPU Adam; install ninja and a C++ compiler: "
                       f"{first[0]}")
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # output of C++ code
        output.seek(0)
        said = output.read()
    if problem:
        fail(problem)
    found = re.search(r"created with (.+?) arithmetic", said)
    torch.set_num_threads(threads)
    return torch, DeepSpeedCPUAdam, found[1] if found else "unknown"


def require_memory(size):
    """Counts the peers' arrays, the temporaries of foreach and Ballast's arrays."""
    needed = 48 * size
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
            if needed > free:
                fail(f"--params {size} needs about {needed / 2**30:.1f} GiB of memory and "
                     f"{free / 2**30:.1f} GiB is free; --params {free // 48 // 2**20}Mi would fit")


class Memory:
    """Allocates tensors in the kind of memory that --memory names."""

    def __init__(self, torch, kind):
        self.torch = torch
        self.kind = kind
        self.made = 0

    def tensor(self, size, dtype):
        if self.kind == "torch":
            return self.torch.zeros(size, dtype=dtype)
        skew = (self.made + 1) * SKEW
        self.made += 1
        area = mmap.mmap(-1, skew + size * dtype.itemsize,
                         flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
        return self.torch.frombuffer(area, dtype=dtype, offset=skew, count=size).zero_()


class Peers:
    """The peers' jobs. All update the same arrays."""

    def __init__(self, torch, ds_adam, size, memory):
        make = Memory(torch, memory).tensor
        master = make(size, torch.float32)
        first = make(size, torch.float32)
        second = make(size, torch.float32)
        self.gradient16 = make(size, torch.bfloat16)
        self.weight16 = make(size, torch.bfloat16)
        tile = torch.randn(2**16, generator=torch.Generator().manual_seed(1))
        for start in range(0, size, len(tile)):
            end = min(size, start + len(tile))
            master[start:end] = 0.02 * tile[:end - start]
            self.gradient16[start:end] = 0.03 * tile.roll(4099)[:end - start]
        self.master = torch.nn.Parameter(master)
        self.master.grad = make(size, torch.float32)
        self.master.grad.copy_(self.gradient16)
        self.deepspeed = ds_adam([self.master], adamw_mode=True, **HYPER)
        self.deepspeed.state[self.master].update(step=0, exp_avg=first, exp_avg_sq=second)
        self.fused = torch.optim.AdamW([self.master], fused=True, **HYPER)
        self.foreach = torch.optim.AdamW([self.master], foreach=True, **HYPER)
        for optimizer in (self.fused, self.foreach):
            optimizer.state[self.master].update(step=torch.tensor(0.0), exp_avg=first,
                                                exp_avg_sq=second)
        self.torch = torch

    def three_passes(self, optimizer, clipping=False):
        def job():
            with self.torch.no_grad():
                self.master.grad.copy_(self.gradient16)
                if clipping:
                    self.master.grad.mul_(CLIP_COEFFICIENT)
                optimizer.step()
                self.weight16.copy_(self.master)
        return job

    def jobs(self):
        """Tuples of a name, the function to time, and the equal variant of Ballast."""
        optimizers = {"deepspeed": self.deepspeed, "torch fused": self.fused,
                      "torch foreach": self.foreach}
        return [("deepspeed with clipping", self.three_passes(self.deepspeed, clipping=True),
                 "adamw-bf16"),
                *((f"{name} three passes", self.three_passes(optimizer), "adamw-bf16")
                  for name, optimizer in optimizers.items()),
                *((f"{name} fp32", optimizer.step, "adamw-fp32")
                  for name, optimizer in optimizers.items())]


def rate_of(job, size, seconds):
    """Median Gparam/s."""
    for _ in range(WARM_UPS):
        job()
    times = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return size / statistics.median(times) * 1e-9


def ballast_row(arguments, variant, *more):
    """Ballast's result for `variant`, with its best instruction set unless `more` names one."""
    command = [arguments.ballast, "bench", "adam", "--json", "--no-check", "--variant", variant,
               "--params", str(arguments.params), "--threads", str(arguments.threads),
               # The command measures its ceiling half of the time.
               "--seconds", str(2 * arguments.seconds), "--repeats", "3", *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"{arguments.ballast}: {error.strerror}; name the built program with --ballast")
    if done.returncode != 0:
        fail(f"{arguments.ballast}: {done.stderr.strip()}")
    return json.loads(done.stdout)[-1]


def measure(arguments, peers, isa):
    """One result for each peer, with the rates of every round."""
    rounds = {name: [] for name, _, _ in peers.jobs()}
    for _ in range(arguments.rounds):
        for name, job, variant in peers.jobs():
            ours = ballast_row(arguments, variant, "--isa", isa)["gparams_per_second"]
            rounds[name].append((ours, rate_of(job, arguments.params, arguments.seconds)))
    results = []
    for name, _, variant in peers.jobs():
        ratios = [ours / theirs for ours, theirs in rounds[name]]
        results.append({
            "peer": name, "against": variant, "isa": isa, "params": arguments.params,
            "threads": arguments.threads, "memory": arguments.memory,
            "peer_gparams_per_second": statistics.median(theirs for _, theirs in rounds[name]),
            "ballast_gparams_per_second": statistics.median(ours for ours, _ in rounds[name]),
            "ratio": statistics.median(ratios), "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": [{"ballast": ours, "peer": theirs} for ours, theirs in rounds[name]]})
    return results


def spread(rates):
    return max(rates) / min(rates)


def print_table(arguments, results, isa):
    version = importlib.metadata.version
    print(f"{arguments.params} parameters, {arguments.threads} threads, {arguments.rounds} rounds, "
          f"memory: {arguments.memory}")
    print(f"DeepSpeed {version('deepspeed')} ({isa}), PyTorch {version('torch')}, "
          f"Ballast {results[0]['isa']}; Gparam/s")
    for variant in dict.fromkeys(result["against"] for result in results):
        print(f"\n{'against ' + variant:<27} {'peer':>7} {'Ballast':>8} {'ratio':>7}   range")
        for result in results:
            if result["against"] == variant:
                print(f"{result['peer']:<27} {result['peer_gparams_per_second']:>7.3f} "
                      f"{result['ballast_gparams_per_second']:>8.3f} {result['ratio']:>6.2f}x   "
                      f"{result['ratio_min']:.2f} to {result['ratio_max']:.2f}")
    worst = max(spread([pair[side] for pair in result["rounds"]])
                for result in results for side in ("ballast", "peer"))
    if worst > NOISY:
        print(f"\nNoisy: a rate changed {worst:.1f}-fold between rounds. Rerun on a quiet machine; "
              "--json has every round.")


def main():
    arguments = read_arguments()
    require_memory(arguments.params)
    torch, ds_adam, isa = load_peers(arguments.threads)
    # Fails early if the path is wrong.
    ballast_isa = ballast_row(arguments, "adamw-bf16")["isa"]
    peers = Peers(torch, ds_adam, arguments.params, arguments.memory)
    results = measure(arguments, peers, ballast_isa)
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        print_table(arguments, results, isa)


if __name__ == "__main__":
    main()
