"""Messages of a run about its rows: refusals, skipped rows, and notes."""

import collections

LISTED = 5  # skipped rows
NAMED = 12  # names of a note
STOP = "so the model does not learn to stop"


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
        self._ends_of_row = []
        self.ends = collections.Counter()  # trained replies by the special token that ends them, or None

    def add(self, kind, name):
        """A note about the row that is being prepared."""
        self._of_row[kind, name] = None

    def end_reply(self, token):
        """A reply of the row that is being prepared, whose training ends with a special token or None."""
        self._ends_of_row.append(token)

    def end_row(self, place, used):
        """`place` is "FILE:LINE". The notes of a row that is not used are dropped."""
        if used:
            for key in self._of_row:
                self._rows.setdefault(key, [0, place])[0] += 1
            self.ends.update(self._ends_of_row)
        self._of_row, self._ends_of_row = {}, []

    def merge(self, other):
        """Adds the notes of later rows."""
        for key, (rows, place) in other._rows.items():
            self._rows.setdefault(key, [0, place])[0] += rows
        self.ends.update(other.ends)

    def lines(self):
        kinds = {}
        for (kind, name), (rows, place) in self._rows.items():
            where = place if rows == 1 else f"{rows:,} rows, the first {place}"
            kinds.setdefault(kind, []).append(f"{name} ({where})")
        return [f"{kind}: {', '.join(names[:NAMED])}"
                + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
                for kind, names in kinds.items()]


def ends_of_replies(ends):
    """Words about a Counter of the tokens that end replies. Empty without replies."""
    if not ends:
        return ""
    names = {token: f"'{one_line(token)}'" if token else "no end token" for token in ends}
    parts = [f"{names[token]} ({count:,})"
             for token, count in sorted(ends.items(), key=lambda item: (-item[1], names[item[0]]))]
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return f"replies end with {', '.join(parts[:NAMED])}{more}"


class Report:
    """Notes and skipped rows. Without `skip_invalid` a bad row is a refusal. `stops` are the stop tokens
    that generation_config.json lists, or None without one."""

    def __init__(self, skip_invalid=False, stops=None):
        self.skip_invalid = skip_invalid
        self._stops = stops
        self.notes = Notes()
        self.left_out = 0
        self.first_left_out = []

    def leave_out(self, problems):
        """`problems` are lines "FILE:LINE: reason"."""
        if problems and not self.skip_invalid:
            raise Refusal(f"{problems[0]} (--skip-invalid leaves such rows out)")
        self.left_out += len(problems)
        self.first_left_out += problems[:LISTED - len(self.first_left_out)]

    def _warnings(self):
        """A warning if no reply ends with a token at which the model stops."""
        ends = set(self.notes.ends)
        if not ends or (ends - {None} if self._stops is None else ends & self._stops):
            return []
        if self._stops is None:
            return [f"no token that ends a reply is trained on, because the chat template writes none, {STOP}; "
                    f"end the replies with the model's end token, or use another template"]
        stops = ", ".join(f"'{one_line(token)}'" for token in sorted(self._stops)) or "none"
        return [f"no reply ends with a stop token of generation_config.json ({stops}), {STOP}; add the token "
                f"with which the chat template ends a reply to 'eos_token_id' there, or use another template"]

    def lines(self):
        lines = [f"warning: {line}" for line in self._warnings()]
        lines += [f"note: {line}" for line in self.notes.lines()]
        lines += [f"left out: {line}" for line in self.first_left_out]
        if self.left_out > len(self.first_left_out):
            lines.append(f"left out: and {self.left_out - len(self.first_left_out):,} more rows")
        return lines
