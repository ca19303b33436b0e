#!/usr/bin/env python3
"""Runs `ballast plan` like a user, with correct and wrong input.

    plan_test.py PATH_OF_BALLAST
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line

BALLAST = ""

CONFIG = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 64, "num_layers": 3,
              "num_heads": 4, "num_kv_heads": 2},
    # The swap folder does not exist, and the data only where this machine is measured.
    "data": {"text": ["no/such/text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme",
                                                            "nvme_path": "no/such/disk"}},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 3,
                "out": "run"},
}
RATES = {
    "name": "a quick machine",
    "forward": [{"tokens": 64, "tflops": 5}, {"tokens": 1024, "tflops": 20}],
    "backward": [{"tokens": 64, "tflops": 5}, {"tokens": 1024, "tflops": 20}],
    "head": [{"tokens": 64, "tflops": 5}],
    "device_memory_gbps": 900, "launch_us": 5, "update_gbps": 40,
    "upload_gbps": 20, "offload_gbps": 20,
    "read_gbps": 3, "write_gbps": 2, "mixed_gbps": 4, "io_latency_us": 80,
    "fabric_gbps": 100, "network_gbps": 10, "ranks_per_node": 4,
    "device_memory": "24GiB", "host_memory": "64GiB", "nvme_space": "1TB",
    "drive_writes_tb": 1200,
}
ALL_AUTO = ("zero_optimization.offload_optimizer.device=auto",
            "zero_optimization.offload_param.device=auto", "ballast.activations=auto",
            "train_micro_batch_size_per_gpu=auto")


def settings(*assignments):
    return [word for assignment in assignments for word in ("--set", assignment)]


class Plan(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-e2e-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.config = self.path / "config.json"
        self.config.write_text(json.dumps(CONFIG))
        self.rates = self.path / "rates.json"
        self.rates.write_text(json.dumps(RATES))

    def ballast(self, *arguments):
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.path / "cache")}
        return subprocess.run([BALLAST, *map(str, arguments)], capture_output=True, text=True,
                              timeout=300, cwd=self.path, check=False, env=environment)

    def write_data(self, size=20000):
        (self.path / "no/such").mkdir(parents=True)
        (self.path / "no/such/text.txt").write_text("x" * size)

    def plan(self, *arguments):
        return self.ballast("plan", self.config, "--rates", self.rates, *arguments)

    def planned(self, *arguments):
        done = self.plan("--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    # Refuses before the machine is measured.

    def test_what_cannot_fit_is_refused_before_anything_is_measured(self):
        self.write_data(1000 * 1001)
        done = self.ballast("plan", self.config, "--set", "data.sequence_length=1000000",
                            "--set", "zero_optimization.offload_optimizer.device=cpu")
        assert_one_line(self, done, 1, ["budget of 64.0 MiB is ", "it would fit with"],
                        ignored="ballast: warning: ")

    def test_a_missing_gpu_is_named_before_budgets_and_data(self):
        if pathlib.Path("/dev/nvidiactl").exists():
            self.skipTest("there is a GPU")
        for command in ("plan", "train", "eval"):
            done = self.ballast(command, self.config, *settings("ballast.device=cuda",
                                                                "ballast.device_bytes=1KiB"))
            assert_one_line(self, done, 1, ['ballast.device is "cuda", but '])

    # Successful commands.

    def test_json_has_the_fields_that_scripts_use(self):
        plan = self.planned()
        self.assertGreater(plan["predicted_step_seconds"], 0)
        self.assertAlmostEqual(plan["tokens_per_second"],
                               8 * 32 / plan["predicted_step_seconds"], delta=1)
        self.assertIn(plan["bottleneck"], plan["lanes"])
        self.assertIn(plan["second_bottleneck"], plan["lanes"])
        self.assertNotEqual(plan["bottleneck"], plan["second_bottleneck"])
        for line in plan["ledger"]:
            self.assertEqual(sorted(line), ["bytes", "kind", "tier"])
        for tier, peak in plan["peak_bytes"].items():
            self.assertEqual(
                peak, sum(line["bytes"] for line in plan["ledger"] if line["tier"] == tier))
        self.assertGreater(plan["nvme_bytes_written"], 0)
        self.assertEqual(plan["wear"]["rated_bytes"], 1200e12)
        self.assertEqual(plan["bandwidth_run"], plan["bound_by"] != "compute")

    def test_each_device_has_a_budget_and_lanes(self):
        plan = self.planned(*settings("pipeline.stages=2", "model.vocabulary_tiles=2"))
        self.assertEqual(plan["devices"], 2)
        self.assertEqual(plan["config"]["pipeline"]["stages"], 2)
        totals = [sum(line["bytes"] for line in plan["ledger"] if line.get("device") == device)
                  for device in (0, 1)]
        self.assertEqual(plan["peak_bytes"]["device"], max(totals))
        self.assertLessEqual(max(totals), plan["budgets"]["device"])
        self.assertGreater(min(totals), 0)
        self.assertEqual(len(plan["lanes"]["compute"]["busy_seconds_by_device"]), 2)
        self.assertGreater(plan["lanes"]["pass"]["bytes"], 0)
        done = self.plan("--set", "pipeline.stages=2")
        self.assertEqual(done.stderr, "")
        self.assertIn("  devices           2; each has every 2nd layer\n", done.stdout)
        for words in ("device 0 total", "device 1 total", "between devices"):
            self.assertIn(words, done.stdout)

    def test_text_fits_a_terminal(self):
        done = self.plan(*settings(*ALL_AUTO))
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("a quick machine", "memory (peak)", "prediction", "bottleneck",
                     "tokens per step that hide transfers and updates (this run: "):
            self.assertIn(word, done.stdout)
        self.assertNotIn("T*", done.stdout)
        self.assertRegex(done.stdout,
                         r"(?m)^  link +\d\S*: (hidden in|[\d.]+x those of) this run$")
        for line in done.stdout.splitlines():
            if not line.startswith("ballast plan "):
                self.assertLessEqual(len(line), 80, line)

    def test_bottlenecks_are_the_busiest_lanes_of_the_table(self):
        configs = pathlib.Path(__file__).resolve().parents[2] / "configs"
        slow_writes = self.path / "slow.json"
        slow_writes.write_text(json.dumps({**RATES, "write_gbps": 0.01, "mixed_gbps": 0.02}))
        # The GPU's kernels need more workspace than the demo's budget.
        larger = ("--set", "ballast.device_bytes=128MiB")
        for config, rates, more in (
                (self.config, self.rates, ()), (self.config, slow_writes, ()),
                (configs / "demo.json", configs / "rates" / "rtx4090-2nvme.json", larger),
                (configs / "larger-than-memory.json", configs / "rates" / "h100-node.json", ())):
            with self.subTest(config=config, rates=rates):
                arguments = ("plan", config, "--rates", rates, *more)
                text = self.ballast(*arguments).stdout
                for line in text.splitlines()[1:]:
                    self.assertLessEqual(len(line), 80, line)
                table = text[text.index("of step"):]
                rows = re.findall(r"^  (\w+) +[\d.]+ m?s +(\d+)% ", table, re.MULTILINE)
                said = re.findall(r"bottleneck +(\w+) \(busy (\d+)% of the step\)", text)
                self.assertEqual(len(said), 2)
                shares = sorted((int(share) for _, share in rows), reverse=True)
                self.assertEqual([int(share) for _, share in said], shares[:2])
                self.assertLessEqual(set(said), set(rows))
                plan = json.loads(self.ballast(*arguments, "--json").stdout)
                bound = re.search(r"the run is +bound by (\w+)", text).group(1)
                self.assertEqual(plan["bound_by"] or "no", bound)
                self.assertEqual(bound != "no", shares[0] >= 90)
                self.assertEqual([plan["bottleneck"], plan["second_bottleneck"]],
                                 [lane for lane, _ in said])

    def test_what_a_refusal_advises_fits(self):
        adapters = 'ballast.adapters={"targets": "all-linear", "rank": 4}'
        auto = ("zero_optimization.offload_optimizer.device=auto",
                "zero_optimization.offload_param.device=auto")
        none = ("zero_optimization.offload_optimizer.device=none",)
        for run in (("train_batch_size=4096", "train_micro_batch_size_per_gpu=1024"),
                    ("ballast.activations=device", "ballast.order=layer_major",
                     "train_batch_size=8192", "train_micro_batch_size_per_gpu=1"),
                    ("ballast.gradients=host", "model.hidden_size=512", "ballast.host_bytes=8MiB",
                     *auto),
                    ("model.hidden_size=1024", *none),
                    ("data.sequence_length=100000", "train_batch_size=1",
                     "train_micro_batch_size_per_gpu=1", *auto),
                    ("ballast.train=adapters", adapters, "model.hidden_size=1024",
                     "train_micro_batch_size_per_gpu=8", *none)):
            with self.subTest(run=run):
                done = self.plan(*settings(*run))
                assert_one_line(self, done, 1, ["budget of ", "; it would fit with "])
                ways = done.stderr.strip().split("it would fit with ")[1].split(", or with ")
                for way in ways:
                    changes = re.findall(r"--set (\S+)", way)
                    changes += [f"ballast.{tier}_bytes={size.replace(' ', '')}" for tier, size in
                                re.findall(r"(device|host) memory of ([\d.]+ \w+)", way)]
                    self.assertTrue(changes, way)
                    followed = self.plan(*settings(*run, *changes))
                    self.assertEqual(followed.returncode, 0, f"{way}: {followed.stderr}")

    def test_a_large_vocabulary_is_cut_where_nothing_else_fits(self):
        # Sizes of kernels are those of the device that the rates describe.
        self.rates.write_text(json.dumps({**RATES, "shared_cores": 2, "compute_threads": 1,
                                          "update_threads": 1}))
        large = ("model.vocab_size=32768", "model.tie_embeddings=true", "ballast.device_bytes=16MiB", "ballast.host_bytes=1GiB",
                 *ALL_AUTO)
        done = self.plan(*settings(*large, "model.vocabulary_tiles=1"))
        assert_one_line(self, done, 1, ["; it would fit with --set model.vocabulary_tiles="])
        change = re.search(r"--set (model.vocabulary_tiles=\d+)", done.stderr).group(1)
        followed = self.plan(*settings(*large, change))
        self.assertEqual(followed.returncode, 0, followed.stderr)
        # Left to the program, the number is the same, and a line says so.
        done = self.plan(*settings(*large), "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f'planner: "auto" takes {change}, because nothing fits', done.stderr)
        tiles = int(change.split("=")[1])
        text = self.plan(*settings(*large)).stdout
        self.assertRegex(text, rf"blocks +{tiles + 3 + 1} ")  # tied: tiles, layers, norm
        roomy = self.plan(*settings(*large, "ballast.device_bytes=1GiB"))
        self.assertEqual((roomy.returncode, roomy.stderr), (0, ""))

    def test_memory_that_no_budget_counts_is_said(self):
        for save, words in ((True, "for the program, [0-9.]+ [KM]iB more while weights are saved"),
                            (False, "for the program")):
            text = self.plan(*settings(f"ballast.save_weights={str(save).lower()}")).stdout
            lines = re.search(r"\n  not budgeted +(about .*\n(?: {20}.*\n)*)", text).group(1)
            self.assertRegex(" ".join(lines.split()), f"^about 25.0 MiB of host memory {words}$")

    def test_writes_nothing_but_what_was_asked_for(self):
        before = sorted(self.path.rglob("*"))
        self.planned()
        self.assertEqual(sorted(self.path.rglob("*")), before)

    def test_trace_is_the_simulated_one(self):
        trace = self.path / "trace.json"
        self.planned("--trace", trace)
        events = json.loads(trace.read_text())["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        self.assertGreater(len(slices), 10)
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        self.assertEqual(names, ["simulated"])

    def test_the_decided_config_leaves_nothing_open(self):
        # A GPU's workspace alone exceeds the budget.
        self.rates.write_text(json.dumps({**RATES, "shared_cores": 4, "compute_threads": 1,
                                          "update_threads": 1}))
        tight = ("ballast.device_bytes=1200KiB", "ballast.host_bytes=1500KiB",
                 "ballast.compute_threads=1")
        plan = self.planned(*settings(*ALL_AUTO, *tight))
        self.assertGreater(plan["simulated"], 1)
        self.assertEqual(plan["micro_batch"] * plan["accumulation"], 8)
        self.config.write_text(json.dumps(plan["config"]))
        again = self.planned()
        self.assertEqual(again["simulated"], 1)
        for key in ("ledger", "placement", "predicted_step_seconds", "micro_batch"):
            self.assertEqual(again[key], plan[key], key)

    def test_budgets_left_open_are_those_of_the_rates(self):
        plan = self.planned(*settings("ballast.device_bytes=auto", "ballast.host_bytes=auto"))
        self.assertEqual(plan["budgets"], {"device": 24 << 30, "host": 64 << 30})

    def test_a_rank_holds_its_part(self):
        """Weights, states and gradients of a rank as in Table 1 of the ZeRO paper, with 2, 10 and 2
        bytes per parameter. States are padded to pages, and arrays have gaps between them."""
        home = settings("zero_optimization.offload_optimizer.device=none",
                        "zero_optimization.offload_param.device=none",
                        "model.hidden_size=768", "ballast.device_bytes=1GiB")
        alone = self.planned(*home)
        parameters = alone["parameters"]
        for stage in (0, 1, 2, 3):
            for world in (2, 4):
                plan = self.planned(*home, *settings(f"zero_optimization.stage={stage}"),
                                    "--world", world)
                lines = {line["kind"]: line["bytes"] for line in plan["ledger"]
                         if line["tier"] == "device"}
                expected = {"weights": (2, stage >= 3), "optimizer states": (10, stage >= 1),
                            "gradients": (2, stage >= 2)}
                for kind, (each, split) in expected.items():
                    exact = parameters * each / (world if split else 1)
                    self.assertGreaterEqual(lines[kind], exact, (kind, stage, world))
                    self.assertLess(lines[kind], 1.05 * exact, (kind, stage, world))

    def test_ranks_share_the_batch(self):
        plan = self.planned("--world", 4)
        self.assertEqual(plan["world"], 4)
        self.assertEqual(plan["accumulation"], 1)
        self.assertEqual(plan["tokens_per_step"], 8 * 32)
        self.assertGreater(plan["lanes"]["reduce"]["bytes"], 0)

    def test_ranks_of_this_machine_need_no_rates(self):
        self.write_data()
        done = self.ballast("plan", self.config, "--world", "2", "--json",
                            *settings("zero_optimization.offload_optimizer.device=cpu"))
        self.assertEqual(done.returncode, 0, done.stderr)
        plan = json.loads(done.stdout)
        self.assertEqual(plan["world"], 2)
        self.assertGreater(plan["lanes"]["reduce"]["busy_seconds"], 0)
        self.assertIn("assumes that all 2 ranks run on this machine", done.stderr)

    def test_the_missing_rate_is_named_whatever_the_budget(self):
        without = {key: rate for key, rate in RATES.items()
                   if key not in ("network_gbps", "ranks_per_node")}
        self.rates.write_text(json.dumps(without))
        for budget in ("100KiB", "1GiB"):
            done = self.plan("--world", "2", "--set", f"ballast.device_bytes={budget}")
            assert_one_line(self, done, 2, ["network_gbps is missing"])

    def test_drives_wear_by_the_bytes_of_all_ranks_of_a_machine(self):
        """Two of four ranks of a machine with two swap folders share one. The rates have 4 ranks
        per machine and 1200 TB for the drives of each rank. Without that, a folder is a drive of
        600 TB."""
        folders = settings('zero_optimization.offload_optimizer.nvme_path=["/a", "/b"]')

        def wear(world, share, rated):
            plan = self.planned(*folders, "--world", world)
            per_day = plan["nvme_bytes_written"] * 86400 / plan["predicted_step_seconds"]
            self.assertAlmostEqual(plan["wear"]["terabytes_per_day"] * 1e12,
                                   min(world, 4) * per_day, delta=1e-6 * per_day)
            self.assertAlmostEqual(plan["wear"]["days"] * share * per_day, rated, delta=1e-6 * rated)

        for world in (1, 4):
            wear(world, 1, 1200e12)
        del RATES["drive_writes_tb"]
        self.addCleanup(RATES.update, drive_writes_tb=1200)
        self.rates.write_text(json.dumps(RATES))
        for world, share in ((1, 0.5), (2, 1), (4, 2)):
            wear(world, share, 600e12)
        self.config.write_text(self.config.read_text().replace('"train_batch_size": 8',
                                                               '"train_batch_size": 16'))
        wear(8, 2, 600e12)  # on two machines

    def test_this_machine_is_measured_when_no_rates_are_given(self):
        self.write_data()
        plan = self.ballast("plan", self.config, "--json",
                            *settings("zero_optimization.offload_optimizer.device=cpu"))
        self.assertEqual(plan.returncode, 0, plan.stderr)
        self.assertGreater(json.loads(plan.stdout)["predicted_step_seconds"], 0)

    def test_train_decides_what_is_left_open(self):
        self.write_data()
        done = self.ballast(
            "train", self.config,
            *settings(*ALL_AUTO, "aio.any_file_system=true", "ballast.device_bytes=1200KiB",
                      "ballast.host_bytes=1500KiB",
                      "zero_optimization.offload_optimizer.nvme_path=no"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("plans simulated", done.stderr)

    def test_train_runs_the_plan_that_was_saved(self):
        self.write_data()
        self.rates.write_text(json.dumps({**RATES, "shared_cores": 2, "compute_threads": 2,
                                          "update_threads": 2}))
        saved = self.path / "plan.json"
        tight = settings(*ALL_AUTO, "aio.any_file_system=true", "ballast.device_bytes=1200KiB",
                         "ballast.host_bytes=1500KiB",
                         "zero_optimization.offload_optimizer.nvme_path=no")
        plan = self.planned(*tight, "--save", saved)

        def run(out, *source):
            done = self.ballast("train", self.config, "--steps", 1, "--out", out, *tight, *source)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("measuring", done.stderr)
            return json.loads((self.path / out / "run.json").read_text())["plan"]

        for out, source in (("a", ("--plan", saved)), ("b", ("--rates", self.rates))):
            with self.subTest(source=source):
                used = run(out, *source)
                for key in ("placement", "ledger", "micro_batch", "buffers",
                            "predicted_step_seconds"):
                    self.assertEqual(used[key], plan[key], key)
        for words, arguments in (
                ("model.num_layers was 3 for it and is 2 now",
                 (*tight, *settings("model.num_layers=2"), "--plan", saved)),
                ("not a saved plan", (*tight, "--plan", self.config)),
                ("exclude each other", (*tight, "--plan", saved, "--rates", self.rates))):
            with self.subTest(words=words):
                done = self.ballast("train", self.config, *arguments)
                assert_one_line(self, done, 2, [words])

    # Errors: one line each.

    def test_refusals_name_changes_that_fit(self):
        done = self.plan(*settings("ballast.host_bytes=1MiB", "model.hidden_size=128"))
        assert_one_line(self, done, 1, ["host budget of 1.00 MiB", "too small", "would fit"])

    def test_mistakes_are_one_line(self):
        missing = self.path / "none.json"
        broken = self.path / "broken.json"
        broken.write_text("{")
        cases = [
            (["plan", missing], 2, ["none.json"]),
            (["plan", self.config, "--rates", missing], None, ["none.json"]),
            (["plan", self.config, "--rates", broken], 2, ["broken.json"]),
            (["plan", self.config, "--set", "balast.steps=3"], 2, ["balast", "ballast"]),
            (["plan", self.config, "--rates", self.rates, "--world", "3"], 2,
             ["train_batch_size", "3 ranks"]),
            (["plan", self.config, "--rates", self.rates, "--world", "0"], 2, ["--world"]),
            (["plan", self.config, "--rates", self.rates, "--trace", self.path / "no/t.json"], 2,
             ["no/t.json"]),
            (["plan", self.config, "--rates", self.rates, "--save", self.config], 2,
             ["config.json is an input of this command"]),
            (["plan"], 2, ["CONFIG"]),
            (["plna", self.config], 2, ["plan"]),
        ]
        for arguments, status, words in cases:
            with self.subTest(arguments=arguments):
                done = self.ballast(*arguments)
                assert_one_line(self, done, done.returncode if status is None else status, words)
                self.assertNotEqual(done.returncode, 0)

    def test_a_machine_that_lacks_a_rate_is_named(self):
        self.rates.write_text(json.dumps({key: value for key, value in RATES.items()
                                          if key != "read_gbps"}))
        assert_one_line(self, self.plan(), 2, ["a quick machine", "read_gbps"])

    def test_drives_that_are_too_small_are_named(self):
        self.rates.write_text(json.dumps({**RATES, "nvme_space": "1MB"}))
        assert_one_line(self, self.plan(), 1, ["a quick machine", "drives"])


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main()
