#!/usr/bin/env python3
"""Builds and runs tests of a build folder, except those that have passed before in the same state.

    run_tests.py FOLDER [--needed | --inputs NAME] [--all] [--no-rebuild] [OPTIONS OF meson test]

The state of a test is a digest of its program and of the project's programs and libraries that it runs,
its command and environment, the fixtures, scripts and folders that it is given or that its program
names, and the machine (green.py). A changed library changes only programs that contain the changed
code, since test.sh links them without unused functions. A test that gets the source tree as an
argument depends on every file, as do the tests of suite arch that are not in suite given-inputs. A test
that gets the build folder always runs. Skipped tests have not passed. The file FOLDER/green.json
remembers the states.

--needed: only print the files that the tests need. --inputs: only print the files of a test's state.
--all: run all of the tests; the results are remembered.
"""

import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys

import green
from green import ROOT

# Files that scripts may read without being given them: their helpers, fixtures, configs, scripts of tools.
SCRIPTS = ("tests/e2e/*.py", "tests/data/**/*", "configs/**/*", "tools/**/*.py", "tools/**/*.sh",
           "tools/**/*.json", "tools/gpu_check/**/*")


def suites_of(test: dict) -> set[str]:
    return {suite.partition(":")[2] for suite in test["suite"]}


class Tests:
    """The tests of a build folder as Meson describes them."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.resolve()
        self.all = self._described("tests")
        # Meson runs all tests of a name.
        names = [test["name"] for test in self.all]
        if doubled := {name for name in names if names.count(name) > 1}:
            sys.exit(f"several tests have the name {', '.join(sorted(doubled))}; give each its own")
        targets = self._described("targets")
        self._files = {target["id"]: [pathlib.Path(name) for name in target["filename"]] for target in targets}
        # Programs look for modules at run time, also those that a test does not name.
        self._modules = {file for target in targets if target["type"].startswith("shared")
                         for file in self._files[target["id"]]}

    def _described(self, kind: str) -> list[dict]:
        return json.loads((self.folder / f"meson-info/intro-{kind}.json").read_text())

    def chosen(self, suites: list[str], without: list[str]) -> list[dict]:
        return [test for test in self.all
                if (not suites or suites_of(test) & set(suites)) and not suites_of(test) & set(without)]

    def built_for(self, test: dict) -> list[pathlib.Path]:
        return [file for target in test["depends"] for file in self._files.get(target, [])]

    @functools.cache
    def _named_in(self, program: pathlib.Path) -> frozenset[pathlib.Path]:
        """Paths below the source tree that are part of a program."""
        text = program.read_bytes() if program.is_file() else b""
        found = re.findall(re.escape(str(ROOT).encode()) + rb"/[\w./+-]+", text)
        return frozenset(pathlib.Path(name.decode()) for name in found)

    def read_by(self, test: dict) -> list[pathlib.Path] | None:
        """The files on which a test may depend; None if they are not known."""
        files = self._modules | set(self.built_for(test))
        words = [word.rpartition("=")[2] for word in test["cmd"]]
        given = {(self.folder / word).resolve() for word in words if word}
        if self.folder in given:
            return None
        fixtures = {pathlib.Path(part) for value in test["env"].values() for part in re.split("[:=]", value)}
        files |= {path for path in given if path.is_file()}
        for program in [path for path in files if path.is_relative_to(self.folder)]:
            fixtures |= self._named_in(program)
        folders = {path for path in given if path.is_relative_to(ROOT) and path.is_dir()}
        for path in fixtures:
            if path.is_relative_to(ROOT) and not path.is_relative_to(self.folder):
                (folders if path.is_dir() else files).add(path)
        if "arch" in suites_of(test) and "given-inputs" not in suites_of(test):
            folders.add(ROOT)
        for folder in folders:
            files.update(green.files_below(folder))
        if "e2e" in suites_of(test) and any(word.endswith(".py") for word in test["cmd"]):
            files |= read_by_scripts()
        # The environments of setups.
        files |= {ROOT / "tests/meson.build", *(ROOT / "tests").glob("*.supp")}
        return sorted(files)

    def key(self, test: dict, setup: str) -> str | None:
        """The state of a test; None if it has to run anyway."""
        files = self.read_by(test)
        if files is None:
            return None
        return green.key_of(setup, [test[part] for part in ("name", "cmd", "env", "protocol")], green.contents(files))


@functools.cache
def read_by_scripts() -> frozenset[pathlib.Path]:
    return frozenset(path for pattern in SCRIPTS for path in ROOT.glob(pattern)) & frozenset(green.tree())


def run(tests: Tests, chosen: list[dict], options: argparse.Namespace, more: list[str]) -> int:
    files = [str(file.relative_to(tests.folder)) for file in needed(tests, chosen)]
    if not options.no_rebuild:
        status = subprocess.run(["ninja", "-C", tests.folder, *files], check=False).returncode
        if status != 0:
            return status
    memory = green.Memory(tests.folder / "green.json")

    def label(test: dict) -> str:
        return f"{options.setup}/{test['name']}"

    keys = {test["name"]: tests.key(test, options.setup) for test in chosen}
    left = [test for test in chosen
            if options.all or not keys[test["name"]] or not memory.has(label(test), keys[test["name"]])]
    print(f"{len(chosen) - len(left)} of {len(chosen)} tests have passed before in the same state")
    if not left:
        return 0
    log = tests.folder / f"meson-logs/testlog{'-' + options.setup if options.setup else ''}.json"
    log.unlink(missing_ok=True)
    setup = ["--setup", options.setup] if options.setup else []
    # Meson reads "PROJECT:NAME", and a name may contain a colon.
    names = [f"{test['suite'][0].partition(':')[0]}:{test['name']}" for test in left]
    status = subprocess.run(["meson", "test", "-C", tests.folder, "--no-rebuild", *setup, *more, *names],
                            check=False).returncode
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    passed = {result["name"].partition(" / ")[2] or result["name"] for result in results if result["result"] == "OK"}
    green.digest.cache_clear()
    for test in left:
        key = keys[test["name"]]
        # Something may have been changed meanwhile.
        if key and test["name"] in passed and tests.key(test, options.setup) == key:
            memory.add(label(test), key)
    memory.save()
    return status


def needed(tests: Tests, chosen: list[dict]) -> list[pathlib.Path]:
    return sorted({file for test in chosen for file in tests.built_for(test)})


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--needed", action="store_true")
    parser.add_argument("--inputs")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--no-rebuild", action="store_true")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--no-suite", action="append", default=[])
    parser.add_argument("--setup", default="")
    options, more = parser.parse_known_args()
    # The descriptions of tests are those of the current meson.build files.
    subprocess.run(["ninja", "-C", options.folder, "build.ninja"], check=True, stdout=sys.stderr)
    tests = Tests(options.folder)
    chosen = tests.chosen(options.suite, options.no_suite)
    if options.inputs:
        test = next(test for test in tests.all if test["name"] == options.inputs)
        print(*(tests.read_by(test) or ["anything: the test runs every time"]), sep="\n")
        return 0
    if options.needed:
        print(*(file.relative_to(tests.folder) for file in needed(tests, chosen)))
        return 0
    return run(tests, chosen, options, more)


if __name__ == "__main__":
    sys.exit(main())
