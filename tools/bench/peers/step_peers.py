#!/usr/bin/env python3
"""Compares Ballast's training steps with PyTorch's or DeepSpeed's, in one run on one machine.

    step_peers.py [--peer torch|deepspeed] [--preset NAME] [--device cpu|cuda]
                        [--recompute no|yes|both] [--precision bf16,amp] [--compile no|yes|both]
                        [--equal-memory] [--rounds 3] [--steps 3] [--ballast PATH] [--json] [shape ...]

Needs `torch` from PyPI; `deepspeed` and `ninja` with --peer deepspeed, `transformers` with --model
transformers or FOLDER. In every round all programs take turns, in an order that rotates, each in its own
process: `ballast bench step`, and `step_torch.py` once for every configuration of the peer. Each
makes the model in memory, runs two warm-up steps and measures --steps. A program's rate in a
round is that of its median step; `ratio` is Ballast's rate / the peer's in the same round, median
over the rounds.

Equal: the model (numbers of parameters are compared), the tokens, the batch and its micro-batches;
in bf16, products of bf16 matrices with fp32 master weights and moments; AdamW, clipping by the
global norm, the learning rate, the threads, and that the host has the loss after every step. The
first loss must be about ln(vocabulary), the last losses about equal. Different:

- Ballast keeps layers' intermediates for the backward pass as far as its device memory allows, and
  recomputes the others. `recompute` peers recompute all of them (torch.utils.checkpoint), the
  other peers none: less work, more memory.
- Initial weights are different numbers from the same distribution.
- Kernels and libraries: PyTorch has its own GEMM library. `GEMM` is the peak that each program
  measures itself. MFU counts 6 FLOPs per token and weight in matrix products, half of the square of
  attention and the products of recurrences, without recomputation, relative to Ballast's peak.
- Precision of the residual stream: bf16 in Ballast and with bf16, fp32 with amp. bf16: bf16
weights and fp32 masters, sums of gradients in fp32; amp: torch.autocast over fp32 weights.
- DeepSpeed has its default settings except for --offload. It sums micro-batches in bf16. Ballast
  then has the same keys: stage 3, states in host memory (--offload optimizer), weights too
  (--offload all).
- Device memory: Ballast takes what it can use. --device-bytes limits both to one budget. With
  --equal-memory, Ballast runs a second time after each peer, with the peer's peak of allocated bytes
  as ballast.device_bytes. Contexts and what libraries allocate are not counted for either.
- Memory: `host` is the process's resident peak, libraries included; `device` is the increase that
  nvidia-smi reports, sampled once a second, contexts and caches included.

If a peer fails (out of memory, for example), its row gives the reason and the others are measured.
If the machine's speed changes, the rates suffer more than the ratios: the table then has a
warning, and --json has every round. Exit status: 0, or 2 if a measurement failed.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading

from peers import NOISY, fail
from step_options import lacking_memory, of_folder, read_arguments

HERE = pathlib.Path(__file__).resolve().parent
LOSS_TOLERANCE = 0.05  # relative to ln(vocabulary)
STDDEV = 0.02  # standard deviation of the initial weights
ROPE_THETA = 10000.0  # Ballast's default


class DeviceMemory:
    """Peak increase of the GPU memory in use between construction and close()."""

    def __init__(self, device):
        self.samples = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        if device == "cuda":
            self.sample()
            self.thread.start()

    def sample(self):
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        with contextlib.suppress(OSError, ValueError):
            done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "-i", gpu,
                                   "--format=csv,noheader,nounits"], capture_output=True, text=True,
                                  check=False)
            self.samples.append(int(done.stdout))

    def watch(self):
        while not self.over.wait(1.0):
            self.sample()

    def close(self):
        """Returns bytes, or None if they could not be measured."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        if len(self.samples) < 2:
            return None
        return (max(self.samples) - self.samples[0]) * 2**20


def run(command, device, environment):
    """Returns exit status, stdout, stderr, peak resident bytes and GPU bytes (see DeviceMemory)."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        memory = DeviceMemory(device)
        process = subprocess.Popen(command, stdout=out, stderr=err,
                                   env={**os.environ, **environment})
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
            device_bytes = memory.close()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return process.returncode, *texts, 1024 * usage.ru_maxrss, device_bytes


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


class Ballast:
    """`ballast bench step`."""

    name = "ballast"

    def __init__(self, a):
        keys = [f"ballast.compute_threads={a.threads}", f"ballast.update_threads={a.threads}"]
        sizes = ["sequence", "micro_batch", "accumulation", "steps"]
        if not of_folder(a):
            keys += [f"model.num_kv_heads={a.kv_heads}", f"model.intermediate_size={a.intermediate}",
                     f"model.tie_embeddings={'true' if a.tied else 'false'}"]
            sizes += ["family", "vocab", "hidden", "layers", "heads"]
        if a.offload != "none":
            keys += ["zero_optimization.stage=3", "zero_optimization.offload_optimizer.device=cpu"]
        if a.offload == "all":
            keys.append("zero_optimization.offload_param.device=cpu")
        if a.device_bytes:
            keys.append(f"ballast.device_bytes={a.device_bytes}")
        if a.host_bytes:
            keys.append(f"ballast.host_bytes={a.host_bytes}")
        self.device = a.device
        self.command = [a.ballast, "bench", "step", "--json",
                        "--device", {"cpu": "host"}.get(a.device, a.device), "--dtype", a.dtype]
        if of_folder(a):
            self.command += ["--model", a.model]
        for option in sizes:
            self.command += [f"--{option.replace('_', '-')}", str(getattr(a, option))]
        for key in [*keys, *a.set]:
            self.command += ["--set", key]

    def measure(self, device_bytes=None):
        """`device_bytes`: another budget than that of the options."""
        command = list(self.command)
        if device_bytes is not None:
            command += ["--set", f"ballast.device_bytes={device_bytes}"]
        try:
            status, out, err, host, device = run(command, self.device, {})
        except OSError as error:
            fail(f"{self.command[0]}: {error.strerror}; name the built program with --ballast")
        if status != 0 and device_bytes is not None:
            return {"problem": last_line(err)}
        if status != 0:
            fail(f"{self.command[0]}: {last_line(err)}")
        row = json.loads(out)[0]
        return {"tokens_per_second": row["tokens_per_second"], "step_seconds": row["step_seconds"],
                "parameters": round(row["parameters"]), "loss": row["loss"], "first_loss": None,
                "gemm": row["gemm_peak_flops_per_second"], "host_bytes": host,
                "device_bytes": device,
                "flops_per_token": row["model_flops_per_second"] / row["tokens_per_second"]}


class Peer:
    """`step_torch.py` in one configuration."""

    def __init__(self, a, precision, recompute, compiled):
        words = [a.peer, precision] + ["recompute"] * recompute + ["compiled"] * compiled
        self.name = " ".join(words)
        self.device = a.device
        self.threads = a.threads
        self.problem = lacking_memory(a, precision)
        self.version = None
        copied = ("peer", "family", "vocab", "hidden", "layers", "heads", "kv_heads",
                  "intermediate", "sequence", "micro_batch", "accumulation", "steps", "threads",
                  "device", "device_bytes", "loss_chunks", "tied", "model", "offload")
        self.job = {**{key: getattr(a, key) for key in copied}, "precision": precision,
                    "recompute": recompute, "compile": compiled, "rope_theta": ROPE_THETA}
        self.tokens = a.sequence * a.micro_batch * a.accumulation

    def measure(self):
        """Returns the figures, or None with the reason in `problem`."""
        # DeepSpeed's build looks for the ninja of the same environment.
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        status, out, err, host, device = run(
            [sys.executable, "-B", HERE / "step_torch.py", json.dumps(self.job)],
            self.device, {"OMP_NUM_THREADS": str(self.threads), "PATH": path})
        if status != 0:
            reason = last_line(err) if status > 0 else f"killed by signal {-status}"
            self.problem = reason if len(reason) < 200 else reason[:200] + "..."
            return None
        row = json.loads(last_line(out))
        self.version = row["version"]
        seconds = statistics.median(row["seconds"])
        return {"tokens_per_second": self.tokens / seconds, "step_seconds": seconds,
                "parameters": row["parameters"], "loss": row["loss"],
                "first_loss": row["first_loss"], "gemm": row["gemm_peak_flops_per_second"],
                "host_bytes": host, "device_bytes": device,
                "allocated_bytes": row["device_bytes"]}


def make_programs(a):
    both = {"no": (False,), "yes": (True,), "both": (False, True)}
    return [Ballast(a), *(Peer(a, precision, recompute, compiled) for
                          precision, compiled, recompute in
                          itertools.product(a.precision, both[a.compile], both[a.recompute]))]


def check_losses(a, name, ours, theirs):
    """Checks that parameters, first loss and last loss agree."""
    if ours["parameters"] != theirs["parameters"]:
        fail(f"{name} has {theirs['parameters']} parameters, but Ballast has {ours['parameters']}")
    # The logits are products of normalized rows and random weights with variance hidden * STDDEV^2.
    expected = math.log(a.vocab) + a.hidden * STDDEV**2 / 2
    tolerance = LOSS_TOLERANCE * math.log(a.vocab)
    if not abs(theirs["first_loss"] - expected) <= tolerance:
        fail(f"{name}: the first loss is {theirs['first_loss']:.4f}, expected about {expected:.4f}")
    if not abs(theirs["loss"] - ours["loss"]) <= tolerance:
        fail(f"losses of the last step differ: {name} {theirs['loss']:.4f}, Ballast "
             f"{ours['loss']:.4f}")


def measure(a, programs):
    """Returns a list of rounds {program: figures} without the programs that failed."""
    rounds = []
    for number in range(a.rounds):
        turn = number % len(programs)
        figures = {}
        for program in programs[turn:] + programs[:turn]:
            if getattr(program, "problem", None):
                continue
            row = program.measure()
            if row is not None:
                figures[program.name] = row
                if a.equal_memory and row.get("allocated_bytes"):
                    row["equal"] = programs[0].measure(row["allocated_bytes"])
            said = f"{row['tokens_per_second']:.4g} tokens/s" if row else program.problem
            print(f"round {number + 1}/{a.rounds} {program.name}: {said}", file=sys.stderr)
        for name, row in figures.items():
            if name != "ballast":
                check_losses(a, name, figures["ballast"], row)
        rounds.append(figures)
    return rounds


def equal_summary(equal, rates):
    """Returns the figures of Ballast with a peer's device memory, or None if they were not asked for."""
    problem = next((row["problem"] for row in equal if "problem" in row), None)
    if problem or not equal:
        return {"problem": problem} if problem else None
    ratios = [row["tokens_per_second"] / rate for row, rate in zip(equal, rates)]
    return {"tokens_per_second": statistics.median(row["tokens_per_second"] for row in equal),
            "step_seconds": statistics.median(row["step_seconds"] for row in equal),
            "device_bytes": max((row["device_bytes"] or 0) for row in equal),
            "ratio": statistics.median(ratios)}


def summary(a, program, rounds):
    mine = [figures for figures in rounds if program.name in figures]
    if getattr(program, "problem", None) or not mine:
        return {"program": program.name, "problem": program.problem}

    def of(key):
        return [figures[program.name].get(key) for figures in mine]

    def most(key):
        return max((value for value in of(key) if value is not None), default=None)
    rates = of("tokens_per_second")
    equal = [figures[program.name]["equal"] for figures in mine if "equal" in figures[program.name]]
    ratios = [figures["ballast"]["tokens_per_second"] / rate for figures, rate in zip(mine, rates)]
    return {
        "program": program.name, "device": a.device, "preset": a.preset, "threads": a.threads,
        "parameters": of("parameters")[0], "tokens": a.sequence * a.micro_batch * a.accumulation,
        "step_seconds": statistics.median(of("step_seconds")),
        "tokens_per_second": statistics.median(rates),
        "model_flops_share": statistics.median(
            flops * rate / max(figures["ballast"]["gemm"], flops * rate)
            for figures, rate in zip(mine, rates)
            for flops in [figures["ballast"]["flops_per_token"]]),
        "gemm_peak_flops_per_second": most("gemm"), "host_bytes": most("host_bytes"),
        "device_bytes": most("device_bytes"), "allocated_bytes": most("allocated_bytes"),
        "first_loss": of("first_loss")[0], "loss": of("loss")[0],
        "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "equal_memory": equal_summary(equal, rates),
        "rounds": [{"tokens_per_second": rate, "ratio": ratio}
                   for rate, ratio in zip(rates, ratios)]}


def gibibytes(value):
    return "-" if value is None else f"{value / 2**30:.2f}"


def print_equal(row):
    equal = row.get("equal_memory")
    if equal is None:
        return
    if "problem" in equal:
        print(f"{'  ballast in its memory':28}failed: {equal['problem']}")
        return
    print(f"{'  ballast in its memory':28}{equal['step_seconds']:8.3f}{equal['tokens_per_second']:10.4g}"
          f"{'':22}{gibibytes(equal['device_bytes']):>8}{'':8}{equal['ratio']:6.2f}x")


def print_table(a, rows, programs, load):
    first = rows[0]
    version = next((program.version for program in programs[1:] if program.version), "?")
    print(f"{a.family} {first['parameters'] / 1e6:.1f}M parameters, {a.dtype}, {first['tokens']} "
          f"tokens per step ({a.accumulation} x {a.micro_batch} x {a.sequence}), {a.device}, "
          f"{a.threads} threads, {a.rounds} rounds of {a.steps} steps")
    print(f"PyTorch {version}, offload: {a.offload}, model: {a.model}; "
          f"load average before: {load:.1f}\n")
    print(f"{'':28}{'step s':>8}{'tokens/s':>10}{'MFU':>7}{'GEMM':>8}{'host':>7}{'device':>8}"
          f"{'loss':>8}{'ratio':>7}   range")
    print(f"{'':28}{'':>8}{'':>10}{'':>7}{'TFLOP/s':>8}{'GiB':>7}{'GiB':>8}")
    for row in rows:
        if "problem" in row:
            print(f"{row['program']:28}failed: {row['problem']}")
            continue
        print(f"{row['program']:28}{row['step_seconds']:8.3f}{row['tokens_per_second']:10.4g}"
              f"{100 * row['model_flops_share']:6.1f}%"
              f"{1e-12 * row['gemm_peak_flops_per_second']:8.3g}{gibibytes(row['host_bytes']):>7}"
              f"{gibibytes(row['device_bytes']):>8}{row['loss']:8.3f}"
              + ("" if row is first else f"{row['ratio']:6.2f}x   {row['ratio_min']:.2f} to "
                                         f"{row['ratio_max']:.2f}"))
        print_equal(row)
    print("\nratio: Ballast's tokens/s / the peer's in the same round, median over the rounds")
    rates = [[pair["tokens_per_second"] for pair in row["rounds"]] for row in rows
             if "rounds" in row]
    worst = max(max(each) / min(each) for each in rates)
    if worst > NOISY:
        print(f"Noisy: a rate changed {worst:.1f}-fold between rounds. Rerun on a quiet machine; "
              "--json has every round.")


def main():
    arguments = read_arguments()
    load = os.getloadavg()[0]
    programs = make_programs(arguments)
    rounds = measure(arguments, programs)
    rows = [summary(arguments, program, rounds) for program in programs]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(arguments, rows, programs, load)
    return 2 if any("problem" in row for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("interrupted")
