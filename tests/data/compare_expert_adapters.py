#!/usr/bin/env python3
"""Compare training of adapters of experts, routers and shared experts with PyTorch. Run it by hand:

    python tests/data/compare_expert_adapters.py PATH_OF_BALLAST [FAMILY ...]

It needs torch, transformers and peft. For each family it makes a small random model, and adapters with
random A and B in two forms: of all experts of a layer together, which PEFT makes (target_parameters),
and of each map of each expert. PyTorch trains both for ten steps in fp32: the first with PEFT, the
second by the formula W + s B A. Ballast trains from the same folders. Printed are the largest relative
differences of losses, of gradient norms, and of the trained adapters; then the largest differences of
the logits of the merged model from those of PEFT (or the formula), of the saved adapters that PEFT
loads from those of the merged model, and the effect of the adapters.
"""

import importlib.util
import json
import math
import pathlib
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("exported", here / "compare_exported_adapters.py")
sys.path.insert(0, "")  # compare_exported_adapters removes the first entry
exported = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exported)

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

STEPS, LENGTH = 10, 32
OPTIMIZER = {"lr": 4e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
PREFIX = "base_model.model."
FAMILIES = {family: exported.FAMILIES[family] for family in (
    "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_5_moe_text", "qwen2_moe",
    "olmoe")}


def make_model(family, path):
    torch.manual_seed(5)
    keys = {**exported.COMMON, **FAMILIES[family]}
    config = transformers.AutoConfig.for_model(family, **keys)
    if hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef = 0.0
    model = exported.class_of(config)(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(path / "model")
    return exported.load(path / "model")


def names_of(model):
    """Parameters with experts, routers, and all other maps of the MLPs."""
    experts, others = [], []
    for name, parameter in model.named_parameters():
        if ".layers." not in name or "norm" in name or parameter.dim() < 2:
            continue
        if "experts." in name and parameter.dim() == 3:
            experts.append(name)
        elif (".mlp." in name and not name.endswith("shared_expert_gate.weight")
              and not name.endswith("bias")):
            others.append(name)
    return experts, others


def attention(model):
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules()
                   if isinstance(module, torch.nn.Linear) and ".self_attn." in name})


def losses_of(logits_of, trained, tokens):
    optimizer = torch.optim.AdamW(trained, lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]),
                                  eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"])
    losses, norms = [], []
    for step in range(STEPS):
        window = tokens[step * LENGTH:(step + 1) * LENGTH + 1].long()
        loss = torch.nn.functional.cross_entropy(logits_of(window[None, :-1])[0], window[1:])
        optimizer.zero_grad()
        loss.backward()
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in trained)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def with_peft(model, path, rank, rslora):
    experts, others = names_of(model)
    config = peft.LoraConfig(r=rank, lora_alpha=6, use_rslora=rslora, task_type="CAUSAL_LM",
                             target_modules=attention(model), target_parameters=experts + others,
                             rank_pattern={"o_proj": 2, "experts.down_proj": rank + 1})
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(path / "adapters")
    trained = [p for p in model.parameters() if p.requires_grad]
    merged = lambda: model.merge_and_unload()  # noqa: E731
    return lambda ids: model(ids).logits, trained, merged, lambda: {
        name: value for name, value in peft.get_peft_model_state_dict(model).items()}


def by_formula(model, path, rank, rslora):
    """Adapters of each map of each expert."""
    scale = 6 / (math.sqrt(rank) if rslora else rank)
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors, plan = {}, {}

    def adapter(name, out, inputs):
        for end, shape in (("A", (rank, inputs)), ("B", (out, rank))):
            tensors[f"{name}.lora_{end}.weight"] = torch.nn.Parameter(torch.randn(shape) * 0.1)
        return name

    experts, _ = names_of(model)
    for name in experts:
        parameter = model.get_parameter(name)
        stored = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        before = stored.rsplit(".", 1)[0]
        count, out, inputs = parameter.shape
        maps = [down] if name.endswith("down_proj") else [gate, up]
        plan[name] = [[adapter(f"{before}.{e}.{m}", out // len(maps), inputs) for m in maps]
                      for e in range(count)]

    def weights():
        changed = {}
        for name, parts in plan.items():
            deltas = [torch.cat([tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"]
                                 for m in maps]) for maps in parts]
            changed[name] = model.get_parameter(name).detach() + scale * torch.stack(deltas)
        return changed

    (path / "adapters").mkdir()
    save_file({PREFIX + name: value.detach().contiguous() for name, value in tensors.items()},
              path / "adapters/adapter_model.safetensors")
    (path / "adapters/adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 6, "use_rslora": rslora,
        "target_modules": [gate, up, down]}))

    def merged():
        with torch.no_grad():
            for name, value in weights().items():
                model.get_parameter(name).copy_(value)
        return model

    return (lambda ids: torch.func.functional_call(model, weights(), (ids,)).logits,
            list(tensors.values()), merged,
            lambda: {PREFIX + name: value.detach() for name, value in tensors.items()})


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens[None, :LENGTH].long()).logits


def compare(ballast, family, form, rank, rslora, path):
    model = make_model(family, path)
    torch.manual_seed(7)
    tokens = torch.randint(0, exported.COMMON["vocab_size"], (STEPS * LENGTH + 1,), dtype=torch.int32)
    (path / "tokens.bin").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    make = with_peft if form == "stacked" else by_formula
    logits_of, trained, merged, saved = make(model, path, rank, rslora)
    losses, norms = losses_of(logits_of, trained, tokens)
    final = {name: value.clone() for name, value in saved().items()}
    (path / "c.json").write_text(json.dumps({
        "model": {"path": str(path / "model")}, "train_batch_size": 1, "bf16": {"enabled": False},
        "data": {"tokens": str(path / "tokens.bin"), "token_type": "u16", "sequence_length": LENGTH,
                 "held_out": 0, "shuffle": False},
        "optimizer": {"type": "AdamW", "params": OPTIMIZER}, "gradient_clipping": 0,
        "ballast": {"steps": STEPS, "device": "host", "train": "adapters",
                    "adapters": {"path": str(path / "adapters")}}}))
    exported.run(ballast, "train", path / "c.json", "--out", path / "run")
    rows = [json.loads(line) for line in (path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row and "grad_norm" in row]
    exported.run(ballast, "export", path / "run", "--out", path / "saved")
    exported.run(ballast, "export", path / "run", "--merged", "--out", path / "merged")
    ours = load_file(path / "saved/adapter_model.safetensors")
    assert set(ours) == set(final), (sorted(set(ours) ^ set(final))[:4])
    adapters = max(((ours[name] - final[name]).norm() / final[name].norm()).item() for name in final)
    base = logits(exported.load(path / "model"), tokens)
    expected = logits(merged(), tokens)
    found = logits(exported.load(path / "merged"), tokens)
    loaded = peft.PeftModel.from_pretrained(exported.load(path / "model"), path / "saved").eval()
    largest = lambda a, b: (a - b).abs().max().item()  # noqa: E731
    return (relative([row["loss"] for row in rows], losses),
            relative([row["grad_norm"] for row in rows], norms), adapters, largest(found, expected),
            largest(logits(loaded, tokens), found), largest(expected, base))


def main():
    ballast, *chosen = sys.argv[1:]
    wrong = 0
    for family in chosen or FAMILIES:
        for form in ("stacked", "modules"):
            for rank, rslora in ((1, False), (3, True), (8, False)):
                if form == "modules" and family == "gpt_oss":
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        found = compare(ballast, family, form, rank, rslora, pathlib.Path(folder))
                    except Exception as error:  # noqa: BLE001
                        wrong += 1
                        print(f"{family:17} {form} {rank} FAILS {type(error).__name__}: {error}"[:300],
                              flush=True)
                        continue
                loss, norm, adapters, merge, loaded, effect = found
                good = loss < 2e-6 and norm < 1e-5 and adapters < 1e-3 and merge < 1e-4
                wrong += not good
                print(f"{family:17} {form:7} rank {rank} {'rsLoRA' if rslora else '      '} "
                      f"{'equal' if good else 'DIFFERENT'}: loss {loss:.0e}, norm {norm:.0e}, "
                      f"adapters {adapters:.0e}, merged {merge:.0e}, loaded by PEFT {loaded:.0e}, "
                      f"effect {effect:.1f}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
