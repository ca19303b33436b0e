"""Ballast for Python: optimizers for PyTorch whose states are in host memory or on NVMe, modules of
PyTorch that are larger than the memory of their device (``ballast.offload``), asynchronous file I/O,
plans and training runs in this process, and the program itself as ``ballast`` and
``python -m ballast``.

The optimizers and ``ballast.offload`` need PyTorch (``pip install ballast-offload[torch]``), which is
imported at their first use.
"""

import importlib
import importlib.util

from ._ballast import optimizer_rows as _rows, version as _version

# True for type checkers, which recognise this name. Importing the module typing would double the
# import time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import (aio as aio, errors as errors, offloading as offloading, optim as optim,
                   plan_modules as plan_modules, plans as plans, runs as runs)
    from .errors import ConfigError, Error, FileError, OutOfMemoryError, UsageError
    from .offloading import Offloaded, offload
    from .optim import *
    from .plan_modules import ModulePlan as ModulePlan, plan_module as plan_module
    from .plans import Forecast, LedgerLine, Plan, plan
    from .runs import Run, train

__version__: str = _version()

__all__ = ["ConfigError", "Error", "FileError", "Forecast", "LedgerLine", "OutOfMemoryError", "Plan",
           "Run", "UsageError", "aio", "plan", "train"]
if TYPE_CHECKING:
    __all__ += [*optim.__all__, "ModulePlan", "Offloaded", "offload", "plan_module"]

# Type checkers read the imports above instead of the functions below, so a mistyped name is an
# error for them.
if not TYPE_CHECKING:
    _MODULES = {
        "errors": ("ConfigError", "Error", "FileError", "OutOfMemoryError", "UsageError"),
        "optim": ("OffloadOptimizer", *(f"Offload{row['title']}" for row in _rows().values())),
        "offloading": ("Offloaded", "offload"),
        "plans": ("Forecast", "LedgerLine", "Plan", "plan"),
        "plan_modules": ("ModulePlan", "plan_module"),
        "runs": ("Run", "train"),
        "aio": (),
    }
    _HOMES = {name: module for module, names in _MODULES.items() for name in names}

    # Without PyTorch, dir(), help() and `from ballast import *` show only what can be used.
    if importlib.util.find_spec("torch") is not None:
        __all__ += [*_MODULES["optim"], *_MODULES["offloading"], *_MODULES["plan_modules"]]

    def __getattr__(name):
        """Imports a part of the package at its first use."""
        home = _HOMES.get(name)
        if home is None and name not in _MODULES:
            raise AttributeError(f"module 'ballast' has no attribute {name!r}")
        try:
            module = importlib.import_module(f".{home or name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(f"ballast.{name} needs PyTorch: pip install ballast-offload[torch]",
                                      name="torch") from None
        value = getattr(module, name) if home else module
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib"})
