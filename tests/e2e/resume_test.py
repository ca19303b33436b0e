#!/usr/bin/env python3
"""Stops `ballast train` in every way and resumes from its checkpoints.

    resume_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]

However often a run is stopped, its losses and weights have the bits of a run that was not.
"""

import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import runs
from one_line import assert_one_line

MPIRUN = sys.argv.pop(2) if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else ""
# BALLAST_TEST_KILLS=200 kills more often.
KILLS = int(os.environ.get("BALLAST_TEST_KILLS", "3"))


class ResumeTest(runs.CheckpointTest):
    BALLAST = {**runs.CheckpointTest.BALLAST, "eval_every": 5}
    TIGHT = "16MiB"  # not enough for a vocabulary of 32768 in one tile

    def copied_run(self):
        """The first steps of a run, computed once and copied for each test that resumes from
        them."""
        if not (self.path / "part").exists():
            self.part_of_run()
            (self.path / "run").rename(self.path / "part")
        shutil.rmtree(self.path / "run", ignore_errors=True)
        shutil.copytree(self.path / "part", self.path / "run")

    def test_killed_at_random_moments(self):
        expected = self.reference()
        seed = random.randrange(1 << 30)
        dice = random.Random(seed)
        whole = self.time_of_a_run()
        killed = resumed = 0
        while killed < KILLS:
            shutil.rmtree(self.path / "run", ignore_errors=True)
            while True:
                process = self.start("--resume=auto")
                try:
                    out, errors = process.communicate(timeout=dice.uniform(0, 1.1 * whole))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    killed += 1
                    continue
                self.assertEqual(process.returncode, 0, f"seed {seed}: {errors}")
                resumed += "states of step " in out or "is finished" in out
                break
            self.assertEqual(self.results(), expected, f"seed {seed}")
            self.assertEqual(self.checkpoints(), ["step-18", "step-20"])
        self.assertGreater(resumed, 0)

    def test_killed_while_writing_a_checkpoint_it_keeps_the_others(self):
        self.config(ballast={**self.BALLAST, "steps": 100000, "eval_every": 0})
        for after in range(KILLS):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            process = self.start()
            self.wait_for_row(process, 6 + after)
            deadline = time.monotonic() + 60
            complete = False  # two of them
            while time.monotonic() < deadline and process.poll() is None:
                names = self.checkpoints()
                if complete and any(name.startswith(".incomplete-") for name in names):
                    break
                complete = complete or sum(name.startswith("step-") for name in names) >= 2
            time.sleep(0.003 * after)
            process.kill()
            process.communicate()
            listed = json.loads(self.run_ballast("inspect", "run", "--verify", "--json").stdout)
            whole = [entry["step"] for entry in listed["checkpoints"] if entry["whole"]]
            self.assertGreaterEqual(len(whole), 2, listed)

    def test_weights_that_were_not_saved_are_saved_later(self):
        expected = self.reference()
        self.part_of_run(steps=self.STEPS)
        shutil.rmtree(self.path / "run/weights")
        done = self.resume()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.results(), expected)
        done = self.resume()
        self.assertEqual(done.returncode, 0, done.stderr)  # nothing is left to do
        self.assertEqual(self.results(), expected)

    def test_tiles_that_a_small_budget_needed_stay_whatever_the_budget_of_the_resume(self):
        model = {**runs.TINY["model"], "vocab_size": 32768}

        def sections(device_bytes):
            return {"model": model, "ballast": {**self.BALLAST, "placement": [],
                                                "device_bytes": device_bytes}}

        def tiles(out):
            return json.loads((self.path / out / "config.json").read_text())["model"][
                "vocabulary_tiles"]

        done = self.train("--out", "reference", **sections(self.TIGHT))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('"auto" takes model.vocabulary_tiles=', done.stderr)
        self.assertGreater(tiles("reference"), 1)
        done = self.train("--out", "roomy", **sections("256MiB"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(tiles("roomy"), 1)
        self.part_of_run(**sections(self.TIGHT))
        done = self.resume(**sections("256MiB"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(tiles("run"), tiles("reference"))
        self.assertEqual(self.results(), self.results("reference"))
        # And the other way round: without room for its one tile the resume is refused.
        self.part_of_run("--out", "one", **sections("256MiB"))
        done = self.train("--resume", "one", "--out", "two", **sections(self.TIGHT))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the device budget of ", done.stderr)

    def time_of_a_run(self):
        started = time.monotonic()
        self.part_of_run(steps=self.STEPS)
        return time.monotonic() - started

    def test_a_signal_ends_it_after_a_checkpoint_and_names_the_command(self):
        expected = self.reference(ballast={**self.BALLAST, "checkpoint_every": 1000})
        for number in (signal.SIGTERM, signal.SIGINT):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            process = self.start()
            self.wait_for_row(process, 3)
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
            lines = out.splitlines()
            ended = not lines[-1].startswith("to continue: ")  # before the signal
            self.assertEqual((process.returncode, runs.without_notice(err)),
                             (0 if ended else runs.RESUMABLE, ""))
            if ended:
                continue
            self.assertIn(f"{number.name}: the run ends after the step that is running, with a "
                          "checkpoint; ", err)
            self.assertTrue(any(line.startswith("interrupted after step ") for line in lines))
            done = self.go_on_with(lines[-1])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.results(), expected)

    def test_sigusr1_writes_a_checkpoint(self):
        self.config(ballast={**self.BALLAST, "checkpoint_every": 1 << 30, "steps": 100000,
                             "eval_every": 0})
        process = self.start()
        self.wait_for_row(process, 2)
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 120
        while not self.checkpoints() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        self.assertEqual(process.returncode, runs.RESUMABLE)
        self.assertEqual(len(self.checkpoints()), 2)

    def test_other_placements_and_splits_give_the_same_bits(self):
        expected = self.reference()
        for arguments in (("zero_optimization.offload_optimizer.device=cpu",),
                          ("zero_optimization.offload_optimizer.device=none",),
                          ("zero_optimization.offload_optimizer.device=none",
                           "zero_optimization.offload_param.device=nvme",
                           "zero_optimization.stage=3"),
                          ("ballast.update_threads=3", "ballast.order=micro_batch_major")):
            self.copied_run()
            done = self.resume(*[word for each in arguments for word in ("--set", each)])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.results(), expected, arguments)

    def test_other_formats_of_states(self):
        for optimizer in ("8bit",) if KILLS < 200 else ("8bit", "bf16_first"):
            sections = {"ballast": {**self.BALLAST, "optimizer_states": optimizer}}
            expected = self.reference(**sections)
            self.part_of_run(**sections)
            self.assertEqual(self.resume(**sections).returncode, 0)
            self.assertEqual(self.results(), expected, optimizer)
            for out in ("run", "reference"):
                shutil.rmtree(self.path / out)

    def test_frozen_tensors(self):
        for device in ("none", "nvme"):
            def sections(*patterns):
                return {"ballast": {**self.BALLAST, "train": patterns},
                        "zero_optimization": {"offload_param": {"device": device}}}
            some = sections("model.layers.1.mlp.*", "model.norm.weight")
            expected = self.reference(**some)
            self.part_of_run(**some)
            for other in (("*",), ("model.layers.1.self_attn.*", "model.norm.weight")):
                done = self.resume(**sections(*other))
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn("another ballast.train", done.stderr)
            done = self.resume(**some)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("copied", done.stderr)
            self.assertEqual(self.results(), expected)
            for out in ("run", "reference"):
                shutil.rmtree(self.path / out)

    def test_adapters(self):
        def sections(**adapters):
            adapters = {"targets": ["q_proj", "down_proj"], "rank": 2, "dropout": 0.2, **adapters}
            return {"ballast": {**self.BALLAST, "train": "adapters", "adapters": adapters}}
        some = sections()
        expected = self.reference(**some)
        self.part_of_run(**some)
        for other, words in (
                (sections(alpha=9), "with ballast.adapters.alpha 8, but the config has 9"),
                (sections(rank=3), "with ballast.adapters.rank 2, but the config has 3"),
                (sections(targets=["q_proj"]),
                 "with ballast.adapters.targets down_proj, q_proj, but the config has q_proj"),
                (sections(dora=True, dropout=0),
                 "with ballast.adapters.dora false, but the config has true"),
                ({"ballast": self.BALLAST}, "with adapters, but the config has none")):
            done = self.resume(**other)
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertIn(f"was written {words}", done.stderr)
        done = self.resume(**some)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.results(), expected)

    def test_quantized_base(self):
        def sections(**base):
            adapters = {"targets": ["q_proj", "down_proj"], "rank": 2}
            return {"ballast": {**self.BALLAST, "train": "adapters", "adapters": adapters, **base}}
        some = sections(quantized_base="nf4", double_quantization=True)
        expected = self.reference(**some)
        self.part_of_run(**some)
        for other, words in (
                (sections(), "quantized_base nf4, but the config has none"),
                (sections(quantized_base="nf4"),
                 "double_quantization true, but the config has false"),
                (sections(quantized_base="int8"), "quantized_base nf4, but the config has int8")):
            done = self.resume(**other)
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertIn(f"was written with ballast.{words}", done.stderr)
        done = self.resume(**some)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.results(), expected)

    def test_latent_attention_and_moving_router_biases(self):
        few = {**self.BALLAST, "steps": 6, "eval_every": 2}
        some = {"ballast": few, "model": {
            "family": "deepseek_v3", "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2,
            "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
            "v_head_dim": 8, "intermediate_size": 40, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "n_group": 2, "topk_group": 1, "router_bias_update_speed": 0.01}}
        expected = self.reference(**some)
        self.part_of_run(steps=4, **some)
        done = self.resume("--set", "model.router_bias_update_speed=0", **some)
        assert_one_line(self, done, 2, ["model.router_bias_update_speed 0.01 -> 0.0"])
        done = self.resume("--set", "zero_optimization.offload_param.device=nvme", **some)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.results(), expected)
        facts = json.loads((self.path / "run/checkpoints/step-6/checkpoint.json").read_text())
        [biases] = facts["content"]["correction_biases"]
        self.assertGreater(max(biases), 0.005)
        [file] = (self.path / "run/weights").glob("*.safetensors")
        self.assertTrue(struct.pack("<8f", *biases) in file.read_bytes(), biases)

    def test_states_of_recurrences_and_layers_of_two_shapes(self):
        few = {**self.BALLAST, "steps": 4, "eval_every": 2}
        adapters = {**few, "train": "adapters", "quantized_base": "nf4",
                    "adapters": {"targets": "all-linear", "rank": 2}}
        delta = {"family": "qwen3_5", "hidden_size": 32, "num_heads": 2, "head_dim": 16,
                 "num_layers": 2, "full_attention_interval": 2, "linear_num_key_heads": 1,
                 "linear_num_value_heads": 2, "linear_key_head_dim": 12,
                 "linear_value_head_dim": 8}
        gemma = {"family": "gemma4", "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1,
                 "num_layers": 2, "head_dim": 8, "global_head_dim": 12, "sliding_window": 7,
                 "layer_types": ["sliding_attention", "full_attention"]}
        lfm2 = {"family": "lfm2", "hidden_size": 32, "num_heads": 2, "num_layers": 2,
                "full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 8}
        for some in ({"ballast": few, "model": delta}, {"ballast": adapters, "model": delta},
                     {"ballast": few, "model": lfm2}, {"ballast": adapters, "model": lfm2},
                     {"ballast": few, "model": gemma}):
            with self.subTest(family=some["model"]["family"], train=some["ballast"].get("train")):
                expected = self.reference(**some)
                self.part_of_run(steps=2, **some)
                done = self.resume("--set", "ballast.order=micro_batch_major", **some)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(self.results(), expected)
                for made in ("run", "reference"):
                    shutil.rmtree(self.path / made)

    def test_changes_of_results_are_refused_or_allowed_by_name(self):
        self.part_of_run(steps=2)
        other = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}}
        (self.path / "other").mkdir()
        (self.path / "other/moved.txt").write_text((self.path / "text.txt").read_text())
        (self.path / "other.txt").write_text((self.path / "text.txt").read_text()[::-1])
        for sections, words in (
                (other, ('optimizer.type "AdamW" -> "Lion"', "--allow-change optimizer")),
                ({"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}}},
                 ("optimizer.params.lr 0.001 -> 0.002;", "--allow-change optimizer.params.lr")),
                ({"data": {"text": ["other.txt"]}}, ("data.text", "--allow-change data.text")),
                ({"gradient_clipping": 0.5, "ballast": {**self.BALLAST, "seed": 7}},
                 ("ballast.seed 1234 -> 7", "gradient_clipping 1.0 -> 0.5"))):
            for place in (("--resume",), ("--resume=run", "--out", "elsewhere")):
                done = self.train(*place, "--steps", 3, **{"ballast": self.BALLAST, **sections})
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
        # The place of the data may change, as may steps and placement.
        done = self.resume("--steps", 3, "--set", "zero_optimization.stage=2",
                           data={"text": ["other/moved.txt"]})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = self.resume("--steps", 4, "--allow-change", "optimizer", **other)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the run changes optimizer.params.betas [0.9,0.999] -> [0.9,0.99], as", done.stderr)
        changes = json.loads((self.path / "run/run.json").read_text())["changes"]
        self.assertIn('optimizer.type "AdamW" -> "Lion"', changes)
        done = self.resume("--steps", 5, **other)  # its latest checkpoint has the new settings
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for arguments, word in ((("--resume", "--allow-change", "optimiser"), "did you mean 'optimizer'"),
                                (("--resume", "--allow-change", "ballast.out"), "may change without"),
                                (("--allow-change", "all"), "--resume")):
            done = self.train(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)

    def damage(self, name, change):
        file = self.path / "run/checkpoints" / name
        content = bytearray(file.read_bytes())
        change(content)
        file.write_bytes(content)

    def test_a_damaged_checkpoint_is_named_and_skipped(self):
        expected = self.reference()
        def flip(content):
            content[len(content) // 2] ^= 4
        for name, change in (("rank-0.states", flip), ("rank-0.states", lambda c: c.pop()),
                             ("rank-0.json", flip), ("checkpoint.json", flip),
                             ("checkpoint.json", lambda c: c.clear())):
            self.copied_run()
            self.damage("step-10/" + name, change)
            done = self.resume()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("warning: skipped a checkpoint: ", done.stderr)
            self.assertIn("step-10/" + name, done.stderr)
            self.assertIn("states of step 8 from ", done.stdout)
            self.assertEqual(self.results(), expected, name)
            self.assertEqual(done.stderr.count("now called damaged-step-10"), 1)
            self.assertEqual(self.checkpoints(), ["damaged-step-10", "step-18", "step-20"])

    def extents(self, step, out="run"):
        """Begin and size of the extents that a checkpoint keeps in its only swap file."""
        path = self.path / out / f"checkpoints/step-{step}/rank-0.json"
        swap = json.loads(path.read_text())["content"]["swap"]
        begins = list(itertools.accumulate(swap["extents"], initial=0))
        return [(begins[home["extent"]], swap["extents"][home["extent"]])
                for home in swap["homes"]]

    def test_states_on_nvme_are_not_copied(self):
        expected = self.reference()
        self.part_of_run()
        newest = self.path / "run/checkpoints/step-10"
        older = self.path / "run/checkpoints/step-8"
        self.assertEqual(os.stat(newest / "rank-0.swap-0").st_ino,
                         os.stat(older / "rank-0.swap-0").st_ino)
        kept = {begin for begin, _ in self.extents(10)}
        self.assertFalse(kept & {begin for begin, _ in self.extents(8)})
        content = json.loads((newest / "rank-0.json").read_text())["content"]
        copied = {block for block, kind, *_ in content["ranges"] if kind != "weights"}
        self.assertEqual(copied, {1})  # in host memory
        self.assertEqual((newest / "rank-0.states").stat().st_size, content["bytes"])
        inode = os.stat(newest / "rank-0.swap-0").st_ino
        done = self.resume()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("copied", done.stderr)
        self.assertEqual(self.results(), expected)
        last = self.path / "run/checkpoints/step-20/rank-0.swap-0"
        self.assertEqual(os.stat(last).st_ino, inode)
        self.assertEqual(os.stat(last).st_nlink, 2)  # names in step-18 and step-20

    def test_damaged_states_on_nvme_are_skipped(self):
        expected = self.reference()
        self.part_of_run()
        begin, size = self.extents(10)[-1]
        name = self.path / "run/checkpoints/step-10/rank-0.swap-0"
        with name.open("r+b") as file:
            file.seek(begin + size // 2)
            byte = file.read(1)
            file.seek(begin + size // 2)
            file.write(bytes([byte[0] ^ 1]))
        done = self.resume()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("step-10/rank-0.swap-0: damaged: ", done.stderr)
        self.assertIn("states of step 8 from ", done.stdout)
        self.assertEqual(self.results(), expected)

    def test_another_number_of_checkpoints_copies_into_new_swap_files(self):
        expected = self.reference()
        self.part_of_run()
        done = self.resume("--set", "ballast.checkpoint_keep=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("were copied to new swap files", done.stdout + done.stderr)
        self.assertEqual(self.results(), expected)
        self.assertEqual(self.checkpoints(), ["step-20"])

    def test_another_number_of_devices_continues_in_the_same_swap_files(self):
        model = {"model": {**runs.TINY["model"], "vocabulary_tiles": 2}}
        expected = self.reference(**model)
        self.part_of_run(**model)
        for steps, devices in ((15, 3), (20, 1)):
            done = self.resume("--steps", steps, "--set", f"pipeline.stages={devices}", **model)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("copied", done.stdout + done.stderr)
        self.assertEqual(self.results(), expected)

    def test_swap_files_on_another_file_system_go_with_their_checkpoints(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
            if os.stat(other).st_dev == os.stat(self.path).st_dev:
                self.skipTest("one file system")
            there = {"zero_optimization": {"offload_optimizer": {"device": "nvme",
                                                                 "nvme_path": other}},
                     "aio": {"buffered": True, "any_file_system": True}}
            expected = self.reference(**there)
            def files_and_records():
                names = [path.name for path in pathlib.Path(other).iterdir()]
                return sum(".swap-" in name for name in names), len(names)
            self.assertEqual(files_and_records(), (2, 3))
            self.part_of_run(**there)
            self.assertEqual(files_and_records(), (4, 6))
            self.damage("step-10/rank-0.states", lambda content: content.clear())
            done = self.resume("--steps", 10, **there)  # its files get the names of the damaged one's
            self.assertIn("states of step 8 from ", done.stdout)
            done = self.resume(**there)
            self.assertIn("states of step 10 from ", done.stdout)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.results(), expected)
            self.part_of_run("--overwrite", "--set", "ballast.checkpoint_every=0", **there)
            self.assertEqual(files_and_records(), (2, 3))  # those of the reference

    def test_a_damaged_one_does_not_displace_an_intact_one(self):
        self.part_of_run()
        def flip(content):
            content[0] ^= 1
        self.damage("step-10/rank-0.states", flip)
        left = self.path / "run/checkpoints/.incomplete-step-12"  # left by a killed process
        left.mkdir()
        (left / "rank-0.states").write_bytes(b"0")
        done = self.resume("--steps", "9", "--set", "ballast.checkpoint_keep=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.checkpoints(), ["damaged-step-10", "step-9"])
        self.assertIn("states of step 9", self.resume().stdout)

    def test_an_older_damaged_one_does_not_count(self):
        self.part_of_run()
        (self.path / "run/checkpoints/step-8/rank-0.states").unlink()
        (self.path / "run/checkpoints/step-4").write_text("a file")
        done = self.resume("--steps", 12)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("an older checkpoint is damaged: "), 2, done.stderr)
        self.assertEqual(self.checkpoints(), ["damaged-step-4", "damaged-step-8", "step-10", "step-12"])
        done = self.resume("--steps", 13)
        self.assertEqual((done.returncode, done.stderr), (0, ""))  # it was reported once

    def test_without_an_intact_one_nothing_is_lost(self):
        self.part_of_run()
        for step in ("step-8", "step-10"):
            (self.path / "run/checkpoints" / step / "rank-0.json").unlink()
        before = (self.path / "run/metrics.jsonl").read_bytes()
        for how in ("--resume", "--resume=auto"):
            done = self.train(how, ballast=self.BALLAST)
            assert_one_line(self, done, 1, ("has no complete checkpoint to resume from",
                                            "all 2 are damaged", "step-10/rank-0.json: No such file"))
            self.assertEqual((self.path / "run/metrics.jsonl").read_bytes(), before)
            self.assertEqual(self.checkpoints(), ["step-10", "step-8"])

    def test_what_does_not_fit_is_refused(self):
        self.part_of_run()
        before = {file: file.read_bytes() for file in (self.path / "run").rglob("*.*")
                  if file.is_file()}
        for arguments, words in (
                (("--set", "model.num_layers=3"), ("step-10", "another model")),
                (("--set", "ballast.optimizer_states=8bit"), ("ballast.optimizer_states",)),
                (("--set", "gradient_accumulation_steps=4"), ("train_batch_size",)),
                (("--steps", "9"), ("has 10 finished steps, but the run only 9", "--steps")),
                (("--out", "elsewhere"), ("has no complete checkpoint", "ballast.checkpoint_every")),
                (("--overwrite",), ("--overwrite", "--resume"))):
            done = self.resume(*arguments)
            self.assertNotEqual(done.returncode, 0, arguments)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            for word in words:
                self.assertIn(word, done.stderr)
        self.assertFalse((self.path / "elsewhere").exists())
        for file, content in before.items():
            self.assertTrue(file.read_bytes() == content, file)

    def test_another_run_does_not_find_old_checkpoints(self):
        self.part_of_run()
        done = self.train(ballast={**self.BALLAST, "checkpoint_every": 0})
        self.assertIn("exists", done.stderr)
        done = self.train("--overwrite", ballast={**self.BALLAST, "checkpoint_every": 0})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.checkpoints(), [])

    def test_a_full_disk_skips_the_checkpoint_and_training_continues(self):
        in_memory = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}},
                     "ballast": {**self.BALLAST, "save_weights": False}}
        done = self.train(limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE,
                                                            (300_000, 300_000)), **in_memory)
        self.assertEqual(done.returncode, 1, done.stderr)  # nothing is left of the run
        *warnings, error = done.stderr.splitlines()
        # The warnings are about the first, second, fourth, eighth and last of ten checkpoints.
        self.assertEqual([line.split()[3] for line in warnings], ["2:", "4:", "8:", "16:", "20:"])
        for line in warnings:
            self.assertIn("rank-0.states: File too large", line)
            self.assertEqual("training continues" in line, line != warnings[-1])
        self.assertIn("error: step 20: the last step has no checkpoint", error)
        self.assertEqual(self.checkpoints(), [])
        self.assertEqual(self.steps(), list(range(1, self.STEPS + 1)))

    def test_checkpoints_and_swap_files_must_fit_together(self):
        image, disk = self.path / "image", self.path / "disk"
        disk.mkdir()
        with open(image, "wb") as file:
            file.truncate(8 << 20)
        for command in (["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image],
                        ["mount", "-o", "loop", image, disk]):
            if subprocess.run(command, capture_output=True, check=False).returncode != 0:
                self.skipTest(f"cannot {command[0]} an image")
        self.addCleanup(subprocess.run, ["umount", "-l", disk], check=True)
        sections = {"ballast": {**self.BALLAST, "steps": 4, "save_weights": False}}
        done = self.train("--out", "disk/run", **sections)  # each of them fits alone
        assert_one_line(self, done, 1, ("ballast.checkpoint_every: ", "in addition to swap files of ",
                                        "ballast.checkpoint_keep"))
        self.assertEqual(list(disk.iterdir()), [disk / "lost+found"])
        done = self.train("--out", "disk/run", "--set", "ballast.checkpoint_keep=1", **sections)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def ranks(self, count, *arguments):
        done = subprocess.run([MPIRUN, "-n", str(count), self.ballast, "train", "config.json",
                               *arguments], cwd=self.path, capture_output=True, text=True,
                              timeout=240, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def processes_of(self, rank):
        wanted = {f"BALLAST_RESUME_TEST={self.path}", f"OMPI_COMM_WORLD_RANK={rank}"}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if wanted <= set(environment):
                yield int(entry.name)

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_ranks_killed_at_random_moments(self):
        self.config(ballast={**self.BALLAST, "save_weights": False, "comm_timeout_seconds": 20},
                    train_batch_size=4, train_micro_batch_size_per_gpu=1,
                    gradient_accumulation_steps="auto",
                    zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}})
        started = time.monotonic()
        self.ranks(2, "--out", "reference")
        whole = time.monotonic() - started
        expected = [{key: row.get(key) for key in self.SAME} for row in self.rows("reference")]
        seed = random.randrange(1 << 30)
        dice = random.Random(seed)
        killed = 0
        while killed < max(KILLS // 4, 1):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            while True:
                process = subprocess.Popen(
                    [MPIRUN, "-n", "2", self.ballast, "train", "config.json", "--resume=auto"],
                    cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env={**os.environ, "BALLAST_RESUME_TEST": str(self.path)})
                try:
                    _, errors = process.communicate(timeout=dice.uniform(0, 1.1 * whole))
                except subprocess.TimeoutExpired:
                    for rank in dice.choice(((0,), (1,), (0, 1))):
                        for pid in self.processes_of(rank):
                            os.kill(pid, signal.SIGKILL)
                            killed += 1
                    process.communicate(timeout=120)
                    continue
                self.assertEqual(process.returncode, 0, f"seed {seed}: {errors}")
                break
            found = [{key: row.get(key) for key in self.SAME} for row in self.rows()]
            self.assertEqual(found, expected, f"seed {seed}")

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_other_numbers_of_ranks(self):
        losses = {}
        for stage in (3,) if KILLS < 200 else (0, 1, 2, 3):
            self.config(ballast={**self.BALLAST, "steps": 8, "eval_every": 0}, bf16={"enabled": False},
                        train_batch_size=4, train_micro_batch_size_per_gpu=1,
                        gradient_accumulation_steps="auto",
                        zero_optimization={"stage": stage,
                                           "offload_optimizer": {"device": "nvme"}})
            for worlds in ((1, 4, 2), (2, 2, 2)):
                shutil.rmtree(self.path / "run", ignore_errors=True)
                for world, steps in zip(worlds, ("4", "6", "8")):
                    self.ranks(world, "--steps", steps, *(("--resume",) if steps != "4" else ()))
                losses[stage, worlds] = [row["loss"] for row in self.rows()]
            shutil.rmtree(self.path / "run")
            self.ranks(2)
            self.assertEqual(losses[stage, (2, 2, 2)], [row["loss"] for row in self.rows()])
            shutil.rmtree(self.path / "run")
        expected = losses[3, (2, 2, 2)]
        for run, found in losses.items():
            self.assertEqual(len(found), 8)
            for one, other in zip(found, expected):
                self.assertAlmostEqual(one / other, 1.0, delta=1e-5, msg=str(run))


class RequeuedJobTest(runs.CheckpointTest):
    """Runs one command line for the first attempt and all that follow."""

    STEPS = 4
    BALLAST = {**runs.CheckpointTest.BALLAST, "steps": STEPS}

    def automatic(self, *arguments, **sections):
        return self.train("--resume=auto", *arguments, **{"ballast": self.BALLAST, **sections})

    def files(self):
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"")
                for file in sorted((self.path / "run").rglob("*"))}

    def test_it_starts_in_the_directory_of_a_killed_process(self):
        expected = self.reference()
        rows = (self.path / "reference/metrics.jsonl").read_bytes().splitlines(keepends=True)
        run = self.path / "run"
        for left in ({}, {"metrics.jsonl": b""}, {"metrics.jsonl": b'{"st'},
                     {"metrics.jsonl": rows[0] + rows[1][:40], "config.json": b"{}",
                      "run.json": b"{", "config.json.tmp-12": b"",
                      "checkpoints/.incomplete-step-2/rank-0.states": b"0"}):
            for name, content in left.items():
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_bytes(content)
            done = self.automatic()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("the run begins again" in done.stderr, len(left.get("metrics.jsonl", b"")) > 0)
            self.assertEqual(self.results(), expected)
            self.assertEqual(self.checkpoints(), ["step-2", "step-4"])
            self.assertEqual(list(run.glob("*.tmp-*")), [])
            shutil.rmtree(run)

    def test_a_finished_run_does_not_change(self):
        for sections in ({}, {"ballast": {**self.BALLAST, "checkpoint_every": 0}}):
            self.assertEqual(self.automatic(**sections).returncode, 0)
            before = self.files()
            done = self.automatic(**sections)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^\S*/run is finished: 4 steps, weights in \S*; nothing is left to do$")
            self.assertEqual(self.files(), before)
            if not sections:
                done = self.automatic("--set", "optimizer.params.lr=2e-3")
                assert_one_line(self, done, 2, ("optimizer.params.lr 0.001 -> 0.002", "--allow-change"))
                self.assertEqual(self.files(), before)
                done = self.automatic("--steps", 5)  # then it is not finished
                self.assertEqual((done.returncode, self.steps()), (0, [1, 2, 3, 4, 5]), done.stderr)
            shutil.rmtree(self.path / "run")

    def test_what_it_must_not_replace_is_named(self):
        run = self.path / "run"
        row = '{"step":1,"loss":5.0}\n'
        for left, words in (({"config.json": "{}"}, ("run/config.json exists", "--out")),
                            ({"weights/model.safetensors": ""}, ("run/weights exists", "--out")),
                            ({"metrics.jsonl": "loss 3\n"}, ("run/metrics.jsonl: is not the file of a run",)),
                            ({"metrics.jsonl": row, "weights/config.json": "{}"},
                             ("run/weights: are trained weights without a checkpoint", "--out")),
                            ({"metrics.jsonl": row, "checkpoints/damaged-step-2/rank-0.json": ""},
                             ("checkpoints/damaged-step-2: ", "no complete checkpoint")),
                            ({"metrics.jsonl": row, "checkpoints/step-2/rank-0.json": ""},
                             ("has no complete checkpoint to resume from", "step-2/checkpoint.json"))):
            for name, content in left.items():
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_text(content)
            before = self.files()
            done = self.automatic()
            assert_one_line(self, done, 1 if "no complete checkpoint" in words[0][4:] else 2, words)
            self.assertEqual(self.files(), before)
            shutil.rmtree(run)
        run.write_text("a file")
        assert_one_line(self, self.automatic(), 1, (str(run), "is not a directory"))
        run.unlink()
        done = self.train("--resume=auto", "--overwrite", ballast=self.BALLAST)
        assert_one_line(self, done, 2, ("--overwrite", "--resume"))
        done = self.automatic(ballast={**self.BALLAST, "out": ""})
        assert_one_line(self, done, 2, ("--resume", "--out DIR"))

    def test_a_signal_names_the_same_command(self):
        self.config(ballast={**self.BALLAST, "steps": 100000})
        process = self.start("--resume=auto", "--out", "run")
        self.wait_for_row(process, 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, runs.without_notice(err)), (runs.RESUMABLE, ""))
        self.assertTrue(out.splitlines()[-1].endswith(" train config.json --resume=auto --out run"), out)


if __name__ == "__main__":
    runs.main()
