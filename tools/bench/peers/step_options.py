"""Options of step_peers.py: presets of sizes, and checks of combinations."""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import sys

from peers import fail, size

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Defaults. host_bytes is Ballast's budget.
BASE = {"peer": "torch", "family": "llama", "accumulation": 4, "recompute": "both", "offload": None,
        "kv_heads": None, "intermediate": None, "tied": None, "host_bytes": None, "loss_chunks": 1}
LLAMA_8B = {**BASE, "peer": "deepspeed", "vocab": 128256, "hidden": 4096, "heads": 32,
            "kv_heads": 8, "intermediate": 14336, "sequence": 2048, "micro_batch": 4,
            "accumulation": 8, "recompute": "yes", "offload": "all"}  # 64Ki tokens a step
PRESETS = {
    "tiny": {**BASE, "vocab": 256, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2,
             "sequence": 32, "micro_batch": 4, "accumulation": 2},
    "124m": {**BASE, "family": "gpt2", "vocab": 50257, "hidden": 768, "layers": 12, "heads": 12,
             "sequence": 512, "micro_batch": 4, "accumulation": 2},
    "1.5b": {**BASE, "vocab": 32000, "hidden": 2048, "layers": 24, "heads": 16, "kv_heads": 4,
             "intermediate": 7680, "sequence": 2048, "micro_batch": 8},
    "6b-offload": {**LLAMA_8B, "layers": 22, "host_bytes": "100GiB"},
    "8b-offload": {**LLAMA_8B, "layers": 32, "host_bytes": "112GiB"},
}
# Bytes of a peer's states per parameter, in the memory that holds most of them. DeepSpeed's are
# those of its estimate_zero3_model_states_mem_needs without the additional buffer factor of 1.5.
STATE_BYTES = {"bf16": 18, "amp": 16, "fp32": 16}
OFFLOADED_BYTES = {"optimizer": 16, "all": 18}


def positive(text):
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def precisions(text):
    names = text.split(",")
    for name in names:
        if name not in ("bf16", "amp"):
            raise argparse.ArgumentTypeError(f"'{name}' is not a precision; choose bf16 or amp")
    return list(dict.fromkeys(names))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message} (--help lists the options)")


def read_arguments():
    parser = Parser(
        description="Compares `ballast bench step` with PyTorch and DeepSpeed; the docstring of "
                    "the file describes the measurement", allow_abbrev=False)
    choice = ("no", "yes", "both")
    add = parser.add_argument
    add("--peer", choices=("torch", "deepspeed"))
    add("--preset", choices=tuple(PRESETS), default="124m", help="sizes (default 124m); the "
        "options below override single ones")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--recompute", choices=choice,
        help="whether the peer recomputes layers; both measures both")
    add("--precision", type=precisions, metavar="LIST",
        help="PyTorch's precision: bf16 (default), amp or bf16,amp")
    add("--compile", choices=choice, default="no", help="whether the peer uses torch.compile")
    add("--model", default="plain", metavar="plain|transformers|FOLDER",
        help="layers of the peer: those of step_torch.py (plain, the default), of transformers, or the "
             "class of transformers that config.json in FOLDER names, which gives the sizes")
    add("--rounds", type=positive, default=3, metavar="N")
    add("--steps", type=positive, default=3, metavar="N", help="steps of one measurement")
    add("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N")
    add("--offload", choices=("none", "optimizer", "all"),
        help="offload nothing, optimizer states, or also weights to host memory (default: none; "
             "with --peer deepspeed: optimizer)")
    add("--device-bytes", type=size, metavar="SIZE",
        help="limit of GPU memory for Ballast and the peer")
    add("--equal-memory", action="store_true",
        help="also measure Ballast with the device memory that each peer has used")
    add("--host-bytes", metavar="SIZE", help="Ballast's budget of host memory")
    add("--ballast", type=pathlib.Path, default=ROOT / "build/tools/ballast", metavar="PATH",
        help="the program (default: build/tools/ballast)")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="override a key of Ballast's config")
    add("--json", action="store_true", help="print a JSON array")
    shape = parser.add_argument_group("shape")
    shape.add_argument("--family", choices=("gpt2", "llama"))
    shape.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    for name in ("vocab", "hidden", "layers", "heads", "kv-heads", "intermediate", "sequence",
                 "micro-batch", "accumulation"):
        shape.add_argument(f"--{name}", type=positive, metavar="N")
    shape.add_argument("--tied", action=argparse.BooleanOptionalAction,
                       help="tie the head to the embedding (default: gpt2 yes, llama no)")
    shape.add_argument("--loss-chunks", type=positive, metavar="N",
                       help="chunks in which the peer computes its logits, twice each (default 1)")
    arguments = parser.parse_args()
    given = vars(arguments)
    for key, value in PRESETS[arguments.preset].items():
        if given.get(key) is None:
            given[key] = value
    if of_folder(arguments):
        read_sizes(arguments)
    complete(arguments)
    check(arguments)
    return arguments


def of_folder(a):
    """Whether a config.json gives the model."""
    return a.model not in ("plain", "transformers")


def read_sizes(a):
    """Takes the sizes from the config.json of a folder."""
    file = pathlib.Path(a.model, "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        a.family = config["model_type"]
        for name, key in (("vocab", "vocab_size"), ("hidden", "hidden_size"),
                          ("layers", "num_hidden_layers"), ("heads", "num_attention_heads"),
                          ("kv_heads", "num_key_value_heads"), ("intermediate", "intermediate_size")):
            setattr(a, name, config[key])
    except (OSError, ValueError) as error:
        fail(f"--model {a.model}: {error}; give plain, transformers or a folder with a config.json")
    except KeyError as error:
        fail(f"--model: {file} has no key {error}")
    a.tied = config.get("tie_word_embeddings", False)


def complete(a):
    """Fills in the defaults that depend on other options, as Ballast does."""
    gpt2 = a.family == "gpt2"
    # The heads of a preset fit its own family only.
    a.kv_heads = a.heads if gpt2 or a.kv_heads is None else a.kv_heads
    if a.intermediate is None:
        a.intermediate = 4 * a.hidden if gpt2 else -(-8 * a.hidden // 3 // 64) * 64
    if a.tied is None:
        a.tied = gpt2
    if a.offload is None:
        a.offload = "optimizer" if a.peer == "deepspeed" else "none"
    if a.dtype == "fp32":
        if a.precision:
            fail("--precision applies only to --dtype bf16; remove it")
        a.precision = ["fp32"]
    elif a.peer == "deepspeed":
        if a.precision not in (None, ["bf16"]):
            fail("--precision: with --peer deepspeed it must be bf16")
        a.precision = ["bf16"]
    a.precision = a.precision or ["bf16"]


def check(a):
    if a.peer == "deepspeed" and of_folder(a):
        fail("--model FOLDER needs --peer torch")
    if not of_folder(a) and (a.hidden % a.heads or a.hidden // a.heads % 2 or a.heads % a.kv_heads):
        fail(f"--hidden {a.hidden}, --heads {a.heads} and --kv-heads {a.kv_heads} do not fit: "
             "hidden / heads must be an even whole number, and --kv-heads must divide --heads")
    if a.peer == "torch" and a.offload != "none":
        fail("--offload: PyTorch cannot offload; use --peer deepspeed")
    if a.peer == "deepspeed" and a.offload == "none":
        fail("--offload none: with --peer deepspeed it must be optimizer or all")
    if a.device == "cpu" and a.device_bytes:
        fail("--device-bytes needs --device cuda: PyTorch cannot limit its memory on a CPU")
    if a.device == "cpu" and a.equal_memory:
        fail("--equal-memory needs --device cuda")
    if a.peer == "deepspeed" and (a.model != "plain" or a.compile != "no"):
        fail("--model transformers and --compile need --peer torch")
    if a.compile != "no" and a.model != "plain":
        fail("--compile needs --model plain")
    if not a.ballast.is_file():
        fail(f"{a.ballast} does not exist; build it or name it with --ballast")
    needed = ["torch"] + [name for name, wanted in (("deepspeed", a.peer == "deepspeed"),
                                                    ("transformers", a.model != "plain"))
                          if wanted]
    for module in needed:
        if importlib.util.find_spec(module) is None:
            extra = " ninja" if "deepspeed" in needed else ""
            fail(f"{sys.executable} has no module {module}; run "
                 f"pip install {' '.join(needed)}{extra}")


def product_weights(a):
    """Number of weights in the matrix products of one layer."""
    if a.family == "gpt2":
        return 4 * a.hidden**2 + 2 * a.hidden * a.intermediate
    return (2 * a.hidden**2 + 2 * a.hidden * a.kv_heads * (a.hidden // a.heads)
            + 3 * a.hidden * a.intermediate)


def lacking_memory(a, precision):
    """Returns why the peer's states do not fit into host memory, or None. Does not check
    GPU memory, which the peer reports itself, and models of a folder."""
    if of_folder(a) or (a.device == "cuda" and a.offload == "none"):
        return None
    layer = product_weights(a)
    rest = (1 if a.tied else 2) * a.vocab * a.hidden
    each = STATE_BYTES[precision] if a.offload == "none" else OFFLOADED_BYTES[a.offload]
    needed = each * (rest + a.layers * layer)
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
            if needed > free:
                fits = (free // each - rest) // layer
                advice = f"; --layers {fits} would fit" if fits > 0 else ""
                return (f"its states need about {needed / 2**30:.1f} GiB of host memory, but only "
                        f"{free / 2**30:.1f} GiB are free{advice}")
    return None
