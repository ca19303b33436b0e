"""Places of the assistant's replies in the text that a chat template writes for a conversation.

A template may write a reply in another way once messages follow it: Qwen3 and gpt-oss drop earlier
thoughts, DeepSeek-R1 drops all, and Phi-3 ends a conversation with one more token. So a reply is
searched in two ways:

- If the text of the messages before the reply, or of those up to it, is the beginning of the whole
  text, it ends where the reply begins or ends.
- Otherwise marks, characters that no text has, are put around what a message says, and the
  conversation is rendered again. If the text without the marks is the same as before, they show
  where the message is.

No place is guessed: what cannot be found is refused.
"""

import re

from preparing.messages import REASONING_KEYS
from preparing.report import Refusal
from preparing.rows import common_prefix

PRIVATE_USE = range(0xF0000, 0xFFFFD)  # characters of which marks are taken
CLOSING_THOUGHT = re.compile(r"</think>\s*")
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


class Said:
    """Place of a message's content in a text. `begin` is its first character, or None if that is
    not known. `end` follows its last one. If the end is not `exact`, only the message's last tool
    call is known to surround it."""

    def __init__(self, begin, end, exact):
        self.begin = begin
        self.end = end
        self.exact = exact


class SpecialTokens:
    """Special tokens of a tokenizer in a text. Added tokens are these and others, such as `<think>`."""

    def __init__(self, tokenizer):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = set(tokenizer.all_special_tokens) | {str(token) for token in added if token.special}
        self._tokens = tuple(sorted(special - {""}))
        self._special = _pattern_of(special)
        self._added = _pattern_of(special | set(map(str, added)))

    def end_of_last(self, text):
        """The end of the last special token in a text; 0 if there is none."""
        return max((match.end() for match in self._special.finditer(text)), default=0)

    def end_of_first(self, text):
        """The end of the special token with which a text begins; 0 if there is none."""
        match = self._special.match(text)
        return match.end() if match else 0

    def start_of_one_at(self, text, at):
        """The start of the added token that contains `at` or follows it directly; `at` if there is
        none."""
        return next((match.start() for match in self._added.finditer(text)
                     if match.start() <= at < match.end()), at)

    def added_ends(self, text):
        return any(match.end() == len(text) for match in self._added.finditer(text))

    def without_space(self, text, start, end):
        """`end` without white space after an end token, which belongs to the template."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._tokens) else end


def _pattern_of(tokens):
    """Matches the longest of the tokens that is there."""
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Replies:
    """Finds the replies of a conversation. `render(messages, prompt)` returns the text that the
    template writes, followed by the beginning of a reply if `prompt`. `whole` is the text of all
    messages. `without` collects the ends of generation prompts that replies do not follow in
    `whole`."""

    def __init__(self, render, messages, whole, special):
        self._render = render
        self._messages = messages
        self._whole = whole
        self._special = special
        self._said = {}  # by message
        self.without = set()

    def ranges(self, indices):
        """The characters [start, end) of each reply, in order."""
        made = []
        at = 0
        for index in indices:
            start, end = self._start(index), self._end(index)
            if start is None or end is None or not at <= start <= end <= len(self._whole):
                raise Refusal(f"message {index + 1}, a reply, cannot be found in what the chat template "
                              f"writes for the whole conversation; use --mask none, one reply per "
                              f"conversation, or a template with {{% generation %}}")
            at = self._special.without_space(self._whole, start, end)
            made.append((self._after_empty_thought(index, start, at), at))
        return made

    def _after_empty_thought(self, index, start, end):
        """The start of a reply without the empty thought that the template writes before a reply
        that has none. Otherwise a reasoning model would learn to stop thinking."""
        message = self._messages[index]
        if "<think>" in message.get("content", "") or any(message.get(key) for key in REASONING_KEYS):
            return start
        empty = EMPTY_THOUGHT.match(self._whole, start, end)
        return empty.end() if empty else start

    def _try(self, messages, prompt=False):
        """The text of other messages, or None if the template refuses them."""
        try:
            return self._render(messages, prompt)
        except Refusal:
            return None

    def _start(self, index):
        before = self._try(self._messages[:index], True)
        if before is not None and self._whole.startswith(before):
            return len(before)
        reply = self._in_whole(index)
        previous = self._in_whole(index - 1) if before is not None and index > 0 else None
        alone = self._find(self._messages[:index], index - 1, True, before) if previous else None
        if not alone:
            return reply.begin if reply else None
        rest, header = self._whole[previous.end:], before[alone.end:]
        shared = common_prefix(header, rest)
        begin = reply.begin if reply else None
        if shared < len(header):
            # This reply has another header. If the two do not differ first between tokens or lines,
            # the reply begins at an unknown place before its content.
            shared = self._special.start_of_one_at(header, shared)
            self.without.add(header[shared:])
            if not self._special.added_ends(rest[:shared]) and not rest[:shared].endswith("\n"):
                return begin
        return previous.end + shared

    def _end(self, index):
        last = index + 1 == len(self._messages)
        upto = self._try(self._messages if last else self._messages[:index + 1], last)
        if upto is not None and last and upto.startswith(self._whole):
            return len(self._whole)
        if upto is not None and not last and self._whole.startswith(upto):
            return len(upto)
        reply = self._in_whole(index)
        if not reply:
            return len(self._whole) if last else None
        other = self._find(self._messages[:index + 1], index, last, upto) if upto is not None else None
        if other and not last and self._whole.startswith(upto[other.end:], reply.end):
            return reply.end + len(upto) - other.end
        # White space at the end of a reply is kept or dropped. The text that follows the reply in
        # both cases ends with a token.
        rest = self._whole[reply.end:].lstrip()
        following = upto[other.end:].lstrip() if other else ""
        shared = self._special.end_of_last(rest[:common_prefix(rest, following)])
        if shared == 0 and last:
            return len(self._whole)
        if shared == 0 and reply.exact and self._special.end_of_first(following) > 0:
            # The end of a conversation has another end token.
            shared = self._special.end_of_first(rest)
        if shared > 0:
            end = len(self._whole) - len(rest) + shared
        elif reply.exact:
            end = reply.end
        else:
            return None
        after = None if last else self._in_whole(index + 1)
        return None if after and after.end <= end else end

    def _in_whole(self, index):
        if index not in self._said:
            self._said[index] = self._find(self._messages, index, False, self._whole)
        return self._said[index]

    def _find(self, messages, index, prompt, text):
        """The Said of message `index` in `text`, the rendering of `messages`, or None."""
        marks = [mark for mark in map(chr, PRIVATE_USE[:64]) if mark not in text][:4]
        for message, late, exact in _marked(messages[index], marks):
            marked = self._try(messages[:index] + [message] + messages[index + 1:], prompt)
            if marked is None or marked.translate(dict.fromkeys(map(ord, marks))) != text:
                continue
            *begins, end = (_place_of(mark, marked, marks, exact) for mark in marks)
            if end is not None:
                begins = [begin for begin in begins if begin is not None]
                return Said(min(begins, default=None), end + late, exact)
        return None


def _place_of(mark, marked, marks, once):
    """Position of a mark, not counting the marks before it. None if it is missing, or there twice
    if `once`."""
    at = marked.find(mark)
    if at < 0 or (once and marked.find(mark, at + 1) >= 0):
        return None
    return at - sum(character in marks for character in marked[:at])


def _marked(message, marks):
    """(message with marks, characters between the last mark and the end, whether that is exact).
    The marks are at the beginning of the thoughts, of the content and of what follows the thoughts
    in it, and at the end. Some templates render a message with all marks differently, so variants
    with fewer marks follow."""
    content = message.get("content", "")
    thoughts = {key: _insert(message[key], {_first_of(message[key]): marks[0]})
                for key in REASONING_KEYS
                if isinstance(message.get(key), str) and message[key].strip()}
    begins = {}
    if content.strip():
        begins[_first_of(content)] = marks[1]
        closing = list(CLOSING_THOUGHT.finditer(content))
        if closing and closing[-1].end() < len(content):
            begins[closing[-1].end()] = marks[2]
    if "tool_calls" in message:
        call = message["tool_calls"][-1]
        function = call.get("function", call)
        function = function | {"name": function["name"] + marks[3]}
        call = call | {"function": function} if "function" in call else function
        called = message | {"tool_calls": message["tool_calls"][:-1] + [call]}
        if content.strip():
            yield called | thoughts | {"content": _insert(content, begins)}, 0, False
        yield called | thoughts, 0, False
        yield called, 0, False
    elif content.strip():
        end = len(content.rstrip())
        yield message | thoughts | {"content": _insert(content, begins | {end: marks[3]})}, 0, True
        yield message | {"content": _insert(content, {end: marks[3]})}, 0, True
        yield message | {"content": _insert(content, {end - 1: marks[3]})}, 1, True
    elif "content" in message:  # white space, which the template keeps or drops
        for at in sorted({len(content), 0}, reverse=True):
            yield message | {"content": _insert(content, {at: marks[1] + marks[3]})}, 0, True
        yield message | {"content": marks[1] + marks[3]}, 0, True


def _first_of(text):
    return len(text) - len(text.lstrip())


def _insert(text, marks):
    for at in sorted(marks, reverse=True):
        text = text[:at] + marks[at] + text[at:]
    return text
