#!/usr/bin/env python3
"""Tests the live view of `ballast train --live`: what tmux shows, and the state of the terminal
afterwards.

    live_test.py PATH_OF_BALLAST

Skipped (status 77) without tmux.
"""

import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

from runs import TINY, RunTest, main

PATIENCE = 60
LONG = "1000000"  # steps: the test ends the run
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
HELP = "q leaves the view, the run continues"


class LiveTest(RunTest):
    def setUp(self):
        super().setUp()
        self.config(data={"text": ["text.txt"], "sequence_length": 32},
                    ballast={**TINY["ballast"], "eval_every": 1000})

    def wait_for(self, what, check):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = check()
            if found:
                return found
            time.sleep(0.05)
        self.fail(f"{what}: not within {PATIENCE} s")


class Pane(LiveTest):
    """Runs in tmux."""

    def tmux(self, *arguments):
        done = subprocess.run(["tmux", "-S", str(self.path / "tmux"), "-f", "/dev/null", *arguments],
                              capture_output=True, text=True, check=False, timeout=PATIENCE,
                              env={**os.environ, "LC_ALL": "C.UTF-8"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def start(self, *arguments, columns=80, rows=24, environment=""):
        """A shell that runs `train --live` and keeps the pane after its end."""
        self.addCleanup(self.tmux, "kill-server")
        command = f"{environment} {shlex.quote(self.ballast)} train config.json --live " + \
            shlex.join(arguments)
        self.tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(self.path),
                  "env PS1='$ ' LC_ALL=C.UTF-8 HISTFILE= bash --norc --noprofile -i")
        self.tmux("send-keys", command + "; stty -a >modes; echo ended\n")

    def pane(self, *options):
        return self.tmux("capture-pane", "-p", *options).split("\n")[:-1]

    def shown(self, condition, *options):
        """The pane when it shows the whole view and `condition` holds for it."""
        def check():
            lines = self.pane(*options)
            text = "\n".join(lines)
            # Two equal readings: not while tmux draws.
            return lines if condition(text) and lines == self.pane(*options) else None
        return self.wait_for("the view", check)

    def view(self, *options, condition=lambda text: True):
        return self.shown(lambda text: HELP in text and "lanes" in text and condition(text), *options)

    def end(self):
        self.tmux("send-keys", "C-c")
        return self.shown(lambda text: re.search(r"^ended", text, re.M))

    def assert_view(self, lines, columns, rows):
        """Expects that every line has its place: none was wrapped, scrolled or cut."""
        self.assertEqual(len(lines), rows)
        self.assertTrue(all(len(line) <= columns for line in lines))
        step, = re.findall(r"^step (\d+)/1000000  ballast train config\.json$", lines[0], re.M)
        loss, = re.findall(r"^loss (\d\.\d{4}), lr 1\.00e-03, gradient norm [\d.e+-]+", lines[1])
        self.assertAlmostEqual(float(loss), self.rows()[int(step) - 1]["loss"], delta=6e-5)
        text = "\n".join(lines)
        for name in ("device", "host", "nvme", "compute", "upload", "fetch", "update"):
            row, = re.findall(rf"^{name} +(\S*) +(.*)$", text, re.M)
            self.assertIn(len(row[0]), range(1, columns))
        self.assertRegex(text, r"(?m)^\S+ tok/s, \S+ per step, \d+% of the GEMM peak$")
        self.assertRegex(text, r"(?m)^eta \S+.* at the pace of the last \d+ steps and of all$")
        self.assertRegex(text, r"(?m)^device .* of 64\.0 MiB$")
        self.assertEqual([line for line in lines if line][-1], HELP)
        chart = [line for line in lines if re.match(r" *[\d.]* [▁▂▃▄▅▆▇█ ]+$", line)]
        self.assertGreater(len(chart), 1, text)

    def test_two_devices(self):
        self.start("--steps", LONG, "--set", "pipeline.stages=2", "--set", "model.vocabulary_tiles=1",
                   rows=60)
        text = "\n".join(self.view(condition=lambda text: "compute" in text))
        for device in (0, 1):
            self.assertRegex(text, rf"(?m)^device {device} .* of 64\.0 MiB$")
        for lane in ("upload", "compute", "pass"):
            self.assertRegex(text, rf"(?m)^{lane} .*\n  device 0 .*%\n  device 1 .*%$")
        self.assertEqual(len(re.findall(r"(?m)^fetch .*\n  device", text)), 0)
        self.end()

    def test_sizes(self):
        self.start("--steps", LONG)
        enough = lambda text: re.search(r"step \d{3,}/", text) and "eta after" not in text
        lines = self.view(condition=enough)
        self.assert_view(lines, 80, 24)
        for columns, rows in ((200, 60), (80, 24)):
            self.tmux("resize-window", "-x", str(columns), "-y", str(rows))
            bar = re.compile(rf"^device +\S{{{columns - 37}}} ", re.M)
            lines = self.view(condition=lambda text, bar=bar: bar.search(text))
            self.assert_view(lines, columns, rows)
        for columns, rows in ((40, 10), (20, 4)):
            self.tmux("resize-window", "-x", str(columns), "-y", str(rows))
            time.sleep(1)
            lines = self.pane()
            self.assertEqual(len(lines), rows)
            self.assertRegex(lines[0], r"^step \d+/1000000")
            self.assertRegex(lines[1], r"^loss \d\.\d{4}")
        self.tmux("resize-window", "-x", "80", "-y", "24")
        self.end()

    def test_colour(self):
        self.start("--steps", LONG)
        self.assertIn("\x1b[36m", "\n".join(self.view("-e")))
        self.end()

    def test_no_colour(self):
        self.start("--steps", LONG, environment="NO_COLOR=1")
        self.assertNotIn("\x1b", "\n".join(self.view("-e")))
        self.end()

    def test_ascii_where_the_locale_is_not_utf8(self):
        self.start("--steps", LONG, environment="LC_ALL=C")
        text = "\n".join(self.view())
        self.assertTrue(text.isascii(), text)
        self.assertRegex(text, r"(?m)^device +#+-+ ")
        self.end()

    def test_a_dumb_terminal_has_lines(self):
        self.start("--steps", "3", environment="TERM=dumb")
        lines = self.shown(lambda text: re.search(r"^ended", text, re.M))
        text = "\n".join(lines)
        self.assertNotIn(HELP, text)
        self.assertNotIn("running", text)
        lines = self.tmux("capture-pane", "-p", "-S", "-200").splitlines()
        self.assertIn("ballast: --live needs a terminal for input and output; lines instead", lines)
        self.assertEqual(sum(re.match(r" +\d/3 ", line) is not None for line in lines), 3)

    def test_q_leaves_the_view_and_the_run_continues(self):
        self.start("--steps", LONG, "--set", "steps_per_print=50")
        self.view(condition=lambda text: re.search(r"step \d{3,}/", text))
        self.tmux("send-keys", "q")
        lines = self.shown(lambda text: HELP not in text and "running, loss" in text)
        numbers = lambda found: [int(n) for line in found for n in re.findall(r"^ *(\d+)/1000000 ", line)]
        first = numbers(lines)
        self.assertTrue(all(number % 50 == 0 or number % 1000 == 0 for number in first), first)
        self.shown(lambda text: (numbers(text.split("\n")) or [0])[-1] > first[-1])
        history = self.tmux("capture-pane", "-p", "-S", "-500").splitlines()
        # The lines that the view has held back.
        self.assertEqual(numbers(history)[:2], [50, 100])
        self.assertEqual(sum(line.split()[:2] == ["step", "loss"] for line in history), 1)
        self.end()
        self.assertIn(" echo ", (self.path / "modes").read_text())

    def test_ctrl_z_and_back(self):
        self.start("--steps", LONG)
        self.view()
        self.tmux("send-keys", "C-z")
        self.shown(lambda text: "Stopped" in text and HELP not in text)
        self.tmux("send-keys", "stty -a | grep -o ' echo '; echo here\n")
        self.shown(lambda text: re.search(r"^ echo $|^ echo\n", text, re.M) and
                   re.search(r"^here", text, re.M))
        # In the background it leaves the terminal to the shell.
        self.tmux("send-keys", "bg\n")
        self.tmux("send-keys", "jobs; echo there\n")
        self.shown(lambda text: "Running" in text and re.search(r"^there", text, re.M))
        self.tmux("send-keys", "fg\n")
        self.assert_view(self.view(condition=lambda text: "eta after" not in text), 80, 24)
        self.tmux("send-keys", "C-c")
        self.shown(lambda text: "interrupted after" in text and HELP not in text)

    def test_warnings_are_in_the_view_and_after_it(self):
        self.start("--steps", LONG, "--set",
                   'ballast.spike={"action": "warn", "window": 4, "factor": 0.01}')
        warning = re.compile(r"^ballast: warning: step \d+: ", re.M)
        self.view(condition=warning.search)
        self.end()
        self.assertRegex(self.tmux("capture-pane", "-p", "-S", "-500"), warning)


class Restored(LiveTest):
    """Runs on a separate terminal, which is compared before and after."""

    def on_terminal(self, act, *arguments, environment=None):
        """Starts a run and calls `act` with its process and the terminal when the view is there.
        Returns the status, the output, and the terminal modes before and after."""
        child, terminal = pty.fork()
        if child == 0:
            # The process that runs the tests may ignore them (nohup, a shell's background).
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self.path)
            os.execve(self.ballast, [self.ballast, "train", "config.json", "--live", *arguments],
                      {**os.environ, "TERM": "xterm", **(environment or {})})
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(terminal)
        os.set_blocking(terminal, False)
        data, acted, status = b"", False, None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                data += os.read(terminal, 65536)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
            if not acted and HELP.encode() in data and b"tok/s" in data:
                acted = True
                act(child, terminal)
            if status is None:
                done, found = os.waitpid(child, os.WNOHANG)
                if done:
                    status = found
        after = termios.tcgetattr(terminal)
        os.close(terminal)
        if status is None:
            if time.monotonic() >= deadline:
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        self.assertTrue(acted, data)
        return os.waitstatus_to_exitcode(status), data, before, after

    def assert_restored(self, act, wanted, *arguments, environment=None):
        status, data, before, after = self.on_terminal(act, *(arguments or ("--steps", LONG)),
                                                       environment=environment)
        self.assertEqual(status, wanted, data[-2000:])
        self.assertEqual(data.count(ENTER), data.count(LEAVE))
        self.assertGreater(data.rindex(LEAVE), data.rindex(ENTER))
        shown = data.rindex(b"\x1b[?25h")
        self.assertNotIn(b"\x1b[?25l", data[shown:])
        self.assertNotIn(b"\x1b[?7l", data[shown:])
        self.assertEqual(after, before)
        return data

    def assert_taken(self, terminal):
        """The view reads keys without echo. For runs of LONG steps: a short one may have ended."""
        self.assertFalse(termios.tcgetattr(terminal)[3] & termios.ECHO)

    def send(self, *signals):
        def act(child, terminal):
            self.assert_taken(terminal)
            for number in signals:
                os.kill(child, number)
                time.sleep(0.02)
        return act

    def test_at_the_end(self):
        data = self.assert_restored(lambda child, terminal: None, 0, "--steps", "40")
        after = data[data.rindex(LEAVE):].decode()
        self.assertIn("40/40", after)
        self.assertIn("done in", after)
        # Each frame is one block from the upper left corner, and nothing is erased in between.
        frames = re.findall(rb"\x1b\[\?2026h(.*?)\x1b\[\?2026l", data, re.S)
        self.assertGreater(len(frames), 1)
        for frame in frames:
            self.assertTrue(frame.startswith(b"\x1b[H"))
            self.assertNotIn(b"\x1b[2J", frame)
            self.assertNotIn(b"\x1b[K", frame)
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame.decode())
            lines = text.replace("\r", "").split("\n")
            self.assertEqual({len(line) for line in lines if line}, {80})

    def test_after_ctrl_c(self):
        def press(_, terminal):
            self.assert_taken(terminal)
            os.write(terminal, b"\x03")
        data = self.assert_restored(press, 130)
        self.assertIn(b"interrupted after", data[data.rindex(LEAVE):])

    def test_after_sigterm(self):
        self.assert_restored(self.send(signal.SIGTERM), 143)

    def test_after_two_signals_at_once(self):
        def twice(child, _):
            os.kill(child, signal.SIGINT)
            time.sleep(0.001)
            os.kill(child, signal.SIGINT)
        self.assert_restored(twice, 130)

    def test_after_sighup(self):
        self.assert_restored(self.send(signal.SIGHUP, signal.SIGCONT), 129)

    def test_after_stop_and_continue(self):
        data = self.assert_restored(self.send(signal.SIGSTOP, signal.SIGCONT, signal.SIGINT), 130)
        self.assertGreater(data.count(ENTER), 1)

    def test_after_a_crash(self):
        for number in (signal.SIGABRT, signal.SIGQUIT):
            self.assert_restored(self.send(number), -number)
            shutil.rmtree(self.path / "run")

    def test_after_an_error(self):
        data = self.assert_restored(lambda child, terminal: None, 1, environment={
            "BALLAST_IO_FAULTS": "eio:on=write:after=600:times=1"})
        self.assertIn(b"ballast: error: ", data[data.rindex(LEAVE):])

    def test_after_q(self):
        def act(child, terminal):
            self.assert_taken(terminal)
            os.write(terminal, b"q")
            time.sleep(1)
            self.assertTrue(termios.tcgetattr(terminal)[3] & termios.ECHO)
            os.kill(child, signal.SIGINT)
        self.assert_restored(act, 130)


class WithoutTerminal(LiveTest):
    def test_lines_instead(self):
        done = self.run_ballast("train", "config.json", "--live")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--live needs a terminal", done.stderr)
        self.assertNotIn("\x1b", done.stdout)
        self.assertIn("3/3", done.stdout)


if __name__ == "__main__":
    if shutil.which("tmux") is None:
        print("skipped: tmux is not installed (Debian: apt-get install tmux)")
        sys.exit(77)
    main()
