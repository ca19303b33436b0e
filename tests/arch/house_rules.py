#!/usr/bin/env python3
"""House rules that no compiler checks.

    house_rules.py SOURCE_ROOT

- libraries never print and never exit: only tools/ and tests/ may;
- files stay under 500 lines, or under 800 where one class is one idea;
- files of the product have at least 60 lines, but for the kinds in SHORT_KINDS and the files in SHORT;
- a source includes its own header first, which proves that the header compiles alone;
- conditional compilation stays rare: an agreed number of #if lines outside tests;
- no absolute paths of a developer's machine;
- the table of DeepSpeed's keys in configs/keys.md has every key that is treated.
"""

import pathlib
import re
import sys

MAX_LINES = 500
# Files whose one class is one idea.
MAX_LINES_OF_CLASS = 800
ONE_CLASS = {"src/model/cuda/ops.cpp", "src/model/host/ops.cpp", "tests/unit/step/interpreter.cpp"}
MIN_LINES = 60
# Files that the build chooses one of, or compiles with other options, and the entry of the program.
SHORT_KINDS = re.compile(r"_absent\.cpp$|_loaded\.cpp$|/pch/|tools/main\.cpp$"
                         r"|device/cuda/(driver_root|profiler_range)\.cpp$|host/kernel_tables\.cpp$")
# Interfaces between two compilers, libraries or replaceable halves. This list may only become shorter.
SHORT = {
    "aio/anonymous_file.h",
    "cpu_adam/stream_copy.h",
    "include/ballast/state/checksum.h",
    "include/ballast/update/device_update.h",
    "src/comm/nccl_functions.h",
    "src/device/cuda/shared_memory.h",
    "src/model/compute/factories.h",
    "src/python/run_observer.h",
    "src/state/checksum.cpp",
    "src/update/cuda/cuda_update.cpp",
    "src/update/cuda/kernels.h",
    "src/update/host_update.cpp",
    "tools/bench/adam_data.h",
    "tools/bench/step_times.h",
    "tools/commands/inspected.h",
    "tools/commands/tokenize.cpp",
    "tools/program.h",
}
MAX_CONDITIONALS = 6
LIBRARIES = ("include", "src", "aio", "cpu_adam")
SOURCES = {".h", ".cpp", ".cu", ".cuh"}

LOUD = re.compile(r"\b(std::cout|std::cerr|std::clog|printf|fprintf|puts|fmt::print|std::exit"
                  r"|std::abort|std::quick_exit|_exit)\b\s*[(<]?")
CONDITIONAL = re.compile(r"^\s*#\s*if")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.M)
HOME = re.compile(r"/(home|root|Users|work)/\w+")


def source_files(root: pathlib.Path, folders: tuple[str, ...]) -> list[pathlib.Path]:
    return [p for folder in folders for p in sorted((root / folder).rglob("*"))
            if p.suffix in SOURCES]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def missing_deepspeed_keys(root: pathlib.Path) -> list[str]:
    code = (root / "src/config/deepspeed_keys.cpp").read_text()
    table = (root / "configs/keys.md").read_text()
    lists = re.findall(r",((?:\s*\"[a-z0-9_ ]+\")+)\},", code)
    keys = [key for names in lists for key in re.findall(r"[a-z0-9_]+", names)]
    assert len(keys) > 100, "the keys have another form"
    return [f"configs/keys.md: DeepSpeed's key {key} is missing" for key in keys
            if f"`{key}`" not in table]


def headers_that_come_late(root: pathlib.Path) -> list[str]:
    """Sources that do not begin with the header of the same name in their folder or in that of their module."""
    late = []
    for source in source_files(root, (*LIBRARIES, "tools")):
        if source.suffix != ".cpp":  # nvcc compiles the others, with other headers
            continue
        name = source.relative_to(root).with_suffix(".h")
        own = [str(path) for path in (name, pathlib.PurePath("ballast", *name.parts[1:]), pathlib.PurePath("ballast", name))
               if (root / path).is_file() or (root / "include" / path).is_file()]
        first = INCLUDE.search(source.read_text())
        if own and (not first or first.group(1) not in own):
            late.append(f"{source.relative_to(root)}: includes {own[0]}, but not first")
    return late


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    breaches = missing_deepspeed_keys(root) + headers_that_come_late(root)
    conditionals = []
    for path in source_files(root, LIBRARIES):
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1):
            if LOUD.search(line):
                breaches.append(f"{path.relative_to(root)}: a library prints or exits: {line.strip()}")
            if CONDITIONAL.match(line):
                conditionals.append(f"{path.relative_to(root)}: {line.strip()}")
    if len(conditionals) > MAX_CONDITIONALS:
        breaches += conditionals
        breaches.append(f"{len(conditionals)} #if lines, {MAX_CONDITIONALS} agreed")
    everything = source_files(root, (*LIBRARIES, "tools", "tests"))
    for path in everything:
        text = path.read_text()
        lines = text.count("\n")
        name = str(path.relative_to(root))
        agreed = MAX_LINES_OF_CLASS if name in ONE_CLASS else MAX_LINES
        if lines > agreed:
            breaches.append(f"{name}: {lines} lines, {agreed} agreed")
        if path.is_relative_to(root / "tests") or SHORT_KINDS.search(name):
            pass
        elif lines < MIN_LINES and name not in SHORT:
            breaches.append(f"{name}: {lines} lines; a file has at least {MIN_LINES}, merge it with its subject")
        elif lines >= MIN_LINES and name in SHORT:
            breaches.append(f"{name}: {lines} lines, remove it from SHORT")
        if HOME.search(text):
            breaches.append(f"{path.relative_to(root)}: an absolute path of some machine")
    breaches += [f"{name}: gone, remove it from SHORT" for name in SHORT if not (root / name).is_file()]
    for breach in breaches:
        print(breach)
    print(f"{len(everything)} files, {len(breaches)} breaches")
    return 1 if breaches or not everything else 0


if __name__ == "__main__":
    sys.exit(main())
