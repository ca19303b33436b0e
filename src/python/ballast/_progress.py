"""The progress of a run in a terminal or a notebook, shown by tqdm if that is installed."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# Takes finished and planned steps, the loss of the last one or None, and its tokens per second.
Show = Callable[[int, int, "float | None", float], None]


@contextlib.contextmanager
def shown(wanted: bool | None) -> Iterator[Show | None]:
    """Returns what shows the progress, or None for none. None for `wanted`: in a terminal or a
    notebook. Raises ImportError if it is wanted and tqdm is missing."""
    bar_class = _bar_class(wanted)
    if bar_class is None:
        yield None
        return
    progress = _Progress(bar_class)
    try:
        yield progress.show
    finally:
        progress.close()


class _Progress:
    """A bar that begins with the first call. Errors of the display end the display, not the run."""

    def __init__(self, bar_class: Any) -> None:
        self._bar_class = bar_class
        self._bar: Any = None
        self._failed = False

    def show(self, step: int, steps: int, loss: float | None, tokens_per_second: float) -> None:
        if self._failed:
            return
        try:
            if self._bar is None:
                self._bar = self._bar_class(total=steps, initial=step, unit="step", dynamic_ncols=True)
                return
            words = [] if loss is None else [f"loss {loss:.4f}"]
            words.append(f"{tokens_per_second:,.0f} tokens/s")
            self._bar.set_postfix_str(", ".join(words), refresh=False)
            self._bar.update(step - self._bar.n)  # less than zero after a return to a checkpoint
        except Exception:
            self._failed = True

    def close(self) -> None:
        if self._bar is not None and not self._failed:
            with contextlib.suppress(Exception):
                self._bar.close()


def _bar_class(wanted: bool | None) -> Any:
    if wanted is False or (wanted is None and not (_in_terminal() or _in_notebook())):
        return None
    try:
        with warnings.catch_warnings():  # tqdm warns of notebooks without ipywidgets
            warnings.simplefilter("ignore")
            return importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        if wanted:
            raise ImportError("progress: needs tqdm: pip install 'ballast-offload[progress]'") from None
        return None


def _in_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None, or closed
        return False


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
