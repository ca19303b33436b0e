#!/usr/bin/env python3
"""Fails if a test case is left out by the tags and filters of every registration of its program.

    every_case_runs.py BUILD_ROOT

Some programs are registered several times, each time with a part of their cases. A case that is added to
such a program must be in one of these parts. A program that runs all cases of the same names covers
them, too, as the host device does for programs of the emulated GPU, and unit_kernels for kernels that are
watched for races; suites that need a GPU do not count.
"""

import functools
import json
import pathlib
import subprocess
import sys

CHOOSING = ("--gtest_filter=", "--tagged=", "--untagged=")


@functools.cache
def cases_of(program: pathlib.Path, arguments: tuple[str, ...] = ()) -> list[str]:
    """The cases that a program runs with these arguments."""
    listed = subprocess.run([program, *arguments, "--gtest_list_tests"], stdout=subprocess.PIPE, text=True,
                            check=True).stdout
    suite, cases = "", []
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            cases.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return cases


def registrations(build: pathlib.Path) -> dict[pathlib.Path, list[tuple[str, ...]]]:
    """The arguments with which each program of the build is a test, if they choose cases."""
    found: dict[pathlib.Path, list[tuple[str, ...]]] = {}
    for test in json.loads((build / "meson-info/intro-tests.json").read_text()):
        if any(suite.endswith(":gpu") for suite in test["suite"]):
            continue
        choosing = tuple(word for word in test["cmd"] if word.startswith(CHOOSING))
        for word in test["cmd"]:
            program = build / word
            if program.is_relative_to(build / "tests"):
                found.setdefault(program, []).append(choosing)
    return found


def main() -> int:
    build = pathlib.Path(sys.argv[1])
    programs = registrations(build)
    parts = {program: several for program, several in programs.items() if () not in several}
    left_out = []
    count = 0
    for program, several in sorted(parts.items()):
        if not program.exists():
            left_out.append(f"{program.name} is not built: add it to run_in_parts")
            continue
        cases = cases_of(program)
        count += len(cases)
        missing = set(cases).difference(*(cases_of(program, arguments) for arguments in several))
        # A program with the same source may run all of it.
        twin = program.with_name(program.name.removesuffix("_on_cuda").replace("unit_races", "unit_kernels"))
        if missing and twin != program and twin.exists():
            missing = missing.difference(*(cases_of(twin, arguments) for arguments in programs.get(twin, [])))
        left_out += [f"{program.name}: {case} is run by none of {several}" for case in sorted(missing)]
        left_out += [f"{program.name} runs nothing with {arguments}"
                     for arguments in several if not cases_of(program, arguments)]
    for line in left_out:
        print(line)
    print(f"{len(parts)} programs run in parts, {count} cases, {len(left_out)} differences")
    return 1 if left_out or not programs else 0


if __name__ == "__main__":
    sys.exit(main())
