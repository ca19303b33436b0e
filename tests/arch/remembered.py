#!/usr/bin/env python3
"""Checks that a test runs again if anything that it depends on has changed, and only then.

    remembered.py SOURCE_ROOT
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "tools/dev"))
import green  # noqa: E402
import run_tests  # noqa: E402


class Keys(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-remembered-")
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name).resolve()
        run_tests.ROOT = green.ROOT = self.root
        self.build = self.root / "build"
        for name in ("tests/data/fixture", "tests/e2e/helper.py", "tests/e2e/some_test.py", "tests/meson.build", "configs/a.json",
                     "src/a.cpp", "build/program", "build/helper", "build/module.so", "build/meson-info/x", ".gitignore"):
            self.write(name, "first")
        self.write(".gitignore", "/build/\n")
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        targets = [{"id": id, "type": kind, "filename": [str(self.build / name)]}
                   for id, kind, name in (("p", "executable", "program"), ("l", "executable", "helper"), ("m", "shared module", "module.so"))]
        self.write("build/meson-info/intro-targets.json", json.dumps(targets))
        self.test = {"name": "some", "suite": ["ballast:unit"], "cmd": [str(self.build / "program"), "--fast"], "depends": ["p", "l"],
                     "env": {"BALLAST_TEST_DATA": str(self.root / "tests/data")}, "protocol": "gtest"}

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def key(self, setup="", **changes):
        for cached in (green.digest, green.tree, green.files_below, green.machine, run_tests.read_by_scripts):
            cached.cache_clear()
        self.write("build/meson-info/intro-tests.json", json.dumps([{**self.test, **changes}]))
        tests = run_tests.Tests(self.build)
        return tests.key(tests.all[0], setup)

    def changes_with(self, name, **changes):
        """Whether the key changes with a file."""
        before = self.key(**changes)
        self.assertEqual(before, self.key(**changes))
        self.write(name, (self.root / name).read_text() + "x")
        return self.key(**changes) != before

    def test_a_program_depends_on_itself_its_programs_its_modules_and_its_fixtures(self):
        for name in ("build/program", "build/helper", "build/module.so", "tests/data/fixture", "tests/meson.build"):
            self.assertTrue(self.changes_with(name), name)
        self.write("tests/data/new", "")
        self.assertTrue(self.changes_with("tests/data/new"))
        for name in ("src/a.cpp", "configs/a.json", "tests/e2e/helper.py"):
            self.assertFalse(self.changes_with(name), name)

    def test_a_program_depends_on_folders_that_it_names(self):
        self.write("build/program", f"\0{self.root}/configs\0")
        self.assertTrue(self.changes_with("configs/a.json"))

    def test_a_script_depends_on_helpers_configs_and_its_program(self):
        script = {"suite": ["ballast:e2e"], "cmd": ["python3", "-B", str(self.root / "tests/e2e/some_test.py"), "program"], "env": {}}
        for name in ("tests/e2e/helper.py", "tests/e2e/some_test.py", "tests/data/fixture", "configs/a.json", "build/program"):
            self.assertTrue(self.changes_with(name, **script), name)
        self.assertFalse(self.changes_with("src/a.cpp", **script))

    def test_rules_of_the_architecture_depend_on_all_files(self):
        rule = {"suite": ["ballast:arch"], "cmd": ["python3", "-c", ""], "env": {}, "depends": []}
        self.assertTrue(self.changes_with("src/a.cpp", **rule))
        self.assertFalse(self.changes_with("src/a.cpp", **{**rule, "suite": ["ballast:arch", "ballast:given-inputs"]}))
        self.assertTrue(self.changes_with("src/a.cpp", **{**rule, "suite": ["ballast:unit"], "cmd": ["x", str(self.root)]}))

    def test_arguments_environment_and_setup_count(self):
        keys = {self.key(), self.key(setup="asan"), self.key(cmd=[str(self.build / "program")]), self.key(env={}), self.key(env={"A": "b"})}
        os.environ["BALLAST_OTHER"] = "1"
        self.addCleanup(os.environ.pop, "BALLAST_OTHER")
        keys.add(self.key())
        self.assertEqual(len(keys), 6)

    def test_a_test_of_the_build_folder_always_runs(self):
        self.assertIsNone(self.key(cmd=["x", str(self.build)]))

    def test_memory_keeps_the_latest_keys_of_each_check(self):
        memory = green.Memory(self.build / "green.json")
        for number in range(green.KEPT + 1):
            memory.add("a", str(number))
        memory.add("b", "0")
        memory.save()
        memory = green.Memory(self.build / "green.json")
        self.assertEqual([memory.has("a", str(number)) for number in (0, 1, green.KEPT)], [False, True, True])
        self.assertTrue(memory.has("b", "0"))
        self.write("build/green.json", "{damaged")
        self.assertFalse(green.Memory(self.build / "green.json").has("b", "0"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
