#!/usr/bin/env python3
"""Runs small random models of each family in transformers and writes what they compute.

    python tests/data/make_family_fixtures.py [OUTPUT_FOLDER]

Needs torch, transformers, safetensors and numpy; the build and the tests do not. It writes into
families/ beside this script (or OUTPUT_FOLDER):

    NAME.safetensors   fp32: the initial weights under transformers' names; gradient.X of the loss
                       of the first batch; final.X after the last step; logits [SEQ, T, VOCAB] of the
                       first batch
    NAME.json          `model` (keys of Ballast's model section), tokens and targets, `loss` of each
                       step and `grad_norm`; `bf16`: what transformers computes in bf16 from the
                       first batch, with each of its attentions, as `loss` and as the larger
                       relative error against fp32 (L2) of the logits and of each gradient
                       `packed`: `loss` of the steps when each sequence is two documents
                       (`documents`: their lengths) and not all targets count (`counts`), and of the
                       first gradients `norm` and `projection`, see project(); their logits are the
                       tensor packed.logits
    rotary.json        frequencies and factor of each type of rope_scaling

Step i trains on batch i with torch.optim.AdamW (weight decay on every parameter), without clipping.
The loss is the mean cross-entropy of all tokens, logits in fp32.
"""

import copy
import json
import pathlib
import sys

import numpy
import safetensors.torch
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STEPS, SEQ, T, VOCAB = 10, 2, 37, 61
# Both have a document beyond LONGROPE's original_max_position_embeddings: transformers then takes the
# long factors, as Ballast does for the length of the sequence.
DOCUMENTS = [[12, 25], [26, 11]]
OPTIMIZER = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
SHAPE = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 7,
         "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 40,
         "max_position_embeddings": 48, "rms_norm_eps": 1e-6}
OWN_NAMES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
             "num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_sequence",
             "rms_norm_eps": "norm_epsilon", "layer_norm_eps": "norm_epsilon",
             "tie_word_embeddings": "tie_embeddings"}

# Keys of transformers' config besides SHAPE; `rope` is its rope_parameters.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.1, 2.0, 5.0, 9.0],
            "original_max_position_embeddings": 24}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA_GLOBAL = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
NEOX = {"type": "gpt_neox", "hidden_size": 48, "num_attention_heads": 3, "layer_norm_eps": 1e-5,
        "without": ["num_key_value_heads", "head_dim", "rms_norm_eps"]}
# Of the cases, not of the configs.
OF_CASES = ("type", "without", "rope", "own_rope")
CASES = {
    "llama": {"hidden_size": 56, "attention_bias": True, "mlp_bias": True, "rope": LLAMA3},
    "mistral": {"sliding_window": 11, "rope": PLAIN},
    "qwen2": {"tie_word_embeddings": True, "rope": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope": PLAIN},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
                "sliding_window": 20, "tie_word_embeddings": True,
                "rope": PLAIN},
    "phi3": {"hidden_size": 48, "num_attention_heads": 3, "head_dim": 16, "sliding_window": None, "original_max_position_embeddings": 24,
             "rope": LONGROPE},
    "olmo2": {"hidden_size": 56, "rope": PLAIN},
    "gemma3": {"type": "gemma3_text", "hidden_size": 56, "num_hidden_layers": 3, "head_dim": 16,
               "sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
               "tie_word_embeddings": True,
               "rope": {"full_attention": GEMMA_GLOBAL,
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
               "own_rope": {"rope_scaling": GEMMA_GLOBAL, "rope_local_base_freq": 100.0}},
    "gpt_neox": {**NEOX, "rope": {"rope_type": "default", "rope_theta": 1000.0,
                                  "partial_rotary_factor": 0.5},
                 "own_rope": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
    "gpt_neox_sequential": {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new",
                            "attention_bias": False, "tie_word_embeddings": True,
                            "rope": {"rope_type": "default"}, "own_rope": {}},
}
ROTARY = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
             "original_max_position_embeddings": 1024},
    "yarn_of_mscales": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                        "beta_fast": 24.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                        "truncate": False, "original_max_position_embeddings": 4096},
    "longrope_short": LONGROPE,
    "longrope_long": LONGROPE,
}


def shape_of(case):
    return {key: value for key, value in SHAPE.items() if key not in case.get("without", ())}


def make_config(name, case):
    keys = {"tie_word_embeddings": False, **shape_of(case),
            **{k: v for k, v in case.items() if k not in OF_CASES}}
    return transformers.AutoConfig.for_model(
        case.get("type", name), **keys, rope_parameters=copy.deepcopy(case["rope"]),
        pad_token_id=None, bos_token_id=None, eos_token_id=None)


def own_scaling(parameters, positions):
    """As Ballast's import writes it: with what transformers takes from the rest of the config."""
    filled = dict(parameters)
    if filled["rope_type"] in ("dynamic", "longrope"):
        filled.setdefault("original_max_position_embeddings", positions)
    if filled["rope_type"] == "longrope":
        filled["factor"] = positions / filled["original_max_position_embeddings"]
    return filled


def model_section(name, case):
    family = case.get("type", name).removesuffix("_text")
    section = {"family": family, "tie_embeddings": False}
    for key, value in {**shape_of(case), **case}.items():
        if key == "rope" and "own_rope" in case:
            section.update(case["own_rope"])
        elif key == "rope":
            section["rope_scaling"] = own_scaling(value, SHAPE["max_position_embeddings"])
        elif key in OF_CASES:
            pass
        elif key == "original_max_position_embeddings":
            pass  # in rope_scaling
        elif value is not None:
            section[OWN_NAMES.get(key, key)] = value
    return section


def randomise(model, centre):
    """Leaves no parameter at 0 or 1, so that a missing bias or gain is detected. `centre`: of gains."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() == 2:
            values *= 0.2
        elif name.endswith("bias"):
            values *= 0.1
        else:
            values = centre + 0.2 * values
        parameter.data.copy_(values)


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def parameters(model):
    """By the names that files have; transformers renames GPT-NeoX's output matrix in memory."""
    neox = model.config.model_type == "gpt_neox"
    return {"embed_out.weight" if neox and name == "lm_head.weight" else name: parameter
            for name, parameter in model.named_parameters()}


def forward(model, batch):
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return logits, torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def in_bf16(config, attention, tensors, batch):
    """The same model and batch in bf16, against the results in fp32 in `tensors`."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in parameters(model).items():
        parameter.data.copy_(tensors[name])
    model = model.to(torch.bfloat16).train()
    logits, loss = forward(model, batch)
    loss.backward()
    errors = {name: relative_error(parameter.grad, tensors["gradient." + name])
              for name, parameter in parameters(model).items()}
    return loss.item(), relative_error(logits, tensors["logits"]), errors


def spread_in_bf16(config, tensors, batch):
    losses, logits, gradients = zip(*[in_bf16(config, attention, tensors, batch)
                                      for attention in ("eager", "sdpa")])
    return {"loss": losses, "logits_error": max(logits),
            "gradient_error": {name: max(errors[name] for errors in gradients)
                               for name in gradients[0]}}


def make_model(config, tensors):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in parameters(model).items():
        parameter.data.copy_(tensors[name])
    return model.to(torch.float32).train()


def make_optimizer(model):
    return torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]),
        eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"], foreach=False)


def project(gradient):
    """A number on which every element has an influence."""
    values = gradient.double().flatten()
    return (values * torch.cos(0.7 * torch.arange(values.numel(), dtype=torch.float64) + 0.3)).sum()


def run_packed(config, tensors, tokens):
    """Trains on sequences of two documents; transformers finds them by their positions."""
    model = make_model(config, tensors)
    optimizer = make_optimizer(model)
    positions = torch.tensor([[i for length in lengths for i in range(length)]
                              for lengths in DOCUMENTS])
    counts = torch.ones(SEQ, T, dtype=torch.bool)
    counts[:, 4::5] = False
    for sequence, lengths in enumerate(DOCUMENTS):
        counts[sequence, numpy.cumsum(lengths) - 1] = False
    record = {"documents": DOCUMENTS, "counts": counts.int().tolist(), "loss": [], "norm": {},
              "projection": {}}
    for step in range(STEPS):
        batch = torch.tensor(tokens[step])
        logits = torch.cat([
            model(input_ids=batch[s:s + 1, :-1], position_ids=positions[s:s + 1],
                  use_cache=False).logits.float() for s in range(SEQ)])
        loss = torch.nn.functional.cross_entropy(logits[counts], batch[:, 1:][counts])
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            tensors["packed.logits"] = logits.detach().clone()
            for name, parameter in parameters(model).items():
                record["norm"][name] = parameter.grad.double().norm().item()
                record["projection"][name] = project(parameter.grad).item()
        record["loss"].append(loss.item())
        optimizer.step()
    return record


def run(name, case, folder):
    torch.manual_seed(0)
    config = make_config(name, case)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).train()
    randomise(model, 0.0 if name == "gemma3" else 1.0)
    tokens = numpy.random.default_rng(5).integers(0, VOCAB, size=(STEPS, SEQ, T + 1))
    tensors = {k: p.detach().clone() for k, p in parameters(model).items()}
    optimizer = make_optimizer(model)
    record = {"model": model_section(name, case), "optimizer": OPTIMIZER,
              "tokens": tokens.tolist(), "loss": [], "grad_norm": [],
              "packed": run_packed(config, tensors, tokens)}
    for step in range(STEPS):
        batch = torch.tensor(tokens[step])
        logits, loss = forward(model, batch)
        optimizer.zero_grad()
        loss.backward()
        gradients = {k: p.grad.detach().clone() for k, p in parameters(model).items()}
        if step == 0:
            tensors["logits"] = logits.detach().clone()
            tensors.update({"gradient." + k: g for k, g in gradients.items()})
            record["bf16"] = spread_in_bf16(config, tensors, batch)
        record["loss"].append(loss.item())
        record["grad_norm"].append(
            sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5)
        optimizer.step()
    tensors.update({"final." + k: p.detach().clone() for k, p in parameters(model).items()})
    safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(record) + "\n")
    print(f"{name}: loss {record['loss'][0]:.6f} to {record['loss'][-1]:.6f}")


def rotary():
    found = {}
    for name, parameters in ROTARY.items():
        small = name.startswith("longrope") or name == "llama3"
        length = {"longrope_short": 20, "dynamic": 3000}.get(name, 37 if small else 8192)
        shape = {"head_dim": 16 if small else 64, "max_position_embeddings": 48 if small else 2048}
        config = transformers.LlamaConfig(
            **{**SHAPE, "hidden_size": 56, **shape}, rope_parameters=dict(parameters), bos_token_id=None,
            eos_token_id=None)
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, "cpu", seq_len=length)
        scaling = own_scaling(parameters, shape["max_position_embeddings"])
        found[name] = {"rope_scaling": scaling, "head_dim": shape["head_dim"], "length": length,
                       "frequencies": frequencies.tolist(), "factor": factor}
    return found


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "families"
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        run(name, case, folder)
    (folder / "rotary.json").write_text(json.dumps(rotary(), indent=1) + "\n")


if __name__ == "__main__":
    main()
