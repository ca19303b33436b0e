"""Memory of checks that have passed: a check whose inputs are the same need not run again.

A key is a digest of everything that a check reads. What cannot be listed is represented by what changes
with it: the system's libraries and compilers by the table of installed packages, the machine by its
processor, kernel and memory.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Variables that programs, their libraries or scripts read.
VARIABLES = ("ASAN_", "BALLAST_", "COLUMNS", "CUDA_", "DNNL_", "GLIBC_", "GTEST_", "HOME", "KMP_", "LANG", "LC_", "LD_",
             "LSAN_", "MALLOC_", "NVIDIA_", "OMP", "ONEDNN_", "PATH", "PMIX_", "PRTE_", "PYTHON", "TERM", "TMPDIR",
             "TSAN_", "TZ", "UBSAN_", "XDG_")
KEPT = 8  # keys of a check, so that a change of branches and back costs nothing


@functools.cache
def digest(path: pathlib.Path) -> str:
    """Digest of a file's content; "" if there is no file."""
    if not path.is_file():
        return ""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


@functools.cache
def tree() -> tuple[pathlib.Path, ...]:
    """The files of the project: committed ones and new ones that git does not ignore. Fails without git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return tuple(sorted({ROOT / name for name in listed.split("\0") if name}))


@functools.cache
def files_below(folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The project's files in a folder, or all files if the folder is not part of the project."""
    found = tuple(path for path in tree() if path.is_relative_to(folder))
    return found or tuple(sorted(path for path in folder.rglob("*") if path.is_file()))


def contents(files) -> dict[str, str]:
    """Digest of each file by its name."""
    return {str(path): digest(path) for path in files}


@functools.cache
def machine() -> str:
    """Everything that a result may depend on outside the project: machine, system and environment."""
    processor = sorted(line for line in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
                       if line.startswith(("model name", "flags", "Features", "CPU part")))
    memory = [line for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    devices = sorted(str(path) for path in pathlib.Path("/dev").glob("nvidia*"))
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return json.dumps([platform.release(), platform.machine(), processor, memory, devices,
                       sorted(os.sched_getaffinity(0)), os.geteuid(), sys.version,
                       digest(pathlib.Path("/var/lib/dpkg/status")), variables])


def key_of(*parts) -> str:
    return hashlib.sha256(json.dumps([machine(), *parts], sort_keys=True).encode()).hexdigest()


class Memory:
    """The keys with which each check has passed, in a file."""

    def __init__(self, file: pathlib.Path):
        self._file = file
        try:
            self._keys = json.loads(file.read_text())
        except (OSError, ValueError):
            self._keys = {}

    def has(self, check: str, key: str) -> bool:
        return key in self._keys.get(check, [])

    def add(self, check: str, key: str) -> None:
        self._keys[check] = ([key] + [k for k in self._keys.get(check, []) if k != key])[:KEPT]

    def save(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._keys))
        new.replace(self._file)
