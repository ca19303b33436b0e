#!/usr/bin/env python3
"""Tests a run in a terminal: lines of finished steps stay, one live line is below them, no line is
too wide.

    terminal_test.py PATH_OF_BALLAST
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios

import crossings
from runs import TINY, RunTest, main

ROWS = 24


class Screen:
    """The lines of a terminal that interprets the output: text, carriage return, line feed, "erase
    to end of line" and nothing else."""

    def __init__(self):
        self.lines = [""]
        self.column = 0
        self.widest = 0
        self.live = []  # lines that were overwritten

    def feed(self, text):
        for token in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+|\x1b", text):
            line = self.lines[-1]
            if token == "\x1b[K":
                if line[self.column:]:
                    self.live.append(line)
                self.lines[-1] = line[:self.column]
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self.lines.append("")
                self.column = 0
            else:
                assert token != "\x1b", "an escape sequence that this test does not know"
                self.lines[-1] = line[:self.column] + token + line[self.column + len(token):]
                self.column += len(token)
                self.widest = max(self.widest, len(self.lines[-1]))


class Terminal(RunTest):
    def in_terminal(self, *arguments, columns=80, environment=None, **sections):
        """Runs `train` in a terminal. Returns the screen and the exit status."""
        main_end, run_end = pty.openpty()
        fcntl.ioctl(run_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        # A short name, because the title is not broken.
        self.config(**sections)
        process = subprocess.Popen([self.ballast, "train", "config.json", *arguments], cwd=self.path,
                                   stdout=run_end, stderr=run_end,
                                   env={**os.environ, **(environment or {})})
        os.close(run_end)
        screen, data = Screen(), b""
        while True:
            try:
                more = os.read(main_end, 65536)
            except OSError:  # the run has ended
                break
            if not more:
                break
            data += more
        os.close(main_end)
        status = process.wait(timeout=240)
        screen.feed(data.decode().replace("\r\n", "\n"))
        return screen, status

    def rows(self, screen):
        """Numbers of the steps whose lines are on the screen at the end."""
        found = [re.match(r" +(\d+)/\d+ ", line) for line in screen.lines]
        return [int(match[1]) for match in found if match]

    def test_lines_of_steps_stay_and_one_live_line_is_below(self):
        screen, status = self.in_terminal("--steps", "7", "--set", "steps_per_print=3",
                                        "--set", "ballast.eval_every=5")
        self.assertEqual(status, 0)
        self.assertEqual(self.rows(screen), [3, 5, 6, 7])
        self.assertEqual(sum(line.split()[:2] == ["step", "loss"] for line in screen.lines), 1)
        steps = [re.match(r"step (\d+)/7 running", line) for line in screen.live]
        self.assertEqual([int(match[1]) for match in steps], [1, 2, 3, 4, 5, 6, 7])
        for line in screen.live[1:]:
            self.assertRegex(line, r", loss \d\.\d{4}, \S+ tok/s, eta \S+$")
        self.assertEqual([line for line in screen.lines if "running" in line], [])
        self.assertTrue(any(line.startswith("done in ") for line in screen.lines))

    def test_sixty_columns_are_enough(self):
        for columns in (60, 50):
            screen, status = self.in_terminal("--overwrite", columns=columns)
            self.assertEqual(status, 0)
            wide = [line for line in screen.lines + screen.live if len(line) > columns]
            # Only a path without spaces cannot be broken.
            self.assertEqual([line for line in wide if not line.startswith("/")], [], screen.lines)
            self.assertEqual(self.rows(screen), [1, 2, 3])
            header, = [line for line in screen.lines if line.split()[:2] == ["step", "loss"]]
            names = header.split()
            self.assertEqual(names[-1], "eta")
            self.assertIn("tok/s", names)
            self.assertNotIn("nvme", names)
            for line in screen.lines:
                if re.match(r" +\d/3 ", line):
                    self.assertEqual(len(line.split()), len(names))
                    self.assertEqual(len(line), len(header))

    def test_eighty_columns_have_all(self):
        screen, _ = self.in_terminal()
        header, = [line for line in screen.lines if line.split()[:2] == ["step", "loss"]]
        self.assertEqual(header.split(), ["step", "loss", "lr", "norm", "tok/s", "gemm", "device",
                                          "host", "nvme", "eta"])

    def test_pairs_have_their_accuracy_and_margin(self):
        crossings.write_data(self.path)
        for columns, names in ((80, ["step", "loss", "acc", "margin", "lr", "norm", "tok/s"]),
                               (50, ["step", "loss", "acc", "margin"])):
            screen, status = self.in_terminal(
                "--overwrite", columns=columns, zero_optimization={"offload_optimizer": {"device": "cpu"}},
                data={"text": None, "pairs": ["pairs.safetensors"], "sequence_length": 96},
                ballast={**TINY["ballast"], "train": "adapters",
                         "adapters": {"targets": "all-linear", "rank": 2}})
            self.assertEqual(status, 0, screen.lines)
            header, = [line for line in screen.lines if line.split()[:2] == ["step", "loss"]]
            self.assertEqual(header.split()[:len(names)], names)
            rewards = [json.loads(line)["rewards"]
                       for line in (self.path / "run/metrics.jsonl").read_text().splitlines()]
            shown = [line for line in screen.lines if re.match(r" +\d/3 ", line)]
            for line, row in zip(shown, rewards, strict=True):
                self.assertEqual(line.split()[2], f"{100 * row['accuracy']:.0f}%")
                self.assertAlmostEqual(float(line.split()[3]), row["margin"], delta=6e-5)
                self.assertEqual(len(line), len(header))
            last, = [line for line in screen.lines if line.startswith("last loss ")]
            self.assertRegex(last, rf", accuracy {100 * rewards[-1]['accuracy']:.0f}%, margin -?\d\.\d{{4}}$")
            self.assertRegex(screen.live[-1], r", loss \d\.\d{4}, accuracy \d+%")

    def test_a_dumb_terminal_has_lines_alone(self):
        screen, status = self.in_terminal(environment={"TERM": "dumb"})
        self.assertEqual(status, 0)
        self.assertEqual(screen.live, [])
        self.assertEqual(self.rows(screen), [1, 2, 3])
        screen, _ = self.in_terminal("--overwrite", environment={"TERM": "xterm"})
        self.assertGreater(len(screen.live), 0)

    def test_a_warning_is_a_line_of_its_own(self):
        screen, status = self.in_terminal(
            "--steps", "1000", environment={"BALLAST_IO_FAULTS": "hang:on=read:after=9:times=1"},
            aio={"any_file_system": True, "stall_seconds": 2, "abandon_seconds": 3})
        self.assertEqual(status, 1)
        self.assertGreater(len(screen.live), 1)
        warnings = [line for line in screen.lines if "warning" in line]
        self.assertEqual(len(warnings), 2, screen.lines)  # the first one is about the fault
        for line in warnings:
            self.assertTrue(line.startswith("ballast: warning: "), line)
        self.assertEqual([line for line in screen.lines if "running" in line], [])

    def test_an_error_is_a_line_of_its_own(self):
        screen, status = self.in_terminal(
            "--steps", "1000", environment={"BALLAST_IO_FAULTS": "eio:on=write:after=40:times=1"})
        self.assertEqual(status, 1)
        self.assertGreater(len(screen.live), 0)
        self.assertEqual([line for line in screen.lines if "running" in line], [])
        self.assertTrue(screen.lines[-2].startswith("ballast: error: "), screen.lines[-5:])


if __name__ == "__main__":
    main()
