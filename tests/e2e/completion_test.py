#!/usr/bin/env python3
"""Completes command lines in real shells, and reads the manual page.

    completion_test.py PATH_OF_BALLAST

Each case is a line up to the cursor, words that the shell must offer, and words that it must not.
The tests of zsh and fish are skipped if these shells are not installed.
"""

import os
import pty
import shutil
import subprocess

from runs import RunTest, main

# Line: words that are offered, words that are not.
CASES = {
    "ballast tr": (["train"], ["tune", "eval"]),
    "ballast bench ": (["adam", "io", "step"], ["train"]),
    "ballast help pl": (["plan"], []),
    "ballast completion z": (["zsh"], ["fish"]),
    "ballast -v eval --js": (["--json"], ["--data"]),
    "ballast train --over": (["--overwrite"], ["--out"]),
    "ballast bench io --so": ([], ["--sqpoll"]),
    "ballast export run --dtype b": (["bf16"], ["fp16"]),
    "ballast train ": (["one.json"], ["notes.txt"]),
    "ballast train one.json --set zero_optimization.st": (["zero_optimization.stage="], ["ballast.steps="]),
    "ballast train one.json --set ballast.update=e": (["eager"], ["gated"]),
    "ballast train one.json --out ": (["run"], ["one.json"]),
    "ballast bench io --pattern read,m": (["mixed"], ["copy"]),
}

BASH = r"""
source "$1"
COMP_LINE=$2
COMP_POINT=${#COMP_LINE}
read -r -a COMP_WORDS <<< "$COMP_LINE"
_ballast
printf '%s\n' "${COMPREPLY[@]}"
"""

# Line: a part of the line after Tab.
ZSH_CASES = {
    "ballast tr": "ballast train ",
    "ballast bench at": "ballast bench attention ",
    "ballast train --over": "ballast train --overwrite ",
    "ballast train on": "ballast train one.json ",
    "ballast export run --dtype b": "ballast export run --dtype bf16 ",
    "ballast train one.json --set ballast.update_i": "--set ballast.update_isa=",
    "ballast train one.json --set ballast.update=e": "--set ballast.update=eager ",
    "ballast train one.json --out r": "--out run/",
    "ballast bench io --pattern read,m": "--pattern read,mixed",
}

# A key prints the line after its completion.
ZSH = r"""
PS1=; unsetopt zle_bracketed_paste prompt_cr prompt_sp; autoload -U compinit; compinit -u -D
source $COMPLETION
dump() { print -r -- "LINE<$BUFFER>"; BUFFER=; zle reset-prompt }
zle -N dump; bindkey '^X' dump
print READY
"""


class Completion(RunTest):

    def setUp(self):
        super().setUp()
        (self.path / "one.json").write_text("{}")
        (self.path / "notes.txt").write_text("")
        (self.path / "run").mkdir()

    def script(self, shell):
        done = subprocess.run([self.ballast, "completion", shell], capture_output=True, text=True,
                              check=True)
        file = self.path / f"script.{shell}"
        file.write_text(done.stdout)
        return str(file)

    def shell(self, *words):
        return subprocess.run(words, capture_output=True, text=True, cwd=self.path, timeout=60,
                              check=False, stdin=subprocess.DEVNULL,
                              env={**os.environ, "HOME": str(self.path)})

    def check_cases(self, complete, cases):
        for line, (offered, others) in cases.items():
            with self.subTest(line):
                words = complete(line)
                for word in offered:
                    self.assertTrue(any(one.endswith(word) for one in words), f"{word} in {words}")
                for word in others:
                    self.assertFalse(any(one.endswith(word) for one in words), f"{word} in {words}")

    def test_bash(self):
        script = self.script("bash")
        self.assertEqual(self.shell("bash", "-n", script).stderr, "")

        def complete(line):
            done = self.shell("bash", "--norc", "-c", BASH, "bash", script, line)
            self.assertEqual(done.stderr, "")
            return done.stdout.splitlines()

        self.check_cases(complete, CASES)
        # '=' breaks words by default. Where it does not, the whole word is offered.
        for breaks, word in (("=", "run"), ("", "--out=run")):
            done = self.shell("bash", "--norc", "-c", f"COMP_WORDBREAKS='{breaks}'\n" + BASH, "bash", script,
                              "ballast train one.json --out=r")
            self.assertEqual(done.stdout.splitlines(), [word])

    def test_fish(self):
        if shutil.which("fish") is None:
            self.skipTest("fish is not installed")
        script = self.script("fish")

        def complete(line):
            done = self.shell("fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', script, line)
            self.assertEqual(done.stderr, "")
            return [one.split("\t")[0].rstrip("/") for one in done.stdout.splitlines()]

        self.check_cases(complete, {line: words for line, words in CASES.items()
                                    # It has no lists with commas, and offers other files last.
                                    if "," not in line and line != "ballast train "})

    def test_zsh(self):
        if shutil.which("zsh") is None:
            self.skipTest("zsh is not installed")
        script = self.script("zsh")
        self.assertEqual(self.shell("zsh", "-n", script).stderr, "")
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self.path)
            os.execvpe("zsh", ["zsh", "-f", "-i"],
                       {**os.environ, "COMPLETION": script, "HOME": str(self.path), "TERM": "dumb"})
        try:
            os.write(terminal, ZSH.encode())
            self.read_until(terminal, b"READY\r\n")
            for line, after in ZSH_CASES.items():
                with self.subTest(line):
                    os.write(terminal, line.encode() + b"\t\x18")  # Tab, and the key that prints
                    text = self.read_until(terminal, b">\r\n").decode(errors="replace")
                    self.assertIn(after, text.rsplit("LINE<", 1)[-1])
        finally:
            os.write(terminal, b"\x15exit\r")
            os.close(terminal)
            os.waitpid(child, 0)

    @staticmethod
    def read_until(terminal, end):
        text = b""
        while end not in text:
            try:
                piece = os.read(terminal, 4096)
            except OSError:  # the shell has ended
                break
            text += piece
        return text

    def test_manual_page_names_every_command_and_option(self):
        page = subprocess.run([self.ballast, "man"], capture_output=True, text=True, check=True).stdout
        plain = page.replace("\\fB", "").replace("\\fI", "").replace("\\fR", "").replace("\\-", "-")
        for command in ("train", "plan", "bench io", "completion"):
            shown = self.shell(self.ballast, "help", *command.split()).stdout
            self.assertIn(f".SS {command}\n", plain)
            for line in shown.splitlines():
                for word in line.split() if line.startswith("  --") else []:
                    if word.startswith("--"):
                        self.assertIn(word.split("[")[0].rstrip(","), plain)
        for words in ("ballast.optimizer_states: fp32, bf16_first, 8bit", ".SH EXIT STATUS"):
            self.assertIn(words, plain)
        if shutil.which("mandoc") is not None:
            (self.path / "ballast.1").write_text(page)
            done = self.shell("mandoc", "-Tlint", "-W", "warning", "ballast.1")
            self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    main()
