"""The order in which units are used, learnt from what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

if TYPE_CHECKING:
    from ._units import Unit

# A use of a unit: "forward", "no_grad" or "backward", and the unit.
Use = tuple[str, "Unit"]
_Last = tuple["Use | None", "Use | None"]


class Order:
    """Predicts the next uses from the last two.

    One table maps the last two uses to the next one. It does not know training steps: forward and
    backward passes, sampling and skipped layers are all entries. What happens replaces an entry. A
    wrong guess costs time and never a value, because each use is checked when it comes.
    """

    def __init__(self) -> None:
        self.right = 0  # uses that were guessed
        self.wrong = 0  # uses of another unit, or of another kind, than the guess
        self._after: dict[_Last, Use] = {}
        self._last: _Last = (None, None)

    def note(self, phase: str, unit: Unit) -> None:
        """Records a use that begins now."""
        use = (phase, unit)
        guess = self._after.get(self._last)
        if guess is not None:
            self.right += guess == use
            self.wrong += guess != use
        self._after[self._last] = use
        self._last = (self._last[1], use)

    def ahead(self, count: int) -> Iterator[Unit]:
        """The units of the next `count` uses, as far as they are known. A unit may come twice."""
        before, last = self._last
        for _ in range(count):
            use = self._after.get((before, last))
            if use is None:
                return
            yield use[1]
            before, last = last, use

    def forget(self, units: set[Unit]) -> None:
        """Drops all transitions from and to these units, which do not exist any more."""
        def gone(use: Use | None) -> bool:
            return use is not None and use[1] in units

        self._after = {last: use for last, use in self._after.items()
                       if not gone(use) and not gone(last[0]) and not gone(last[1])}
        if gone(self._last[0]) or gone(self._last[1]):
            self._last = (None, None)

    def described(self) -> list[list[list[str]]]:
        """The table by names of units: entries of three uses, the last two and the next one."""
        return [[[use[0], use[1].name] for use in (*last, following) if use is not None]
                for last, following in self._after.items() if None not in last]

    def learn(self, described: list[list[list[str]]], units: dict[str, Unit]) -> None:
        """Takes over a result of described(). Entries of other units are left out."""
        for entry in described:
            if len(entry) == 3 and all(name in units for _, name in entry):
                before, last, following = [(phase, units[name]) for phase, name in entry]
                self._after.setdefault((before, last), following)
