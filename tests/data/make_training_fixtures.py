#!/usr/bin/env python3
"""Trains small models with PyTorch and writes the reference for the engine's runs.

    python tests/data/make_training_fixtures.py [OUTPUT_FOLDER [NAME ...]]

Needs torch, transformers, peft, safetensors and numpy; the build and the tests do not. For each case
NAME (see CASES) it writes into training/ beside this script (or OUTPUT_FOLDER):

    NAME.json                  config, batch geometry, optimizer, and the runs (see below)
    NAME.initial.safetensors   initial weights, fp32, names of transformers' state_dict(); not for
                               cases that start from those of another one ("initial")
    NAME.final.safetensors     trained weights after the last step of the fp32 run
    tokens.u16.bin             token ids, little-endian, shared by all cases

Batches. Sample i is tokens[i*T .. i*T+T] (T + 1 ids: inputs are the first T, targets the last T);
sample i = (step * MICRO + micro) * SEQ + sequence, with step counted from 0. So a loader that reads
the file in order without shuffling gives exactly these batches.

Loss of a step: mean over all its MICRO * SEQ * T target tokens of the next-token cross-entropy,
token losses in fp32 (logits cast to fp32), summed in double. The micro-batches are equally large,
so this is also the mean of their mean losses, which is what DeepSpeed's accumulation optimises.

Learning rate of step k = 1, 2, ...: DeepSpeed's WarmupLR. Its constructor sets warmup_min_lr (t =
-1) and it is stepped after each optimizer step, so step k uses t = k - 2:
    W = max(2, warmup_num_steps);  gamma = 0                     for t < 0
    gamma = t / W (linear) or ln(t + 1) / ln(W) (log)            for 0 <= t < W;  1 from t = W
    lr = warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma
so steps 1 and 2 both use warmup_min_lr. The list is stored.

Gradient norm: L2 over all parameters (a tied matrix counts once, with its summed gradient), in
double, before clipping. Clipping: c = max(1, (norm + 1e-6) / clip); gradients are multiplied by
1/c.

Optimizer: torch.optim.AdamW (single-tensor form) with weight decay on every parameter, biases and
norms included. Its epsilon is 1e-6: GPT-2's key biases have a gradient that is zero but for
rounding, and with 1e-8 Adam would amplify that rounding into steps of the size of the learning
rate.

Run "fp32": weights, activations and gradients in fp32; the three micro-batches' gradients are
summed by autograd into .grad in micro-batch order.

Run "bf16": the model's weights are bf16, rounded to nearest even from fp32 master weights before
each step; activations and logits are bf16 as transformers computes them (Llama: RMSNorm and
softmax in fp32; GPT-2: LayerNorm and softmax with bf16 in and out); the loss is fp32 on logits cast
to fp32. Each micro-batch's gradient is bf16 as autograd gives it and is added in fp32 to an
accumulator in micro-batch order; the accumulated fp32 gradient goes, without another rounding, into
norm, clipping and AdamW on the fp32 master weights (moments fp32). Only losses and norms are stored
for it: bf16 results depend on the order of summation, so compare them with a tolerance.

Run "fp16": as "bf16" with fp16 instead of bf16, and with a loss scale. torch.amp.GradScaler
starts at 2^20, which overflows, and doubles the scale after 7 good steps, which overflows within two
steps: so its rules are those of DeepSpeed with hysteresis 1 and a window of 6, which differ only
where a second doubling follows the first. The sums of the scaled gradients are rounded to
fp16 once, as where they are moved to the optimizer; where one is infinite or NaN, the scaler skips
the step: weights, moments, and the number of updates on which the learning rate depends stay.
`scale` has the scale of each step, `skipped` whether it was skipped; its norm is then null.

Frozen parameters (those that match no pattern of "train"): requires_grad is False. They are not
given to the optimizer, so neither decay nor the norm counts them. In the bf16 run they are bf16,
without a master.

Adapters (cases with "adapters", the arguments of PEFT's LoraConfig): the model of "initial" with
adapters whose B are random too; magnitudes of DoRA are the norms of W, without A and B. Besides, the
case has
    NAME/                      the adapters at the beginning, as PEFT writes them
    NAME.merged.safetensors    the tensors of layer 1 and all others outside of layers that
                               merge_and_unload() changes at the beginning
and NAME.final.safetensors has PEFT's names without "base_model.model.".

Determinism: one thread, deterministic algorithms, eager attention, no dropout, no compilation.
"""

import copy
import fnmatch
import json
import math
import pathlib
import platform
import sys

import numpy
import peft
import safetensors.torch
import torch
import transformers

STEPS, MICRO, SEQ, T = 30, 3, 2, 37
VOCAB = 131
OPTIMIZER = {"lr": 4e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def gpt2_config():
    return transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_inner=None, n_positions=48,
        layer_norm_epsilon=1e-5, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)


def llama_config(tied, theta):
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=136, max_position_embeddings=48,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied, attention_bias=False, mlp_bias=False, attention_dropout=0.0,
        bos_token_id=None, eos_token_id=None)


def experts_config():
    return transformers.Qwen2MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, max_position_embeddings=48, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, mlp_only_layers=[0], attention_dropout=0.0,
        pad_token_id=None, bos_token_id=None, eos_token_id=None)


# `model` uses the key names of Ballast's configs; `transformers` is built from the same numbers.
CASES = {
    "gpt2": {
        "make": gpt2_config, "warmup_type": "linear", "clip": 1.5, "seed": 11,
        "model": {"family": "gpt2", "vocab_size": VOCAB, "hidden_size": 64, "num_layers": 2,
                  "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 256, "max_sequence": 48,
                  "norm_epsilon": 1e-5, "tie_embeddings": True},
    },
    "llama": {
        "make": lambda: llama_config(False, 10000.0), "warmup_type": "log", "clip": 1.8, "seed": 12,
        "model": {"family": "llama", "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 2,
                  "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 136, "max_sequence": 48,
                  "norm_epsilon": 1e-6, "rope_theta": 10000.0, "tie_embeddings": False},
    },
    "llama_tied": {
        "make": lambda: llama_config(True, 500.0), "warmup_type": "linear", "clip": 1.8, "seed": 13,
        "model": {"family": "llama", "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 2,
                  "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 136, "max_sequence": 48,
                  "norm_epsilon": 1e-6, "rope_theta": 500.0, "tie_embeddings": True},
    },
}


# Layers with both, below and above frozen ones; maps that are joined with frozen ones if they are
# trained too; parts of a norm; positions without the tokens of a tied matrix, and the reverse.
CASES["gpt2_frozen"] = CASES["gpt2"] | {
    "initial": "gpt2", "clip": 0.8,
    "train": ["transformer.wpe.weight", "transformer.h.0.attn.*", "transformer.h.1.ln_2.weight",
              "transformer.h.1.mlp.c_fc.bias", "transformer.h.1.mlp.c_proj.weight",
              "transformer.ln_f.bias"]}
CASES["llama_frozen"] = CASES["llama"] | {
    "initial": "llama", "clip": 0.72,
    "train": ["model.layers.1.self_attn.[qv]_proj.weight", "model.layers.1.input_layernorm.weight",
              "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]}
CASES["llama_tied_frozen"] = CASES["llama_tied"] | {
    "initial": "llama_tied", "clip": 1.8, "train": ["model.embed_tokens.*", "model.layers.0.*"]}
CASES["llama_tied_fp16"] = CASES["llama_tied"] | {"initial": "llama_tied", "kinds": ("fp16",)}


# Several targets, maps that are joined and some of their neighbours not, biases that stay frozen,
# modules that are trained in full; one map for queries, keys and values, weights [in, out].
CASES["llama_lora"] = CASES["llama"] | {
    "initial": "llama", "clip": 0.68,
    "adapters": {"r": 4, "lora_alpha": 6, "modules_to_save": ["lm_head"],
                 "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}}
CASES["gpt2_lora"] = CASES["gpt2"] | {
    "initial": "gpt2", "clip": 0.6,
    "adapters": {"r": 3, "lora_alpha": 5, "use_rslora": True, "fan_in_fan_out": True,
                 "modules_to_save": ["ln_f"], "target_modules": ["c_attn", "mlp.c_proj", "c_fc"]}}
# Ranks and alphas by names: maps that are joined with adapters of different ranks.
CASES["llama_patterns"] = CASES["llama"] | {
    "initial": "llama", "clip": 0.8,
    "adapters": {"r": 4, "lora_alpha": 6, "use_rslora": True,
                 "rank_pattern": {"q_proj": 1, r"layers\.1\..*v_proj": 8, "mlp.up_proj": 3},
                 "alpha_pattern": {r"layers\.0\.self_attn\..*": 9, "down_proj": 2.5},
                 "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]}}
# DoRA: a part between two others without an adapter; one map for queries, keys and values with
# biases, and one that adds to the residual.
CASES["llama_dora"] = CASES["llama"] | {
    "initial": "llama", "clip": 0.375, "steps": 10,
    "adapters": {"r": 4, "lora_alpha": 6, "use_dora": True,
                 "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"]}}
CASES["gpt2_dora"] = CASES["gpt2"] | {
    "initial": "gpt2", "clip": 0.28, "steps": 10,
    "adapters": {"r": 3, "lora_alpha": 5, "use_dora": True, "fan_in_fan_out": True,
                 "target_modules": ["c_attn", "mlp.c_proj"]}}
# All maps of a layer with experts, those of the experts together.
CASES["qwen2_moe"] = {
    "make": experts_config, "warmup_type": "log", "clip": 1.1, "seed": 14, "steps": 10,
    "kinds": ("fp32",),
    "model": {"family": "qwen2_moe", "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2,
              "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 40, "max_sequence": 48,
              "norm_epsilon": 1e-6, "rope_theta": 10000.0, "tie_embeddings": False,
              "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
              "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
}
CASES["qwen2_moe_lora"] = CASES["qwen2_moe"] | {
    "initial": "qwen2_moe", "clip": 0.22,
    "adapters": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"],
                 "rank_pattern": {"experts.down_proj": 5},
                 "target_parameters": [
                     "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight",
                     "shared_expert.up_proj.weight", "shared_expert.down_proj.weight",
                     "mlp.gate_proj.weight"]}}
PREFIX = "base_model.model."


def add_adapters(model, case):
    """The model of PEFT, and the names that its files have for the trained parameters."""
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **case["adapters"]))
    generator = torch.Generator().manual_seed(case["seed"] + 100)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.05, generator=generator)
    saved = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            saved[name] = name.replace("modules_to_save.default.", "").replace(".default", "")
            saved[name] = saved[name].replace("_magnitude_vector.weight", "_magnitude_vector")
    names = peft.get_peft_model_state_dict(model)
    assert sorted(saved.values()) == sorted(names), (saved, list(names))
    return model, {name: short.removeprefix(PREFIX) for name, short in saved.items()}


def save_adapters(model, name, folder):
    model.save_pretrained(folder / name)
    (folder / name / "README.md").unlink()
    before = model.get_base_model().state_dict()
    before = {key.replace(".base_layer", ""): value.clone() for key, value in before.items()}
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    changed = {key: value.contiguous().clone() for key, value in merged.items()
               if key not in before or not torch.equal(value, before[key])}
    safetensors.torch.save_file(
        {key: value for key, value in changed.items() if ".0." not in key},
        folder / f"{name}.merged.safetensors")


def make_tokens():
    """A learnable stream: mostly a fixed successor of the last token, else a skewed random one."""
    generator = numpy.random.default_rng(20240229)
    count = STEPS * MICRO * SEQ * T + 1
    successor = generator.permutation(VOCAB)
    tokens = numpy.empty(count, dtype=numpy.int64)
    tokens[0] = 7
    for i in range(1, count):
        if generator.random() < 0.7:
            tokens[i] = successor[tokens[i - 1]]
        else:
            tokens[i] = int(VOCAB * generator.random() ** 2)
    return tokens


def randomise(model, seed):
    """Leaves no parameter at 0 or 1, so that a missing bias or gain is detected."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() >= 2:
            values *= 0.1
        elif name.endswith("bias"):
            values *= 0.03
        else:
            values = 1.0 + 0.1 * values
        parameter.data.copy_(values)


def learning_rate(k, warmup):
    t = k - 2
    steps = max(2, warmup["warmup_num_steps"])
    if t < 0:
        gamma = 0.0
    elif t < steps:
        linear = warmup["warmup_type"] == "linear"
        gamma = t / steps if linear else (1.0 / math.log(steps)) * math.log(t + 1)
    else:
        gamma = 1.0
    low, high = warmup["warmup_min_lr"], warmup["warmup_max_lr"]
    return low + (high - low) * gamma


def micro_batch(tokens, step, micro):
    rows = [(step * MICRO + micro) * SEQ + s for s in range(SEQ)]
    window = torch.stack([tokens[r * T:r * T + T + 1] for r in rows])
    return window[:, :-1], window[:, 1:]


def token_losses(model, inputs, targets):
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), targets.reshape(-1), reduction="none")


def run(model, tokens, warmup, clip, kind, steps):
    """Trains `model` (fp32 weights) in place; returns the per-step record."""
    half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=7,
                                  enabled=kind == "fp16")
    updates = 0
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if half:
        model.to(half)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(trained) == list(masters)
    optimised = masters if half else trained
    optimizer = torch.optim.AdamW(
        list(optimised.values()), lr=0.0, betas=tuple(OPTIMIZER["betas"]), eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"], foreach=False, fused=False)
    record = {"loss": [], "grad_norm": [], "clipped": []}
    if kind == "fp16":
        record |= {"scale": [], "skipped": []}
    for step in range(steps):
        total = 0.0
        sums = {name: torch.zeros_like(m) for name, m in masters.items()} if half else None
        model.zero_grad(set_to_none=True)
        for micro in range(MICRO):
            losses = token_losses(model, *micro_batch(tokens, step, micro))
            total += losses.detach().double().sum().item()
            scaler.scale(losses.sum() / (MICRO * SEQ * T)).backward()
            if half:
                for name, parameter in trained.items():
                    sums[name] += parameter.grad.float()
                model.zero_grad(set_to_none=True)
        gradients = sums if half else {name: p.grad for name, p in trained.items()}
        record["loss"].append(total / (MICRO * SEQ * T))
        if kind == "fp16":
            record["scale"].append(scaler.get_scale())
            for name, parameter in optimised.items():
                parameter.grad = gradients[name].half().float()
            scaler.unscale_(optimizer)
            gradients = {name: p.grad for name, p in optimised.items()}
            finite = all(g.isfinite().all() for g in gradients.values())
            record["skipped"].append(not finite)
            if not finite:
                scaler.step(optimizer)
                scaler.update()
                record["grad_norm"].append(None)
                record["clipped"].append(False)
                continue
        norms = {name: g.double().norm().item() for name, g in gradients.items()}
        norm = math.sqrt(sum(n * n for n in norms.values()))
        if step == 0:
            record["first_step_grad_norms"] = norms
        updates += 1
        scale = 1.0 / max(1.0, (norm + 1e-6) / clip)
        for name, parameter in optimised.items():
            parameter.grad = gradients[name].mul(scale)
        optimizer.param_groups[0]["lr"] = learning_rate(updates, warmup)
        scaler.step(optimizer)
        scaler.update()
        if half:
            for name, parameter in trained.items():
                parameter.data.copy_(masters[name])
        record["grad_norm"].append(norm)
        record["clipped"].append(scale < 1.0)
    return record


def weights_of(model, trained_only=False):
    return {name: p.detach().float().contiguous().clone() for name, p in model.named_parameters()
            if p.requires_grad or not trained_only}


def make_case(name, case, tokens, folder):
    warmup = {"warmup_min_lr": 5e-4, "warmup_max_lr": OPTIMIZER["lr"], "warmup_num_steps": 10,
              "warmup_type": case["warmup_type"]}
    steps = case.get("steps", STEPS)
    runs = {}
    for kind in case.get("kinds", ("fp32", "bf16")):
        config = case["make"]()
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.float().train()
        randomise(model, case["seed"])
        short = {}
        if "adapters" in case:
            model, short = add_adapters(model, case)
        for parameter, weights in model.named_parameters():
            weights.requires_grad = parameter in short if short else any(
                fnmatch.fnmatchcase(parameter, pattern) for pattern in case.get("train", ["*"]))
        if short and kind == "fp32":
            save_adapters(model, name, folder)
        if kind == "fp32" and "initial" not in case:
            safetensors.torch.save_file(weights_of(model), folder / f"{name}.initial.safetensors")
        runs[kind] = run(model, tokens, warmup, case["clip"], kind, steps)
        if kind == "fp32":
            final = weights_of(model, trained_only=True)
            safetensors.torch.save_file({short.get(key, key): final[key] for key in final},
                                        folder / f"{name}.final.safetensors")
            clipped = sum(runs[kind]["clipped"])
            margin = steps // 6
            assert margin <= clipped <= steps - margin, f"{name}: {clipped} of {steps} steps clipped"
    document = {
        "model": case["model"],
        "batch": {"steps": steps, "micro_batches": MICRO, "sequences": SEQ, "sequence_length": T},
        "optimizer": OPTIMIZER,
        "scheduler": {"type": "WarmupLR", **warmup},
        "gradient_clipping": case["clip"],
        "lr": [learning_rate(k, warmup) for k in range(1, steps + 1)],
        "runs": runs,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__,
                      "peft": peft.__version__, "python": platform.python_version(), "numpy": numpy.__version__,
                      "cpu_capability": torch.backends.cpu.get_cpu_capability()},
    }
    document.update({key: case[key] for key in ("train", "initial", "adapters") if key in case})
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    for kind, record in runs.items():
        norms = [norm for norm in record["grad_norm"] if norm is not None]
        print(f"{name} {kind}: loss {record['loss'][0]!r} -> {record['loss'][-1]!r}, grad norm "
              f"{min(norms):.3f} to {max(norms):.3f}, {steps - len(norms)} skipped, "
              f"{sum(record['clipped'])} of {steps} steps clipped")
    if "bf16" not in runs:
        return
    drift = max(abs(a - b) for a, b in zip(runs["fp32"]["loss"], runs["bf16"]["loss"]))
    print(f"{name}: bf16 losses within {drift:.4f} of fp32")


def main():
    wanted = sys.argv[2:] or list(CASES)
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else (
        pathlib.Path(__file__).resolve().parent / "training")
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokens = make_tokens()
    tokens.astype("<u2").tofile(folder / "tokens.u16.bin")
    for name in wanted:
        make_case(name, CASES[name], torch.from_numpy(tokens), folder)


if __name__ == "__main__":
    main()
