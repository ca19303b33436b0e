#!/usr/bin/env python3
"""Ends `ballast train` by signals, closed terminals and closed pipes, and compares exit statuses with
what is left of the run.

    ends_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]
"""

import dataclasses
import fcntl
import json
import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time

import runs

MPIRUN = sys.argv.pop(2) if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else ""
# BALLAST_TEST_SIGNALS=100 sends signals in 100 rounds with one process and 100 with two ranks.
ROUNDS = int(os.environ.get("BALLAST_TEST_SIGNALS", "2"))
SEED = int(os.environ.get("BALLAST_TEST_SEED", "0")) or random.randrange(1 << 30)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE = 2.0  # seconds after the first signal in which others have no effect


def with_standard_signals():
    """The process that runs the tests may ignore them (nohup, a shell's background)."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@dataclasses.dataclass
class Ended:
    status: int
    out: str
    err: str
    gaps: list  # seconds from the first signal to each further one that was sent


class EndTest(runs.CheckpointTest):
    BALLAST = {**runs.CheckpointTest.BALLAST, "eval_every": 5, "checkpoint_every": 1000}

    def start(self, *arguments, command=(), **options):
        process = subprocess.Popen(
            [*command, self.ballast, "train", "config.json", *arguments], cwd=self.path, text=True,
            preexec_fn=with_standard_signals,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})
        self.addCleanup(self.end, process)
        return process

    def wait_until(self, ready, process):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None and not ready():
            time.sleep(0.005)
        self.assertTrue(ready())

    def intact(self):
        """Steps of the intact checkpoints; all must be."""
        if not self.checkpoints():
            return []
        done = self.run_ballast("inspect", "run", "--verify", "--json")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [entry["step"] for entry in json.loads(done.stdout)["checkpoints"] if entry["whole"]]

    def begin_long(self, *arguments, command=(), **options):
        self.config(ballast={**self.BALLAST, "steps": 1000000, "eval_every": 0})
        process = self.start(*arguments, command=command, **options)
        self.wait_for_row(process, 3)
        return process

    def assert_resumable(self, status):
        """The last finished step has an intact checkpoint, from which the run continues."""
        self.assertEqual(status, runs.RESUMABLE)
        last = self.steps()[-1]
        self.assertEqual(self.intact(), [last])
        done = self.run_ballast("train", "config.json", "--resume=auto", "--steps", last + 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"states of step {last} from ", done.stdout)
        self.assertEqual(self.steps(), list(range(1, last + 3)))


class Random(EndTest):
    def send(self, process, targets, dice, whole):
        """Sends one to three signals, the first at a random moment of a run of `whole` seconds."""
        gaps, first = [], None
        time.sleep(dice.uniform(0, 1.1 * whole))
        for _ in range(dice.randrange(1, 4)):
            if process.poll() is not None:
                break
            number = dice.choice(SIGNALS)
            for pid in targets():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            now = time.monotonic()
            if first is not None:
                gaps.append(now - first)
            first = first or now
            time.sleep(10 ** dice.uniform(-6, 0.4))
        out, err = process.communicate(timeout=240)
        return Ended(process.returncode, out, err, gaps)

    def check(self, ended, before, after, checkpoints):
        """`before`, `after`: finished steps."""
        told = f"seed {SEED}: {ended}"
        if ended.status == 0:
            self.assertEqual(after, self.STEPS, told)
            return
        if ended.status == runs.RESUMABLE:
            self.assertTrue(checkpoints, told)
            self.assertIn(after, self.intact(), told)
            return
        by_signal = ended.status - 128 if ended.status > 128 else -ended.status
        self.assertIn(by_signal, SIGNALS, told)
        # A signal that comes later ends the program at once.
        if any(gap > 0.9 * GRACE for gap in ended.gaps):
            return
        if checkpoints:
            self.assertEqual(after, before, told)  # it has not begun, and so has lost nothing
            self.assertEqual(self.intact() != [] and ended.status > 0, False, told)

    def last_step(self):
        file = self.path / "run/metrics.jsonl"
        rows = file.read_text().splitlines() if file.exists() else []
        return json.loads(rows[-1])["step"] if rows else 0

    def until_it_is_done(self, dice, whole, checkpoints, start, targets):
        shutil.rmtree(self.path / "run", ignore_errors=True)
        counts = {}
        for attempt in range(60):
            before = max(self.intact(), default=0) if checkpoints else 0
            process = start("--resume=auto")
            if attempt < 4:
                ended = self.send(process, lambda: targets(process), dice, whole)
            else:
                out, err = process.communicate(timeout=240)
                ended = Ended(process.returncode, out, err, [])
            after = self.last_step()
            self.check(ended, before, max(after, before) if checkpoints else after, checkpoints)
            counts[ended.status] = counts.get(ended.status, 0) + 1
            if ended.status == 0:
                return counts
        return self.fail(f"seed {SEED}: {counts}")

    def run_rounds(self, start, targets, reference):
        dice = random.Random(SEED)
        total = {}
        for _ in range(ROUNDS):
            every = dice.choice((0, 3, 1000))
            saves = dice.random() < 0.7
            self.config(ballast={**self.BALLAST, "checkpoint_every": every, "save_weights": saves})
            started = time.monotonic()
            expected = reference(every, saves)
            whole = time.monotonic() - started
            counts = self.until_it_is_done(dice, whole, every > 0, start, targets)
            rows = [{key: row.get(key) for key in self.SAME} for row in self.rows()]
            if every == 0 and not saves:
                # A signal in the last evaluation leaves nothing that another process could continue.
                rows[-1]["eval_loss"] = expected[-1]["eval_loss"]
            self.assertEqual(rows, expected, f"seed {SEED}")
            for status, count in counts.items():
                total[status] = total.get(status, 0) + count
        print(f"seed {SEED}: ends by status {dict(sorted(total.items()))}", file=sys.stderr)

    def test_signals_to_one_process(self):
        def reference(*_):
            shutil.rmtree(self.path / "reference", ignore_errors=True)
            self.run_ballast("train", "config.json", "--out", "reference")
            return [{key: row.get(key) for key in self.SAME} for row in self.rows("reference")]
        self.run_rounds(self.start, lambda process: [process.pid], reference)

    def ranks_of(self, process):
        """PIDs of the ranks that mpirun has started, in the order of their numbers."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    parent = file.read().rsplit(")", 1)[1].split()[1]
                with open(f"/proc/{entry}/comm", encoding="utf-8") as file:
                    name = file.read().strip()
            except OSError:
                continue
            if parent == str(process.pid) and name == "ballast":
                found.append(int(entry))
        return found

    def test_signals_to_two_ranks(self):
        if not MPIRUN:
            self.skipTest("no mpirun")
        command = (MPIRUN, "-n", "2")
        dice = random.Random(SEED)

        def targets(process):
            ranks = self.ranks_of(process)
            return ranks if dice.random() < 0.7 else ranks[:1]

        def start(*arguments):
            return self.start(*arguments, command=command)

        def reference(*_):
            shutil.rmtree(self.path / "reference", ignore_errors=True)
            process = start("--out", "reference")
            process.communicate(timeout=240)
            return [{key: row.get(key) for key in self.SAME} for row in self.rows("reference")]
        self.run_rounds(start, targets, reference)


class Signals(EndTest):
    def test_each_signal_alone_and_several_within_microseconds(self):
        for numbers in ((signal.SIGHUP,), (signal.SIGTERM, signal.SIGTERM),
                        (signal.SIGTERM, signal.SIGHUP, signal.SIGCONT),
                        (signal.SIGINT, signal.SIGTERM, signal.SIGINT)):
            with self.subTest(numbers=numbers):
                shutil.rmtree(self.path / "run", ignore_errors=True)
                process = self.begin_long()
                for number in numbers:
                    process.send_signal(number)
                _, err = process.communicate(timeout=120)
                # If several wait, the system chooses which one arrives first.
                self.assertRegex(err, rf"^ballast: ({'|'.join(number.name for number in numbers)}): the run ends "
                                 "after the step that is running, with a checkpoint; a second signal after 2 "
                                 "seconds ends it at once\n$")
                self.assert_resumable(process.returncode)

    def test_a_signal_after_the_grace_ends_it_at_once(self):
        self.config(ballast={**self.BALLAST, "steps": 1000},
                    aio={"any_file_system": True, "stall_seconds": 100, "abandon_seconds": 200})
        process = self.start(env={
            **os.environ, "BALLAST_IO_FAULTS": "hang:on=read:after=60:times=1"})
        self.wait_for_row(process, 1)
        time.sleep(0.5)  # the next steps hang
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            self.assertIsNone(process.poll())
        time.sleep(GRACE)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_sighup_that_is_ignored_stays_ignored(self):
        self.config(ballast={**self.BALLAST, "steps": 300})
        process = self.start(command=("nohup",), stdin=subprocess.DEVNULL)
        self.wait_for_row(process, 1)
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, len(self.rows())), (0, 300), err)

    def in_last_step(self, saves):
        """A signal in the evaluation of thousands of batches after the last step."""
        (self.path / "long.txt").write_text("the quick brown fox. " * 60000)
        self.config(data={"text": ["long.txt"], "sequence_length": 32, "held_out": 0.5},
                    ballast={**self.BALLAST, "steps": 2, "save_weights": saves, "eval_batches": 1 << 20})
        process = self.start("--trace", "trace.json")  # written before that evaluation
        self.wait_until((self.path / "trace.json").exists, process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=240)
        self.assertEqual(self.intact(), [2])
        self.assertIn("eval_loss", self.rows()[-1])
        return process.returncode, out

    def test_in_the_last_step_without_weights_to_save_it_is_done(self):
        status, out = self.in_last_step(False)
        self.assertEqual(status, 0)
        self.assertIn("\ndone in ", out)

    def test_in_the_last_step_the_weights_are_left_for_the_resume(self):
        status, out = self.in_last_step(True)
        self.assertEqual(status, runs.RESUMABLE)
        self.assertIn("\ninterrupted after step 2 of 2, before its weights were saved, in ", out)
        self.assertFalse((self.path / "run/weights").exists())
        done = self.run_ballast("train", "config.json", "--resume=auto")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue((self.path / "run/weights").exists())

    def during_measurements(self, *arguments):
        """A signal while the machine is measured, because the cache of rates is empty."""
        shutil.rmtree(self.path / "cache", ignore_errors=True)
        process = self.start(*arguments, env={**os.environ, "XDG_CACHE_HOME": str(self.path / "cache")})
        before = ""
        while "measuring this machine" not in before:
            line = process.stderr.readline()
            self.assertNotEqual(line, "", before)
            before += line
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        self.assertIn("SIGTERM: the run ends before its first step; ", err)
        self.assertIn("ballast: error: interrupted", err)
        return process.returncode

    def test_before_the_first_step(self):
        self.config(ballast={**self.BALLAST, "host_bytes": "auto"},
                    zero_optimization={"offload_optimizer": {"device": "auto"}})
        self.assertEqual(self.during_measurements("--resume=auto"), 143)
        self.assertFalse((self.path / "run").exists())
        self.run_ballast("train", "config.json", "--steps", "2")
        for resume in ("--resume", "--resume=auto"):  # nothing is lost
            self.assertEqual(self.during_measurements(resume), runs.RESUMABLE)
        # The checkpoints of a run that would be replaced are not those of this run.
        self.assertEqual(self.during_measurements("--overwrite"), 143)
        self.assertEqual(self.intact(), [2])


class LastCheckpoint(EndTest):
    """Files may become large enough for the weights, but not for a checkpoint."""

    def train_without_room(self, *arguments, **ballast):
        self.config(zero_optimization={"offload_optimizer": {"device": "cpu"}},
                    ballast={**self.BALLAST, "checkpoint_every": 5, **ballast})
        limit = (800 << 10, resource.RLIM_INFINITY)
        return self.run_ballast("train", "config.json", *arguments,
                                limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))

    def test_its_failure_is_always_said(self):
        for steps in (5, 15):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            done = self.train_without_room("--steps", steps, save_weights=False)
            self.assertEqual(done.returncode, 1)
            *warnings, error = done.stderr.splitlines()
            self.assertEqual(len(warnings), steps // 5)  # warnings 1, 2 and the last one
            for number, line in enumerate(warnings, 1):
                self.assertTrue(line.startswith(f"ballast: warning: step {5 * number}: no checkpoint: "), line)
                self.assertEqual(line.endswith(", and training continues"), 5 * number < steps, line)
            self.assertIn(f"error: step {steps}: the last step has no checkpoint", error)
            self.assertIn(f"step {steps} has no checkpoint; this run has none", done.stdout)

    def test_an_earlier_one_and_the_command_are_named(self):
        self.config(zero_optimization={"offload_optimizer": {"device": "cpu"}},
                    ballast={**self.BALLAST, "steps": 5, "save_weights": False})
        self.assertEqual(self.run_ballast("train", "config.json").returncode, 0)
        done = self.train_without_room("--resume", "--steps", "8", save_weights=False)
        self.assertEqual(done.returncode, 1)
        folder = self.path / "run/checkpoints/step-5"
        self.assertIn(f"step 8 has no checkpoint; the latest one is {folder}", done.stdout)
        self.assertIn(f"to continue from {folder}: ", done.stderr)
        # It is not taken for a finished run.
        done = self.run_ballast("train", "config.json", "--resume=auto", "--steps", "8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("states of step 5 from ", done.stdout)
        self.assertEqual(sorted(self.intact()), [5, 8])

    def test_with_weights_the_run_is_done(self):
        done = self.train_without_room("--steps", "15")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 3)
        self.assertIn("step 15 has no checkpoint; this run has none", done.stdout)
        self.assertTrue((self.path / "run/weights").exists())
        done = self.run_ballast("train", "config.json", "--resume=auto", "--steps", "15")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("is finished", done.stdout)


class NumberOfSteps(EndTest):
    """"auto" of a schedule follows the number of steps, wherever that is given."""

    SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-3,
                                                    "total_num_steps": "auto"}}

    def rates(self, out):
        return [row["lr"] for row in self.rows(out)]

    def test_given_by_an_option_or_by_the_key(self):
        for steps, other in ((10, 4), (4, 10)):
            self.config(scheduler=self.SCHEDULE, ballast={**self.BALLAST, "steps": other})
            ways = (("--steps", steps), ("--set", f"ballast.steps={steps}"),
                    ("--set", f"ballast.steps={other}", "--steps", steps),
                    ("--set", "ballast.steps=null", "--steps", steps))
            for number, way in enumerate(ways):
                out = f"run-{steps}-{number}"
                done = self.run_ballast("train", "config.json", "--out", out, *way)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertNotIn("warning", done.stderr)
                self.assertEqual(self.rates(out), self.rates(f"run-{steps}-0"), way)
            # Step k has the rate of t = k - 2, which decays to 0 at t = total_num_steps.
            self.assertAlmostEqual(self.rates(out)[-1], 1e-3 * 2 / (steps - 2), places=9)

    def test_more_of_them_change_an_automatic_schedule(self):
        self.config(scheduler=self.SCHEDULE, ballast=self.BALLAST)
        self.assertEqual(self.run_ballast("train", "config.json", "--steps", "4").returncode, 0)
        for resume in ("--resume", "--resume=auto"):
            done = self.run_ballast("train", "config.json", resume, "--steps", "8")
            self.assert_one_refusal(done, "scheduler.params.total_num_steps 4 -> 8",
                                    "--allow-change scheduler.params.total_num_steps")
        done = self.run_ballast("train", "config.json", "--resume", "--steps", "8", "--allow-change",
                                "scheduler.params.total_num_steps")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(self.rates("run")[-1], 0)

    def assert_one_refusal(self, done, *words):
        self.assertEqual(done.returncode, 2)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ballast: error: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        for word in words:
            self.assertIn(word, lines[0])

    def test_only_training_needs_it(self):
        self.config(scheduler=self.SCHEDULE, ballast={**self.BALLAST, "steps": None, "save_weights": True})
        self.assert_one_refusal(self.run_ballast("train", "config.json"),
                                "ballast.steps is missing or 0: set it or give --steps N")
        done = self.run_ballast("eval", "config.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        printed = self.run_ballast("train", "config.json", "--print-config").stdout
        self.assertEqual(json.loads(printed)["scheduler"]["params"]["total_num_steps"], "auto")
        (self.path / "config.json").write_text(printed)
        printed = self.run_ballast("train", "config.json", "--print-config", "--steps", "7").stdout
        self.assertEqual(json.loads(printed)["scheduler"]["params"]["total_num_steps"], 7)


class Output(EndTest):
    def on_terminal(self, *command):
        """A run whose controlling terminal is closed after some steps. Returns the process."""
        self.config(ballast={**self.BALLAST, "steps": 2000, "eval_every": 0})
        ours, theirs = pty.openpty()

        def take_terminal():
            with_standard_signals()
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        process = subprocess.Popen([*command, self.ballast, "train", "config.json"], cwd=self.path,
                                   stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        os.close(theirs)
        os.set_blocking(ours, False)
        metrics = self.path / "run/metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                os.read(ours, 65536)
            except BlockingIOError:
                time.sleep(0.01)
            if metrics.exists() and metrics.read_text().count("\n") > 3:
                break
        os.close(ours)
        return process.wait(timeout=240)

    def test_of_a_closed_terminal(self):
        self.assert_resumable(self.on_terminal())

    def test_of_a_closed_terminal_without_sighup(self):
        self.assertEqual(self.on_terminal("sh", "-c", 'trap "" HUP; exec "$@"', "sh"), 0)
        self.assertEqual(len(self.rows()), 2000)

    def test_to_a_closed_pipe(self):
        for every, wanted in ((1000, runs.RESUMABLE), (0, 141)):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            self.config(ballast={**self.BALLAST, "steps": 1000000, "checkpoint_every": every, "eval_every": 0})
            process = self.start()
            self.wait_for_row(process, 3)
            process.stdout.close()
            _, err = process.communicate(timeout=120)
            self.assertEqual((process.returncode, err), (wanted, ""))
            if every:
                self.assert_resumable(process.returncode)

    def test_that_nobody_reads(self):
        process = self.begin_long("--set", "steps_per_print=1")
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        rows = -1
        while rows != len(self.rows()):
            rows = len(self.rows())
            time.sleep(1)  # until the pipe is full and the run waits
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), runs.RESUMABLE)
        process.stdout.close()
        process.stderr.close()
        self.assert_resumable(process.returncode)

    def test_to_a_full_disk(self):
        self.config(ballast={**self.BALLAST, "steps": 10})
        with open("/dev/full", "w", encoding="utf-8") as full:
            process = self.start(stdout=full)
            _, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, len(self.rows())), (0, 10))
        self.assertEqual(err, "ballast: warning: standard output: No space left on device; training "
                         "continues, and metrics.jsonl has all steps\n")


if __name__ == "__main__":
    runs.main()
