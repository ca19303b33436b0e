#!/usr/bin/env python3
"""Stands for bin/ballast in gpu_check_test.py: runs the program that BALLAST_ON_FAKES names, with the
same options and keys but small numbers. So a misspelt option or key fails as on a GPU.
"""

import os
import re
import sys

# Options of `ballast bench`, and config keys.
NUMBERS = {"--vocab": 64, "--hidden": 64, "--intermediate": 96, "--sequence": 32, "--steps": 1,
           "--repeats": 1, "--seconds": 0.01, "--bytes": "64KiB", "--params": "64Ki",
           "model.head_dim": 16, "model.global_head_dim": 32, "model.sliding_window": 16,
           "model.num_global_key_value_heads": 2, "model.linear_num_key_heads": 2,
           "model.linear_num_value_heads": 8, "model.linear_key_head_dim": 16,
           "model.linear_value_head_dim": 16, "model.q_lora_rank": 32, "model.kv_lora_rank": 16,
           "model.qk_nope_head_dim": 16, "model.qk_rope_head_dim": 16, "model.v_head_dim": 16,
           "model.n_routed_experts": 4, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 32,
           "ballast.device_bytes": "64MiB", "ballast.host_bytes": "256MiB"}
MOST = {"--layers": 4, "--micro-batch": 2, "--accumulation": 2, "--heads": 4,
        "ballast.speculative_updates": 2}


def small(name, value):
    if name in NUMBERS:
        return str(NUMBERS[name])
    if name in MOST:
        return str(min(int(value), MOST[name]))
    return value


def shrink(words):
    """Returns the words of a command with small numbers."""
    result = []
    for name, value in zip([""] + words, words):
        if name == "--set":
            key, _, number = value.partition("=")
            value = f"{key}={re.sub(r'16', '4', number) if key == 'ballast.adapters' else small(key, number)}"
        else:
            value = small(name, value)
        result.append(value)
    if "--heads" in words:
        at = words.index("--kv-heads")
        # Heads of keys and queries are equal in number where they were.
        result[at + 1] = "4" if words[at + 1] == words[words.index("--heads") + 1] else "2"
    if "step" in words:
        for key in ("ballast.device_bytes", "ballast.host_bytes"):
            if not any(word.startswith(key) for word in words):
                result += ["--set", f"{key}={NUMBERS[key]}"]
    return result


if __name__ == "__main__":
    program = os.environ["BALLAST_ON_FAKES"]
    os.execv(program, [program, *shrink(sys.argv[1:])])
