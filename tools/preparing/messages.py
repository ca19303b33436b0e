"""Messages of conversations, converted from the forms of training data to that of chat
templates."""

from .inputs import parse
from .report import Refusal, one_line

# Keys that say whether a reply is trained on: those of OpenAI, Mistral, axolotl, ms-swift and
# LLaMA-Factory (1 or true: yes), and of torchtune (true: no).
TRAINED_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "train_on_turn", "loss")
MASKED_KEYS = ("masked",)
# Keys about training that are refused, since their meaning is not known.
REFUSED_KEYS = ("mask", "loss_mask", "loss_masks", "loss_scale", "label", "labels", "weights",
                "train_detail", "training_detail", "train_on", "train_on_eot", "ignore", "ignore_loss",
                "no_loss", "no_train", "is_masked")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
         "function": "tool"}


class Messages:
    """A list of messages without their keys about training. `trained` has an entry per message:
    whether it is trained on, or None if it does not say."""

    def __init__(self, messages, trained):
        self.messages = messages
        self.trained = trained

    def __add__(self, other):
        return Messages(self.messages + other.messages, self.trained + other.trained)

    def __len__(self):
        return len(self.messages)

    def first(self, count):
        return Messages(self.messages[:count], self.trained[:count])

    def after(self, count):
        return Messages(self.messages[count:], self.trained[count:])


def said(role, content):
    """A single message."""
    return Messages([{"role": role, "content": content}], [None])


def messages_of(value, key):
    """The messages of column `key`: objects with role and content, or with from and value
    (ShareGPT)."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse(value, f"'{key}' is ")
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Refusal(f"'{key}' is not a list of messages")
    made = [_message(message, f"message {number} of '{key}'")
            for number, message in enumerate(value, 1)]
    return Messages([message for message, _ in made], [trained for _, trained in made])


def _message(message, what):
    if isinstance(message, dict):
        message = {name: part for name, part in message.items() if part is not None}
        if "from" in message and "role" not in message:
            message = _from_sharegpt(message, what)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(f"{what} is not an object with a 'role'")
    if "function_call" in message:  # the older form of OpenAI
        call = message.pop("function_call")
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message["role"] == "function":
        message["role"] = "tool"
    if "tool_calls" in message:
        calls = _tool_calls(message.pop("tool_calls"), what)
        if calls:
            message["tool_calls"] = calls
    if "content" in message:
        message["content"] = _content(message["content"], what)
    elif "tool_calls" not in message:
        raise Refusal(f"{what} has no 'content'")
    return message, _trained(message, what)


def _from_sharegpt(message, what):
    if message["from"] == "function_call":
        calls = message.get("value")
        if isinstance(calls, str):
            calls = parse(calls, f"'value' of {what} is ")
        calls = calls if isinstance(calls, list) else [calls]
        made = {"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls]}
    else:
        if not isinstance(message["from"], str) or message["from"] not in ROLES:
            raise Refusal(f"{what} is from '{one_line(message['from'])}'; known are "
                          f"{', '.join(ROLES)} and function_call")
        made = {"role": ROLES[message["from"]]}
        if "value" in message:
            made["content"] = message["value"]
    return made | {name: part for name, part in message.items() if name not in ("from", "value")}


def _content(content, what):
    """A content as one text. Parts of a list are joined without a separator, as in the chat
    templates that take lists."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"the content of {what} is neither a text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict):
            kind = part.get("type", "text" if "text" in part else "without a type")
            if kind not in ("text", "input_text", "output_text"):
                advice = ("; give it as 'reasoning_content' of the message"
                          if kind in ("thinking", "reasoning") else "; only texts can be trained on")
                raise Refusal(f"{what} has a part of type '{one_line(kind)}'{advice}")
            part = part.get("text")
        if not isinstance(part, str):
            raise Refusal(f"{what} has a part that is not a text")
        texts.append(part)
    return "".join(texts)


def _tool_calls(calls, what):
    if isinstance(calls, str):
        calls = parse(calls, f"'tool_calls' of {what} is ") if calls.strip() else []
    if not isinstance(calls, list):
        raise Refusal(f"'tool_calls' of {what} is not a list")
    made = []
    for call in calls:
        call = parse(call, f"a tool call of {what} is ") if isinstance(call, str) else call
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, str):
            function = parse(function, f"a function of {what} is ")
            call = call | {"function": function}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(f"a tool call of {what} is not a function with a 'name'")
        made.append(call)
    return made


def _trained(message, what):
    """Returns whether the message is to be trained on, or None if it does not say, and removes
    these keys."""
    for key in REFUSED_KEYS:
        if key in message:
            raise Refusal(f"{what} has the key '{key}', which is not understood; write \"weight\": 0 to "
                          f"a reply that is not to be trained on, and remove '{key}'")
    said_by = {}
    for key in TRAINED_KEYS + MASKED_KEYS:
        if key not in message:
            continue
        value = message.pop(key)
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise Refusal(f"{what} has {key} {one_line(value)}; only 0 and 1, or false and true, can be "
                          f"used")
        said_by[bool(value) != (key in MASKED_KEYS)] = key
    if len(said_by) == 2:
        raise Refusal(f"{what}: '{said_by[True]}' says that it is trained on, and '{said_by[False]}' "
                      f"that it is not")
    trained = next(iter(said_by), None)
    if trained and message["role"] != "assistant":
        raise Refusal(f"{what} is to be trained on ('{said_by[True]}'), but has the role "
                      f"'{one_line(message['role'])}'; only replies of the assistant are")
    return trained


def tools_of(value):
    """The list of tools of a row, or None: a list, or its JSON text; a tool and its parameters may be
    JSON texts, too."""
    if isinstance(value, str):
        value = parse(value, "'tools' is ") if value.strip() else None
    if value is not None and not isinstance(value, list):
        raise Refusal("'tools' is not a list of tools")
    made = []
    for number, tool in enumerate(value or [], 1):
        what = f"tool {number}"
        tool = parse(tool, f"{what} is ") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise Refusal(f"{what} is not an object")
        if isinstance(tool.get("function"), str):
            tool = tool | {"function": parse(tool["function"], f"'function' of {what} is ")}
        if isinstance(tool.get("function"), dict):
            tool = tool | {"function": _with_parameters(tool["function"], what)}
        made.append(_with_parameters(tool, what))
    return made or None  # some templates announce tools for an empty list


def _with_parameters(function, what):
    if isinstance(function.get("parameters"), str):
        return function | {"parameters": parse(function["parameters"], f"'parameters' of {what} is ")}
    return function
