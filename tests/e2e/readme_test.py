#!/usr/bin/env python3
"""Tests README.md: its links lead somewhere, its commands run, its planned figures are those that
`ballast plan` prints, and its excerpts of outputs have the lines of today's program.

    readme_test.py PATH_OF_BALLAST SOURCE_ROOT
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from runs import RunTest, main

ROOT = pathlib.Path(sys.argv.pop(2)).resolve()
README = (ROOT / "README.md").read_text()
LLAMA_3_1_8B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
                "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05,
                "rope_theta": 500000.0, "max_position_embeddings": 131072, "hidden_act": "silu",
                "tie_word_embeddings": False, "torch_dtype": "bfloat16",
                "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
# The planner takes 30 seconds of CPU and more for these, so only their configs are checked.
SLOW_PLANS = {"e", "g", "j", "k"}


def code_blocks():
    return [block.replace("\\\n", " ") for block in re.findall(r"```\n(.*?)```", README, re.DOTALL)]


def commands():
    """Every command of README.md as its words: lines of code blocks and code in the text."""
    texts = [line for block in code_blocks() for line in block.splitlines()]
    texts += re.findall(r"`([^`\n]+)`", README)
    found = []
    for text in texts:
        text = re.sub(r"^\(\w\) |\s{2,}#.*", "", text)
        if re.match(r"(build/tools/)?ballast [a-z]|tools/\S+\.(sh|py)( |$)", text):
            found.append(shlex.split(text))
    return found


def without_figures(text):
    return re.sub(r"[\d.]+", "N", text)


def planned():
    """Letter of a command below the first table: its words after `ballast`."""
    commands = re.findall(r"^\((\w)\) ballast (.*)$", "\n".join(code_blocks()), re.MULTILINE)
    return {letter: shlex.split(command) for letter, command in commands}


def anchors_of(document):
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Readme(RunTest):
    def setUp(self):
        super().setUp()
        # Paths of the commands are relative to the source tree.
        (self.path / "configs").symlink_to(ROOT / "configs")

    def folder(self, config):
        """The folder of the model that README.md fine-tunes, without weights."""
        shutil.copy(ROOT / "configs/finetune.json", self.path)
        folder = self.path / "Llama-3.1-8B"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def test_is_short(self):
        self.assertLessEqual(len(README.splitlines()), 200)

    def test_links_of_all_documents_lead_somewhere(self):
        documents = [ROOT / "README.md", *ROOT.glob(".github/*.md"), *ROOT.glob("configs/**/*.md"),
                     *ROOT.glob("[ast]*/**/README.md"), *ROOT.glob("*_adam/README.md")]
        checked = 0
        for document in documents:
            for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
                if "://" in link:
                    continue
                path, _, anchor = link.partition("#")
                target = document.parent / path if path else document
                with self.subTest(document=document.name, link=link):
                    self.assertTrue(target.exists())
                    if anchor:
                        self.assertIn(anchor, anchors_of(target))
                    checked += 1
        self.assertGreater(checked, 50)

    def test_the_table_of_machines_is_what_the_planner_says(self):
        self.folder(LLAMA_3_1_8B)
        rows = re.findall(r"^\|.*\| ([\d.,]+) \| planned \((\w)\) \|$", README, re.MULTILINE)
        commands = planned()
        self.assertEqual(len(rows), 9)
        for figure, letter in rows:
            if letter in SLOW_PLANS:
                self.assertTrue((self.path / commands[letter][1]).exists())
                continue
            with self.subTest(command=letter):
                done = self.run_ballast(*commands[letter], "--json")
                self.assertEqual(done.returncode, 0, done.stderr)
                rate = json.loads(done.stdout)["tokens_per_second"]
                # A build with CUDA includes the workspace of its kernels, which moves a few blocks.
                self.assertLess(abs(rate / float(figure.replace(",", "")) - 1), 0.03)

    def test_the_plan_of_the_example_is_what_the_planner_prints(self):
        if "cuda: not built in" in self.run_ballast("--version").stdout:
            self.skipTest("a build without CUDA estimates the workspace of its kernels")
        self.folder(LLAMA_3_1_8B)
        lines = without_figures(self.run_ballast(*planned()["d"]).stdout).splitlines()
        excerpt = next(block for block in code_blocks() if "written to NVMe" in block and
                       "speedup" in block).splitlines()
        for line in excerpt:
            self.assertIn(without_figures(line), lines)

    def test_measured_commands_are_accepted(self):
        for letter in "ab":
            with self.subTest(command=letter):
                train, config, *more = planned()[letter]
                self.assertEqual(train, "train")
                done = self.run_ballast("train", config, *more, "--print-config")
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_example_runs_as_it_stands(self):
        """Uses a small model and few tokens instead of the model that README.md names."""
        folder = self.folder({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131,
            "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
            "num_key_value_heads": 2, "intermediate_size": 136, "max_position_embeddings": 48,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "hidden_act": "silu"})
        shutil.copy(ROOT / "tests/data/training/llama.initial.safetensors",
                    folder / "model.safetensors")
        shutil.copy(ROOT / "tests/data/documents/conversations.safetensors",
                    self.path / "chat.safetensors")
        block = next(block for block in code_blocks() if "tools/prepare.py" in block)
        commands = re.findall(r"^build/tools/ballast (.*?)(?:\s{2,}#.*)?$", block, re.MULTILINE)
        small = ["--set", "data.sequence_length=32", "--set", "data.as_is=true",
                 "--set", "ballast.steps=2", "--set", "aio.any_file_system=true",
                 "--set", "ballast.device=host",
                 "--set", f"zero_optimization.offload_optimizer.nvme_path={self.path}"]
        self.assertEqual([command.split()[0] for command in commands], ["plan", "train", "export"])
        for command in commands:
            words = shlex.split(command)
            more = [] if words[0] == "export" else small
            done = self.run_ballast(*words, *more)
            self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
        self.assertTrue((self.path / "Llama-3.1-8B-tuned/model.safetensors").exists())
        # The commands of "Next steps", on this run.
        for command in (["plan", "finetune.json", *small, "--html", "plan.html"],
                        ["eval", "run", "--data", "chat.safetensors"], ["inspect", "run"],
                        ["report", "run", "--out", "report.html"], ["help", "train"],
                        ["config-keys"]):
            done = self.run_ballast(*command)
            self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")

    def test_every_command_exists_with_its_options(self):
        """Most commands run in other tests. This one keeps new ones from being forgotten."""
        helps = {}
        for words in commands():
            name = tuple(words[:1])
            if words[0].endswith("ballast"):
                depth = 3 if words[1] == "bench" else 2
                name = ("ballast", *words[1:depth])
            if name not in helps:
                script = ROOT / words[0]
                done = (self.run_ballast("help", *name[1:]) if name[0] == "ballast" else
                        subprocess.run([sys.executable, script, "--help"], capture_output=True,
                                       text=True, check=False) if script.suffix == ".py" else None)
                if done is None:
                    self.assertTrue(os.access(script, os.X_OK), script)
                    continue
                self.assertEqual(done.returncode, 0, f"{name}: {done.stderr}")
                helps[name] = done.stdout
            for option in (word.partition("=")[0] for word in words if word.startswith("--")):
                with self.subTest(command=" ".join(words), option=option):
                    self.assertRegex(helps[name], rf"{option}\b")
        self.assertGreater(len(helps), 12)

    def test_the_excerpt_of_the_demo_has_the_lines_of_a_run(self):
        done = self.train()
        self.assertEqual(done.returncode, 0, done.stderr)
        excerpt = next(block for block in code_blocks() if "held out" in block)
        header = next(line for line in excerpt.splitlines() if "loss" in line)
        self.assertIn(header, done.stdout.splitlines())
        for line in ("  weights           ", "  optimizer states  ", "  device            ", "done in "):
            for text in (excerpt, done.stdout):
                self.assertRegex(text, f"(?m)^{line}")


if __name__ == "__main__":
    main()
