#!/usr/bin/env python3
"""Tests README.md and the manual in configs/: links lead somewhere, commands run, planned figures are
those that `ballast plan` prints, and excerpts of outputs have the lines of today's program.

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
INDEX = ROOT / "configs/README.md"
CHAPTERS = sorted(page for page in (ROOT / "configs").glob("*.md") if page != INDEX)
LLAMA_3_1_8B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
                "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
                "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05,
                "rope_theta": 500000.0, "max_position_embeddings": 131072, "hidden_act": "silu",
                "tie_word_embeddings": False, "torch_dtype": "bfloat16",
                "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
# The planner takes 30 seconds of CPU and more for these, so only their configs are checked.
SLOW_PLANS = {"e", "g", "j", "k"}


def code_blocks(document=README):
    return [block.replace("\\\n", " ") for block in re.findall(r"(?m)^```\n(.*?)^```$", document, re.DOTALL)]


def commands(document=README):
    """Every command of a document as its words: lines of code blocks and code in the text."""
    texts = [line for block in code_blocks(document) for line in block.splitlines()]
    texts += re.findall(r"`([^`\n]+)`", document)
    found = []
    for text in texts:
        text = re.sub(r"^\(\w\) |^(mpirun|srun) [^|]*?(?=\S*ballast )|\s{2,}#.*", "", text)
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


class Documents(RunTest):
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

    def small_folder(self):
        """Makes this folder with a small model and its weights, and documents. Returns options for them."""
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
        return ["--set", "data.sequence_length=32", "--set", "data.as_is=true",
                "--set", "ballast.steps=2", "--set", "aio.any_file_system=true",
                "--set", "ballast.device=host",
                "--set", f"zero_optimization.offload_optimizer.nvme_path={self.path}"]


class Readme(Documents):
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
        small = self.small_folder()
        block = next(block for block in code_blocks() if "tools/prepare.py" in block)
        commands = re.findall(r"^build/tools/ballast (.*?)(?:\s{2,}#.*)?$", block, re.MULTILINE)
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
        everything = [words for document in (README, *map(pathlib.Path.read_text, CHAPTERS))
                      for words in commands(document)]
        for words in everything:
            name = tuple(words[:1])
            if words[0].endswith("ballast"):
                depth = 3 if words[1] in ("bench", "tune") else 2
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


class Manual(Documents):
    def test_the_index_has_all_chapters_and_configs(self):
        index = INDEX.read_text()
        self.assertGreater(len(CHAPTERS), 8)
        for page in CHAPTERS:
            self.assertIn(f"]({page.name})", index)
        for config in (ROOT / "configs").glob("*.json"):
            self.assertIn(f"`{config.name}`", index)

    def test_chapters_begin_with_an_example_and_end_with_what_can_go_wrong(self):
        for page in CHAPTERS:
            with self.subTest(page=page.name):
                text = page.read_text()
                self.assertRegex(text, r"\A# .*\n\n```\n")
                self.assertEqual(re.findall(r"(?m)^## (.*)$", text)[-1], "What can go wrong")

    def test_the_config_of_the_first_run_is_the_shipped_one(self):
        [block] = re.findall(r"(?s)```json\n(.*?)```", (ROOT / "configs/first-run.md").read_text())
        shipped = (ROOT / "configs/tiny.json").read_text()
        self.assertEqual(json.loads(block), json.loads(re.sub(r"(?m)^//.*", "", shipped)))

    def test_the_first_examples_run(self):
        """Runs few steps on the host device, and a small model for the one that they name."""
        small = self.small_folder()
        count = 0
        for page in CHAPTERS:
            for line in code_blocks(page.read_text())[0].splitlines():
                words = shlex.split(re.sub(r"\s{2,}#.*", "", line))
                # Other tests run several ranks, and prepare.py needs Python packages.
                if words[0] != "ballast":
                    continue
                more = []
                if words[1] in ("train", "plan"):
                    more = (small if "finetune.json" in words else
                            ["--set", "ballast.device=host", "--set", "aio.any_file_system=true"])
                if words[1] == "train" and "--steps" not in words:
                    more = [*more, "--steps", "2"]
                with self.subTest(page=page.name, command=line):
                    done = self.run_ballast(*words[1:], *more)
                    self.assertEqual(done.returncode, 0, done.stderr)
                count += 1
        self.assertGreater(count, 20)


if __name__ == "__main__":
    main()
