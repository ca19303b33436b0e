#!/usr/bin/env python3
"""Compares `ballast bench io` with fio, in one run on one directory.

    io_peers.py --path DIR [--pattern read,write,mixed] [--block 1MiB] [--depth 32]
                      [--size 2GiB] [--seconds 5] [--rounds 5] [--huge] [--registered]
                      [--ballast PATH] [--json]

Needs `fio` (Debian: fio). In every round and for every pattern three programs take turns, in an
order that rotates. Each runs for --seconds on its own file, which was written in full before. All
use O_DIRECT and the same block size, depth and file size:

    fio                fio --ioengine=io_uring --direct=1 --rw=read|write|rw (--rwmixread=50)
    ballast io_uring   ballast bench io --backend io_uring
    ballast threads    ballast bench io --backend threads

In the pattern mixed, fio reads and writes at two places of the file; Ballast writes back each
block that it has read. Ballast's buffers lie on transparent huge pages; with --huge fio's do too
(--mem=mmaphuge, which needs vm.nr_hugepages): a transfer is then one request for the driver
instead of several. If requests limit the device, this doubles fio's rate. With --registered fio
keeps its file and buffers registered (--fixedbufs --registerfiles), as Ballast always does. CPU
time is user and system time over the measured time: fio's usr_cpu and sys_cpu, Ballast's
getrusage, all threads. Ratios are Ballast's figure over fio's in the same round; the table shows
the medians over the rounds and compares them with the bounds. If the machine's speed changes, the
rates suffer more than the ratios: the table then has a warning, and --json has every round. Exit
status: 0 if all bounds are met, 1 if one is not, 2 if a measurement failed.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from peers import NOISY, fail, size

PATTERNS = ("read", "write", "mixed")
HUGE_PAGE = 2 * 2**20
# Lower bound of the rate and upper bound of the CPU time per byte, relative to fio's.
BARS = {"io_uring": (0.97, 1.1), "threads": (0.90, None)}


def patterns(text):
    names = text.split(",")
    for name in names:
        if name not in PATTERNS:
            raise argparse.ArgumentTypeError(
                f"'{name}' is not a pattern; choose from {', '.join(PATTERNS)}")
    return names


def free_huge_pages():
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


def read_arguments():
    parser = argparse.ArgumentParser(description="Compares `ballast bench io` with fio")
    root = pathlib.Path(__file__).resolve().parents[3]
    parser.add_argument("--path", type=pathlib.Path, required=True, metavar="DIR",
                        help="directory on the disk to measure")
    parser.add_argument("--pattern", type=patterns, default=list(PATTERNS), metavar="LIST")
    parser.add_argument("--block", type=size, default=size("1MiB"), metavar="SIZE")
    parser.add_argument("--depth", type=int, default=32, metavar="N")
    parser.add_argument("--size", type=size, default=size("2GiB"), metavar="SIZE",
                        help="size of each program's file (default 2GiB)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S",
                        help="time of one measurement (default 5)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--huge", action="store_true",
                        help="let fio use huge pages for its buffers")
    parser.add_argument("--registered", action="store_true",
                        help="let fio register its file and buffers")
    parser.add_argument("--ballast", type=pathlib.Path, default=root / "build/tools/ballast",
                        metavar="PATH", help="the program (default: build/tools/ballast)")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    arguments = parser.parse_args()
    if arguments.depth < 1 or arguments.rounds < 1 or arguments.seconds < 1:
        parser.error("--depth, --rounds and --seconds must be at least 1")
    if arguments.block * arguments.depth > arguments.size:
        parser.error("--size must be at least --depth times --block")
    if not arguments.path.is_dir():
        parser.error(f"{arguments.path} is not a directory")
    if arguments.huge:
        wanted = -(-arguments.block * arguments.depth // HUGE_PAGE) + 1
        if free_huge_pages() < wanted:
            parser.error(f"--huge needs {wanted} free huge pages: sysctl vm.nr_hugepages={wanted}")
    return arguments


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        fail(f"{' '.join(map(str, command[:3]))} ended with exit status {done.returncode}: "
             f"{said[-1]}")
    return done.stdout


class Fio:
    """fio on one file, which is written in full once."""

    def __init__(self, arguments, directory):
        self.arguments = arguments
        self.file = directory / "fio"
        self.job("write", "--end_fsync=1")

    def job(self, direction, *options):
        extra = ["--fixedbufs=1", "--registerfiles=1"] if self.arguments.registered else []
        if self.arguments.huge:
            extra += ["--mem=mmaphuge", f"--hugepage-size={HUGE_PAGE}"]
        text = output_of(["fio", "--name=ballast", f"--filename={self.file}",
                          "--ioengine=io_uring", "--direct=1", f"--rw={direction}",
                          f"--bs={self.arguments.block}", f"--iodepth={self.arguments.depth}",
                          f"--size={self.arguments.size}", "--overwrite=1",
                          "--output-format=json", *extra, *options])
        # fio may print notes before the JSON.
        return json.loads(text[text.index("{"):])["jobs"][0]

    def measure(self, pattern):
        direction = {"mixed": "rw"}.get(pattern, pattern)
        job = self.job(direction, "--rwmixread=50", "--time_based",
                       f"--runtime={self.arguments.seconds:g}s")
        parts = [job[part] for part in ("read", "write") if job[part]["io_bytes"] > 0]
        moved = sum(part["io_bytes"] for part in parts)
        seconds = 1e-3 * max(part["runtime"] for part in parts)
        cpu = 1e-2 * (job["usr_cpu"] + job["sys_cpu"]) * 1e-3 * job["job_runtime"]
        return {"gb_per_second": 1e-9 * moved / seconds, "cpu_seconds_per_gb": 1e9 * cpu / moved}


def measure_ballast(arguments, directory, backend, pattern):
    text = output_of([arguments.ballast, "bench", "io", "--json", "--path", directory,
                      "--pattern", pattern, "--backend", backend,
                      "--block", str(arguments.block), "--depth", str(arguments.depth),
                      "--size", str(arguments.size), "--seconds", str(arguments.seconds)])
    row, = json.loads(text)
    return {key: row[key] for key in ("gb_per_second", "cpu_seconds_per_gb")}


def measure_all(arguments, directory):
    """Returns a list of rounds for each pattern; a round is {program: figures}."""
    fio = Fio(arguments, directory)
    programs = {"fio": fio.measure}
    for backend in BARS:
        programs[backend] = lambda pattern, backend=backend: measure_ballast(
            arguments, directory, backend, pattern)
    rounds = {pattern: [] for pattern in arguments.pattern}
    names = list(programs)
    for number in range(arguments.rounds):
        for pattern in arguments.pattern:
            order = names[number % len(names):] + names[:number % len(names)]
            figures = {}
            for name in order:
                os.sync()  # so that no program waits for the writes of the one before
                figures[name] = programs[name](pattern)
            rounds[pattern].append(figures)
            if sys.stderr.isatty():
                print(f"round {number + 1}/{arguments.rounds} {pattern}", file=sys.stderr)
    return rounds


def summary(pattern, rounds, backend):
    def median_of(name, key):
        return statistics.median(figures[name][key] for figures in rounds)

    def ratios(key):
        return [figures[backend][key] / figures["fio"][key] for figures in rounds]
    rate = statistics.median(ratios("gb_per_second"))
    cpu = statistics.median(ratios("cpu_seconds_per_gb"))
    least, most = BARS[backend]
    rates = [figures["fio"]["gb_per_second"] for figures in rounds]
    return {
        "pattern": pattern, "backend": backend, "rounds": len(rounds),
        "gb_per_second": median_of(backend, "gb_per_second"),
        "fio_gb_per_second": median_of("fio", "gb_per_second"),
        "cpu_seconds_per_gb": median_of(backend, "cpu_seconds_per_gb"),
        "fio_cpu_seconds_per_gb": median_of("fio", "cpu_seconds_per_gb"),
        "rate_ratio": rate, "rate_ratios": ratios("gb_per_second"),
        "cpu_ratio": cpu, "cpu_ratios": ratios("cpu_seconds_per_gb"),
        "rate_bar": least, "cpu_bar": most,
        "met": rate >= least and (most is None or cpu <= most),
        "noisy": max(rates) > NOISY * min(rates),
    }


def version_of(command):
    return output_of(command).strip().splitlines()[0]


def print_table(arguments, rows):
    print(f"{version_of(['fio', '--version'])}, {version_of([arguments.ballast, '--version'])}; "
          f"{arguments.path}, blocks of {arguments.block} bytes, depth {arguments.depth}, "
          f"{arguments.rounds} rounds of {arguments.seconds:g} s"
          f"{', fio on huge pages' if arguments.huge else ''}"
          f"{', fio with registered file and buffers' if arguments.registered else ''}\n")
    print(f"{'':8}{'':10}{'GB/s':>7}{'fio':>7}{'share':>8}{'least':>6}"
          f"{'CPU s/GB':>10}{'fio':>8}{'ratio':>7}{'most':>6}")
    for row in rows:
        most = "-" if row["cpu_bar"] is None else f"{row['cpu_bar']:.1f}"
        print(f"{row['pattern']:8}{row['backend']:10}{row['gb_per_second']:7.3f}"
              f"{row['fio_gb_per_second']:7.3f}{100 * row['rate_ratio']:7.1f}%"
              f"{100 * row['rate_bar']:5.0f}%{row['cpu_seconds_per_gb']:10.4f}"
              f"{row['fio_cpu_seconds_per_gb']:8.4f}{row['cpu_ratio']:7.2f}{most:>6}"
              f"  {'ok' if row['met'] else 'MISSED'}{' (noisy)' if row['noisy'] else ''}")
    print("\nshare and ratio: Ballast's figure / fio's in the same round, median over the rounds")
    if any(row["noisy"] for row in rows):
        print(f"noisy: fio's best round is {NOISY} times its worst or more; measure again")


def main():
    arguments = read_arguments()
    if shutil.which("fio") is None:
        fail("fio is not installed; on Debian: apt install fio")
    if not arguments.ballast.is_file():
        fail(f"{arguments.ballast} does not exist; build it or name it with --ballast")
    with tempfile.TemporaryDirectory(prefix="ballast-peers-", dir=arguments.path) as directory:
        rounds = measure_all(arguments, pathlib.Path(directory))
    rows = [summary(pattern, rounds[pattern], backend)
            for pattern in arguments.pattern for backend in BARS]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(arguments, rows)
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
