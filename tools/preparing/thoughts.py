"""Empty thoughts at the beginning of replies.

A template of a reasoning model writes an empty thought into a reply that has none, or replaces a dropped
thought by it. Training on it teaches the model to skip its thoughts. So no reply begins with an empty thought,
whether the template's generation prompt, the template's reply or the data has written it.
"""

import re

# The word in the tags of thoughts: <think>, <thinking>, <seed:think>, [THINK], <|START_THINKING|>.
_WORD = r"[\w:.-]*(?:think|thought|reasoning)[\w:.-]*"
# (opening, closing) of a thought. The generation prompt may have written the opening, so a reply may begin
# with the closing alone.
_TAGS = (
    (rf"<(?P<xml>{_WORD})>", rf"</(?(xml)(?P=xml)|{_WORD})>"),
    (rf"\[(?P<brackets>{_WORD})\]", rf"\[/(?(brackets)(?P=brackets)|{_WORD})\]"),
    (rf"◁(?P<triangles>{_WORD})▷", rf"◁/(?(triangles)(?P=triangles)|{_WORD})▷"),
    (rf"<\|{_WORD}\|>", rf"<\|(?:/{_WORD}|end_{_WORD}|{_WORD}_end)\|>"),
    (r"<\|channel>thoughts?\b", r"<channel\|>"),  # Gemma 4
    (r"<unused94>thought", r"<unused95>"),  # MedGemma
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
)
# Thoughts that are messages of the assistant to itself, with the header of its next message. They end with a
# token that ends other messages, too, so the closing alone is no thought.
_MESSAGES = (
    r"<\|channel\|>analysis<\|message\|>\s*<\|end\|>(?:<\|start\|>assistant)?",  # gpt-oss
    r" to=self<\|message\|>\s*<\|eom\|>(?:<\|start\|>assistant)?",
)
_EMPTY = re.compile(
    "|".join([rf"\s*(?:{opening}\s*)?{closing}\s*" for opening, closing in _TAGS]
             + [rf"\s*{message}" for message in _MESSAGES]), re.IGNORECASE)
_OPENED = re.compile("(?:" + "|".join(opening for opening, _ in _TAGS) + r")\s*\Z", re.IGNORECASE)


def after_empty_thought(text, start, end):
    """The place after the empty thought with which text[start:end] begins, which may have been opened before
    it; `start` if there is none."""
    empty = _EMPTY.match(text, start, end)
    return empty.end() if empty else start


def without_opening(prompt):
    """A generation prompt without the opening of a thought at its end."""
    return _OPENED.sub("", prompt)


def has_empty_thought(text):
    """Whether a text begins with an empty thought."""
    return _EMPTY.match(text) is not None
