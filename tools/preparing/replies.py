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

from .messages import REASONING_KEYS
from .report import Refusal
from .rows import common_prefix
from .thoughts import after_empty_thought, without_opening

PRIVATE_USE = range(0xF0000, 0xFFFFD)  # characters of which marks are taken
CLOSING_THOUGHT = re.compile(r"</think>\s*")


class Said:
    """Place of a message's content in a text. `begin` is its first character, or None if that is
    not known. `end` follows its last one. If the end is not `exact`, only the message's last tool
    call is known to surround it."""

    def __init__(self, begin, end, exact):
        self.begin = begin
        self.end = end
        self.exact = exact


class Replies:
    """Finds the replies of a conversation. `render(messages, prompt)` returns the text that the
    template writes, followed by the beginning of a reply if `prompt`. `text` is that of all messages,
    `whole` the same with the token that ends a last reply, if the template leaves it to the message
    that would follow. `without` collects the ends of generation prompts that replies do not follow in
    `whole`."""

    def __init__(self, render, messages, text, habits, special, stops):
        self._render = render
        self._habits = habits
        self._messages = messages
        self._text = text
        self._special = special
        self._stops = stops
        self._said = {}  # by message
        self.whole = self._closed() if messages[-1]["role"] == "assistant" else text
        self.without = set()

    def ranges(self, indices):
        """The characters [start, end) of `whole` of each reply, in order."""
        made = []
        at = 0
        for index in indices:
            start, end = self._start(index), self._end(index)
            if start is None or end is None or not at <= start <= end <= len(self._text):
                raise Refusal(f"message {index + 1}, a reply, cannot be found in what the chat template "
                              f"writes for the whole conversation; use --mask none, one reply per "
                              f"conversation, or a template with {{% generation %}}")
            end = self._with_stop(start, end)
            at = self._special.without_space(self.whole, start, end)
            made.append((after_empty_thought(self.whole, start, at), at))
        return made

    def _closed(self):
        """The text with the stop token of the last reply. It is the first token of the message that
        follows such a reply in most conversations: one of a tool after a call, else one of the user."""
        header, by_next = self._habits.header, self._habits.next_ends
        written = self._text.rstrip()
        if not by_next or self._stops.ends(written, by_next):
            return self._text
        last = len(self._messages) - 1
        calls = self._messages[last].get("tool_calls")
        role = {"role": "tool", "name": _function_of(calls[-1])["name"]} if calls else {"role": "user"}
        more = self._messages + [role | {"content": "a"}]
        text = self._try(more)
        if text is None:
            return self._text
        if text.startswith(written):
            rest = text[len(written):]
        else:  # it writes an earlier reply in another way
            reply, other = self._in_whole(last), self._find(more, last, False, text)
            if not reply or not other or not text.startswith(written[reply.end:], other.end):
                return self._text
            rest = text[other.end + len(written) - reply.end:]
        space = _first_of(rest)
        token = self._stops.end_of_first(rest[space:], header)
        return written + rest[:space + token] if token > 0 else self._text

    def _with_stop(self, start, end):
        """The end of a reply, with the stop token that follows it if it has none."""
        header, by_next = self._habits.header, self._habits.next_ends
        if self._stops.ends(self.whole[start:end].rstrip(), by_next):
            return end
        rest = self.whole[end:]
        space = _first_of(rest)
        token = self._stops.end_of_first(rest[space:], header)
        return end + space + token if token > 0 else end

    def _try(self, messages, prompt=False):
        """The text of other messages, or None if the template refuses them."""
        try:
            return self._render(messages, prompt)
        except Refusal:
            return None

    def _start(self, index):
        start = self._start_after_prompt(index)
        header = self._habits.header
        # A prompt that continues the assistant's turn, after a tool's answer, may lack the header.
        if start is not None and header and self._text.startswith(header, start):
            return start + len(header)
        return start

    def _start_after_prompt(self, index):
        before = self._try(self._messages[:index], True)
        if before is not None and self._text.startswith(before):
            return len(before)
        reply = self._in_whole(index)
        previous = self._in_whole(index - 1) if index > 0 else None
        alone = (self._find(self._messages[:index], index - 1, True, before)
                 if previous and before is not None else None)
        begin = self._after_header(previous.end if previous else 0, reply) if reply else None
        if not alone:
            return begin
        rest, header = self._text[previous.end:], before[alone.end:]
        shared = common_prefix(header, rest)
        if shared < len(header):
            # This reply has another header. If the two do not differ first between tokens or lines,
            # the reply begins at an unknown place before its content.
            shared = self._special.start_of_one_at(header, shared)
            self.without.add(header[shared:])
            if not self._special.added_ends(rest[:shared]) and not rest[:shared].endswith("\n"):
                return begin
        return previous.end + shared

    def _after_header(self, previous, reply):
        """The end of the text that begins replies, between the end of the previous message and the
        reply's content or last tool call. If it is not there, the beginning of the content, if known."""
        whole = self._habits.header
        for header in filter(None, dict.fromkeys((whole, without_opening(whole)))):
            if reply.begin is not None:
                at = self._text.rfind(header, previous, reply.begin)
            else:
                at = self._text.find(header, previous, reply.end)
            if at >= 0:
                self.without.update({whole[len(header):]} - {""})
                return at + len(header)
        return reply.begin

    def _end(self, index):
        last = index + 1 == len(self._messages)
        upto = self._try(self._messages if last else self._messages[:index + 1], last)
        if upto is not None and last and upto.startswith(self._text):
            return len(self._text)
        if upto is not None and not last and self._text.startswith(upto):
            return len(upto)
        reply = self._in_whole(index)
        if not reply:
            return len(self._text) if last else None
        other = self._find(self._messages[:index + 1], index, last, upto) if upto is not None else None
        if other and not last and self._text.startswith(upto[other.end:], reply.end):
            return reply.end + len(upto) - other.end
        # White space at the end of a reply is kept or dropped. The text that follows the reply in
        # both cases ends with a token.
        rest = self._text[reply.end:].lstrip()
        following = upto[other.end:].lstrip() if other else ""
        shared = self._special.end_of_last(rest[:common_prefix(rest, following)])
        if shared == 0 and last:
            return len(self._text)
        if shared == 0 and reply.exact and self._special.end_of_first(following) > 0:
            # The end of a conversation has another end token.
            shared = self._special.end_of_first(rest)
        if shared > 0:
            end = len(self._text) - len(rest) + shared
        elif reply.exact:
            end = reply.end
        else:
            end = reply.end + self._stops.end_of_known(self._text[reply.end:])
            if end == reply.end:
                return None
        after = None if last else self._in_whole(index + 1)
        return None if after and after.end <= end else end

    def _in_whole(self, index):
        if index not in self._said:
            self._said[index] = self._find(self._messages, index, False, self._text)
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
        function = _function_of(call)
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


def _function_of(call):
    return call.get("function", call)


def _first_of(text):
    return len(text) - len(text.lstrip())


def _insert(text, marks):
    for at in sorted(marks, reverse=True):
        text = text[:at] + marks[at] + text[at:]
    return text
