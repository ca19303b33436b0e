"""States that were handed out. In-place changes of them are written back to the optimizer."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import torch


class _Loan:
    def __init__(self, tensor: torch.Tensor, give_back: Callable[[torch.Tensor], None]) -> None:
        self.alias = tensor.detach()  # shares the tensor's memory and counter of changes
        self.version = self.alias._version
        self._give_back = give_back

    def flush(self) -> None:
        if self.alias._version != self.version:
            self.version = self.alias._version
            self._give_back(self.alias)

    def end(self) -> None:
        self.flush()
        del self.alias  # the memory


class Loans:
    """Copies of states that a user may change in place, as the states of torch's optimizers. A
    change is written back when the copy is dropped, and before the states are read or updated."""

    def __init__(self) -> None:
        self._loans: dict[Any, list[tuple[weakref.finalize[..., Any], _Loan]]] = {}

    def lend(self, key: Any, tensor: torch.Tensor,
             give_back: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """`give_back` gets the changed values. `key` identifies whose state it is."""
        loan = _Loan(tensor, give_back)
        alive = [entry for entry in self._loans.get(key, []) if entry[0].alive]
        finalizer = weakref.finalize(tensor, loan.end)
        finalizer.atexit = False
        self._loans[key] = [*alive, (finalizer, loan)]
        return tensor

    def flush(self, key: Any) -> None:
        """Writes the changes of one parameter's states."""
        for finalizer, loan in self._loans.get(key, []):
            if finalizer.alive:
                loan.flush()

    def forget(self, key: Any) -> None:
        """Copies of this parameter's states are no longer connected."""
        for finalizer, _ in self._loans.pop(key, []):
            finalizer.detach()

    def end(self) -> None:
        """Writes all changes. Copies handed out before are no longer connected."""
        loans, self._loans = self._loans, {}
        for entries in loans.values():
            for finalizer, loan in entries:
                if finalizer.detach() is not None:
                    loan.end()
