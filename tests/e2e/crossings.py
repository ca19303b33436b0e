#!/usr/bin/env python3
"""Random crossings of features: runs that must agree bit by bit, and checkpoints that must be read.

    python3 -B tests/e2e/crossings.py BALLAST [--mpirun MPIRUN] [--runs 500] [--seed 1] [--jobs 2]
                                      [--only INDEX] [--keep]

Each crossing draws a small model and a way to train it: family, sizes, data, type, trained part, tiles,
optimizer, ranks. It then makes these runs:

1. the reference, with all data on the device and one operation at a time;
2. the crossing, with other tiers, buffers, sub-groups, order of operations, speculative updates, stage,
   devices, tensor places and threads, and with checkpoints;
3. a resume of one of its checkpoints in another directory, again with other choices.

Every checkpoint is verified; losses, gradient norms and evaluations, and the hash of weights and states
after the last step are the same in all three. A failure prints the commands that repeat it. A crossing
whose reference is refused is drawn again; a refusal of the crossing alone is a failure. The exit status
is 1 if anything differs, crashes, hangs or is refused.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

from runs import write_file

STEPS = 5
HANGS_AFTER = 120  # seconds; a run takes about one
VOCABULARY = 300
COMPARED = ("loss", "lr", "grad_norm", "tokens", "skipped", "eval_loss", "loss_scale", "experts",
            "rewards")
DENSE = ["gpt2", "llama", "granite", "granite_swa", "granitemoehybrid", "cohere2", "arcee", "lfm2", "muse_glimmer",
         "seed_oss", "hunyuan_v1_dense", "ernie4_5", "exaone4", "mistral", "ministral3", "qwen2", "qwen3", "smollm3",
         "phi3", "olmo2", "olmo3", "gemma3", "gpt_neox"]
LATENT = ["deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "mistral4"]
DELTA = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"]  # gated delta nets
SIGMOID = ["glm4_moe", "minimax_m2", "minimax_m3_vl_text", "solar_open", "hy_v3", "afmoe"]  # routers with sigmoids
EXPERTS = ["cohere2_moe", "mixtral", "qwen2_moe", "qwen3_moe", "mellum", "ernie4_5_moe", "olmoe", "gpt_oss", "granitemoe_swa", *LATENT,
           *SIGMOID, *DELTA[1:3]]
CAN_BE_TILED = {"arcee", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "gpt2", "lfm2", "llama", "mistral", "ministral3",
                "phi3", "qwen2", "qwen3", "smollm3"}
WINDOWED = ("afmoe", "cohere2_moe", "mistral", "exaone4", "mellum", "cohere2", "granite_swa", "granitemoe_swa", "phi3", "gemma3", "gpt_oss",
            "muse_glimmer")
MOST_RANKS = 4
# Patterns of the tensors of a layer in Hugging Face's folders.
LAYER = {"gpt2": "*h.{}.*", "gpt_neox": "*gpt_neox.layers.{}.*"}


class Mismatch(Exception):
    """The runs of a crossing disagree, or one of them failed."""


def draw_gemma4(dice):
    """Draws tables of embeddings per layer, and layers that attend to keys and values of others."""
    layers = dice.choice([2, 3, 4])
    shared = dice.choice([0, 0, 1, layers - 2])
    return {"family": "gemma4", "vocab_size": VOCABULARY, "hidden_size": dice.choice([32, 64]),
            "num_layers": layers, "num_heads": 4, "num_kv_heads": dice.choice([1, 2]), "head_dim": 16,
            "global_head_dim": dice.choice([16, 24]), "intermediate_size": 64, "sliding_window": 7,
            # The layers at the end have types of earlier ones.
            "layer_types": (["sliding_attention", "full_attention"] * 2)[:layers],
            "hidden_size_per_layer_input": dice.choice([0, 8, 8]),
            "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": max(0, min(shared, layers - 2)),
            "vocabulary_tiles": dice.choice([1, 2]), "init_stddev": 0.06}


def draw_delta(dice, model):
    """Draws gated delta nets, and attention in every second layer."""
    model |= {"head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2,
              "linear_num_value_heads": dice.choice([2, 4]), "linear_key_head_dim": 8,
              "linear_value_head_dim": dice.choice([8, 12]), "intermediate_size": 64}
    if model["family"] == "olmo_hybrid":
        del model["head_dim"], model["full_attention_interval"]
    elif model["family"] != "qwen3_5":
        model |= {"num_experts": 4, "num_experts_per_tok": dice.choice([1, 2]),
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def draw_model(dice):
    family = dice.choice(DENSE + EXPERTS + [DELTA[0], DELTA[3]] + ["gemma4"] * 3)
    if family == "gemma4":
        return draw_gemma4(dice)
    model = {"family": family, "vocab_size": dice.choice([256, VOCABULARY]),
             "hidden_size": dice.choice([32, 64]), "num_layers": dice.choice([1, 2, 3]),
             "num_heads": 4, "init_stddev": 0.06}
    if family not in ("gpt2", "gpt_neox", *LATENT):
        model["num_kv_heads"] = dice.choice([1, 2, 4])
    if family in ("qwen2_moe", "qwen3_moe", "mellum", "hy_v3", "ernie4_5_moe", "afmoe"):
        model["moe_intermediate_size"] = 32
    if family == "afmoe":
        model["mup_enabled"] = dice.choice([True, False])
    if family == "minimax_m3_vl_text":
        model |= {"dense_intermediate_size": 48, "shared_intermediate_size": 32,
                  "mlp_layer_types": [dice.choice(["dense", "sparse"])
                                      for _ in range(model["num_layers"] - 1)] + ["sparse"]}
    if family == "cohere2_moe":
        model |= {"first_k_dense_replace": dice.choice([0, 1]),
                  "expert_selection_fn": dice.choice(["softmax", "sigmoid"]),
                  "num_shared_experts": dice.choice([0, 1])}
    if family in ("qwen2_moe", "qwen3_moe"):
        if dice.random() < 0.3:
            model["mlp_only_layers"] = [0]
    if family == "qwen2_moe":
        model["shared_expert_intermediate_size"] = 32
    if family in LATENT:
        model |= {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
                  "qk_rope_head_dim": 6, "v_head_dim": dice.choice([10, 14]),
                  "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "intermediate_size": 64,
                  "num_experts_per_tok": dice.choice([1, 2]), "moe_intermediate_size": 32}
        if family != "glm4_moe_lite":
            model["first_k_dense_replace"] = dice.choice([0, 1])
    elif family in DELTA:
        draw_delta(dice, model)
    elif family == "lfm2":
        model |= {"layer_types": [dice.choice(["conv", "conv", "full_attention"])
                                  for _ in range(model["num_layers"])],
                  "conv_bias": dice.choice([True, False]), "block_multiple_of": 32}
    elif family in ("glm4_moe", "solar_open"):
        model |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                  "intermediate_size": 64, "moe_intermediate_size": 32}
        if family == "glm4_moe":
            model["first_k_dense_replace"] = dice.choice([0, 1])
    elif family in EXPERTS:
        model["num_local_experts" if family in ("mixtral", "gpt_oss", "minimax_m2", "minimax_m3_vl_text", "granitemoe_swa") else "num_experts"] = 4
        model["num_experts_per_tok"] = dice.choice([1, 2])
        model["intermediate_size"] = 64
        if family not in (*SIGMOID, "ernie4_5_moe", "cohere2_moe") and dice.random() < 0.5:
            model |= {"output_router_logits": True, "router_aux_loss_coef": 0.1,
                      "router_z_loss_coef": 0.01}
    if family in WINDOWED and dice.random() < 0.7:
        model["sliding_window"] = 7
    if family in CAN_BE_TILED and dice.random() < 0.4:
        model["layer_tiles"] = dice.choice([2, 4])
    # Without it, more devices would have more tiles.
    model["vocabulary_tiles"] = dice.choice([1, 1, 2, 3]) if "layer_tiles" not in model else dice.choice([2, 4])
    if family != "gemma3" and dice.random() < 0.4:
        model["tie_embeddings"] = True
    return model


def draw_targets(dice, family):
    """Draws maps of experts, alone or of all experts together, and perhaps the router."""
    only_stacks = family in ("gpt_oss", "granitemoe_swa", "mistral4")
    alone = ["w1", "w2"] if family in ("mixtral", "minimax_m2") else ["gate_proj", "down_proj"]
    targets = ["experts.gate_up_proj", "experts.down_proj"] if only_stacks or dice.random() < 0.5 else alone
    router = {"gpt_oss": "mlp.router", "granitemoe_swa": "block_sparse_moe.router"}.get(family, "mlp.gate")
    return dice.sample(targets, dice.choice([1, 2, 2])) + [router] * (dice.random() < 0.3)


def draw_trained(dice, model):
    """Draws what is trained and how the rest is stored: keys of the section ballast."""
    layer = LAYER.get(model["family"], "model.layers.{}.*")
    last = layer.format(model["num_layers"] - 1)
    kind = dice.choice(["all", "all", "all", "patterns", "adapters", "adapters"])
    if kind == "all":
        return {}
    base = dice.choice(["none", "none", "nf4", "int8"])
    kept = {"quantized_base": base, "double_quantization": base == "nf4" and dice.random() < 0.5}
    if kind == "patterns":
        return kept | {"train": dice.choice([["*bias" if "gpt" in model["family"] else "*norm*"],
                                             [layer.format(0)], [last, "*embed*"], [last]])}
    adapters = {"targets": "all-linear", "rank": dice.choice([2, 4]), "dora": dice.random() < 0.3}
    if not adapters["dora"] and dice.random() < 0.4:
        adapters["dropout"] = 0.1
    if dice.random() < 0.3:
        adapters["modules_to_save"] = ["lm_head"]
    if model["family"] in EXPERTS and dice.random() < 0.6:
        adapters |= {"targets": draw_targets(dice, model["family"]), "dora": False, "dropout": 0}
    return kept | {"train": "adapters", "adapters": adapters}


def draw_mathematics(dice, ranks_allowed):
    """Draws everything that may change the bits. Returns the config and the number of ranks."""
    model = draw_model(dice)
    ranks = dice.choice([1, 1, 2, 3]) if ranks_allowed else 1
    ballast = draw_trained(dice, model)
    data = {"sequence_length": dice.choice([16, 31, 48])}
    if ballast.get("train") == "adapters" and dice.random() < 0.3:
        data["pairs"] = ["pairs.safetensors"]
    else:
        kind = dice.choice(["text", "documents", "tokens"])
        data[kind] = [{"text": "text.txt", "documents": "documents.safetensors",
                       "tokens": "tokens.bin"}[kind]]
    data["held_out"] = dice.choice([0.0, 0.1])
    states = dice.choice(["fp32", "fp32", "8bit", "bf16_first"])
    rule = dice.choice(["AdamW", "AdamW", "Adam", "Adagrad", "Lion", "SGD"])
    params = {"lr": 1e-2 if rule != "Lion" else 1e-3, "weight_decay": dice.choice([0.0, 0.1])}
    if rule == "SGD":
        params["momentum"] = 0.9
    config = {
        "model": model, "data": data,
        "optimizer": {"type": rule, "params": params},
        "train_micro_batch_size_per_gpu": dice.choice([1, 2, 3]),
        "gradient_accumulation_steps": dice.choice([1, 2, 3]),
        "gradient_clipping": dice.choice([0.0, 0.3, 1.0]),
        "aio": {"any_file_system": True},
        "ballast": {**ballast, "device": "host", "steps": STEPS, "save_weights": False,
                    "optimizer_states": states if rule != "Adagrad" or states != "bf16_first" else "fp32",
                    "compute_threads": 1, "seed": dice.randrange(1000),
                    "eval_every": dice.choice([0, 2]), "eval_batches": dice.choice([1, 2, 5]),
                    "device_bytes": "256MiB", "host_bytes": "256MiB"},
    }
    kind = dice.choice(["bf16", "bf16", "fp16", "fp32"])
    config["bf16"] = {"enabled": kind == "bf16"}
    if kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": dice.choice([10, 24]),
                          "loss_scale_window": 2, "hysteresis": 1}
    if ranks > 1 and dice.random() < 0.4:
        config["sequence_parallel_size"] = ranks
    if model["family"] in EXPERTS:
        config["ballast"]["expert_updates"] = dice.choice(["all", "active"])
        if ranks == 2 and dice.random() < 0.5:
            config["ballast"]["expert_parallel"] = 2
        config["ballast"]["router_losses"] = dice.choice(["step", "micro_batch"])
    return config, ranks


def has_losses_of_step(config):
    """Whether micro-batches must pass the routers together."""
    model = config["model"]
    return model.get("output_router_logits", False) and config["ballast"]["router_losses"] == "step"


def tensor_places(config, ranks):
    """Numbers of tensor places of each of `ranks` ranks, among which all tiles can be shared."""
    model, ballast = config["model"], config["ballast"]
    if "train" in ballast or "pairs" in config["data"] or "sequence_parallel_size" in config:
        return [1]
    if model["family"] in ("qwen3", "hunyuan_v1_dense"):  # norms of heads
        return [1]
    heads = model.get("num_kv_heads", model["num_heads"])
    attention = next(n for n in range(min(model.get("layer_tiles", 1), heads), 0, -1) if heads % n == 0)
    tiles = (model.get("layer_tiles", 1), attention, model["vocabulary_tiles"])
    return [t for t in (1, 2, 4) if ranks * t <= MOST_RANKS and all(n % t == 0 for n in tiles)]


def draw_placement(dice, config, ranks, checkpoints=True):
    """Overrides that must not change a bit: where data are, and when they move."""
    tiers = ["none", "cpu", "nvme"]
    stage = dice.choice([0, 1, 2, 3]) if ranks > 1 else dice.choice([0, 1])
    made = {
        "zero_optimization.stage": stage,
        "zero_optimization.offload_optimizer.device": dice.choice(tiers),
        "zero_optimization.offload_param.device": dice.choice(tiers),
        "zero_optimization.sub_group_size": dice.choice(["auto", 2048, 16384]),
        "ballast.activations": dice.choice(["device", "host", "nvme"]),
        "ballast.gradients": dice.choice(["host", "host", "nvme"]),
        "ballast.order": dice.choice(["layer_major", "layer_major", "micro_batch_major",
                                      "micro_batch_major_offload"]),
        "ballast.recompute": dice.choice([True, False, "except_attention"]),
        "ballast.speculative_updates": dice.choice([0, 0, 1, 50]),
        "ballast.update_threads": dice.choice([1, 2, 3]),
        "ballast.update_isa": dice.choice(["auto", "scalar"]),
        "ballast.device_weight_buffers": dice.choice([0, 1, 2]),
        "ballast.expert_prefetch": dice.choice([True, False]),
        "ballast.serial": dice.random() < 0.1,
        "aio.backend": dice.choice(["auto", "threads"]),
    }
    if has_losses_of_step(config):
        made["ballast.order"] = "layer_major"
    devices = dice.choice([1, 1, 2, 3])
    if made["ballast.order"] == "layer_major":
        made["pipeline.stages"] = min(devices, config["model"]["num_layers"])
    if ranks > 1 and stage == 3:
        made["zero_optimization.stage3_param_persistence_threshold"] = dice.choice([0, 5000, 10**6])
    if dice.random() < 0.4:
        blocks = config["model"]["num_layers"]
        made["ballast.placement"] = [
            {"blocks": f"0-{dice.randrange(blocks)}",
             dice.choice(["weights", "optimizer", "activations"]): dice.choice(["device", "host", "nvme"])}]
    if dice.random() < 0.3:
        made["ballast.delay_seed"] = dice.randrange(1000)
    if made["ballast.speculative_updates"] == 0 and config["gradient_clipping"] == 0 \
            and "fp16" not in config and dice.random() < 0.3:
        made["ballast.update"] = "eager"
    if checkpoints:
        made["ballast.checkpoint_every"] = dice.choice([1, 2, 5])
        made["ballast.checkpoint_keep"] = dice.choice([1, 2, 6])
    return made


def packed(dtype, form, values):
    """A list as a tensor for write_file."""
    return dtype, [len(values)], struct.pack(f"<{len(values)}{form}", *values)


def write_data(folder):
    """Makes data of every kind, equal for all crossings. Some documents have no trained token."""
    dice = random.Random(7)
    (folder / "text.txt").write_text(" ".join(str(dice.randrange(100)) for _ in range(2000)))
    tokens = [dice.randrange(256) for _ in range(6000)]
    (folder / "tokens.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    for name, pairs in (("documents", False), ("pairs", True)):
        ids, mask, starts = [], [], [0]
        for number in range(120):
            prompt, length = dice.randrange(1, 6), dice.randrange(8, 44)
            if pairs and number % 2:  # chosen and rejected share a prompt
                prompt = first_prompt
                ids += ids[starts[-2]:starts[-2] + prompt]
            else:
                first_prompt = prompt
                ids += [dice.randrange(256) for _ in range(prompt)]
            ids += [dice.randrange(256) for _ in range(length)]
            silent = not pairs and number % 9 == 0
            mask += [0] * prompt + [0 if silent else 1] * length
            starts.append(len(ids))
        metadata = {"format": "ballast documents", "version": "1", "tokenizer": "made up",
                    "tokenizer_sha256": "", "mask": "assistant"}
        write_file(folder / f"{name}.safetensors",
                   {"tokens": packed("U16", "H", ids), "mask": packed("U8", "B", mask),
                    "documents": packed("I64", "q", starts)},
                   metadata | ({"pairs": "chosen, rejected"} if pairs else {}))


def refusal_of(done):
    """The line of stderr with Ballast's error; mpirun adds its own lines."""
    return next((line for line in done.stderr.splitlines() if line.startswith("ballast: error:")),
                done.stderr.strip())


class Crossing:
    """The runs of one crossing, in a separate directory."""

    def __init__(self, program, mpirun, folder, index, seed):
        self._program, self._mpirun, self.folder = program, mpirun, folder
        self._dice = random.Random(f"{seed}/{index}")
        self.commands = []
        self.refused = collections.Counter()

    def _call(self, *arguments, ranks=1):
        command = [self._program, *arguments]
        if ranks > 1:
            command = [self._mpirun, "-n", str(ranks), "--bind-to", "none", "--oversubscribe",
                       *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *command]
        self.commands.append(shlex.join(map(str, command)))
        try:
            return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False,
                                  timeout=HANGS_AFTER, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
        except subprocess.TimeoutExpired as error:
            raise Mismatch(f"no end after {HANGS_AFTER} s") from error

    def _train(self, out, ranks, overrides, *arguments):
        sets = [f"--set={key}={json.dumps(value)}" for key, value in overrides.items()]
        return self._call("train", "config.json", "--out", out, *arguments, *sets, ranks=ranks)

    def _expect(self, done):
        if done.returncode != 0:
            raise Mismatch(f"status {done.returncode}: {refusal_of(done)[-600:]}")
        return done

    def _rows(self, out):
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: {key: row.get(key) for key in COMPARED} for row in rows}

    def _hash(self, checkpoint):
        done = self._expect(self._call("inspect", checkpoint, "--hash"))
        return re.search(r"\b[0-9a-f]{16}\b", done.stdout).group()

    def _same_rows(self, reference, rows, first=1):
        for step, row in rows.items():
            for key, value in row.items():
                if step >= first and value != reference[step][key]:
                    raise Mismatch(f"step {step}: {key} is {value}, {reference[step][key]} in the reference")
        if max(rows) != STEPS:
            raise Mismatch(f"the last row is that of step {max(rows)}")

    def _verify(self, out):
        done = self._expect(self._call("inspect", out, "--verify"))
        names = sorted((entry.name for entry in (self.folder / out / "checkpoints").iterdir()),
                       key=lambda name: int(name.split("-")[1]))
        if not names or done.stdout.count("intact") < len(names):
            raise Mismatch(f"not every checkpoint is intact: {done.stdout}")
        return names

    def _reference(self, config, ranks):
        """Trains the reference. Returns its rows and the hash at its end, or None if it is refused."""
        (self.folder / "config.json").write_text(json.dumps(config, indent=1))
        done = self._train("reference", ranks, {"ballast.checkpoint_every": STEPS, "ballast.serial": True,
                                                "zero_optimization.stage": 0})
        if done.returncode == 2:
            self.refused[re.sub(r"\d+", "#", refusal_of(done))] += 1
            return None
        self._expect(done)
        return self._rows("reference"), self._hash(f"reference/checkpoints/step-{STEPS}")

    def _crossed(self, config, ranks, out, *arguments):
        """Trains with another placement."""
        placement = draw_placement(self._dice, config, ranks)
        tensor = self._dice.choice(tensor_places(config, ranks)) if self._mpirun else 1
        if tensor > 1:
            placement["tensor_parallel.autotp_size"] = tensor
            placement["activation_checkpointing.partition_activations"] = self._dice.random() < 0.5
        self._expect(self._train(out, ranks * tensor, placement, *arguments))

    def check(self, ranks_allowed):
        """Raises Mismatch if anything differs."""
        for _ in range(50):
            shutil.rmtree(self.folder / "reference", ignore_errors=True)
            self.commands.clear()
            config, ranks = draw_mathematics(self._dice, ranks_allowed)
            reference = self._reference(config, ranks)
            if reference is not None:
                break
        else:
            raise Mismatch("every model is refused")
        rows, final = reference
        self._crossed(config, ranks, "crossing")
        self._same_rows(rows, self._rows("crossing"))
        names = self._verify("crossing")
        self._same_end("crossing", names, final)
        name = self._dice.choice(names)
        source = f"crossing/checkpoints/{name}"
        if self._dice.random() < 0.3:
            self._expect(self._call("export", source, "--states", "--out", "states"))
            source = "states"
        if name == f"step-{STEPS}":
            self._expect(self._call("inspect", source, "--hash"))
            return
        step = int(name.split("-")[1])
        if self._dice.random() < 0.3 and self._resume_elsewhere(config, ranks, source, rows[step + 1]):
            return
        self._crossed(config, ranks, "resumed", f"--resume={source}")
        self._same_rows(rows, self._rows("resumed"), first=step + 1)
        self._same_end("resumed", self._verify("resumed"), final)

    def _same_end(self, out, names, final):
        if names[-1] == f"step-{STEPS}" and self._hash(f"{out}/checkpoints/{names[-1]}") != final:
            raise Mismatch(f"the hash after the last step of {out} differs from the reference's")

    def _resume_elsewhere(self, config, ranks, source, row):
        """Resumes with another number of ranks, whose sums have another order. Returns false if the
        batch cannot be divided otherwise."""
        accumulation = config["gradient_accumulation_steps"] * ranks
        others = [n for n in (1, 2, 3) if n != ranks and accumulation % n == 0]
        if self._mpirun is None or not others or config["ballast"].get("expert_parallel") or \
                config.get("sequence_parallel_size"):
            return False
        other = self._dice.choice(others)
        placement = draw_placement(self._dice, config, other)
        placement["gradient_accumulation_steps"] = accumulation // other
        self._expect(self._train("resumed", other, placement, f"--resume={source}"))
        rows = self._rows("resumed")
        self._verify("resumed")
        own, dropout = rows[min(rows)], config["ballast"].get("adapters", {}).get("dropout")
        if not dropout and not abs(own["loss"] - row["loss"]) <= 0.02 * abs(row["loss"]):
            raise Mismatch(f"on {other} ranks the loss is {own['loss']}, not about {row['loss']}")
        return True


def cross(options, index):
    """One crossing; returns its refusals and, if it failed, a description."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"ballast-crossing-{index}-", dir=options.folder))
    write_data(folder)
    crossing = Crossing(options.ballast, options.mpirun, folder, index, options.seed)
    failure = None
    try:
        crossing.check(options.mpirun is not None)
    except Mismatch as error:
        commands = "\n    ".join(crossing.commands)
        failure = f"crossing {index}: {error}\n  in {folder}:\n    {commands}"
    if failure is None and not options.keep:
        shutil.rmtree(folder)
    return crossing.refused, failure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("ballast", type=os.path.abspath)
    parser.add_argument("--mpirun", help="also cross runs of two and three ranks")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="repeat the crossing of this index")
    parser.add_argument("--folder", help="where the runs write; failed ones stay there")
    parser.add_argument("--keep", action="store_true", help="keep all runs")
    options = parser.parse_args()
    indices = range(options.runs) if options.only is None else [options.only]
    refused, failures = collections.Counter(), 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for counted, failure in pool.map(lambda index: cross(options, index), indices):
            refused += counted
            if failure is not None:
                failures += 1
                print(failure, flush=True)
    for message, count in refused.most_common():
        print(f"drawn again {count} times: {message}")
    print(f"{len(indices) - failures} passed, {failures} failed")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
