"""The chat template of a tokenizer of transformers."""

import functools
import inspect
import json
import re

from .messages import REASONING_KEYS
from .report import Refusal, Unprepared, one_line, reason_of

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
ARGUMENTS_MAY_BE_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?string")
# Keys of messages that need no note if a template does not use them: they only link messages.
QUIET_KEYS = {"role", "content", "tool_calls", "tool_call_id", "id", *REASONING_KEYS}
CALL_MARKS = range(0x100000, 0x10FFFD)  # for private use
LEFT_OUT = "the chat template changes or leaves out"


class Habits:
    """Habits of a template in all conversations. `header` is the text that begins a reply, "" if it is
    not known. `next_ends`: the token that ends a reply is the first one of the next message."""

    def __init__(self, header, next_ends):
        self.header = header
        self.next_ends = next_ends


class ChatTemplate:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._habits = {}  # by source and variables
        self._parameters = inspect.signature(tokenizer.apply_chat_template).parameters

    def exists(self):
        return bool(getattr(self._tokenizer, "chat_template", None))

    def source(self, tools):
        """The text of the template. A tokenizer may have several, one of them for tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, str):
            return template
        try:
            return self._tokenizer.get_chat_template(tools=tools)
        except Exception as error:  # of many kinds
            raise Refusal(f"no chat template can be chosen: {reason_of(error)}") from error

    def marks_replies(self, tools):
        return bool(GENERATION_TAG.search(self.source(tools)))

    def render(self, chat, messages, prompt=False):
        """The text of messages with the tools and variables of a Chat. With `prompt` the beginning
        of a reply follows."""
        return self._apply(chat, messages, tokenize=False, add_generation_prompt=prompt)

    def marked(self, chat, messages):
        """Token ids of messages, and for each 1 if the template itself marks it as part of a reply
        of the assistant."""
        made = self._apply(chat, messages, tokenize=True, return_dict=True,
                           return_assistant_tokens_mask=True)
        return list(made["input_ids"]), [int(bit) for bit in made["assistant_masks"]]

    def _apply(self, chat, messages, **how):
        try:
            return self._tokenizer.apply_chat_template(messages, tools=chat.tools, **how,
                                                       **chat.variables)
        except ImportError as error:
            raise Unprepared(f"a Python package is missing: {one_line(error)}") from error
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the chat template fails: {reason_of(error)}") from error

    def form_of(self, chat):
        """Finds the form of messages that the template takes: most want contents as texts, a few as
        lists of parts; some want the arguments of tool calls as objects, others as JSON texts.
        Returns a function that writes messages in the first form whose text has all contents, and
        the text of the Chat in it."""
        as_given = ARGUMENTS_MAY_BE_TEXT.search(self.source(chat.tools))
        arguments = [None] if as_given else [_as_object, _as_text]
        if not any("tool_calls" in message for message in chat.messages):
            arguments = [None]
        found = failure = None
        for in_parts in (False, True):
            for arguments_form in arguments:
                form = functools.partial(_formed, in_parts, arguments_form)
                try:
                    text = self.render(chat, form(chat.messages))
                except Unprepared:
                    raise
                except Refusal as refusal:
                    failure = failure or refusal  # the first one says most
                    continue
                if all(_is_in(_content_of(message), text) for message in chat.messages):
                    return form, text
                found = found or (form, text)
        if not found:
            raise failure
        return found

    def check(self, chat, notes):
        """Refuses variables and messages that the template cannot take, and notes what it ignores."""
        source = self.source(chat.tools)
        for name in chat.variables:
            if name == "messages" or (name != "documents" and name in self._parameters
                                      and name not in ("kwargs", "variables")):
                raise Refusal(f"'chat_template_kwargs' sets '{name}', which is not a variable of "
                              f"templates")
            if not _names(source, name):
                notes.add("variables in 'chat_template_kwargs' that the chat template does not use",
                          f"'{one_line(name)}'")
        for number, message in enumerate(chat.messages, 1):
            if "tool_calls" in message and not _names(source, "tool_calls"):
                raise Refusal(f"message {number} has 'tool_calls', which the chat template does not "
                              f"write")
        if chat.tools and not _names(source, "tools"):
            notes.add(LEFT_OUT, "'tools'")

    def habits(self, chat, form):
        """The Habits of the template with the tools and variables of a Chat."""
        key = self.source(chat.tools), json.dumps(chat.variables, sort_keys=True)
        if key not in self._habits:
            question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
            asked, prompt, answered = (
                self._try(chat, form(messages), as_prompt) for messages, as_prompt in (
                    ([question], False), ([question], True), ([question, answer], False)))
            known = asked is not None and prompt is not None and prompt.startswith(asked)
            self._habits[key] = Habits(prompt[len(asked):] if known else "",
                                       answered is not None and answered.rstrip().endswith("b"))
        return self._habits[key]

    def _try(self, chat, messages, prompt):
        try:
            return self.render(chat, messages, prompt)
        except Unprepared:
            raise
        except Refusal:
            return None

    def refuse_lost_calls(self, chat, form):
        """Refuses a conversation if the template writes only some of its tool calls."""
        marks = []  # characters that no text has, one for each call

        def marked(call):
            marks.append(chr(CALL_MARKS[len(marks) % len(CALL_MARKS)]))
            function = _function_of(call)
            named = function | {"name": function["name"] + marks[-1]}
            return named if function is call else call | {"function": named}
        messages = [message | {"tool_calls": [marked(call) for call in message["tool_calls"]]}
                    if "tool_calls" in message else message for message in chat.messages]
        if not marks:
            return
        text = self.render(chat, form(messages))
        lost = next((at for at, mark in enumerate(marks) if mark not in text), None)
        if lost is not None:
            names = [_function_of(call)["name"] for message in chat.messages
                     for call in message.get("tool_calls", [])]
            raise Refusal(f"the chat template does not write the call of '{one_line(names[lost])}', tool "
                          f"call {lost + 1} of the conversation")

    def _uses(self, key, chat, form, whole):
        """Whether the text of a Chat changes without a key of its messages."""
        others = [{name: part for name, part in message.items() if name != key}
                  for message in chat.messages]
        try:
            return self.render(chat, form(others)) != whole
        except Refusal:
            return True

    def note_left_out(self, chat, form, whole, notes):
        """Notes which parts of the messages the rendered text `whole` lacks."""
        for key in dict.fromkeys(key for message in chat.messages for key in message):
            if key not in QUIET_KEYS and not self._uses(key, chat, form, whole):
                notes.add("keys of messages that are not used", f"'{one_line(key)}'")
        for message in chat.messages:
            reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
            content = message.get("content", "")
            if message["role"] == "assistant" and "</think>" in content:
                reasoning = content.rpartition("</think>")[0].rpartition("<think>")[2]
            if not _is_in(_content_of(message), whole):
                notes.add(LEFT_OUT, f"messages of role '{one_line(message['role'])}'")
            if isinstance(reasoning, str) and not _is_in(reasoning, whole):
                notes.add(LEFT_OUT, "the reasoning of replies")


def _content_of(message):
    """The content of a message; for a reply, without its thoughts."""
    content = message.get("content", "")
    return content.rpartition("</think>")[2] if message["role"] == "assistant" else content


def _is_in(text, whole):
    text = text.strip()
    return text in whole or json.dumps(text, ensure_ascii=False)[1:-1] in whole


@functools.lru_cache(maxsize=1000)
def _names(source, name):
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) is not None


def _function_of(call):
    return call["function"] if isinstance(call.get("function"), dict) else call


def _formed(in_parts, arguments_form, messages):
    return [_message_formed(message, in_parts, arguments_form) for message in messages]


def _message_formed(message, in_parts, arguments_form):
    if in_parts and "content" in message:
        message = message | {"content": [{"type": "text", "text": message["content"]}]}
    if arguments_form and "tool_calls" in message:
        message = message | {"tool_calls": [_with_arguments(call, arguments_form)
                                            for call in message["tool_calls"]]}
    return message


def _with_arguments(call, form):
    function = _function_of(call)
    if "arguments" not in function:
        return call
    formed = function | {"arguments": form(function["arguments"])}
    return formed if function is call else call | {"function": formed}


def _as_object(arguments):
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments  # code of an interpreter, say
        return value if isinstance(value, dict) else arguments
    return arguments


def _as_text(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
