#!/usr/bin/env python3
"""Writes src/python/ballast/optim.py, the classes of the optimizers, from the table of the library
(include/ballast/cpu_adam/rules.h). A test compares the file with class_file().

    PYTHONPATH=FOLDER_OF_BALLAST write_optimizer_classes.py
"""

import pathlib
import textwrap

from ballast import _ballast

PAGE = pathlib.Path(__file__).resolve().parents[2] / "src/python/ballast/optim.py"
HEAD = '''"""Optimizers for PyTorch whose states live in host memory or on NVMe.

    optimizer = ballast.OffloadAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)

They are `torch.optim.Optimizer`s: parameter groups, learning-rate schedulers, `state` and
`state_dict` work as with PyTorch's own. Parameters may be fp32, bf16 or fp16, on the CPU or on a
GPU. Parameters of 16 bits have an fp32 master that the optimizer keeps.
"""

# tools/dev/write_optimizer_classes.py has written this file; do not edit it.

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ._optimizer import OffloadOptimizer
from ._options import Options

'''
CLASS = '''

class Offload{title}(OffloadOptimizer):
    """{summary}

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        {meanings}
    """

    _name = "{name}"

    def __init__({signature}) -> None:
        super().__init__(params, {{{settings}}},
                         **options)
'''
TYPES = {"lr": "float | torch.Tensor", "betas": "tuple[float, float]", "nesterov": "bool"}


def wrapped(items: list[str], indent: int) -> str:
    """The items, separated by commas and not divided, in lines."""
    return lines(", ".join(item.replace(" ", "\0") for item in items), indent).replace("\0", " ")


def lines(text: str, indent: int, before: int = 0) -> str:
    """The text in lines of the width of the house, the first one after the indent and `before`."""
    return textwrap.fill(text, 100, initial_indent=" " * (indent + before), subsequent_indent=" " * indent,
                         break_long_words=False, break_on_hyphens=False).strip()


def class_file() -> str:
    rows = _ballast.optimizer_rows()
    titles = sorted(["Optimizer", *(row["title"] for row in rows.values())], key=str.lower)
    text = HEAD + "__all__: list[str] = [" + wrapped([f'"Offload{title}"' for title in titles], 22) + "]\n"
    for name, row in rows.items():
        parameters = row["parameters"]
        arguments = [f"{key}: {TYPES.get(key, 'float')} = {default!r}"
                     for key, (default, _) in parameters.items()]
        text += CLASS.format(
            title=row["title"], name=name, summary=lines(
                row["title"] + f", as torch.optim.{row['title']}" * row["in_torch"]
                + f": {row['summary']}.", 4, 3),
            meanings="\n        ".join(f"{key}: {meaning}."
                                       for key, (_, meaning) in parameters.items()),
            signature=wrapped(["self", "params: ParamsT | torch.nn.Module", *arguments,
                               "**options: Unpack[Options]"], 17),
            settings=wrapped([f'"{key}": {key}' for key in parameters], 34))
    return text


if __name__ == "__main__":
    PAGE.write_text(class_file())
