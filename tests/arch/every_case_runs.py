#!/usr/bin/env python3
"""Fails if a test case is left out by the --gtest_filter of every registration of its program.

    every_case_runs.py BUILD_ROOT

Some programs are registered several times, each time with a part of their cases. A case that is added to
such a program must be in one of these parts. A program that runs all cases of the same names covers
them, too, as the host device does for programs of the emulated GPU, and unit_kernels for kernels that are
watched for races; suites that need a GPU do not count.
"""

import json
import pathlib
import re
import subprocess
import sys

FILTER = "--gtest_filter="


def matches(filter_text: str, case: str) -> bool:
    """GoogleTest's rule: the name matches a pattern before '-' and none after it."""
    wanted, _, unwanted = filter_text.partition("-")

    def any_of(patterns: str) -> bool:
        return any(re.fullmatch(re.escape(p).replace(r"\*", ".*").replace(r"\?", "."), case)
                   for p in patterns.split(":"))

    return any_of(wanted or "*") and not any_of(unwanted)


def cases_of(program: pathlib.Path) -> list[str]:
    listed = subprocess.run([program, "--gtest_list_tests"], stdout=subprocess.PIPE, text=True,
                            check=True).stdout
    suite, cases = "", []
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            cases.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return cases


def registrations(build: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """Filters of each program of the build that is a test ('*': all cases)."""
    found: dict[pathlib.Path, list[str]] = {}
    for test in json.loads((build / "meson-info/intro-tests.json").read_text()):
        if any(suite.endswith(":gpu") for suite in test["suite"]):
            continue
        filters = [word.removeprefix(FILTER) for word in test["cmd"] if word.startswith(FILTER)]
        for word in test["cmd"]:
            program = build / word
            if program.is_relative_to(build / "tests"):
                found.setdefault(program, []).extend(filters or ["*"])
    return found


def main() -> int:
    build = pathlib.Path(sys.argv[1])
    programs = registrations(build)
    parts = {program: filters for program, filters in programs.items() if "*" not in filters}
    left_out = []
    count = 0
    for program, filters in sorted(parts.items()):
        if not program.exists():
            left_out.append(f"{program.name} is not built: add it to run_in_parts")
            continue
        cases = cases_of(program)
        count += len(cases)
        missing = [case for case in cases if not any(matches(text, case) for text in filters)]
        # A program with the same source may run all of it.
        twin = program.name.removesuffix("_on_cuda").replace("unit_races", "unit_kernels")
        if missing and twin != program.name:
            whole = programs.get(program.with_name(twin), [])
            missing = [case for case in missing if not any(matches(text, case) for text in whole)]
        left_out += [f"{program.name}: {case} is matched by none of {' '.join(filters)}"
                     for case in missing]
        stale = [pattern for text in filters for pattern in text.split(":")
                 if not any(matches(pattern, case) for case in cases)]
        left_out += [f"{program.name}: no case matches {pattern}" for pattern in stale]
    for line in left_out:
        print(line)
    print(f"{len(parts)} programs run in parts, {count} cases, {len(left_out)} differences")
    return 1 if left_out or not programs else 0


if __name__ == "__main__":
    sys.exit(main())
