"""Training runs of the engine in this process, like ``ballast train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _arguments, _ballast, _progress

__all__ = ["Run", "train"]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    directory: str  #: the run directory: metrics.jsonl, config.json, run.json, weights, checkpoints
    steps: int  #: finished ones, those before a resumed checkpoint included
    planned_steps: int
    interrupted: bool  #: the callback, or a signal that Python handles, has ended it early
    loss: float | None  #: of the last step; None if no token of its batch was trained on
    held_out_loss: float | None  #: of the last evaluation
    tokens_per_second: float
    weights: str  #: the folder of the trained weights; "" if there is none
    checkpoint: str  #: the newest one of this run; "" if there is none
    advice: str  #: the bottleneck and the best improvement


def train(config: Mapping[str, Any] | str | os.PathLike[str], *,
          out: str | os.PathLike[str] | None = None, steps: int | None = None,
          overrides: Iterable[str] = (), resume: bool | str | os.PathLike[str] | None = None,
          allow_change: Iterable[str] = (), overwrite: bool = False,
          callback: Callable[[dict[str, Any]], object] | None = None,
          progress: bool | None = None) -> Run:
    """Trains in this process, without the GIL, and returns when the run has ended.

    `config`: a dict, or the path of a JSON file; paths in a dict are relative to the working directory.
    `out`: the run directory; None: that of the config, or a new one. `steps`: instead of
    ``ballast.steps``. `overrides`: like ``"optimizer.params.lr=1e-4"``. `resume`: True continues the run
    of `out`; ``"auto"`` too, but starts it if there is no checkpoint yet and returns at once if it is finished;
    a path continues that run, or starts from that checkpoint. `allow_change`: keys that may then differ from
    the checkpoint although they change results (``"optimizer.params.lr"``, ``"optimizer"``, ``"all"``).
    `overwrite` replaces another run in `out`.

    `callback` is called after each step with the fields of its line in metrics.jsonl, on the calling
    thread. If it returns False, the run ends as after a signal: with a checkpoint if the config writes
    them, otherwise in mid step. So does an exception, which is raised again.

    `progress` shows a line with step, loss, tokens per second and remaining time on standard error, or a
    bar in a notebook, by tqdm. None: in a terminal or a notebook, if tqdm is installed. True: everywhere;
    raises ImportError without tqdm. False: never.

    While it runs, Ctrl-C, SIGTERM and SIGHUP end the run as they end ``ballast train``, one that follows
    after more than 2 seconds ends the process, and SIGUSR1 writes a checkpoint. After the run they have
    their effect in Python: KeyboardInterrupt for Ctrl-C. If a handler of Python takes the signal, a run with
    checkpoints is returned with `interrupted`, and other runs raise ballast.Error. One run at a time in a
    process.

    Raises ballast.ConfigError and ballast.UsageError (ValueErrors), ballast.FileError (an OSError),
    ballast.OutOfMemoryError, ballast.Error.
    """
    file, text = _arguments.config(config)
    directory = "" if out is None else _arguments.path(out, "out")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: must be callable, not {type(callback).__name__}")
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite: must be bool, not {type(overwrite).__name__}")
    number = 0 if steps is None else _arguments.whole(steps, "steps", 1, 1 << 40)
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress: must be bool or None, not {type(progress).__name__}")
    with _progress.shown(progress) as show:
        return Run(**_ballast.train(
            file, text, _arguments.texts(overrides, "overrides"), directory, number, _resumed(resume),
            _arguments.texts(allow_change, "allow_change"), overwrite, [sys.executable, *sys.argv], callback,
            show))


def _resumed(resume: bool | str | os.PathLike[str] | None) -> str:
    """The value of the program's --resume, where "true" is the run of `out`. A path is made
    absolute."""
    if resume is None or isinstance(resume, bool):
        return "true" if resume else ""
    if resume == "auto":
        return "auto"
    return os.path.abspath(_arguments.path(resume, "resume"))
