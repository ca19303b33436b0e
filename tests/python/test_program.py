"""The program as `python -m ballast`, plans, and runs in this process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from support import CONFIG, RATES, FolderTest

import ballast


def with_section(**values):
    return {**CONFIG, "ballast": {**CONFIG["ballast"], **values}}


class Program(FolderTest):
    def run_program(self, *words, **options):
        return subprocess.run([sys.executable, "-m", "ballast", *map(str, words)], capture_output=True,
                              text=True, timeout=100, cwd=self.path, check=False, **options)

    def config(self):
        (self.path / "config.json").write_text(json.dumps(CONFIG))
        return "config.json"

    def test_output_and_statuses(self):
        done = self.run_program("--version")
        self.assertEqual(done.returncode, 0)
        self.assertTrue(done.stdout.startswith(f"ballast {ballast.__version__}\n"), done.stdout)
        for words, status in (((), 2), (("nonsense",), 2), (("train", "missing.json"), 2),
                              (("bench", "io", "--path", "missing"), 2)):
            done = self.run_program(*words)
            self.assertEqual(done.returncode, status, done.stderr)
            if words:
                self.assertTrue(done.stderr.startswith("ballast: error: "), done.stderr)

    def test_a_run(self):
        done = self.run_program("train", self.config(), "--out", "run")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        command = json.loads((self.path / "run/run.json").read_text())["command"]
        self.assertIn("-m ballast train config.json --out run", " ".join(command))

    def test_a_signal_ends_it_as_the_program(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            program = subprocess.Popen(
                [sys.executable, "-m", "ballast", "train", self.config(), "--steps", "1000000", "--out",
                 f"run{number}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.path)
            metrics = self.path / f"run{number}/metrics.jsonl"
            while program.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.01)
            program.send_signal(number)
            output, errors = program.communicate(timeout=60)
            self.assertEqual(program.returncode, 128 + number, errors)
            self.assertNotIn("Traceback", errors)
            self.assertIn("interrupted", output)


class Plans(FolderTest):
    def test_plan(self):
        plan = ballast.plan(CONFIG, rates=RATES)
        values = plan.to_dict()
        self.assertEqual([line.bytes for line in plan.ledger], [line["bytes"] for line in values["ledger"]])
        self.assertEqual(plan.forecast.step_seconds, values["predicted_step_seconds"])
        self.assertEqual(plan.forecast.tokens_per_step, 128)
        peak = {tier: sum(line.bytes for line in plan.ledger if line.tier == tier)
                for tier in plan.forecast.peak_bytes}
        self.assertEqual(peak, plan.forecast.peak_bytes)
        self.assertIn("memory (peak)", str(plan))
        self.assertIn(str(plan), repr(plan))

    def test_it_is_that_of_the_program(self):
        (self.path / "config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "ballast", "plan", "config.json", "--rates", str(RATES)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.assertEqual(str(ballast.plan("config.json", rates=RATES)) + "\n", text)
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        self.assertEqual(ballast.plan(CONFIG, rates=RATES).to_dict(), json.loads(done.stdout))

    def test_overrides_and_ranks(self):
        one = ballast.plan(CONFIG, rates=RATES, overrides=["gradient_accumulation_steps=4"])
        self.assertEqual(one.forecast.tokens_per_step, 256)
        two = ballast.plan(CONFIG, rates=RATES, world=2)
        self.assertEqual(two.to_dict()["world"], 2)

    def test_refusals(self):
        for argument, error, call in (
                ("config", TypeError, lambda: ballast.plan(3)),
                ("config: x: unknown key", ballast.ConfigError, lambda: ballast.plan({**CONFIG, "x": 1})),
                ("config: ", TypeError, lambda: ballast.plan({**CONFIG, "x": object()})),
                ("missing.json", ValueError, lambda: ballast.plan("missing.json")),
                ("world", ValueError, lambda: ballast.plan(CONFIG, world=0)),
                ("rates", TypeError, lambda: ballast.plan(CONFIG, rates=3)),
                ("overrides", TypeError, lambda: ballast.plan(CONFIG, overrides="a=b")),
                ("host", MemoryError, lambda: ballast.plan(with_section(host_bytes="64KiB"), rates=RATES)),
        ):
            with self.subTest(argument=argument):
                with self.assertRaises(error) as caught:
                    call()
                self.assertIn(argument, str(caught.exception))


class Runs(FolderTest):
    def setUp(self):
        super().setUp()
        # The process that runs the tests may ignore it (nohup, a shell's background).
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

    def metrics(self, run):
        return [json.loads(line) for line in (self.path / run / "metrics.jsonl").read_text().splitlines()]

    def test_a_run_is_that_of_the_program(self):
        records = []
        threads = set()

        def callback(record):
            records.append(record)
            threads.add(threading.get_ident())

        run = ballast.train(CONFIG, out="run", callback=callback)
        self.assertEqual(records, self.metrics("run"))
        self.assertEqual(threads, {threading.get_ident()})
        self.assertEqual((run.steps, run.planned_steps, run.interrupted), (3, 3, False))
        self.assertEqual(run.directory, str(self.path / "run"))
        self.assertEqual(run.loss, records[-1]["loss"])
        (self.path / "config.json").write_text(json.dumps(CONFIG))
        subprocess.run([sys.executable, "-m", "ballast", "train", "config.json", "--out", "other"],
                       check=True, capture_output=True)
        self.assertEqual([row["loss"] for row in self.metrics("other")], [row["loss"] for row in records])

    def test_other_threads_run_meanwhile(self):
        ticks = []
        ended = threading.Event()

        def tick():
            while not ended.wait(0.001):
                ticks.append(1)

        thread = threading.Thread(target=tick)
        thread.start()
        ballast.train(CONFIG, out="run", steps=30)
        ended.set()
        thread.join()
        self.assertGreater(len(ticks), 10)

    def test_the_callback_ends_it(self):
        run = ballast.train(CONFIG, out="run", steps=1000, callback=lambda record: record["step"] < 4)
        self.assertTrue(run.interrupted)
        self.assertEqual((run.steps, run.planned_steps), (4, 1000))

        def fails(record):
            raise KeyError("mine")

        with self.assertRaisesRegex(KeyError, "mine"):
            ballast.train(CONFIG, out="other", steps=1000, callback=fails)
        # The next run is not interrupted.
        self.assertFalse(ballast.train(CONFIG, out="third").interrupted)

    def test_checkpoints_and_resuming(self):
        config = with_section(checkpoint_every=1000)
        run = ballast.train(config, out="run", steps=12, callback=lambda record: record["step"] < 4)
        self.assertTrue(run.checkpoint)
        again = ballast.train(config, out="run", steps=12, resume="auto")
        self.assertEqual((again.steps, again.interrupted), (12, False))
        before = self.metrics("run")
        finished = ballast.train(config, out="run", steps=12, resume="auto")  # nothing is left to do
        self.assertEqual((finished.steps, finished.loss), (12, before[-1]["loss"]))
        self.assertEqual(self.metrics("run"), before)
        ballast.train(config, out="whole", steps=12, resume="auto")
        self.assertEqual([row["loss"] for row in self.metrics("run")],
                         [row["loss"] for row in self.metrics("whole")])

    def test_ctrl_c(self):
        before = signal.getsignal(signal.SIGINT)
        for config, checkpoints in ((CONFIG, False), (with_section(checkpoint_every=100_000), True)):
            out = f"run{checkpoints}"

            def interrupt(record):
                if record["step"] == 3:
                    os.kill(os.getpid(), signal.SIGINT)

            with self.assertRaises(KeyboardInterrupt):
                ballast.train(config, out=out, steps=100_000, callback=interrupt)
            self.assertEqual((self.path / out / "checkpoints").exists(), checkpoints)
            self.assertGreaterEqual(len(self.metrics(out)), 3)
        self.assertIs(signal.getsignal(signal.SIGINT), before)
        with self.assertRaises(KeyboardInterrupt):  # Python has its signal again
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    def test_a_signal_that_python_handles(self):
        seen = []
        for number in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, lambda number, _: seen.append(number))
            self.addCleanup(signal.signal, number, before)

            def twice(record):
                if record["step"] == 3:
                    os.kill(os.getpid(), number)
                    os.kill(os.getpid(), number)  # too early to end the process

            run = ballast.train(with_section(checkpoint_every=100_000), out=f"run{number}", steps=100_000,
                                callback=twice)
            self.assertEqual((run.interrupted, seen.pop(), seen), (True, number, []))
            self.assertTrue(run.checkpoint.endswith(f"step-{run.steps}"), run)
            with self.assertRaisesRegex(ballast.Error, "interrupted"):
                ballast.train(CONFIG, out=f"other{number}", steps=100_000, callback=twice)
            seen.clear()

    def test_a_script_may_return_the_status_of_the_program(self):
        (self.path / "config.json").write_text(json.dumps(with_section(checkpoint_every=100_000)))
        script = """
import os, signal, sys
import ballast
signal.signal(signal.SIGTERM, lambda *_: None)
def kill(record):
    if record["step"] == 3:
        os.kill(os.getpid(), signal.SIGTERM)
run = ballast.train("config.json", out="run", resume="auto", steps=int(sys.argv[1]), callback=kill)
if run.interrupted:
    sys.exit(os.EX_TEMPFAIL)
"""
        def status(steps):
            return subprocess.run([sys.executable, "-c", script, str(steps)], check=False).returncode
        self.assertEqual(status(100_000), 75)
        self.assertEqual(status(len(self.metrics("run")) + 2), 0)

    def test_steps_are_those_of_an_automatic_schedule(self):
        params = {"warmup_num_steps": 2, "warmup_max_lr": 1e-3, "total_num_steps": "auto"}
        config = {**CONFIG, "scheduler": {"type": "WarmupDecayLR", "params": params}}
        ballast.train(config, out="argument", steps=9)
        ballast.train(config, out="key", overrides=["ballast.steps=9"])
        rates = [[row["lr"] for row in self.metrics(out)] for out in ("argument", "key")]
        self.assertEqual(rates[0], rates[1])
        self.assertGreater(rates[0][-1], 0)

    def test_ctrl_c_in_mid_step(self):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            ballast.train(CONFIG, out="run", steps=10_000_000)
        timer.join()

    def test_one_run_at_a_time(self):
        errors = []

        def nested(record):
            try:
                ballast.train(CONFIG, out="nested")
            except ballast.UsageError as error:
                errors.append(str(error))

        ballast.train(CONFIG, out="run", callback=nested)
        self.assertEqual(len(errors), 3)
        self.assertIn("in progress", errors[0])

    def test_log_lines_reach_the_logger(self):
        config = {**CONFIG, "wall_clock_breakdown": True}
        with self.assertLogs("ballast", "INFO") as caught:
            ballast.train(config, out="run")
        self.assertIn("wall_clock_breakdown", "\n".join(caught.output))

    def test_refusals(self):
        (self.path / "config.json").write_text(json.dumps(CONFIG))
        ballast.train(CONFIG, out="used", steps=1)
        for words, error, call in (
                ("config", TypeError, lambda: ballast.train(None)),
                ("out", TypeError, lambda: ballast.train(CONFIG, out=3)),
                ("steps", ValueError, lambda: ballast.train(CONFIG, steps=0)),
                ("steps", TypeError, lambda: ballast.train(CONFIG, steps=True)),
                ("callback", TypeError, lambda: ballast.train(CONFIG, callback=3)),
                ("resume", TypeError, lambda: ballast.train(CONFIG, resume=3)),
                ("give steps=N", ValueError,
                 lambda: ballast.train(with_section(steps=0), out="run")),
                ("out=DIR", ValueError, lambda: ballast.train(CONFIG, resume=True)),
                ("used/metrics.jsonl exists", ValueError, lambda: ballast.train(CONFIG, out="used")),
                ("overwrite=", ValueError,
                 lambda: ballast.train(CONFIG, out="used", resume=True, overwrite=True)),
                ("missing.txt", ballast.Error,
                 lambda: ballast.train({**CONFIG, "data": {"text": ["missing.txt"],
                                                           "sequence_length": 32}}, out="run")),
        ):
            with self.subTest(words=words):
                with self.assertRaises(error) as caught:
                    call()
                self.assertIn(words, str(caught.exception))
        self.assertFalse((self.path / "run").exists())


class Measurements(FolderTest):
    def test_bench(self):
        rows = ballast.aio.bench(self.path, size="16MiB", patterns=["read", "write"], depths=[4])
        self.assertEqual([row["pattern"] for row in rows], ["read", "write"])
        self.assertEqual([row["bytes"] for row in rows], [16 << 20] * 2)
        self.assertEqual(list(self.path.iterdir()), [self.path / "text.txt"])

    def test_tune(self):
        tuning = ballast.aio.tune(self.path, size="256MiB", seconds=0.5)
        self.assertEqual(tuning["paths"][0]["path"], str(self.path))
        self.assertIn("block_size", tuning)


if __name__ == "__main__":
    unittest.main()
