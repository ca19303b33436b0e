#!/usr/bin/env python3
"""Runs the program like a user, with correct and wrong input.

    command_line_test.py PATH_OF_BALLAST

Every mistake must give one clear line on stderr, the exit status (1: the work failed, 2: bad usage or
config), and leave nothing behind.
"""

import json
import os
import pathlib
import re
import resource
import shutil
import struct
import subprocess

from runs import TEXT, TINY, RunTest, main


class CommandLine(RunTest):
    # Successful commands.

    def test_training_writes_metrics_and_a_summary(self):
        done = self.train()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["step"] for line in lines], [1, 2, 3])
        last = json.loads(lines[-1])
        for field in ("loss", "lr", "grad_norm", "tokens", "step_seconds", "tokens_per_second"):
            self.assertIn(field, last)
        self.assertGreater(last["lanes"]["fetch"]["busy_seconds"], 0)
        self.assertGreater(last["bytes"]["writeback"], 0)
        self.assertGreater(last["peak_bytes"]["nvme"], 0)
        for line in done.stdout.splitlines():
            if not line.startswith(("ballast train ", "metrics in ")):  # these end in a path
                self.assertLessEqual(len(line), 80, line)
        self.assertIn("3/3", done.stdout)
        self.assertIn("held-out loss", done.stdout)
        seconds = sum(json.loads(line)["step_seconds"] for line in lines)
        shown = f"{1e3 * seconds:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
        self.assertRegex(done.stdout, rf"(?m)^done in \S+ \({shown} of steps\): 3 steps, ")
        self.assertRegex(done.stdout, r"(?m)^last loss \d+\.\d{4}$")
        self.assert_nothing_left()

    def test_the_printed_config_is_a_config_that_prints_itself(self):
        first = self.train("--print-config", "--set", "gradient_clipping=0.5")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(json.loads(first.stdout)["gradient_clipping"], 0.5)
        printed = self.path / "printed.json"
        printed.write_text(first.stdout)
        second = self.run_ballast("train", printed, "--print-config")
        self.assertEqual(second.stdout, first.stdout)

    def test_every_optimizer_trains(self):
        for kind, params in (("AdamW", {"betas": [0.9, 0.95]}), ("Adam", {"adam_w_mode": False}),
                             ("Adagrad", {"eps": 1e-9}), ("Lion", {"betas": [0.9, 0.98]}),
                             ("sgd", {"momentum": 0.9, "nesterov": True}), ("Adamax", {"eps": 1e-7})):
            done = self.train("--overwrite", optimizer={"type": kind, "params": params})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("results differ", done.stdout)

    def test_compressed_states_are_noted_once_before_the_run(self):
        for states, words in (("8bit", "in 8 bits"), ("bf16_first", "first in bf16")):
            done = self.train("--set", f"ballast.optimizer_states={states}", "--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            plan = done.stdout[:done.stdout.index("1/3")].splitlines()
            said = [line for line in plan if words in line and "results differ" in line]
            self.assertEqual(len(said), 1, done.stdout)
            self.assertLessEqual(len(said[0]), 80)

    def test_same_seed_same_losses_serial_or_lanes(self):
        losses = []
        for arguments in ([], ["--serial"]):
            done = self.train(*arguments, "--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)["loss"] for line in lines])
        self.assertEqual(losses[0], losses[1])

    def test_tokenize_makes_a_token_file_that_trains(self):
        done = self.run_ballast("tokenize", "text.txt", "--out", "text.bin")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.path / "text.bin").stat().st_size, 2 * len(TEXT))
        done = self.train(data={"tokens": ["text.bin"], "text": []})
        self.assertEqual(done.returncode, 0, done.stderr)
        tokenize = ("tokenize", "text.txt", "--out")
        tokens = (self.path / "text.bin").read_bytes()
        self.assert_fails(self.run_ballast(*tokenize, "config.json"), 2, "config.json exists")
        self.assert_fails(self.run_ballast(*tokenize, "text.txt", "--overwrite"), 2, "an input")
        self.assertEqual(self.run_ballast(*tokenize, "config.json", "--overwrite").returncode, 0)
        self.assertEqual((self.path / "config.json").read_bytes(), tokens)

    def written_to_output(self, *arguments):
        """Returns the output of a command. Everything else is on standard error."""
        done = subprocess.run([self.ballast, *map(str, arguments)], cwd=self.path, check=True,
                              capture_output=True, timeout=240)
        return done.stdout

    def test_output_files_are_alone_on_standard_output(self):
        config = self.config()
        rates = ("--rates", pathlib.Path(__file__).parents[2] / "configs/rates/rtx4090-1nvme.json")
        (self.path / "link").symlink_to("/dev/stdout")
        for name in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"):
            trace = self.written_to_output("train", config, "--overwrite", "--trace", name)
            self.assertIn("traceEvents", json.loads(trace))
        self.assertEqual({entry.name for entry in self.path.iterdir()},
                         {"config.json", "text.txt", "run", "link"})
        self.assertIn("traceEvents", json.loads(self.written_to_output(
            "plan", config, *rates, "--json", "--trace", "-")))
        self.assertIn("ballast_plan", json.loads(self.written_to_output(
            "plan", config, *rates, "--save", "-")))
        tokens = self.written_to_output("tokenize", "text.txt", "--out", "-")
        self.assertEqual(len(tokens), 2 * len(TEXT))
        self.assertRegex(self.written_to_output("report", "run", "--csv", "-"), rb"\Astep,[^\n]*\n1,")
        for page in (("plan", config, *rates, "--html"), ("report", "run", "--out"),
                     ("bench", "adam", "--params", "1Mi", "--html")):
            self.assertRegex(self.written_to_output(*page, "-"), rb"(?s)\A<!doctype .*</html>\n\Z")
        done = self.run_ballast("plan", config, *rates, "--html", "-", "--trace", "/dev/fd/1")
        self.assert_fails(done, 2, "named for two outputs")

    def test_a_reader_that_closes_the_output_early_is_no_failure(self):
        self.assertEqual(self.run_ballast("tokenize", "text.txt", "--out", "/dev/null").returncode, 0)
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([self.ballast, "tokenize", "text.txt", "--out", "-"], cwd=self.path,
                              text=True, stdout=write, stderr=subprocess.PIPE, check=False)
        os.close(write)
        self.assertEqual((done.returncode, done.stderr), (141, ""))

    def test_paths_of_the_command_line_that_cannot_be(self):
        config = self.config()
        for words, *arguments in (
                ("--out: text.txt is a file", "train", config, "--out", "text.txt"),
                ("text.txt is a file", "train", config, "--out", "text.txt/run"),
                ("text.txt is a file", "export", "run", "--out", "text.txt/x"),
                ("--resume: ", "train", config, "--resume=no"),
                ("not a directory", "train", config, "--resume=text.txt"),
                ("there is no folder no/such", "plan", config, "--html", "no/such/x.html"),
                ("text.txt is a file", "bench", "adam", "--html", "text.txt/x.html")):
            (self.path / "run").mkdir(exist_ok=True)
            self.assert_fails(self.run_ballast(*arguments), 2, words)

    def test_names_of_files_cannot_break_the_line(self):
        for status, *arguments in ((2, "train", "no\nconfig.json"), (1, "inspect", "no\n\x1b[31mrun"),
                                   (2, "tokenize", "text.txt", "--out", "no\nfolder/x")):
            self.assert_fails(self.run_ballast(*arguments), status, "no\\u000a")

    def test_a_working_directory_that_was_deleted_is_named(self):
        gone = self.path / "gone"
        gone.mkdir()
        done = subprocess.run(["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', gone, self.ballast,
                               "train", "config.json"], capture_output=True, text=True, check=False)
        self.assert_fails(done, 1, "the working directory does not exist any more")

    def test_version_lists_what_is_built_in(self):
        done = self.run_ballast("--version")
        self.assertEqual(done.returncode, 0)
        for word in ("devices", "communicators", "I/O backends", "instruction sets", "scalar"):
            self.assertIn(word, done.stdout)

    def test_device_auto_says_in_one_line_why_the_host_device_where_cuda_is_built_in(self):
        version = self.run_ballast("--version")
        self.assertEqual(version.stderr, "")
        with_cuda = re.search(r"devices +host, cuda \(CUDA [0-9.]+, for drivers from [0-9]+ on\)$", version.stdout, re.M) is not None
        done = self.train("--set", "ballast.device=auto")
        self.assertEqual(done.returncode, 0, done.stderr)
        if with_cuda:
            self.assertRegex(done.stderr, re.compile(
                r"\Aballast: device: using the host device; .*cuda.*\n\Z", re.I))
        else:
            self.assertEqual(done.stderr, "")

    # Mistakes in the command line and the config.

    def test_unknown_command(self):
        self.assert_fails(self.run_ballast("trian", "x.json"), 2, "trian", "did you mean 'train'")

    def test_config_named_without_a_directory(self):
        self.config()
        done = self.run_ballast("train", "config.json", "--print-config")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_unknown_option(self):
        self.assert_fails(self.train("--stepps", "3"), 2,
                          "ballast train has no option --stepps (did you mean '--steps'?); "
                          "see ballast train --help")

    def test_usage_mistakes_say_what_to_write(self):
        """A few of the lines of tests/unit/tools/usage_test.cpp."""
        self.config()
        for line, message in (
                ("train config.json --out --serial", "--out needs a value: --out DIR"),
                ("train config.json --steps 0", "--steps: must be at least 1, got 0; see ballast train --help"),
                ("--nproc_per_node 4 train config.json",
                 "mpirun -n N --bind-to none ballast train CONFIG"),
                ("help trian", "'trian' is not a ballast command (did you mean 'train'?)")):
            with self.subTest(line):
                self.assert_fails(self.run_ballast(*line.split()), 2, message)

    def test_a_path_on_the_command_line_that_is_not_there_is_a_usage_error(self):
        self.config()
        (self.path / "run").mkdir()
        (self.path / "run/run.json").write_text("{}")
        (self.path / "run/config.json").write_text("{}")
        for line, message in (
                ("inspect nowhere", "PATH: nowhere: no such file or folder"),
                ("export nowhere --out x", "hf download nowhere"),
                ("eval nowhere", "PATH: nowhere: no such file or folder"),
                ("eval config.json --data nowhere", "--data: nowhere: no such file or folder"),
                ("report nowhere", "RUN: nowhere: no such directory"),
                ("report config.json", "RUN: config.json is not a directory"),
                ("report run/config.json", "is not a directory; give run"),
                ("tokenize nowhere --out x", "TEXT: nowhere: no such file or folder"),
                ("bench io --path nowhere", "--path: nowhere: no such directory"),
                ("tune io --path text.txt", "--path: text.txt is not a directory"),
                ("plan config.json --rates nowhere", "--rates: nowhere: no such file"),
                ("train config.json/x", "config.json is a file, not a folder"),
                ("train run", "run is the directory of a run, not a file; its config is "
                 "run/config.json")):
            with self.subTest(line):
                done = self.run_ballast(*line.split())
                self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
                self.assertIn(message, done.stderr)

    def test_a_file_of_another_kind_as_config_is_named(self):
        files = {"chat.jsonl": (b'{"messages": []}\n{"messages": []}\n', "is JSON Lines, not a config: "
                                "'tools/prepare.py chat.jsonl --model DIR --out chat.safetensors'"),
                 "model.json": (b'{"architectures": ["Llama"]}', "is the config.json of a model"),
                 "c.yaml": (b"model:\n  path: somewhere\n", "is not JSON (.yaml)"),
                 "c.parquet": (b"PAR1" + bytes(60) + b"PAR1", "is a Parquet file, not a config"),
                 "wide.json": ("{}".ljust(80).encode("utf-16"), "iconv -f UTF-16 -t UTF-8 wide.json")}
        for name, (content, message) in files.items():
            (self.path / name).write_bytes(content)
            self.assert_fails(self.run_ballast("train", name), 2, name, message)
        # A config in one line has the keys of a row of data, but its own error takes precedence.
        self.assert_fails(self.train(balast={}), 2, "balast: unknown key (did you mean 'ballast'?)")

    def test_resume_takes_its_directory_after_a_space_too(self):
        config = self.config()
        saved = self.run_ballast("train", config, "--set", "ballast.checkpoint_every=1", "--steps", "1")
        self.assertEqual(saved.returncode, 0, saved.stderr)
        for words in (["--resume", "run", config], [config, "--resume", "run"]):
            done = self.run_ballast("train", *words, "--out", "next", "--steps", "2", "--seed", "1234")
            self.assertEqual(done.returncode, 0, done.stderr)
            command = json.loads((self.path / "next/run.json").read_text())["command"]
            self.assertIn("--resume=run", command)
            shutil.rmtree(self.path / "next")
        # The only argument is the config, as before.
        self.config(ballast={"out": None})
        for words, message in ((["--resume", "config.json"], "needs the directory of the run: give --out DIR"),
                               (["config.json", "--resume", ""], "--resume=: must not be empty")):
            done = self.run_ballast("train", *words)
            self.assertEqual(done.returncode, 2)
            self.assertIn(message, done.stderr)

    def test_seed_overrides_the_key(self):
        done = self.train("--seed", "7", "--print-config")
        self.assertEqual(json.loads(done.stdout)["ballast"]["seed"], 7)

    def test_help_in_80_columns_by_option_and_by_command(self):
        for command in ([], ["train"], ["bench", "io"]):
            done = self.run_ballast(*command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertLessEqual(max(map(len, done.stdout.splitlines())), 80)
            self.assertEqual(self.run_ballast("help", *command).stdout, done.stdout)
        self.assertEqual(self.run_ballast("-V").stdout, self.run_ballast("--version").stdout)

    def test_a_reader_that_closes_the_pipe_is_no_error(self):
        read, write = os.pipe()
        os.close(read)
        try:
            done = subprocess.run([self.ballast, "man"], stdout=write, stderr=subprocess.PIPE, check=False)
        finally:
            os.close(write)
        self.assertEqual((done.returncode, done.stderr), (141, b""))

    def test_closed_standard_streams_do_not_mix_output_into_files(self):
        def close():
            for stream in (0, 1, 2):
                os.close(stream)
        done = subprocess.run([self.ballast, "train", str(self.config())], cwd=self.path, check=False,
                              preexec_fn=close)
        self.assertEqual(done.returncode, 0)
        self.assertEqual([row["step"] for row in self.rows()], [1, 2, 3])

    def test_missing_config(self):
        self.config()
        self.assert_fails(self.run_ballast("train", "confg.json"), 2,
                          "CONFIG: confg.json: no such file (did you mean 'config.json'?)")

    def test_config_that_is_no_json(self):
        file = self.path / "broken.json"
        file.write_text('{\n  "model": {,}\n}\n')
        self.assert_fails(self.run_ballast("train", file), 2, "broken.json", "2")

    def test_unknown_key(self):
        self.assert_fails(self.train(gradient_clipp1ng=1.0), 2, "gradient_clipp1ng",
                          "did you mean 'gradient_clipping'")

    def test_wrong_type(self):
        self.assert_fails(self.train(train_micro_batch_size_per_gpu="two"), 2,
                          "train_micro_batch_size_per_gpu")

    def test_numa_node_that_is_not_there(self):
        self.assert_fails(self.train("--set", "ballast.update_numa_node=1000"), 2, "NUMA node",
                          "1000")

    def test_no_number_of_steps(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "steps": 0}), 2, "ballast.steps")

    def test_cuda_where_there_is_none(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "device": "cuda"}), 1, "cuda")

    # Budgets.

    def test_device_budget_too_small_names_the_ledger_line(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "device_bytes": "200KiB"}), 1,
                          "device budget", "too small", "'", "ballast.device_bytes")

    def test_host_budget_too_small_names_the_ledger_line(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "host_bytes": "100KiB"}), 1,
                          "host budget", "too small", "'", "ballast.host_bytes")

    def test_what_a_refusal_advises_fits(self):
        lowest = {"zero_optimization": {"offload_optimizer": {"device": "nvme"},
                                        "offload_param": {"device": "nvme"}},
                  "ballast": {**TINY["ballast"], "host_bytes": "100KiB"}}
        refused = self.train(**lowest)
        self.assert_fails(refused, 1, "host budget", "it would fit with --set ")
        advice = refused.stderr.strip().split("it would fit with ")[1]
        self.assertNotIn("nvme", advice)
        for way in advice.split(", or with "):
            done = self.train(*way.split(), "--overwrite", **lowest)
            self.assertEqual(done.returncode, 0, done.stderr)

    # Data.

    def test_missing_data_file(self):
        self.assert_fails(self.train(data={"text": ["nothing.txt"]}), 1, "nothing.txt")

    def test_data_file_cut_in_mid_token(self):
        (self.path / "odd.bin").write_bytes(b"\1\0\2")
        self.assert_fails(self.train(data={"tokens": ["odd.bin"], "text": []}), 1, "odd.bin")

    def test_token_id_beyond_the_vocabulary(self):
        (self.path / "big.bin").write_bytes(struct.pack("<2000H", *([5] * 1000 + [300] + [5] * 999)))
        self.assert_fails(
            self.train(data={"tokens": ["big.bin"], "text": [], "held_out": 0, "shuffle": False},
                       ballast={**TINY["ballast"], "steps": 40}), 1, "big.bin", "300", "256")

    def test_sequence_longer_than_the_data(self):
        (self.path / "text.txt").write_text("short")
        self.assert_fails(self.train(), 1, "data.text: ", "33")

    def test_inputs_are_checked_before_the_budgets_and_before_a_measurement(self):
        (self.path / "short.txt").write_text("short")
        automatic = {"stage": 1, "offload_optimizer": {"device": "auto"}}
        for setting, words in (("data.text=nothing.txt", ["data.text: cannot read", "nothing.txt"]),
                               ("data.text=short.txt", ["data.text: ", "one sequence needs 33"]),
                               ("model.weights=none.safetensors",
                                ["model.weights: cannot read", "none.safetensors"])):
            errors = []
            for command in ("train", "plan"):
                done = self.run_ballast(
                    command, self.config(zero_optimization=automatic), "--set", setting, "--set",
                    "ballast.device_bytes=100KiB",
                    environment={"XDG_CACHE_HOME": str(self.path / "cache")})
                self.assert_fails(done, 1, *words)
                errors.append(done.stderr)
            self.assertEqual(len(set(errors)), 1, errors)
            self.assertEqual(errors[0].count("\n"), 1, errors[0])
        self.assertFalse((self.path / "run").exists())

    def test_a_template_without_optimizer_trains_like_the_trainer(self):
        file = self.config(zero_optimization={"overlap_comm": True, "reduce_bucket_size": "auto",
                                              "contiguous_gradients": True})
        config = json.loads(file.read_text())
        del config["optimizer"]
        file.write_text(json.dumps(config))
        done = self.run_ballast("train", file, "--steps", "4")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stderr.splitlines()
        self.assertEqual(sum("ignored: " in line for line in lines), 1, done.stderr)
        self.assertIn("ignored: zero_optimization.contiguous_gradients, "
                      "zero_optimization.reduce_bucket_size, zero_optimization.overlap_comm", lines[0])
        self.assertEqual(sum("optimizer: not given" in line for line in lines), 1, done.stderr)
        self.assertIn("\nrate   5e-05, linear to step 4; AdamW, weight decay 0\n", done.stdout)
        self.assertEqual([round(row["lr"], 9) for row in self.rows()],
                         [5e-5, 3.75e-5, 2.5e-5, 1.25e-5])
        done = self.run_ballast("train", file, "--print-config")
        self.assertIn("ballast: ignored: zero_optimization.contiguous_gradients, ", done.stderr)

    def test_mistakes_in_a_config_of_one_line_are_named(self):
        file = self.path / "one.json"
        for text, words in (('"a": 1, "a": 2', ["one.json: model.a: given twice"]),
                            ('"a": NaN', ["one.json: model.a: unknown key"])):
            file.write_text('{"model": {%s}, "train_batch_size": 4}' % text)
            self.assert_fails(self.run_ballast("train", file), 2, *words)

    def test_a_learning_rate_that_deepspeed_would_not_take_is_said_once(self):
        decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}
        note = ("ballast: scheduler.params.warmup_max_lr: not given, so it is optimizer.params.lr "
                "0.002; DeepSpeed would take 0.001\n")
        settings = ["--set", "optimizer.params.lr=2e-3",
                    "--set", "zero_optimization.offload_optimizer.device=none"]
        done = self.train(*settings, scheduler=decay)
        self.assertEqual((done.returncode, done.stderr), (0, note))
        rates = self.path / "rates.json"
        rates.write_text(json.dumps({
            "forward": [{"tokens": 64, "tflops": 5}], "backward": [{"tokens": 64, "tflops": 5}],
            "head": [{"tokens": 64, "tflops": 5}], "device_memory_gbps": 900, "launch_us": 5,
            "update_gbps": 40, "upload_gbps": 20, "offload_gbps": 20}))
        done = self.run_ballast("plan", self.config(scheduler=decay), *settings, "--rates", rates)
        self.assertEqual((done.returncode, done.stderr), (0, note))
        self.assertEqual(self.train("--overwrite", *settings[2:], scheduler=decay).stderr, "")

    def test_held_out_data_too_short_for_an_evaluation(self):
        # An evaluation needs a sequence of 32 tokens plus 1; padding fills its micro-batch.
        for tokens, held, help in ((60, 3, "give more data or "), (100, 5, ", a larger share"),
                                   (640, 32, ", a larger share"), (660, 33, None)):
            (self.path / "text.txt").write_text(TEXT[:tokens])
            done = self.train("--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("held-out loss" in done.stdout, help is None)
            held_out = [line for line in done.stderr.splitlines() if "held-out loss" in line]
            self.assertEqual(len(held_out), 0 if help is None else 1, done.stderr)
            if help is None:
                continue
            for words in ("no held-out loss", f"data.held_out 0.05 of {tokens} tokens is {held},",
                          "needs 33 ", help, "a smaller sequence_length"):
                self.assertIn(words, done.stderr)
        (self.path / "text.txt").write_text(TEXT[:600])
        self.assertEqual(self.train("--overwrite", "--set", "data.held_out=0").stderr, "")

    # Swap space.

    def offload_to(self, path):
        return {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}

    def test_swap_path_missing(self):
        """Expects an error of train and plan before anything is measured, once, with its key."""
        missing = self.offload_to(self.path / "no/where")
        missing["offload_param"] = {"device": "auto"}
        for done in (self.train(zero_optimization=missing),
                     self.run_ballast("plan", self.config(zero_optimization=missing),
                                      environment={"XDG_CACHE_HOME": str(self.path / "cache")})):
            self.assert_fails(done, 1)
            self.assertEqual(
                done.stderr, "ballast: error: zero_optimization.offload_optimizer.nvme_path: "
                f"{self.path}/no/where: no such directory; create it or choose another\n")
        self.assertFalse((self.path / "run").exists())

    def test_a_swap_path_is_made_if_its_parent_exists(self):
        new = [str(self.path / "new"), str(self.path / "other/")]
        offload = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": new}}
        done = self.run_ballast("doctor", self.config(zero_optimization=offload))
        self.assertRegex(done.stdout, f"(?m)^swap folder +ok +{new[0]}: will be made on ")
        failed = self.train("--set", "ballast.device_bytes=100KiB", zero_optimization=offload)
        self.assert_fails(failed, 1, "device budget")
        broken = self.train(environment={"BALLAST_IO_FAULTS": "eio:on=write"},
                            zero_optimization=offload)
        self.assertEqual(broken.returncode, 1)
        self.assertEqual({entry.name for entry in self.path.iterdir()}, {"config.json", "text.txt"})
        done = self.train(zero_optimization=offload)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("new", "other"):
            self.assertEqual(list((self.path / name).iterdir()), [])
            self.assertRegex(done.stderr, f"nvme_path: made the folder {self.path / name} on ")
        again = self.train("--overwrite", zero_optimization=offload)
        self.assertNotIn("made the folder", again.stderr)

    def test_swap_path_is_a_file(self):
        self.assert_fails(self.train(zero_optimization=self.offload_to(self.path / "text.txt")), 1,
                          "text.txt", "directory")

    def test_swap_path_not_writable(self):
        self.assert_fails(self.train(zero_optimization=self.offload_to("/proc/self")), 1,
                          "/proc/self")

    def test_swap_file_beyond_the_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
        self.assert_fails(self.train(limits=limit), 1, "run", "file-size limit")

    def test_swap_disk_full(self):
        disk = self.path / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
                                 capture_output=True, check=False)
        if mounted.returncode != 0:
            self.skipTest("may not mount")
        self.addCleanup(subprocess.run, ["umount", str(disk)], check=True)
        done = self.train(zero_optimization=self.offload_to(disk))
        self.assert_fails(done, 1, "disk")
        self.assertEqual(list(disk.iterdir()), [])

    # I/O backends.

    def test_io_uring_denied_falls_back_and_says_why(self):
        environment = {"BALLAST_IO_DISABLE": "io_uring"}
        done = self.run_ballast("-v", "train", self.config(), environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("io_uring", done.stderr)
        self.assertIn("NVMe by threads", done.stdout)

    def test_io_uring_denied_by_name_is_an_error(self):
        done = self.train(aio={"backend": "io_uring"},
                          environment={"BALLAST_IO_DISABLE": "io_uring"})
        self.assert_fails(done, 1, "io_uring")

    # Failures of the run itself.

    def test_gradients_that_are_never_finite_stop_the_run(self):
        for limit, words in ((3, "not finite in 3 steps in a row"),
                             (1, "not finite in 1 step in a row")):
            # No loss is a number after the first step.
            done = self.train(
                "--overwrite", "--set", "model.init_stddev=1e30",
                optimizer={"type": "AdamW", "params": {"lr": 1e37, "weight_decay": 0.01}},
                ballast={**TINY["ballast"], "steps": 30, "max_skipped_steps": limit})
            self.assert_fails(done, 1, words, "ballast.max_skipped_steps")
            # The last step is shown and recorded before the error.
            lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            self.assertEqual([step["skipped"] for step in steps[-limit - 1:]],
                             [False] + limit * [True])
            self.assertIn(f"error: step {len(steps)}: ", done.stderr)
            self.assertIn(f" {len(steps)}/30 ", done.stdout)
            self.assertIn(" nan ", done.stdout)
            self.assertNotIn("-nan", done.stdout)

    def test_no_skipped_step_allowed_is_said_with_1(self):
        self.assert_fails(self.train("--set", "ballast.max_skipped_steps=0"), 2,
                          "ballast.max_skipped_steps", "must be at least 1, got 0")


if __name__ == "__main__":
    main()
