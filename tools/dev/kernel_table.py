#!/usr/bin/env python3
"""Makes and checks the table of what CUDA kernels use on each GPU, without a GPU.

    kernel_table.py SOURCE_ROOT              checks the table
    kernel_table.py SOURCE_ROOT BUILD        makes it again for the sources that have changed

The table (tests/data/kernels.txt) has a hash of each source and its headers without comments. The
check compares only these hashes and the rules below, so it needs neither a compiler nor a build.
Making it compiles each changed source to PTX by nvcc, assembles that for each GPU by ptxas, and
runs BUILD/tests/unit/unit_kernels, which records the threads and shared memory of each launch.

Rules: no kernel spills registers, has a stack or divides 64-bit integers in a loop, except for those
listed below; all blocks fit, and a multiprocessor has enough warps for its four tensor units.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

TABLE = "tests/data/kernels.txt"
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]
# One PTX, like src/device/cuda/meson.build: for all GPUs, except for the one with warpgroups.
PTX = {"compute_80": [], "compute_90a": ["-DBALLAST_WARPGROUP_PRODUCTS"]}


@dataclass(frozen=True)
class Gpu:
    """Limits of a multiprocessor. Source: NVIDIA, "CUDA C++ Programming Guide 13.0", table of
    technical specifications per compute capability."""
    code: str
    ptx: str
    warps: int
    blocks: int
    shared: int  # KiB; each block has 1 KiB less at most, and the system takes 1 KiB per block


GPUS = [Gpu("sm_80", "compute_80", 64, 32, 164), Gpu("sm_86", "compute_80", 48, 16, 100),
        Gpu("sm_89", "compute_80", 48, 24, 100), Gpu("sm_90a", "compute_90a", 64, 32, 228),
        Gpu("sm_100", "compute_80", 64, 32, 228), Gpu("sm_120", "compute_80", 48, 24, 100)]
UNITS = 4  # tensor units, each with its own registers and warps

# Kernels by the start of their name.
# The most bytes of stack and of spilled registers of kernels that have any.
LOCAL = {
    "attend<16, F16>": (8, 4), "attend<16, float>": (8, 8),
    "attend<128, 128, true>": (40, 32), "attend<192, 128, false>": (56, 52),
    "differentiate<false, 16, ": (40, 36), "differentiate<true, 8, F16>": (8, 8),
    "differentiate_keys_by_warpgroups<128>": (56, 72),
    "differentiate_router<": (8, 16),
    "differentiate_gated_rows<float>": (8, 4), "differentiate_chunk<float>": (48, 64), "differentiate_columns<": (24, 24),
    "go_through_chunks<true, ": (96, 24),
    "find_angles": (40, 0),  # computes in double
}
# Kernels that divide 64-bit integers in a loop, most of them once per row.
DIVIDING = ("advance_columns<", "convolve_gated_rows<", "convolve_rows<", "differentiate<",
            "differentiate_columns<", "differentiate_gated_rows<", "differentiate_norm_and_gate<",
            "differentiate_rows<", "find_angles",
            "go_through_chunks<true, ", "merge_sums", "norm_backward_rows<", "turn_eights<",
            "turn_pairs<", "write_row_gradients<")
# The most PTX instructions per byte of kernels that only move or add values.
PER_BYTE = {
    "copy_columns<Bf16, 8>": 3.0, "copy_columns<F16, 8>": 3.0, "copy_columns<float, 4>": 3.0,
    "sum_group_columns<Bf16, 8>": 3.0, "sum_group_columns<F16, 8>": 3.0,
    "sum_group_columns<float, 4>": 3.0,
}


@dataclass
class Kernel:
    name: str
    threads: int = 0
    dynamic: int = 0
    static: int = 0
    registers: list[int] = field(default_factory=list)  # per GPU
    stack: int = 0
    spills: int = 0
    divisions: int = 0
    per_byte: float = 0.0

    def runs_on(self, gpu: Gpu) -> bool:
        return "by_warpgroups" not in self.name or gpu.ptx == "compute_90a"

    def line(self) -> str:
        warps = [str(resident(self, n)) if self.threads and self.runs_on(gpu) else "-"
                 for n, gpu in enumerate(GPUS)]
        return (f"  {self.name} | {self.threads} | {self.dynamic}+{self.static} | "
                f"{' '.join(map(str, self.registers))} | {' '.join(warps)} | {self.stack} | "
                f"{self.spills} | {self.divisions} | {self.per_byte:.1f}")

    @staticmethod
    def parse(line: str) -> "Kernel":
        name, threads, shared, registers, _, stack, spills, divisions, per_byte = line.strip().split(" | ")
        dynamic, static = shared.split("+")
        return Kernel(name, int(threads), int(dynamic), int(static),
                      [int(r) for r in registers.split()], int(stack), int(spills),
                      int(divisions), float(per_byte))


def resident(kernel: Kernel, gpu_number: int) -> int:
    """Returns the warps of the kernel that a multiprocessor can have; 0: not one block fits."""
    gpu = GPUS[gpu_number]
    warps = -(-kernel.threads // 32)
    if kernel.dynamic + kernel.static > (gpu.shared - 1) * 1024:
        return 0
    shared = -(-(kernel.dynamic + kernel.static) // 128) * 128 + 1024
    registers = -(-kernel.registers[gpu_number] * 32 // 256) * 256  # of a warp
    by_registers = 65536 // UNITS // registers * UNITS // warps
    return warps * min(gpu.warps // warps, gpu.blocks, gpu.shared * 1024 // shared, by_registers)


def headers_and_source(root: pathlib.Path, source: pathlib.Path) -> list[pathlib.Path]:
    found, waiting = [], [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            header = next((p for p in (root / name, root / "include" / name) if p.exists()), None)
            assert header, f"{path}: no {name}"
            waiting.append(header)
    return sorted(found)


def hash_of(root: pathlib.Path, source: pathlib.Path) -> str:
    digest = hashlib.sha256(repr((FLAGS, PTX, GPUS)).encode())
    for path in headers_and_source(root, source):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        digest.update(" ".join(code.split()).encode())
    return digest.hexdigest()[:12]


def short_name(signature: str) -> str:
    """copy_columns<Bf16, 8> of a demangled signature."""
    signature = re.sub(r"\(anonymous namespace\)::|\b\w+::|\(\w+\)(?=\d)|(?<=\d)u\b", "", signature)
    depth = 0
    for end, letter in enumerate(signature):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            signature = signature[:end]
            break
    return re.sub(r"^void ", "", signature)


def short_names(ptx: str) -> dict[str, str]:
    mangled = re.findall(r"\.entry (\w+)\(", ptx)
    text = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True,
                          check=True).stdout
    return dict(zip(mangled, map(short_name, text.splitlines())))


ACCESS = re.compile(r"\b(?:ld|st)\.(?:volatile\.)?global(?:\.\w+)*?(?:\.v([24]))?\.[a-z](\d+)\b")
INSTRUCTION = re.compile(r"^\s+(?:\{?@!?%p\d+ )?[a-z][\w.]*(?:\s[^:]*)?;")


def in_loops(lines: list[str]) -> list[str]:
    """Returns the lines between a label and a later jump to it."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.match(r"\$\w+:$", line)}
    inside = set()
    for number, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if jump:
            inside.update(range(labels[jump[1]], number))
    return [lines[number] for number in sorted(inside)]


def count_ptx(body: str, kernel: Kernel) -> None:
    """Counts 64-bit divisions in loops, and instructions per byte of the accesses in the text."""
    lines = body.splitlines()
    size = sum(int(count or 1) * int(bits) // 8 for count, bits in ACCESS.findall(body))
    size += 16 * body.count("cp.async.cg")
    kernel.divisions = len(re.findall(r"\b(?:div|rem)\.[us]64\b", "\n".join(in_loops(lines))))
    instructions = sum(INSTRUCTION.match(line) is not None for line in lines)
    kernel.per_byte = instructions / size if size else 0.0


def note_resources(output: str, kernels: dict[str, Kernel], gpu_number: int) -> None:
    """Reads the output of ptxas -v. Stacks and spills are the largest of all GPUs."""
    for part in output.split("Compiling entry function '")[1:]:
        kernel = kernels[part[:part.index("'")]]
        if not kernel.runs_on(GPUS[gpu_number]):
            continue
        frame, stores = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", part).groups()
        static = re.search(r"(\d+) bytes smem", part)
        kernel.registers[gpu_number] = int(re.search(r"Used (\d+) registers", part)[1])
        kernel.static = max(kernel.static, int(static[1]) if static else 0)
        kernel.stack = max(kernel.stack, int(frame))
        kernel.spills = max(kernel.spills, int(stores))


def compile_source(root: pathlib.Path, source: pathlib.Path) -> list[Kernel]:
    kernels: dict[str, Kernel] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch, definitions in PTX.items():
            ptx = pathlib.Path(folder) / f"{arch}.ptx"
            subprocess.run(["nvcc", *FLAGS, *definitions, f"-I{root}", f"-I{root}/include", "-ptx",
                            f"-arch={arch}", source, "-o", ptx], check=True)
            names = short_names(ptx.read_text())
            for name in names.values():
                kernels.setdefault(name, Kernel(name, registers=[0] * len(GPUS)))
            for body in ptx.read_text().split(".entry ")[1:]:
                count_ptx(body, kernels[names[body[:body.index("(")]]])
            for number, gpu in enumerate(GPUS):
                if gpu.ptx != arch:
                    continue
                done = subprocess.run(["ptxas", "-v", f"-arch={gpu.code}", ptx, "-o",
                                       pathlib.Path(folder) / "cubin"], capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(done.stderr)
                note_resources(done.stderr, {m: kernels[n] for m, n in names.items()}, number)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def launches(build: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns the most threads and the most dynamic shared memory of each kernel's launches."""
    with tempfile.TemporaryDirectory() as folder:
        noted = pathlib.Path(folder) / "launches"
        subprocess.run([build / "tests/unit/unit_kernels", "--gtest_brief=1"], check=True,
                       env=os.environ | {"BALLAST_EMULATION_LAUNCHES": str(noted)})
        most: dict[str, tuple[int, int]] = {}
        for line in noted.read_text().splitlines():
            threads, shared, signature = line.split(" ", 2)
            name = short_name(signature)
            before = most.get(name, (0, 0))
            most[name] = max(before[0], int(threads)), max(before[1], int(shared))
    return most


def read_table(root: pathlib.Path) -> dict[str, tuple[str, list[Kernel]]]:
    sources: dict[str, tuple[str, list[Kernel]]] = {}
    kernels: list[Kernel] = []
    path = root / TABLE
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("  "):
            kernels.append(Kernel.parse(line))
        elif line and not line.startswith("#"):
            kernels = []
            name, digest = line.split()
            sources[name] = digest, kernels
    return sources


def make(root: pathlib.Path, build: pathlib.Path) -> None:
    before = read_table(root)
    hashes = {str(p.relative_to(root)): hash_of(root, p) for p in sorted((root / "src").rglob("*.cu"))}
    changed = [name for name, digest in hashes.items() if before.get(name, ("",))[0] != digest]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = dict(zip(changed, pool.map(lambda name: compile_source(root, root / name), changed)))
    launched = launches(build) if changed else {}
    version = re.search(r"V([\d.]+)", subprocess.run(["nvcc", "--version"], capture_output=True,
                                                     text=True, check=True).stdout)[1]
    lines = [f"# Made by tools/dev/kernel_table.py, which explains it, with nvcc {version}.",
             "# Source, hash. Kernel | threads | dynamic+static shared bytes | registers on "
             + " ".join(gpu.code for gpu in GPUS) + " | warps per multiprocessor there | "
             "stack | spilled bytes | 64-bit divisions in loops | PTX instructions per byte"]
    for name, digest in hashes.items():
        kernels = made[name] if name in made else before[name][1]
        lines.append(f"{name} {digest}")
        for kernel in kernels:
            if name in made or kernel.threads == 0:
                # Launches do not depend on the type. Tests of fp16 are in other programs.
                same = (kernel.name, kernel.name.replace("F16", "Bf16"))
                kernel.threads, kernel.dynamic = next(
                    (launched[name] for name in same if name in launched), (0, 0))
            lines.append(kernel.line())
    (root / TABLE).write_text("\n".join(lines) + "\n")
    print(f"{len(changed)} of {len(hashes)} sources compiled")


def breaches(kernel: Kernel) -> list[str]:
    found = []
    local = [most for start, most in LOCAL.items() if kernel.name.startswith(start)]
    stack, spills = local[0] if local else (0, 0)
    if kernel.spills > spills:
        found.append(f"spills {kernel.spills} bytes of registers; the most are {spills}")
    if kernel.stack > stack:
        found.append(f"has a stack of {kernel.stack} bytes; the most are {stack}")
    if kernel.divisions and not kernel.name.startswith(DIVIDING):
        found.append(f"divides 64-bit integers in a loop ({kernel.divisions} times)")
    for number, gpu in enumerate(GPUS):
        if not kernel.runs_on(gpu) or not kernel.threads:
            continue
        warps = resident(kernel, number)
        if warps == 0:
            found.append(f"does not fit on {gpu.code}")
        elif warps < UNITS:
            found.append(f"leaves {UNITS - warps} of {UNITS} tensor units idle on {gpu.code}")
    most = PER_BYTE.get(kernel.name, kernel.per_byte)
    if kernel.per_byte > most:
        found.append(f"has {kernel.per_byte} instructions per byte; the most are {most}")
    return found


def check(root: pathlib.Path) -> int:
    table = read_table(root)
    sources = {str(p.relative_to(root)): p for p in (root / "src").rglob("*.cu")}
    changed = [name for name, path in sources.items()
               if table.get(name, ("",))[0] != hash_of(root, path)]
    changed += [name for name in table if name not in sources]
    names = {kernel.name for _, kernels in table.values() for kernel in kernels}
    found = [f"{start} is not in the table" for start in (*LOCAL, *DIVIDING, *PER_BYTE)
             if not any(name.startswith(start) for name in names)]
    found += [f"{kernel.name} {breach}" for _, kernels in table.values() for kernel in kernels
             for breach in breaches(kernel)]
    for breach in found:
        print(breach)
    if changed:
        print(f"{TABLE} is older than {', '.join(sorted(changed))}. Make it again by: "
              "ninja -C BUILD tests/unit/unit_kernels && python3 tools/dev/kernel_table.py . BUILD")
    print(f"{sum(len(kernels) for _, kernels in table.values())} kernels, {len(found)} breaches")
    return 1 if changed or found or not table else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        make(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve())
    sys.exit(check(pathlib.Path(sys.argv[1]).resolve()))
