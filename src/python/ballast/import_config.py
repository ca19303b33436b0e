"""Translates recipes of LLaMA-Factory and axolotl into configs: ``ballast import-config``.

    ballast import-config RECIPE.yaml --data FILE --out CONFIG.json

A recipe's data become a file with ``ballast prepare``; --data names it. Keys that would change results
and have no equivalent are refused, all at once; others without a meaning here are named in a note.
"""

import argparse
import dataclasses
import importlib
import json
import math
import pathlib
import struct
import sys
from typing import Any, Callable

Json = dict[str, Any]
_OPTIMIZERS = {  # names of transformers' optim: rule, states
    "adamw_torch": ("AdamW", "fp32"), "adamw_torch_fused": ("AdamW", "fp32"), "adamw_hf": ("AdamW", "fp32"),
    "adamw_apex_fused": ("AdamW", "fp32"), "paged_adamw_32bit": ("AdamW", "fp32"), "paged_adamw": ("AdamW", "fp32"),
    "adamw_bnb_8bit": ("AdamW", "8bit"), "adamw_8bit": ("AdamW", "8bit"), "paged_adamw_8bit": ("AdamW", "8bit"),
    "adamw_torch_8bit": ("AdamW", "8bit"), "adagrad": ("Adagrad", "fp32"), "sgd": ("SGD", "fp32"),
    "lion_32bit": ("Lion", "fp32"), "paged_lion_32bit": ("Lion", "fp32"), "lion_8bit": ("Lion", "8bit"),
    "paged_lion_8bit": ("Lion", "8bit")}


class Refusal(ValueError):
    """A recipe that has no equivalent here; the message is one line."""


@dataclasses.dataclass
class Recipe:
    """A recipe of either program, with the defaults of transformers' TrainingArguments."""

    model: str
    method: str = "full"  # or "lora"
    base: str = "none"  # ballast.quantized_base
    double: bool = False  # quantised scales
    adapters: Json = dataclasses.field(default_factory=dict)
    pairs: bool = False
    beta: float = 0.1
    smoothing: float = 0.0
    length: int = 2048
    micro_batch: int = 8
    accumulation: int = 1
    optimizer: str = "adamw_torch"
    params: Json = dataclasses.field(default_factory=dict)
    schedule: str = "linear"
    warmup_steps: float = 0  # below 1: a share of all steps
    least_share: float = 0.0  # of the learning rate at the end of a cosine
    epochs: float = 3.0
    steps: int = 0  # 0: from the epochs
    clipping: float = 1.0
    precision: str = "bf16"
    seed: int = 42
    held_out: float = 0.0
    save_every: int = 0
    output: str = ""


class Keys:
    """Takes the keys of a recipe one by one, and knows those that nobody took."""

    def __init__(self, values: Json, name: str) -> None:
        self._left = {key: value for key, value in values.items() if value is not None}
        self._name = name
        self._refused: list[str] = []

    def take(self, key: str, default: Any = None, kind: Callable[[Any], Any] = lambda value: value) -> Any:
        """The value of `key` as `kind`; YAML reads 1e-4 as a text. Records a value that is of no such kind."""
        if key not in self._left:
            return default
        value = self._left.pop(key)
        try:
            return kind(value)
        except (TypeError, ValueError):
            self._refused.append(f"{key}: {value!r} is no {kind.__name__}")
            return default

    def refuse(self, text: str) -> None:
        self._refused.append(text)

    def must_be(self, key: str, *allowed: Any, instead: str = "") -> None:
        """Refuses other values than `allowed` of a key that would change results."""
        value = self.take(key)
        if value is not None and value is not False and value not in allowed:
            self.refuse(f"{key}: {json.dumps(value, default=str)} has no equivalent" + (f"; {instead}" if instead else ""))

    def rest(self) -> list[str]:
        """Names of the keys that nobody took. Raises Refusal for those that were refused."""
        if self._refused:
            raise Refusal(f"{self._name}: {'; '.join(self._refused)}")
        return sorted(self._left)


def _names(value: Any) -> Any:
    """A list of names, which LLaMA-Factory writes with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) and "," in value else value


def _optimizer_params(keys: Keys) -> Json:
    return {"lr": keys.take("learning_rate", 5e-5, float),
            "betas": [keys.take("adam_beta1", 0.9, float), keys.take("adam_beta2", 0.999, float)],
            "eps": keys.take("adam_epsilon", 1e-8, float), "weight_decay": keys.take("weight_decay", 0.0, float)}


def _precision(keys: Keys) -> str:
    bf16, fp16 = keys.take("bf16", False), keys.take("fp16", False)
    return "bf16" if bf16 not in (False, "false") else "fp16" if fp16 not in (False, "false") else "fp32"


def _warmup(keys: Keys) -> float:
    ratio = keys.take("warmup_ratio", 0.0, float)
    return float(keys.take("warmup_steps", 0, float) or ratio)


def from_llama_factory(values: Json, name: str) -> tuple[Recipe, list[str]]:
    """The recipe of LLaMA-Factory's YAML (0.9), and the keys without a meaning here."""
    keys = Keys(values, name)
    recipe = Recipe(keys.take("model_name_or_path"))
    stage, method = keys.take("stage", "sft"), keys.take("finetuning_type", "lora")
    if stage not in ("sft", "pt", "dpo"):
        keys.refuse(f"stage: {stage!r}; sft, pt and dpo have an equivalent")
    if method not in ("lora", "full"):
        keys.refuse(f"finetuning_type: {method!r}; lora and full have an equivalent, and ballast.train names tensors")
    recipe.pairs, recipe.method = stage == "dpo", "lora" if method == "lora" else "full"
    recipe.beta = keys.take("pref_beta", 0.1, float)
    recipe.smoothing = keys.take("dpo_label_smoothing", 0.0, float)
    keys.must_be("pref_loss", "sigmoid")
    bits, kind = keys.take("quantization_bit", 0, int), keys.take("quantization_type", "nf4")
    if bits not in (0, 4, 8) or (bits == 4 and kind != "nf4"):
        keys.refuse(f"quantization_bit: {bits} of type {kind!r}; 4 (nf4) and 8 have an equivalent")
    recipe.base = {4: "nf4", 8: "int8"}.get(bits, "none")
    recipe.double = bits == 4 and bool(keys.take("double_quantization", True))
    rank = keys.take("lora_rank", 8, int)
    targets = keys.take("lora_target", "all")
    recipe.adapters = {"rank": rank, "alpha": keys.take("lora_alpha", 2 * rank, float),
                       "dropout": keys.take("lora_dropout", 0.0, float),
                       "targets": "all-linear" if targets == "all" else _names(targets),
                       "rslora": bool(keys.take("use_rslora", False)), "dora": bool(keys.take("use_dora", False)),
                       "modules_to_save": _names(keys.take("additional_target")),
                       "path": keys.take("adapter_name_or_path")}
    for key in ("loraplus_lr_ratio", "pissa_init", "use_galore", "use_apollo", "use_badam", "use_llama_pro", "use_muon",
                "use_adam_mini", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "mixture_of_depths", "shift_attn",
                "neftune_noise_alpha", "rope_scaling", "add_tokens", "add_special_tokens", "resize_vocab", "pure_bf16",
                "pref_ftx", "ref_model", "ld_alpha", "freeze_trainable_layers", "freeze_extra_modules"):
        keys.must_be(key, 0, 0.0)
    recipe.length = keys.take("cutoff_len", 2048, int)
    recipe.micro_batch = keys.take("per_device_train_batch_size", 8, int)
    recipe.optimizer = keys.take("optim", "adamw_torch")
    recipe.schedule = keys.take("lr_scheduler_type", "linear")
    recipe.epochs = keys.take("num_train_epochs", 3.0, float)
    _fill_training(recipe, keys)
    recipe.held_out = keys.take("val_size", 0.0, float)
    return recipe, keys.rest()


def from_axolotl(values: Json, name: str) -> tuple[Recipe, list[str]]:
    """The recipe of axolotl's YAML (0.21), and the keys without a meaning here."""
    keys = Keys(values, name)
    recipe = Recipe(keys.take("base_model"))
    adapter, rl = keys.take("adapter"), keys.take("rl")
    if adapter not in (None, "lora", "qlora"):
        keys.refuse(f"adapter: {adapter!r}; lora and qlora have an equivalent")
    if rl not in (None, "dpo"):
        keys.refuse(f"rl: {rl!r}; dpo has an equivalent")
    recipe.method, recipe.pairs = "lora" if adapter else "full", rl == "dpo"
    recipe.beta = keys.take("rl_beta", 0.1, float)
    recipe.smoothing = keys.take("dpo_label_smoothing", 0.0, float)
    four, eight = keys.take("load_in_4bit", adapter == "qlora"), keys.take("load_in_8bit", False)
    recipe.base = "nf4" if four else "int8" if eight else "none"
    recipe.double = bool(four)
    linear, targets = keys.take("lora_target_linear", False), keys.take("lora_target_modules")
    rank = keys.take("lora_r", 8, int)
    recipe.adapters = {"rank": rank, "alpha": keys.take("lora_alpha", rank, float),
                       "dropout": keys.take("lora_dropout", 0.0, float), "targets": "all-linear" if linear else targets,
                       "rank_pattern": keys.take("lora_rank_pattern"), "alpha_pattern": keys.take("lora_alpha_pattern"),
                       "rslora": bool(keys.take("peft_use_rslora", False)), "dora": bool(keys.take("peft_use_dora", False)),
                       "modules_to_save": keys.take("lora_modules_to_save"), "path": keys.take("lora_model_dir")}
    if adapter and not linear and not targets:
        keys.refuse("lora_target_modules: is missing; give it, or lora_target_linear: true")
    for key in ("loraplus_lr_ratio", "relora", "neftune_noise_alpha", "peft_layers_to_transform", "lora_target_parameters",
                "peft_init_lora_weights", "unfrozen_parameters", "fp8", "gptq", "qat", "use_dft", "use_eaft", "embedding_lr",
                "lr_groups", "use_pose", "tokens", "added_tokens_overrides", "cosine_constant_lr_ratio", "dpo_loss_type",
                "dpo_use_weighting", "dpo_ld_alpha", "reinit_weights", "plugins", "curriculum_sampling", "diffusion_lm"):
        keys.must_be(key, 0, 0.0)
    recipe.length = keys.take("sequence_len", 512, int)
    recipe.micro_batch = keys.take("micro_batch_size", 1, int)
    recipe.least_share = keys.take("cosine_min_lr_ratio", 0.0, float)
    recipe.optimizer = keys.take("optimizer", "adamw_torch_fused")
    recipe.schedule = keys.take("lr_scheduler", "cosine")
    recipe.epochs = keys.take("num_epochs", 1.0, float)
    _fill_training(recipe, keys)
    size = keys.take("val_set_size", 0.0, float)
    if size > 1:
        keys.refuse(f"val_set_size: {size:g} rows; give a share below 1, or data.eval in the config")
    recipe.held_out = min(size, 1.0)
    return recipe, keys.rest()


def _fill_training(recipe: Recipe, keys: Keys) -> None:
    """Takes the keys that both programs have from transformers."""
    recipe.accumulation = keys.take("gradient_accumulation_steps", 1, int)
    if recipe.optimizer not in _OPTIMIZERS:
        keys.refuse(f"the optimizer {recipe.optimizer!r} has no equivalent; those that have: {', '.join(_OPTIMIZERS)}")
    recipe.params = _optimizer_params(keys)
    if recipe.schedule not in ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"):
        keys.refuse(f"the schedule {recipe.schedule!r} has no equivalent; linear, cosine and constant have")
    recipe.warmup_steps = _warmup(keys)
    recipe.steps = max(keys.take("max_steps", 0, int), 0)
    recipe.clipping = keys.take("max_grad_norm", 1.0, float)
    recipe.precision = _precision(keys)
    recipe.seed = keys.take("seed", 42, int)
    every = keys.take("save_steps", 0, float)
    recipe.save_every = int(every) if every >= 1 else 0
    recipe.output = keys.take("output_dir", "")


def tokens_in(file: pathlib.Path) -> int:
    """The number of tokens in a file of documents, from its header."""
    with file.open("rb") as source:
        size = struct.unpack("<Q", source.read(8))[0]
        header = json.loads(source.read(size if size < file.stat().st_size else 0))
    return int(header["tokens"]["shape"][0])


def _steps_of(recipe: Recipe, data: list[pathlib.Path]) -> int:
    if recipe.steps:
        return recipe.steps
    if not data:
        raise Refusal("max_steps: is missing, and epochs need the data; give --data, made by `ballast prepare`, or --steps")
    tokens = sum(map(tokens_in, data)) * (1 - recipe.held_out)
    return max(1, math.ceil(recipe.epochs * tokens / (recipe.length * recipe.micro_batch * recipe.accumulation)))


def _scheduler(recipe: Recipe, steps: int) -> Json:
    warmup = math.ceil(recipe.warmup_steps * steps) if recipe.warmup_steps < 1 else int(recipe.warmup_steps)
    if recipe.schedule == "linear":
        return {"type": "linear", "params": {"warmup_num_steps": warmup}}
    if recipe.schedule.startswith("cosine"):
        return {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": warmup,
                                                     "warmup_type": "linear", "cos_min_ratio": recipe.least_share}}
    if warmup:
        return {"type": "WarmupLR", "params": {"warmup_num_steps": warmup, "warmup_type": "linear"}}
    return {"type": "constant"}


def config_of(recipe: Recipe, data: list[pathlib.Path]) -> Json:
    """The config of a recipe with `data`. Raises Refusal if the number of steps cannot be known."""
    steps = _steps_of(recipe, data)
    rule, states = _OPTIMIZERS[recipe.optimizer]
    params = dict(recipe.params)
    if rule in ("SGD", "Adagrad"):
        del params["betas"]
    if rule in ("SGD", "Lion"):
        del params["eps"]
    section: Json = {"steps": steps, "seed": recipe.seed, "optimizer_states": states}
    if recipe.save_every:
        section["checkpoint_every"] = recipe.save_every
    if recipe.output:
        section["out"] = recipe.output
    if recipe.method == "lora":
        section |= {"train": "adapters", "adapters": {key: value for key, value in recipe.adapters.items() if value}}
        if recipe.adapters["path"]:
            section["adapters"] = {"path": recipe.adapters["path"], "dropout": recipe.adapters["dropout"]}
        section["quantized_base"] = recipe.base
        if recipe.double:
            section["double_quantization"] = True
    if recipe.pairs:
        section["preference"] = {"beta": recipe.beta, "label_smoothing": recipe.smoothing}
    return {"model": {"path": recipe.model},
            "data": {"pairs" if recipe.pairs else "documents": [str(file) for file in data], "sequence_length": recipe.length,
                     **({"held_out": recipe.held_out} if recipe.held_out else {})},
            "train_micro_batch_size_per_gpu": recipe.micro_batch, "gradient_accumulation_steps": recipe.accumulation,
            "gradient_clipping": recipe.clipping, "optimizer": {"type": rule, "params": params},
            "scheduler": _scheduler(recipe, steps), "bf16": {"enabled": recipe.precision == "bf16"},
            **({"fp16": {"enabled": True}} if recipe.precision == "fp16" else {}), "ballast": section}


def read_recipe(path: pathlib.Path) -> tuple[Recipe, list[str]]:
    """Reads a YAML or JSON file of either program. Raises Refusal."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise Refusal("a recipe needs the Python package PyYAML: pip install 'ballast-offload[prepare]'") from error
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refusal(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise Refusal(f"{path}: is no YAML of keys and values")
    if "base_model" in values:
        return from_axolotl(values, str(path))
    if "model_name_or_path" in values:
        return from_llama_factory(values, str(path))
    raise Refusal(f"{path}: has neither base_model (axolotl) nor model_name_or_path (LLaMA-Factory)")


def main(words: list[str]) -> int:
    """`ballast import-config`. Returns the exit status."""
    parser: argparse.ArgumentParser = importlib.import_module("ballast.preparing.arguments").Arguments(
        prog="ballast import-config", description="Translates a recipe of LLaMA-Factory or axolotl into a config.")
    parser.add_argument("recipe", type=pathlib.Path, metavar="RECIPE", help="YAML of LLaMA-Factory or axolotl")
    parser.add_argument("--data", nargs="+", type=pathlib.Path, default=[], metavar="FILE",
                        help="files of `ballast prepare`; epochs are counted in their tokens")
    parser.add_argument("--model", metavar="DIR", help="folder of the model, if the recipe names a repository")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="steps instead of the recipe's epochs")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="config to write (default: print it)")
    arguments = parser.parse_args(words)
    try:
        recipe, unused = read_recipe(arguments.recipe)
        recipe.model, recipe.steps = arguments.model or recipe.model, arguments.steps or recipe.steps
        text = json.dumps(config_of(recipe, arguments.data), indent=2) + "\n"
        if arguments.out is None:
            sys.stdout.write(text)
        else:
            with arguments.out.open("x") as file:  # never replaces another config
                file.write(text)
    except (Refusal, OSError, KeyError, struct.error, ValueError) as error:
        reason = error if isinstance(error, (Refusal, OSError)) else f"--data: no file of documents ({error})"
        print(f"ballast import-config: {reason}", file=sys.stderr)
        return 2
    if unused:
        print(f"ballast import-config: without a meaning here: {', '.join(unused)}", file=sys.stderr)
    return 0
