#!/usr/bin/env python3
"""Reads the #include lines of the project and fails where one breaks the order of the modules.

    include_rules.py SOURCE_ROOT

Who may include whom is the table MODULES; where a third-party header may appear, THIRD_PARTY.
Public headers (include/ballast) include the standard library and other public headers only. Headers
to precompile (folders pch) are not looked at.
"""

import pathlib
import re
import sys

# A module may include itself and these. The model is two modules: its description, and its
# computation. Where "model" is allowed, both are.
MODULES = {
    "core": [],
    "text": ["core"],
    "aio": ["core"],
    "cpu_adam": ["core"],
    "plan": ["core"],
    "step": ["core", "model/description", "plan"],
    "device": ["core"],
    "memory": ["core", "device"],
    "comm": ["core", "device"],
    "model/description": ["core", "text"],
    "model/compute": ["core", "device", "model/description", "text"],
    "config": ["core", "cpu_adam", "model/description", "step", "text"],
    "state": ["core", "aio", "device", "memory", "plan"],
    "update": ["core", "cpu_adam", "device"],
    "engine": ["core", "aio", "comm", "cpu_adam", "device", "memory", "model", "plan", "state",
               "step", "update"],
    "calibrate": ["core", "comm", "cpu_adam", "device", "engine", "memory", "model", "plan",
                  "state", "step", "text"],
    "planner": ["core", "device", "engine", "memory", "model", "plan", "step"],
    "setup": ["core", "aio", "calibrate", "comm", "config", "cpu_adam", "device", "engine",
              "memory", "model", "plan", "planner", "state", "step", "text"],
    "formats": ["core", "aio", "config", "model", "text"],
    "data": ["core", "config", "formats", "model/description", "state", "text"],
    "checkpoint": ["core", "comm", "engine", "formats", "model/description", "state", "text"],
    "train": ["core", "calibrate", "checkpoint", "comm", "config", "data", "engine", "formats",
              "memory", "model", "plan", "planner", "setup", "state", "step", "text"],
    "offload": ["core", "cpu_adam", "formats", "state"],
    "tools": ["core", "aio", "calibrate", "checkpoint", "comm", "config", "cpu_adam", "data",
              "device", "engine", "formats", "memory", "model", "plan", "planner", "setup",
              "state", "step", "text", "train"],
    "python": ["core", "aio", "comm", "config", "cpu_adam", "device", "engine", "offload",
               "setup", "text", "tools", "train"],
}

# Header pattern: folders (or file prefixes) in which it may be included.
THIRD_PARTY = {
    r"liburing.*": ["aio/uring"],
    r"xsimd/.*": ["cpu_adam/kernel", "src/model/host"],
    r"(oneapi/)?dnnl.*|oneapi/dnnl/.*": ["src/model/host"],
    r"(oneapi/)?tbb/.*": ["cpu_adam"],
    r"omp\.h": ["src/device/host", "src/model"],
    r"nlohmann/.*": ["src/text"],
    r"CLI/.*": ["tools/io_load/job_file.cpp"],
    r"xxhash\.h": ["src/state"],
    r"openssl/.*": ["src/formats/data_files.cpp"],
    r"hwloc.*": ["cpu_adam", "src/memory"],
    r"cublas.*": ["src/device/cuda/libraries"],
    r"cuda.*": ["src/comm/nccl", "src/device/cuda", "src/model/cuda", "src/update/cuda"],
    r"nccl\.h": ["src/comm/nccl"],
    r"nvtx3/.*": ["src/device/cuda"],
    r"mpi\.h": ["src/comm/mpi"],
    r"nanobind/.*|Python\.h": ["src/python"],
    r"fmt/.*": ["src", "aio", "cpu_adam", "tools"],
}

# Public headers of model/description. The others of the model belong to model/compute.
DESCRIPTION_HEADERS = {"architecture.h",
                "block_layout.h",
                "family.h",
                "kernels.h",
                "lora.h",
                "step_program.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
SOURCES = {".h", ".cpp", ".cu", ".cuh"}


def module_of(path: pathlib.PurePath) -> str:
    parts = path.parts
    if parts[0] == "include":
        return module_of_public(parts[2:])
    if parts[0] != "src":
        return parts[0]
    if parts[1] == "model":
        return "model/description" if parts[2] == "description" else "model/compute"
    return parts[1]


def module_of_public(parts: tuple[str, ...]) -> str:
    """`parts`: parts of a header's path after include/ballast."""
    if parts[0] == "model":
        return "model/description" if parts[1] in DESCRIPTION_HEADERS else "model/compute"
    return parts[0]


def module_of_include(name: str) -> str | None:
    path = pathlib.PurePath(name)
    if path.parts[0] == "ballast":
        return module_of_public(path.parts[1:])
    if path.parts[0] in ("src", "aio", "cpu_adam", "tools", "tests"):
        return module_of(path)
    return None


def may_include(own: str, target: str) -> bool:
    allowed = MODULES.get(own, [])
    return target in (own, *allowed) or (target.startswith("model/") and "model" in allowed)


def breaches_of(path: pathlib.PurePath, text: str) -> list[str]:
    """One line per include in the file `path` (relative to the root) that is not allowed."""
    found = []
    own = module_of(path)
    public = path.parts[0] == "include"
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        name = match.group(2)
        where = f"{path}:{number}: {name}"
        target = module_of_include(name)
        if target is not None:
            if not may_include(own, target):
                found.append(f"{where}: {own} may not include {target}")
            if public and not name.startswith("ballast/"):
                found.append(f"{where}: a public header includes a private one")
            continue
        for pattern, folders in THIRD_PARTY.items():
            if not re.fullmatch(pattern, name):
                continue
            if public:
                found.append(f"{where}: a third-party header in a public header")
            elif not any(str(path).startswith(folder) for folder in folders):
                found.append(f"{where}: belongs in {', '.join(folders)}")
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    files = [p for folder in ("include", "src", "aio", "cpu_adam", "tools")
             for p in sorted((root / folder).rglob("*"))
             if p.suffix in SOURCES and p.parent.name != "pch"]
    if not files:
        print(f"no sources under {root}")
        return 1
    breaches = []
    for file in files:
        breaches += breaches_of(file.relative_to(root), file.read_text())
    # The rules must be able to fail.
    for file, header in (("src/plan/probe.cpp", "engine/engine.h"),
                         ("src/engine/probe.cpp", "config/config.h"),
                         ("src/config/probe.cpp", "model/compute.h"),
                         ("src/model/description/probe.cpp", "model/compute.h"),
                         ("src/model/description/probe.cpp", "device/device.h"),
                         ("src/model/description/probe.cpp", "plan/plan.h"),
                         ("src/calibrate/probe.cpp", "planner/planner.h"),
                         ("src/calibrate/probe.cpp", "config/config.h"),
                         ("src/planner/probe.cpp", "config/config.h"),
                         ("src/planner/probe.cpp", "setup/translate.h"),
                         ("src/formats/probe.cpp", "data/tokens.h"),
                         ("src/data/probe.cpp", "checkpoint/checkpoints.h"),
                         ("src/plan/simulator.cpp", "step/problem.h"),
                         ("include/ballast/plan/plan.h", "model/step_program.h")):
        if not breaches_of(pathlib.PurePath(file), f'#include "ballast/{header}"\n'):
            breaches.append(f"the include rules let {file} include {header}")
    for breach in breaches:
        print(breach)
    print(f"{len(files)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
