#!/usr/bin/env python3
"""Runs every `ballast bench` subcommand with tiny sizes and checks that it prints valid --json.
Checks no times.

    bench_test.py PATH_OF_BALLAST
"""

import argparse
import contextlib
import functools
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line
from report_test import data_of

BALLAST = ""
TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench" / "peers"
QUICK = ("--repeats", "1", "--seconds", "0")
STEP = ("--device", "host", "--vocab", "256", "--hidden", "64", "--layers", "2", "--heads", "2",
        "--sequence", "32", "--steps", "1", "--set", "ballast.device_bytes=256MiB", "--set",
        "ballast.host_bytes=64MiB")
PLAN = ("--set", "model.hidden_size=32", "--set", "model.num_heads=2", "--set",
        "model.vocab_size=131", "--set", "data.sequence_length=16", "--set",
        "aio.any_file_system=true", "--set", "ballast.device_bytes=64MiB", "--set",
        "ballast.host_bytes=64MiB", "--rounds", "1", "--steps", "2")


def step_peers_options():
    """Options of step_peers.py for the preset tiny, without PyTorch."""
    import step_options
    return {**step_options.PRESETS["tiny"], "kv_heads": 2, "intermediate": 192, "tied": False, "steps": 1,
            "offload": "none", "device_bytes": None, "device": "cpu", "dtype": "bf16", "threads": 1,
            "model": "plain", "preset": "tiny", "set": []}


class Bench(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-bench-")
        self.addCleanup(directory.cleanup)
        self.path = directory.name

    def bench(self, *arguments):
        return subprocess.run([BALLAST, "bench", *arguments], capture_output=True, text=True,
                              timeout=300, check=False,
                              env={**os.environ, "XDG_CACHE_HOME": self.path + "/cache"})

    def rows(self, *arguments):
        done = self.bench(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_adam_checks_every_default_variant(self):
        rows = self.rows("adam", "--params", "64Ki", *QUICK)
        self.assertEqual({row["checked"] for row in rows}, {True})

    def test_attention(self):
        done = self.bench("attention", "--sequence", "256", "--micro-batch", "1", "--heads", "4",
                          "--kv-heads", "2", "--head-size", "64", "--json", *QUICK)
        if done.returncode == 0:
            self.assertEqual(json.loads(done.stdout)[0]["by"], "own")
        else:
            assert_one_line(self, done, done.returncode, ("bench attention",))

    def test_io_checks_what_it_reads(self):
        rows = self.rows("io", "--path", self.path, "--size", "4MiB", "--block", "64KiB",
                         "--depth", "2", "--check")
        self.assertEqual([row["pattern"] for row in rows], ["read", "write", "mixed"])
        self.assertEqual([row["bytes"] for row in rows], [4 << 20, 4 << 20, 8 << 20])
        self.assertEqual(os.listdir(self.path), [])

    def test_a_job_file_stands_for_options_and_the_command_line_wins(self):
        job = pathlib.Path(self.path) / "job.ini"
        job.write_text("# a sweep\npath = .\npattern = write, mixed\nblock=64KiB,128KiB\n"
                       "depth = 4  # few\nsize = \"4MiB\"\n")
        rows = self.rows("io", "--job", str(job), "--pattern", "read")
        self.assertEqual([(row["pattern"], row["block_bytes"], row["depth"]) for row in rows],
                         [("read", 65536, 4), ("read", 131072, 4)])
        job.write_text("blokc = 1MiB\n")
        assert_one_line(self, self.bench("io", "--path", self.path, "--job", str(job)), 2,
                        ("job.ini", "'blokc'", "did you mean 'block'"))

    def test_link(self):
        rows = self.rows("link", "--device", "host", "--bytes", "1MiB", *QUICK)
        self.assertEqual([row["way"] for row in rows], ["upload", "offload", "both"])

    def test_plan_allocates_what_its_ledger_says(self):
        cases = "compute,nvme-all,micro-major,activations-host"
        rows = self.rows("plan", "--path", self.path, "--only", cases, *PLAN)
        self.assertEqual(",".join(row["case"] for row in rows), cases)
        for row in rows:
            self.assertEqual(row["ledger_bytes"], row["allocated_bytes"], row["case"])

    def test_step_counts_the_products_of_its_passes(self):
        tokens, width, inner = 4 * 32, 64, 96
        attention = 2 * tokens * 32 * width  # the causal half of the square
        last = 2 * tokens * width * inner
        layer = 2 * tokens * (4 * width * width + 2 * width * inner) + attention
        head = 2 * tokens * width * 256
        (row,) = self.rows("step", *STEP, "--micro-batch", "4", "--intermediate", "96", "--set",
                           "ballast.recompute=true")
        self.assertEqual([p["flops"] for p in row["passes"]],
                         [layer, 2 * layer + layer - last, 3 * head])

    def test_breakdown_divides_a_step_among_its_kernels(self):
        tokens, width, inner, layers, batches = 4 * 32, 64, 96, 2, 2
        (row,) = self.rows("step", *STEP, "--micro-batch", "4", "--intermediate", "96", "--breakdown")
        kernels = row["kernels"]
        self.assertAlmostEqual(sum(k["seconds"] for k in kernels), row["measured_seconds"])
        self.assertEqual(kernels[-1]["kernel"], "rest")
        # Products of weights: 2 FLOPs forward and 4 backward.
        weights = layers * (4 * width * width + 2 * width * inner) + width * 256
        self.assertEqual(sum(k["flops"] for k in kernels), 6 * batches * tokens * weights)
        calls = {k["kernel"]: k["calls"] for k in kernels}
        self.assertEqual(calls[f"{tokens} x {inner} x {width}"], 2 * layers * batches)
        self.assertEqual(calls[f"{width} x {inner} x {tokens}"], layers * batches)
        self.assertEqual(calls["attention"], 2 * layers * batches)
        self.assertGreater(min(calls[k] for k in ("norm", "activation", "update", "packing")), 0)
        self.assertEqual(row["product_algorithms"], "heuristic")

    def test_step_without_micro_batches_takes_the_planners(self):
        def batch(*options):
            (row,) = self.rows("step", *STEP, *options)
            return row["micro_batch"], row["accumulation"]
        (row,) = self.rows("step", *STEP, "--batch", "12")
        self.assertEqual(row["micro_batch"] * row["accumulation"], 12)
        self.assertEqual((row["kernels"], row["recomputed_layers"], row["rolled_back"]), ([], 0, 0))
        self.assertGreater(min(row["device_bytes"], row["host_bytes"]), 0)
        self.assertGreaterEqual(row["waiting_seconds"], 0)
        # Few tokens fit at a time into a small device.
        small = batch("--batch", "64", "--set", "ballast.device_bytes=4MiB")
        self.assertEqual(small[0] * small[1], 64)
        self.assertGreater(small[1], 1)
        self.assertEqual(batch("--micro-batch", "3"), (3, 2))
        self.assertEqual(batch("--accumulation", "3"), (4, 3))
        self.assertEqual(batch("--batch", "6", "--accumulation", "3"), (2, 3))
        assert_one_line(self, self.bench("step", *STEP, "--batch", "7", "--micro-batch", "3"), 2,
                        ("train_batch_size", "not divisible"))

    def test_step_takes_the_model_of_a_folder_and_times_each_kind_of_layer(self):
        folder = pathlib.Path(self.path, "model")
        folder.mkdir()
        config = {"model_type": "qwen3_5_text", "vocab_size": 256, "hidden_size": 64,
                  "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
                  "head_dim": 16, "intermediate_size": 96, "linear_num_key_heads": 1,
                  "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                  "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
        (folder / "config.json").write_text(json.dumps(config))
        small = ("--device", "host", "--sequence", "32", "--micro-batch", "4", "--steps", "1",
                 "--set", "ballast.device_bytes=256MiB", "--set", "ballast.host_bytes=64MiB")
        (row,) = self.rows("step", "--model", str(folder), *small)
        self.assertEqual(row["family"], "qwen3_5")
        passes = {(p["block"], p["pass"]): p["flops"] for p in row["passes"]}
        channels, values = 2 * 16 + 2 * 8, 2 * 8
        weights = 64 * (channels + values + 2 * 2 + values) + 3 * 64 * 96
        recurrence = 2 * (2 * 64 * 16 + 3 * 16 * 8 + 3 * 64 * 8 // 2)
        delta = 2 * 4 * 32 * (weights + recurrence)
        self.assertEqual(passes["layer 0", "layer_forward"], delta)
        self.assertEqual(passes["layer 0", "layer_backward"], 2 * delta)
        attention = 2 * 4 * 32 * (64 * 16 * (2 * 2 + 2 * 1 + 2) + 3 * 64 * 96 + 32 * 2 * 16)
        self.assertEqual(passes["layer 3", "layer_forward"], attention)
        self.assertEqual(len(passes), 5)
        done = self.bench("step", "--model", self.path + "/no", *small)
        assert_one_line(self, done, 2, ("model.path", "there is no folder", "/no"))

    IO = ("io", "--size", "1MiB", "--pattern", "read", "--backend", "threads")

    def page(self, *arguments):
        """The data of a benchmark's page, and the printed output."""
        file = pathlib.Path(self.path, "page.html")
        done = self.bench(*arguments, "--html", str(file))
        self.assertEqual(done.returncode, 0, done.stderr)
        return data_of(file), done

    def test_pages_have_this_run_and_earlier_ones(self):
        sweep = (*self.IO, "--path", self.path, "--block", "4KiB,64KiB", "--depth", "1,2")
        first, done = self.page(*sweep)
        self.assertEqual((first["kind"], first["bench"], first["earlier"]), ("bench", "io", []))
        self.assertEqual(len(first["rows"]), 4)
        self.assertTrue(done.stdout.endswith(f"page in {self.path}/page.html\n"))
        second, done = self.page(*sweep, "--json")
        self.assertEqual(second["rows"], json.loads(done.stdout))
        self.assertEqual([run["rows"] for run in second["earlier"]], [first["rows"]])
        self.assertEqual(second["earlier"][0]["when"], first["when"])
        self.assertRegex(second["kept"], rf"^{self.path}/cache/ballast/bench-io-[0-9a-f]{{16}}\.json$")
        # Runs without a page are not kept, and each benchmark has its own file.
        self.rows(*sweep)
        third, _ = self.page(*sweep)
        self.assertEqual(len(third["earlier"]), 2)
        adam, _ = self.page("adam", "--params", "64Ki", "--variant", "adamw-bf16", *QUICK)
        self.assertEqual((adam["bench"], adam["earlier"]), ("adam", []))
        step, _ = self.page("step", *STEP, "--micro-batch", "4")
        self.assertEqual((step["bench"], len(step["rows"])), ("step", 1))

    def test_only_the_newest_figures_are_kept(self):
        one = (*self.IO, "--path", self.path, "--block", "4KiB")
        data, _ = self.page(*one)
        file = pathlib.Path(data["kept"])
        run, = json.loads(file.read_text())["runs"]
        file.write_text(json.dumps({"runs": [{**run, "when": str(i)} for i in range(50)]}))
        data, _ = self.page(*one)
        kept = json.loads(file.read_text())["runs"]
        self.assertEqual([run["when"] for run in kept], [str(i) for i in range(1, 50)] + [data["when"]])
        # Without spaces, as the program writes and counts them.
        compact = functools.partial(json.dumps, separators=(",", ":"))
        large = {**run, "rows": run["rows"] * (500_000 // len(compact(run["rows"])))}
        file.write_text(compact({"runs": [large, {**large, "when": "newer"}]}))
        self.assertLess(file.stat().st_size, 1 << 20)
        self.page(*one)
        self.assertEqual([run["when"] for run in json.loads(file.read_text())["runs"]][:-1], ["newer"])

    def test_figures_that_cannot_be_used_or_kept(self):
        one = (*self.IO, "--path", self.path, "--block", "4KiB")
        file = pathlib.Path(self.page(*one)[0]["kept"])
        for text in ("{", "[]", '{"runs": 1}', '{"runs": [1]}', '{"runs": [{"when": "x"}]}'):
            file.write_text(text)
            data, done = self.page(*one)
            self.assertEqual(data["earlier"], [])
            self.assertRegex(done.stderr, rf"^ballast: warning: bench: .*{file}.*\n$")
            self.assertEqual(len(json.loads(file.read_text())["runs"]), 1)
        file.unlink()
        file.mkdir()
        data, done = self.page(*one)
        self.assertRegex(done.stderr, rf"^ballast: warning: bench: .*{file}")
        other = pathlib.Path(self.path, "mine.html")
        other.write_text("mine")
        assert_one_line(self, self.bench(*one, "--html", str(other)), 2, ("mine.html", "not a page"))
        self.assertEqual(other.read_text(), "mine")

    def test_ballast_also_runs_in_the_memory_of_a_peer(self):
        program = pathlib.Path(self.path, "ballast")
        # Half the speed with the peer's memory.
        program.write_text("""#!/bin/sh
            case "$*" in *ballast.device_bytes=1000) rate=100 ;; *) rate=200 ;; esac
            echo '[{"tokens_per_second": '$rate', "step_seconds": 1, "parameters": 7, "loss": 5.5,
                "gemm_peak_flops_per_second": 9, "model_flops_per_second": 9}]'
            """)
        program.chmod(0o755)
        sys.path.insert(0, str(TOOLS))
        import step_peers
        a = argparse.Namespace(
            **{**step_peers_options(), "ballast": program, "equal_memory": True, "rounds": 2})

        class Peer:
            name = "peer"

            def measure(self):
                return {"tokens_per_second": 50, "step_seconds": 1, "parameters": 7, "loss": 5.5,
                        "first_loss": math.log(256), "gemm": 9, "host_bytes": 1, "device_bytes": 2000,
                        "allocated_bytes": 1000}
        programs = [step_peers.Ballast(a), Peer()]
        with contextlib.redirect_stderr(io.StringIO()):
            rounds = step_peers.measure(a, programs)
        own, row = (step_peers.summary(a, program, rounds) for program in programs)
        self.assertIsNone(own["equal_memory"])
        self.assertEqual((row["ratio"], row["equal_memory"]["ratio"]), (4, 2))
        program.write_text(program.read_text().replace("rate=100", "{ echo 'too small' >&2; exit 1; }"))
        with contextlib.redirect_stderr(io.StringIO()):
            rounds = step_peers.measure(a, programs)
        self.assertEqual(step_peers.summary(a, programs[1], rounds)["equal_memory"],
                         {"problem": "too small"})
        a.equal_memory = False
        with contextlib.redirect_stderr(io.StringIO()):
            rounds = step_peers.measure(a, programs)
        self.assertIsNone(step_peers.summary(a, programs[1], rounds)["equal_memory"])

    def test_scripts_that_measure_peers_say_how_they_are_used(self):
        for name in ("adam_peers.py", "io_peers.py", "step_peers.py"):
            done = subprocess.run([sys.executable, "-B", TOOLS / name, "--help"],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
