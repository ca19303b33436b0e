"""`ballast import-config` translates recipes of LLaMA-Factory and axolotl. Where these packages are installed, the
keys and defaults that it knows are compared with theirs; they are read, not imported."""

import ast
import importlib.util
import inspect
import json
import pathlib
import re
import struct
import subprocess
import sys
import unittest

from support import FolderTest

from ballast import import_config

LLAMA_FACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
quantization_bit: 4
template: llama3
dataset: alpaca_en_demo
cutoff_len: 64
output_dir: saves/llama3
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
save_steps: 500
"""
AXOLOTL = """
base_model: model
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sequence_len: 64
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
warmup_ratio: 0.1
weight_decay: 0.1
flash_attention: true
"""


def fields_of(package, pattern):
    """Names and defaults of the annotated members of the classes in an installed package's files."""
    folder = pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])
    found = {}
    for file in folder.glob(pattern):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, node.value)
    return found


def keys_read_by(function):
    """The keys that a translation takes, from its source."""
    text = inspect.getsource(function)
    return set(re.findall(r'(?:take|must_be)\("(\w+)"', text)) | set(
        re.findall(r'"(\w+)"', text[text.index("for key in ("):text.index("keys.must_be(key")]))


class ImportConfig(FolderTest):
    def setUp(self):
        super().setUp()
        header = json.dumps({"tokens": {"dtype": "U16", "shape": [10_000], "data_offsets": [0, 20_000]}}).encode()
        (self.path / "data.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(20_000))

    def run_import(self, recipe, *words, status=0):
        (self.path / "recipe.yaml").write_text(recipe)
        done = subprocess.run([sys.executable, "-m", "ballast", "import-config", "recipe.yaml", *words], cwd=self.path,
                              capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, status, done)
        self.assertLessEqual(done.stderr.count("\n"), 1)
        return (json.loads(done.stdout) if done.stdout else None), done.stderr

    def test_a_recipe_of_llama_factory(self):
        config, note = self.run_import(LLAMA_FACTORY, "--data", "data.safetensors")
        steps = -(-2 * 10_000 // (64 * 16))
        self.assertEqual(config["ballast"]["steps"], steps)
        self.assertEqual(config["ballast"]["adapters"], {"rank": 16, "alpha": 32.0, "targets": "all-linear"})
        self.assertEqual((config["ballast"]["quantized_base"], config["ballast"]["double_quantization"]), ("nf4", True))
        self.assertEqual(config["optimizer"]["params"]["lr"], 1e-4)
        self.assertEqual(config["scheduler"]["params"] | {"total_num_steps": 0},
                         {"total_num_steps": 0, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.0})
        self.assertEqual(note, "ballast import-config: without a meaning here: dataset, do_train, template\n")

    def test_a_recipe_of_axolotl(self):
        config, note = self.run_import(AXOLOTL, "--data", "data.safetensors")
        self.assertEqual(config["optimizer"]["params"], {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1})
        self.assertEqual(config["ballast"]["optimizer_states"], "8bit")
        self.assertEqual(config["ballast"]["adapters"]["dropout"], 0.05)
        self.assertIn("sample_packing", note)

    def test_the_config_is_one_of_the_program(self):
        config, _ = self.run_import(LLAMA_FACTORY, "--data", "data.safetensors", "--out", "config.json")
        self.assertIsNone(config)
        config = json.loads((self.path / "config.json").read_text())
        config["model"] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "family": "llama"}
        (self.path / "config.json").write_text(json.dumps(config))
        done = subprocess.run([sys.executable, "-m", "ballast", "train", "config.json", "--print-config"], cwd=self.path,
                              capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("File exists", self.run_import(LLAMA_FACTORY, "--data", "data.safetensors", "--out", "config.json",
                                                     status=2)[1])

    def test_what_changes_results_is_refused_at_once(self):
        _, error = self.run_import(AXOLOTL + "neftune_noise_alpha: 5\nrelora: true\n", "--steps", "3", status=2)
        for word in ("neftune_noise_alpha: 5 has no equivalent", "relora"):
            self.assertIn(word, error)
        _, error = self.run_import(LLAMA_FACTORY.replace("stage: sft", "stage: ppo"), "--steps", "3", status=2)
        self.assertIn("stage: 'ppo'", error)
        _, error = self.run_import(LLAMA_FACTORY.replace("1.0e-4", "fast"), "--steps", "3", status=2)
        self.assertIn("learning_rate: 'fast' is no float", error)

    def test_epochs_need_the_data(self):
        self.assertIn("--data", self.run_import(LLAMA_FACTORY, status=2)[1])
        self.assertIn("no file of documents", self.run_import(LLAMA_FACTORY, "--data", "recipe.yaml", status=2)[1])
        self.assertIn("recipe.yaml: has neither", self.run_import("a: 1\n", status=2)[1])

    def test_pairs(self):
        recipe = LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_beta: 0.3\npref_loss: sigmoid")
        config, _ = self.run_import(recipe, "--data", "data.safetensors")
        self.assertEqual(config["data"]["pairs"], ["data.safetensors"])
        self.assertEqual(config["ballast"]["preference"], {"beta": 0.3, "label_smoothing": 0.0})

    def test_keys_are_those_of_the_packages(self):
        shared = keys_read_by_training() | {"learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"}
        for package, pattern, function in (("llamafactory", "hparams/*.py", import_config.from_llama_factory),
                                           ("axolotl", "utils/schemas/*.py", import_config.from_axolotl)):
            if importlib.util.find_spec(package) is None:
                self.skipTest(f"{package} is not installed")
            known = fields_of(package, pattern)
            if importlib.util.find_spec("transformers") is not None:
                known |= fields_of("transformers", "training_args.py")
            self.assertEqual((keys_read_by(function) | shared) - set(known) - {"warmup_ratio", "lr_scheduler_type"}, set())


def keys_read_by_training():
    return set(re.findall(r'take\("(\w+)"', inspect.getsource(import_config._fill_training)))


if __name__ == "__main__":
    unittest.main()
