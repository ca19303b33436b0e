"""Messages of a run about its rows: refusals, skipped rows, and notes."""

LISTED = 5  # skipped rows
NAMED = 12  # names of a note


class Refusal(Exception):
    """A row, a file or an argument that cannot be used; its text is one line."""


class Unprepared(Refusal):
    """A refusal that concerns all rows, so that leaving out the row would not help."""


def one_line(text):
    """A text without line breaks, with escapes for characters that a terminal would not show."""
    shown = (character if character.isprintable() else ascii(character)[1:-1]
             for character in " ".join(str(text)[:3000].split()))
    return "".join(shown)[:300]


def reason_of(error):
    """One line about an exception of a library, which may have no text."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return one_line(error) or type(error).__name__


class Notes:
    """Facts that do not stop a run but that its user should know. For each kind and name it has the
    number of rows and the first of them."""

    def __init__(self):
        self._rows = {}  # {(kind, name): [number of rows, the first row]}
        self._of_row = {}  # an ordered set

    def add(self, kind, name):
        """A note about the row that is being prepared."""
        self._of_row[kind, name] = None

    def end_row(self, place, used):
        """`place` is "FILE:LINE". The notes of a row that is not used are dropped."""
        if used:
            for key in self._of_row:
                self._rows.setdefault(key, [0, place])[0] += 1
        self._of_row = {}

    def merge(self, other):
        """Adds the notes of later rows."""
        for key, (rows, place) in other._rows.items():
            self._rows.setdefault(key, [0, place])[0] += rows

    def lines(self):
        kinds = {}
        for (kind, name), (rows, place) in self._rows.items():
            where = place if rows == 1 else f"{rows:,} rows, the first {place}"
            kinds.setdefault(kind, []).append(f"{name} ({where})")
        return [f"{kind}: {', '.join(names[:NAMED])}"
                + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
                for kind, names in kinds.items()]


class Report:
    """Notes and skipped rows. Without `skip_invalid` a bad row is a refusal."""

    def __init__(self, skip_invalid=False):
        self.skip_invalid = skip_invalid
        self.notes = Notes()
        self.left_out = 0
        self.first_left_out = []

    def leave_out(self, problems):
        """`problems` are lines "FILE:LINE: reason"."""
        if problems and not self.skip_invalid:
            raise Refusal(f"{problems[0]} (--skip-invalid leaves such rows out)")
        self.left_out += len(problems)
        self.first_left_out += problems[:LISTED - len(self.first_left_out)]

    def lines(self):
        lines = [f"note: {line}" for line in self.notes.lines()]
        lines += [f"left out: {line}" for line in self.first_left_out]
        if self.left_out > len(self.first_left_out):
            lines.append(f"left out: and {self.left_out - len(self.first_left_out):,} more rows")
        return lines
