#!/usr/bin/env python3
"""Runs DeepSpeed's DynamicLossScaler over random overflows and writes the scales of each step.

    python tests/data/make_loss_scale_fixture.py [OUTPUT_FOLDER]

Needs deepspeed; the build and the tests do not. It writes loss_scales.json beside this script (or
into OUTPUT_FOLDER), an array of cases:

    options     keys of a config's section fp16
    overflows   for each step 1 if a gradient overflows, else 0
    scales      the loss scale of each step; one more than `overflows`, unless the run ends
    ends        whether the last step is an overflow at the smallest scale, an error
"""

import json
import pathlib
import random
import sys

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

STEPS = 90
CASES = [
    {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
    {"initial_scale_power": 16, "loss_scale_window": 5, "hysteresis": 2},
    {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1},
    {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 3},
    {"initial_scale_power": 12, "loss_scale_window": 4, "hysteresis": 3,
     "consecutive_hysteresis": True},
    {"initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 2, "min_loss_scale": 0.25},
    {"initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 1, "min_loss_scale": 3.0},
]


def run(options, probability, generator):
    scaler = DynamicLossScaler(
        init_scale=2 ** options["initial_scale_power"], scale_window=options["loss_scale_window"],
        min_scale=options.get("min_loss_scale", 1.0), delayed_shift=options["hysteresis"],
        consecutive_hysteresis=options.get("consecutive_hysteresis", False))
    case = {"options": options, "overflows": [], "scales": [float(scaler.cur_scale)],
            "ends": False}
    for _ in range(STEPS):
        overflow = generator.random() < probability
        case["overflows"].append(int(overflow))
        try:
            scaler.update_scale(overflow)
        except Exception:
            case["ends"] = True
            break
        case["scales"].append(float(scaler.cur_scale))
    return case


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else (
        pathlib.Path(__file__).resolve().parent)
    generator = random.Random(20260701)
    cases = [run(options, probability, generator)
             for options in CASES for probability in (0.05, 0.25, 0.6)]
    assert sum(case["ends"] for case in cases) >= 3
    (folder / "loss_scales.json").write_text(
        "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
