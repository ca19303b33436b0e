"""Special tokens of a text, and the tokens with which a model ends its reply."""

import re


class SpecialTokens:
    """Special tokens of a tokenizer in a text, with the stop tokens that a model's folder lists. Added
    tokens are these and others, such as `<think>`."""

    def __init__(self, tokenizer, stops=None):
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = set(tokenizer.all_special_tokens) | {str(token) for token in added if token.special}
        special |= set(stops or ())
        self._tokens = tuple(sorted(special - {""}))
        self._special = _pattern_of(special)
        every = special | set(map(str, added))
        self._ends = tuple(token for token in every - {""}
                           if token in special or not token.startswith("</"))
        self._added = _pattern_of(every)

    def end_of_last(self, text):
        """The end of the last special token in a text; 0 if there is none."""
        return max((match.end() for match in self._special.finditer(text)), default=0)

    def end_of_first(self, text):
        """The end of the special token with which a text begins; 0 if there is none."""
        match = self._special.match(text)
        return match.end() if match else 0

    def at_end(self, text):
        """The added token with which a text ends, or None. Some tokenizers have end tokens that they do
        not call special, but those like `</tool_call>` only end a part of a reply."""
        return max((token for token in self._ends if text.endswith(token)), key=len, default=None)

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


class StopTokens:
    """The tokens at which a model stops. `listed` are those that its folder lists (stop_tokens_of), or
    None: then the end-of-sequence token is one, and every token with which the chat template
    ends a reply."""

    def __init__(self, tokenizer, special, listed=None):
        self._special = special
        self._begin = getattr(tokenizer, "bos_token", None)
        self._end = getattr(tokenizer, "eos_token", None)
        self.listed = listed

    def ends(self, text, by_next):
        """Whether a reply, without white space after it, ends with a stop token. `by_next`: in this
        template the token that ends a reply is the first one of the next message, so another token at
        the end belongs to the reply's content."""
        token = self._special.at_end(text)
        if self.listed is not None:
            return token in self.listed
        return token is not None and (not by_next or token == self._end)

    def end_of_first(self, text, header):
        """The end of the stop token with which a text that follows a reply begins; 0 if there is none.
        `header` begins a reply, so its first token ends none, unless the header begins with the end of
        the message before it."""
        end = self._special.end_of_first(text)
        if self.listed is not None:
            return end if text[:end] in self.listed else 0
        if text[:end] == self._end:
            return end
        return 0 if header.startswith(text[:end]) or text[:end] == self._begin else end

    def end_of_known(self, text):
        """The end of the first token in a text at which the model surely stops; 0 if there is none."""
        known = self.listed if self.listed is not None else {self._end} - {None}
        match = _pattern_of(set(known)).search(text)
        return match.end() if match else 0


def _pattern_of(tokens):
    """Matches the longest of the tokens that is there."""
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
