#!/usr/bin/env python3
"""Tests `ballast tune io`: the settings that it writes into a config are those that a run uses.
Checks no times and no rates.

    tune_io_test.py PATH_OF_BALLAST
"""

import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line

BALLAST = ""

# Comments, unusual spaces and the form of numbers must survive.
CONFIG = """{
  // Small.
  "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4}, /* a "string", { } */
  "data": {"text": "text.txt",    "sequence_length": 32},
  "train_batch_size": 8,
  "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3, "weight_decay": 0.01}}, // not 1e-3
%s  "steps_per_print": 5 // last
}
"""
OFFLOAD = """  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "%s"}, // states
    "offload_param": {
      "device": "%s"
      // nothing more
    }
  },
"""
AIO = """  "aio": {
    "block_size": 4096, // small
    "backend": "threads",
    "any_file_system": true
  },
"""
QUICK = ("--seconds", "0.5", "--size", "64MiB")


class TuneIo(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-tune-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.swap = self.path / "swap"
        self.swap.mkdir()
        self.file = self.path / "config.json"

    def run_ballast(self, *arguments, environment=None):
        return subprocess.run([BALLAST, *map(str, arguments)], capture_output=True, text=True,
                              timeout=300, check=False, cwd=self.path,
                              env={**os.environ, **(environment or {})})

    def tune(self, *arguments, environment=None):
        done = self.run_ballast("tune", "io", *QUICK, *arguments, environment=environment)
        self.assertEqual(list(self.swap.iterdir()), [], "something was left behind")
        return done

    def tuned(self, *arguments, environment=None):
        done = self.tune("--json", *arguments, environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def effective(self):
        done = self.run_ballast("train", self.file, "--print-config")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def assert_fails(self, done, status, *words):
        assert_one_line(self, done, status, words)
        self.assertEqual(done.stdout, "")

    def assert_is_what_was_tuned(self, aio, tuning):
        for key in ("backend", "block_size", "queue_depth"):
            self.assertEqual(aio[key], tuning[key], key)
        self.assertEqual(len(aio["paths"]), len(tuning["paths"]))
        for entry, found in zip(aio["paths"], tuning["paths"]):
            for key in ("path", "backend", "block_size", "queue_depth"):
                self.assertEqual(entry[key], found[key], key)
            for key in ("read_gbps", "write_gbps"):
                self.assertEqual(entry[key], max(0.001, round(found[key], 3)), key)

    def assert_only_these_changed(self, before, after, keys):
        """Expects that the rest of the text is unchanged, byte for byte and in order."""
        at = 0
        for piece in re.split(r"[,{}\n]", before):
            if any(f'"{key}"' in piece for key in keys):
                continue
            words = piece.strip()
            found = after.find(words, at)
            self.assertGreaterEqual(found, 0, f"{words!r} is gone from\n{after}")
            at = found + len(words)

    # Successful commands.

    def test_written_settings_are_those_of_a_run(self):
        for device in ("nvme", "auto"):
            before = CONFIG % (OFFLOAD % (device, device) + AIO)
            self.file.write_text(before)
            self.file.chmod(0o640)
            tuning = self.tuned("--path", "swap", "--write", self.file)
            after = self.file.read_text()
            effective = self.effective()
            self.assert_is_what_was_tuned(effective["aio"], tuning)
            self.assertIs(effective["aio"]["any_file_system"], True)
            for section in ("offload_optimizer", "offload_param"):
                self.assertEqual(effective["zero_optimization"][section]["nvme_path"],
                                 str(self.swap))
            self.assert_only_these_changed(before, after, ("block_size", "backend"))
            for comment in ("// Small.", '/* a "string", { } */', "// not 1e-3", "// states",
                            "// nothing more", "// small", "// last", "1.0e-3",
                            '"text.txt",    "sequence_length"'):
                self.assertIn(comment, after)
            self.assertEqual(stat.S_IMODE(self.file.stat().st_mode), 0o640)
            self.assertEqual({entry.name for entry in self.path.iterdir()}, {"config.json", "swap"})

    def test_missing_sections_are_added_to_the_config(self):
        self.file.write_text(CONFIG % "")
        tuning = self.tuned("--path", self.swap, "--write", self.file)
        effective = self.effective()
        self.assert_is_what_was_tuned(effective["aio"], tuning)
        # Nothing is offloaded to NVMe, so the config names no folder.
        self.assertNotIn("nvme_path", self.file.read_text())
        self.assertIn("// last", self.file.read_text())

    def test_tuning_again_replaces_what_was_written(self):
        self.file.write_text(CONFIG % (OFFLOAD % ("nvme", "cpu")))
        self.tuned("--path", self.swap, "--write", self.file)
        other = self.path / "other"
        other.mkdir()
        tuning = self.tuned("--path", self.swap, "--path", other, "--write", self.file)
        effective = self.effective()
        self.assert_is_what_was_tuned(effective["aio"], tuning)
        zero = effective["zero_optimization"]
        self.assertEqual(zero["offload_optimizer"]["nvme_path"], [str(self.swap), str(other)])
        self.assertIsNone(zero["offload_param"]["nvme_path"])
        self.assertEqual(self.file.read_text().count('"paths"'), 1)
        self.assertEqual(list(other.iterdir()), [])

    def test_settings_are_written_where_the_config_has_them(self):
        for sections in ('"zero_optimization": {"stage": 1, "aio": {"queue_depth": 8}},\n',
                         '"zero_optimization": {"stage": 1},\n"aio": null,\n'):
            self.file.write_text(CONFIG % sections)
            tuning = self.tuned("--path", self.swap, "--write", self.file)
            self.assert_is_what_was_tuned(self.effective()["aio"], tuning)
            self.assertEqual(self.file.read_text().count('"aio"'), 1)
            self.tuned("--path", self.swap, "--write", self.file)

    def test_tokens_that_hide_the_swapping_follow_from_the_bandwidth(self):
        tuning = self.tuned("--path", self.swap, "--tflops", "250")
        hidden, = tuning["hides_nvme_states"]
        self.assertEqual(hidden["tflops"], 250)
        self.assertAlmostEqual(
            hidden["tokens_per_step"] * 8 * tuning["mixed_gbps"] * 1e9, 20 * 250e12,
            delta=1e-6 * 20 * 250e12)

    def test_the_chosen_setting_has_the_least_memory_of_the_fast_ones(self):
        path, = self.tuned("--path", self.swap)["paths"]
        keys = ("block_size", "queue_depth", "backend")
        chosen, = [trial for trial in path["tried"]
                   if all(trial[key] == path[key] for key in keys)]
        tried = [trial for trial in path["tried"] if trial["turns"] > 0]
        best = max(trial["mixed_gbps"] for trial in tried)
        self.assertGreaterEqual(chosen["mixed_gbps"], 0.97 * best)
        in_flight = {trial["block_size"] * trial["queue_depth"] for trial in tried
                     if trial["mixed_gbps"] > 0.97 * best}
        self.assertEqual(chosen["block_size"] * chosen["queue_depth"], min(in_flight))

    def test_a_backend_that_is_not_there_is_not_chosen(self):
        tuning = self.tuned("--path", self.swap, environment={"BALLAST_IO_DISABLE": "io_uring"})
        self.assertEqual(tuning["backend"], "threads")
        self.assertEqual({trial["backend"] for trial in tuning["paths"][0]["tried"]}, {"threads"})

    def test_the_paragraph_gives_reasons_and_the_table_fits_a_terminal(self):
        self.file.write_text(CONFIG % "")
        done = self.tune("--path", self.swap, "--write", self.file)
        self.assertEqual(done.returncode, 0, done.stderr)
        *_, paragraph, written = done.stdout.rstrip("\n").split("\n\n")
        text = " ".join(paragraph.split())
        for words in ("settings tried", "least memory in flight", "within 3% of the fastest",
                      "20 bytes per parameter", "tokens at 100 TFLOP/s", "tokens at 400 TFLOP/s"):
            self.assertIn(words, text)
        self.assertEqual(written, f"written to {self.file}")
        for line in done.stdout.splitlines():
            if str(self.swap) not in line and str(self.file) not in line:
                self.assertLessEqual(len(line), 80, line)

    def test_a_limit_that_the_setting_exceeds_is_reported(self):
        self.file.write_text(CONFIG % '  "aio": {"in_flight_bytes": 4096},\n')
        done = self.tune("--path", self.swap, "--write", self.file)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("in_flight_bytes is 4.00 KiB, less than", done.stderr)

    # Errors.

    def test_configs_that_cannot_be_written_are_refused_before_measuring(self):
        self.assert_fails(self.tune("--path", self.swap, "--write", "none.json"), 2, "none.json")
        self.file.write_text("{\"model\": }")
        self.assert_fails(self.tune("--path", self.swap, "--write", self.file), 2, "config.json:1:",
                          "not valid JSON")
        self.file.write_text("{\"modell\": {}}")
        self.assert_fails(self.tune("--path", self.swap, "--write", self.file), 2, "modell")
        self.assertEqual(self.file.read_text(), "{\"modell\": {}}")

    def test_an_edit_that_is_refused_is_found_before_measuring(self):
        longest = 1 << 20  # bytes of a config file
        before = CONFIG % ""
        before = "// " + "x" * (longest - len(before) - 4) + "\n" + before
        self.file.write_text(before)
        done = self.tune("--path", self.swap, "--write", self.file,
                         environment={"BALLAST_IO_FAULTS": "eio:on=read"})
        self.assert_fails(done, 2, "config.json", "too long")
        self.assertEqual(self.file.read_text(), before)

    def test_paths_and_sizes_that_cannot_be(self):
        self.assert_fails(self.run_ballast("tune", "io"), 2, "--path")
        self.assert_fails(self.tune("--path", self.path / "none"), 2, "no such directory")
        self.assert_fails(self.run_ballast("tune", "io", "--path", self.swap, "--size", "1MiB"), 2,
                          "--size", "64.0 MiB")
        self.assert_fails(self.run_ballast("tune", "io", "--path", self.swap, "--seconds", "0"), 2,
                          "--seconds")

    def test_an_error_of_the_disk_leaves_the_config(self):
        before = CONFIG % AIO
        self.file.write_text(before)
        done = self.tune("--path", self.swap, "--write", self.file,
                         environment={"BALLAST_IO_FAULTS": "eio:on=read:after=30"})
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"error: tune io: read {self.swap} offset=", done.stderr)
        self.assertEqual(self.file.read_text(), before)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
