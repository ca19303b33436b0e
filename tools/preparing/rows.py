"""Columns of a row: which of the known forms of training data it has, and its parts."""

from .inputs import parse
from .messages import Messages, messages_of, said, tools_of
from .report import Refusal, one_line

CONVERSATIONS = ("messages", "conversations", "conversation")
FORMS = tuple((key,) for key in CONVERSATIONS) + (
    ("prompt", "completion"), ("instruction", "output"), ("text",))
FORM_NAMES = ("'messages', 'conversations', 'prompt' with 'completion', 'instruction' with 'output', "
              "and 'text'")
PAIR_NAMES = "'chosen' and 'rejected', with 'prompt' or with a beginning that both share"
# Columns with content that a text cannot hold.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# Columns that would change what is trained on. The given value, which changes nothing, is accepted.
MASKS = {"weight": 1, "loss_weight": 1, "sample_weight": 1, "train": 1, "masked": 0, "weights": None,
         "mask": None, "loss_mask": None, "completion_mask": None, "assistant_masks": None,
         "labels": None}
UNUSED = "columns that are not used"


class Chat:
    """A conversation: its messages, of which the first `known` are not trained on, and the other
    inputs of its chat template."""

    def __init__(self, conversation, tools=None, variables=None, known=0):
        self.conversation = conversation
        self.tools = tools
        self.variables = variables or {}
        self.known = known

    @property
    def messages(self):
        return self.conversation.messages


class Text:
    """A text whose first `prompt` characters are not trained on."""

    def __init__(self, text, prompt=0):
        self.text = text
        self.prompt = prompt


def example_of(row, notes):
    """The Chat or Text of a row. If a row has several forms, conversations come first."""
    row = _present(row)
    _refuse_masks(row)
    form = next((form for form in FORMS if all(key in row for key in form)), None)
    if form is None:
        if "chosen" in row and "rejected" in row:
            raise Refusal("has 'chosen' and 'rejected': pairs of preferences are prepared with --pairs")
        raise Refusal(f"needs one of {FORM_NAMES}; {_keys_of(row)}")
    if form == ("prompt", "completion") and row.get("label") is False:
        raise Refusal("has 'label' false: the completion is one to avoid, which cannot be trained on")
    used = set(form)
    if form == ("text",) or (form == ("prompt", "completion") and isinstance(row["prompt"], str)):
        _refuse_system_of_text(row)
        texts = [_string(row, key) for key in form]
        made = Text("".join(texts), len(texts[0]) if len(texts) == 2 else 0)
    else:
        made = _chat(row, form, used)
    _note_unused(row, used, notes)
    return made


def _chat(row, form, used):
    system = _system(row, used)
    if form == ("prompt", "completion"):
        prompt = _with_system(messages_of(row["prompt"], "prompt"), system)
        conversation = prompt + messages_of(row["completion"], "completion")
        return Chat(conversation, *_template_parts(row, used), known=len(prompt))
    if form == ("instruction", "output"):
        conversation = _turns(row, used) + said("assistant", _string(row, "output"))
    else:
        conversation = messages_of(row[form[0]], form[0])
    return Chat(_with_system(conversation, system), *_template_parts(row, used))


def pair_of(row, notes):
    """Prompt, chosen and rejected of a preference pair: three Chats of the whole conversation up to
    there, or three texts, where chosen and rejected are only what follows the prompt."""
    row = _present(row)
    _refuse_masks(row)
    missing = [key for key in ("chosen", "rejected") if key not in row]
    if missing:
        raise Refusal(f"needs {PAIR_NAMES}; has no '{missing[0]}', but {_keys_of(row)}")
    used = {"prompt", "chosen", "rejected"}
    chat = _pair_prompt(row, used)
    if chat is not None or isinstance(row["chosen"], (list, dict)):
        made = _chat_pair(row, chat, used)
    else:
        _refuse_system_of_text(row)
        made = _text_pair(row)
    _note_unused(row, used, notes)
    return made


def _text_pair(row):
    chosen, rejected = _string(row, "chosen"), _string(row, "rejected")
    if "prompt" in row:
        return _string(row, "prompt"), chosen, rejected
    known = common_prefix(chosen, rejected)
    if known == len(chosen) == len(rejected):
        raise Refusal("'chosen' and 'rejected' are the same")
    if known > 0 and chosen[known - 1] == " ":  # a space belongs to the following word
        known -= 1
    return chosen[:known], chosen[known:], rejected[known:]


def _pair_prompt(row, used):
    """The messages of the prompt, or None if it is a text or a beginning that both replies
    share."""
    if isinstance(row.get("prompt"), list):
        return messages_of(row["prompt"], "prompt")
    for key in CONVERSATIONS:
        # ShareGPT's form: the conversation so far, and one reply of each kind.
        if key in row and isinstance(row["chosen"], dict):
            used.add(key)
            return messages_of(row[key], key)
    if "prompt" not in row and "instruction" in row and isinstance(row["chosen"], str):
        return _turns(row, used)
    return None


def _chat_pair(row, prompt, used):
    if "instruction" in used:
        replies = [said("assistant", _string(row, key)) for key in ("chosen", "rejected")]
    else:
        replies = [messages_of(row[key], key) for key in ("chosen", "rejected")]
    if prompt is None:
        known = common_prefix(replies[0].messages, replies[1].messages)
        if known == min(map(len, replies)):
            raise Refusal("'chosen' and 'rejected' are the same, or one is the beginning of the other")
        if known > 0:
            used.discard("prompt")  # a text that the messages repeat
            prompt = replies[0].first(known)
            replies = [reply.after(known) for reply in replies]
        elif isinstance(row.get("prompt"), str):
            prompt = said("user", row["prompt"])
        else:
            raise Refusal("'chosen' and 'rejected' begin with different messages, and there is no "
                          "'prompt'")
    elif all(reply.messages[:len(prompt)] == prompt.messages and len(reply) > len(prompt)
             for reply in replies):
        replies = [reply.after(len(prompt)) for reply in replies]  # they repeat the prompt
    if any(trained is False for reply in replies for trained in reply.trained):
        raise Refusal("a message of 'chosen' or 'rejected' is not to be trained on; both are trained on "
                      "as a whole")
    prompt = _with_system(prompt, _system(row, used))
    parts = _template_parts(row, used)
    return tuple(Chat(part, *parts) for part in (prompt, prompt + replies[0], prompt + replies[1]))


def common_prefix(first, second):
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _present(row):
    return {key: value for key, value in row.items() if value is not None}


def _keys_of(row):
    keys = [f"'{one_line(key)}'" for key in row]
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"has {', '.join(keys[:8])}{more}" if keys else "has no values"


def _refuse_masks(row):
    for key in MEDIA:
        if row.get(key):
            raise Refusal(f"has '{key}'; only texts can be trained on")
    for key, neutral in MASKS.items():
        if key in row and (neutral is None or row[key] != neutral):
            raise Refusal(f"has '{key}', which would change what is trained on and is not understood; "
                          f"leave out the row, remove '{key}', or give replies a \"weight\" of 0 or 1")


def _system(row, used):
    """The text of the column `system`, which LLaMA-Factory and ShareGPT have, or None."""
    if "system" not in row:
        return None
    used.add("system")
    return _string(row, "system") if row["system"] != "" else None


def _refuse_system_of_text(row):
    if row.get("system"):
        raise Refusal("has 'system' with a text; write it into the text, or give lists of messages")


def _with_system(conversation, system):
    if system is None:
        return conversation
    first = conversation.messages[0]
    if first["role"] != "system":
        return said("system", system) + conversation
    if first.get("content") != system:
        raise Refusal("has 'system' and another message of the system")
    return conversation


def _turns(row, used):
    """Turns of an alpaca row: `history` and the user's last one."""
    used.update(("instruction", "input", "history"))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
            isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
            for turn in history):
        raise Refusal("'history' is not a list of pairs of texts")
    conversation = Messages([], [])
    for question, answer in history:
        conversation = conversation + said("user", question) + said("assistant", answer)
    texts = [_string(row, key) for key in ("instruction", "input") if row.get(key, "") != ""]
    if not texts:
        raise Refusal("'instruction' is empty")
    return conversation + said("user", "\n".join(texts))


def _template_parts(row, used):
    """The tools of a row and its variables of the chat template."""
    used.update(("tools", "chat_template_kwargs"))
    tools = tools_of(row.get("tools"))
    if tools is None and "functions" in row:  # the older form of OpenAI
        used.add("functions")
        functions = tools_of(row["functions"]) or []
        tools = [{"type": "function", "function": function} for function in functions] or None
    variables = row.get("chat_template_kwargs", {})
    if isinstance(variables, str):
        variables = parse(variables, "'chat_template_kwargs' is ")
    if not isinstance(variables, dict):
        raise Refusal("'chat_template_kwargs' is not an object")
    return tools, _present(variables)


def _note_unused(row, used, notes):
    for key in row:
        if key not in used and key not in MASKS and key not in MEDIA and row[key] not in ("", []):
            notes.add(UNUSED, f"'{one_line(key)}'")


def _string(row, key):
    if not isinstance(row[key], str):
        raise Refusal(f"'{key}' is not a text")
    return row[key]
