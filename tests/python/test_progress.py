"""The progress that ballast.train shows."""

import fcntl
import importlib.util
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import unittest

from support import CONFIG, FolderTest

needs_tqdm = unittest.skipIf(importlib.util.find_spec("tqdm") is None, "tqdm is not installed")
NOTEBOOK = """
import sys, types
shell = types.SimpleNamespace(kernel=None)
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
sys.modules["tqdm.autonotebook"] = types.SimpleNamespace(tqdm=__import__("tqdm").tqdm)
"""


class Progress(FolderTest):
    def setUp(self):
        super().setUp()
        (self.path / "config.json").write_text(json.dumps(CONFIG))

    def train(self, arguments="", before="", status=0):
        """Returns what a run writes to a standard error that is not a terminal."""
        program = f"{before}\nimport ballast\nballast.train('config.json', out='run', overwrite=True{arguments})"
        done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60,
                              check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stderr

    def train_in_terminal(self, arguments="", before=""):
        """Returns the exit status and what a run writes to a terminal."""
        program = f"{before}\nimport ballast\nballast.train('config.json', out='run', overwrite=True{arguments})"
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
        with subprocess.Popen([sys.executable, "-c", program], stderr=its) as process:
            os.close(its)
            written = b""
            while True:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:  # the terminal has no writer any more
                    break
                written += piece
            os.close(ours)
        return process.returncode, written.decode()

    @needs_tqdm
    def test_a_terminal_shows_steps_loss_speed_and_time(self):
        status, text = self.train_in_terminal()
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"100%.* 3/3 \[\d+:\d+<\d+:\d+, .*loss \d+\.\d{4}, [\d,]+ tokens/s\]")
        self.assertIn("0/3", text)
        self.assertEqual(self.train_in_terminal(", progress=False"), (0, ""))

    @needs_tqdm
    def test_only_terminals_and_notebooks_show_it_unless_it_is_wanted(self):
        self.assertEqual(self.train(), "")
        self.assertIn("3/3", self.train(", progress=True"))
        self.assertIn("3/3", self.train(before=NOTEBOOK))
        self.assertEqual(self.train(", progress=False", NOTEBOOK), "")

    @needs_tqdm
    def test_a_resumed_run_begins_at_its_checkpoint(self):
        config = {**CONFIG, "ballast": {**CONFIG["ballast"], "checkpoint_every": 2}}
        (self.path / "config.json").write_text(json.dumps(config))
        self.train(", steps=2")
        program = "import ballast; ballast.train('config.json', out='run', steps=4, resume=True, progress=True)"
        done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60,
                              check=True)
        self.assertIn("2/4", done.stderr)
        self.assertIn("4/4", done.stderr)
        self.assertNotIn("0/4", done.stderr)

    def test_without_tqdm(self):
        without = "import sys; sys.modules['tqdm'] = None"
        status, text = self.train_in_terminal(before=without)
        self.assertEqual((status, text), (0, ""))
        self.assertRegex(self.train(", progress=True", without, status=1),
                         r"ImportError: progress: needs tqdm: pip install 'ballast\[progress\]'")

    def test_a_display_that_fails_does_not_end_the_run(self):
        broken = """
import sys, types
def fail(*_, **__):
    raise BrokenPipeError("gone")
sys.modules["tqdm"] = types.SimpleNamespace()
sys.modules["tqdm.auto"] = types.SimpleNamespace(tqdm=fail)
"""
        self.assertEqual(self.train(", progress=True", broken), "")

    def test_another_type_is_refused(self):
        import ballast

        self.assert_names("progress", TypeError, lambda: ballast.train(CONFIG, progress="yes"))

    @needs_tqdm
    def test_ctrl_c_ends_the_run_with_its_checkpoint(self):
        config = {**CONFIG, "ballast": {**CONFIG["ballast"], "checkpoint_every": 100_000}}
        (self.path / "config.json").write_text(json.dumps(config))
        before = """
import os, signal
def interrupt(record):
    if record["step"] == 3:
        os.kill(os.getpid(), signal.SIGINT)
"""
        status, text = self.train_in_terminal(", steps=100_000, callback=interrupt", before)
        self.assertIn("KeyboardInterrupt", text)
        self.assertNotEqual(status, 0)
        self.assertRegex(text, r" [3-9]/100000 .*\n")  # the line has ended
        self.assertEqual(len(list((self.path / "run/checkpoints").iterdir())), 1)


if __name__ == "__main__":
    unittest.main()
