#!/usr/bin/env python3
"""Compare what tools/prepare.py trains on with the masks of TRL's training templates. Run it by hand:

    python3 tests/data/compare_trained_tokens.py [--record | --random N [--seed S]]

It needs transformers and trl. Each chat template that TRL has renders the same conversations, as it is for
prepare.py, and in TRL's form with marked replies. A difference in the text of a reply that is trained on must
be one of DIFFERENCES, or the script fails. It prints how often each of them occurs, and each template of
which TRL has no training form. --record writes what the templates wrote and what prepare.py trains on to
tests/data/chats/trained.json.gz, for tests/e2e/prepare_replies_test.py. The text before the first message is
left out there. --random N compares N random conversations instead.
"""

import argparse
import collections
import gzip
import json
import os
import random
import re
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "tools")

import trl  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers  # noqa: E402
from tokenizers.models import BPE  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from preparing.documents import Preparer  # noqa: E402
from preparing.report import Refusal  # noqa: E402

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# The first and the last token of a document, by the beginning of the template's name.
ENDS = {"cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"), "gemma4": ("<bos>", "<turn|>"),
        "diffusion": ("<bos>", "<turn|>"), "gemma": ("<bos>", "<end_of_turn>"),
        "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), "glm": (None, "<|endoftext|>"),
        "gptoss": ("<|startoftext|>", "<|return|>"), "idefics": ("<|begin_of_text|>", "<end_of_utterance>"),
        "smolvlm": ("<|im_start|>", "<end_of_utterance>"), "lfm2": ("<|startoftext|>", "<|im_end|>"),
        "llama": ("<|begin_of_text|>", "<|eot_id|>"), "llava": ("<s>", "</s>"),
        "muse": ("<|begin_of_text|>", "<|eot|>"), "nemotron": ("<s>", "<|im_end|>"),
        "phi": ("<s>", "<|endoftext|>"), "qwen": (None, "<|im_end|>")}
SPECIAL = re.compile(r"<\|[^|>\s'\"]+\|?>|<[a-z_]+\|>|<｜[^｜]*｜>|\[/?INST\]|\[gMASK\]|<sop>"
                     r"|<(?:start|end)_of_[a-z]+>|<image>")
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Rules in the order in which they are tried on the reply in TRL's text: (difference, pattern, replacement).
DIFFERENCES = (
    ("the header of a reply, which the generation prompt writes", r"\A<\|start\|>assistant", ""),
    ("the header of a reply, which the generation prompt writes",
     r"\A<｜(?:Assistant|tool▁outputs▁end)｜>", ""),
    ("the line break of the header, which the generation prompt writes", r"\A\n", ""),
    ("white space after the end token", r"(?<=[>\]])\s+\Z", ""),
    ("what follows the end token at the end of a conversation", r"(?<=>)\n<\|endoftext\|>\Z", ""),
    ("an empty thought", r"\A\s*<think>\s*</think>\s*", ""),
    ("the beginning of a thought, which the generation prompt writes", r"\A<think>\n", ""),
    ("an earlier thought, which the template drops", r"\A(?:<think>\n)?.*</think>", ""),
    ("an earlier thought, which the template drops", r"\A\s+", ""),
    ("white space of a reply before which there is no message", r"\A (?=Welcome)", ""),
    ("the token that hands over to a tool", r"(?<=<tool_call\|>)\Z", "<|tool_response>"),
)
# Replies that TRL's templates write in another way: {(template, conversation): reason}.
OTHERS = {
    ("deepseek_r1_distill", "two replies"): "two replies of TRL are one run",
    ("deepseekv3", "two replies"): "two replies of TRL are one run",
    ("gptoss", "two replies"): "two replies of TRL are one run",
    ("muse_glimmer", "two replies"): "two replies of TRL are one run",
    ("glm4moe", "two replies"): "TRL adds the end token of a user's message that is not there",
    ("diffusion_gemma", "begins with a call"): "TRL also trains on an end token after a tool's answer",
    ("diffusion_gemma", "text and two calls"): "TRL also trains on a content after a tool's answer",
}


def user(content):
    return {"role": "user", "content": content}


def reply(content, **more):
    return {"role": "assistant", "content": content, **more}


def thinks(thought, content, **more):
    return reply(content, reasoning_content=thought, thinking=thought, **more)


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "utc"}}}]}
TOOLS = [{"type": "function", "function": {
    "name": "clock", "description": "Time", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string", "description": "Zone"}}}}}]
ANSWER = {"role": "tool", "name": "clock", "content": "noon"}
CONVERSATIONS = {
    "single": [user("Hi"), reply("Hello.")],
    "several": [user("Hi"), reply("Hello."), user("And?"), reply("Fine.")],
    "system": [SYSTEM, user("Hi"), reply("Hello."), user("And?"), reply("Fine.")],
    "later system": [user("Hi"), reply("Hello."), SYSTEM, user("And?"), reply("Fine.")],
    "begins with the assistant": [reply("Welcome."), user("Hi"), reply("Hello.")],
    "only the assistant": [reply("Welcome.")],
    "begins with a call": [reply("", **CALL), ANSWER, user("Hi"), reply("Hello.")],
    "two replies": [user("Hi"), reply("Hello."), reply("Fine.")],
    "text and two calls": [user("time?"), reply("Wait.", tool_calls=CALL["tool_calls"] * 2), ANSWER, ANSWER,
                           reply("It is noon.")],
    "ends with the user": [user("Hi"), reply("Hello."), user("And?")],
    "call": [user("time?"), reply("", **CALL), ANSWER, reply("It is noon.")],
    "last call": [user("time?"), reply("", **CALL)],
    "thoughts": [user("2+2"), thinks("two and two", "4"), user("3+3"), thinks("three and three", "6")],
    "thoughts in contents": [user("2+2"), reply("<think>\ntwo\n</think>\n\n4"), user("3+3"),
                             reply("<think>\nthree\n</think>\n\n6")],
    "thoughts of calls": [user("time?"), thinks("Ask.", "", **CALL), ANSWER, thinks("Tell.", "Noon.")],
    "completion": [user("Hi"), reply("Hello."), user("And?"), reply("Fine.")],
}


def tokenizer_of(name, template):
    """A tokenizer of bytes with the special tokens of a template."""
    first, last = next(ends for begin, ends in ENDS.items() if name.startswith(begin))
    special = [token for token in dict.fromkeys(SPECIAL.findall(template) + [first, last]) if token]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    made.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=first, eos_token=last,
                                   chat_template=template)


def runs_of(tokenizer, ids, mask):
    """The texts of the runs of tokens that are trained on."""
    made, last = [], 0
    for token, bit in zip(ids, mask):
        if bit:
            made = made[:-1] + [made[-1] + [token]] if last else made + [[token]]
        last = bit
    return [tokenizer.decode(run) for run in made]


class Recorder:
    """Calls of a tokenizer's chat template, by their messages."""

    def __init__(self, tokenizer):
        self._apply = tokenizer.apply_chat_template
        self.calls = {}

    def __call__(self, messages, tools=None, tokenize=False, add_generation_prompt=False, **variables):
        key = json.dumps([messages, add_generation_prompt], sort_keys=True)
        if not tokenize:
            self.calls[key] = None
        made = self._apply(messages, tools=tools, tokenize=tokenize,
                           add_generation_prompt=add_generation_prompt, **variables)
        if not tokenize:
            self.calls[key] = made
        return made


def row_of(name, messages):
    tools = {"tools": TOOLS} if "call" in name else {}
    if name == "completion":
        return {"prompt": messages[:-1], "completion": messages[-1:]} | tools
    return {"messages": messages} | tools


def of_trl(tokenizer, training, name, messages):
    """What TRL trains on, or None if its template refuses the messages or does not write all contents."""
    in_parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (messages, in_parts):
        try:
            made = tokenizer.apply_chat_template(
                form, tools=row_of(name, messages).get("tools"), chat_template=training, tokenize=True,
                return_dict=True, return_assistant_tokens_mask=True)
        except Exception:  # templates raise what they like
            continue
        text = tokenizer.decode(made["input_ids"])
        if all(message["content"].rpartition("</think>")[2].strip() in text for message in messages):
            runs = runs_of(tokenizer, made["input_ids"], made["assistant_masks"])
            return runs[-1:] if name == "completion" else runs
    return None


def differences(ours, theirs):
    """The rules that turn a reply of TRL into ours, or None if they do not."""
    used = []
    for reason, pattern, replacement in DIFFERENCES:
        if ours == theirs:
            break
        changed = re.sub(pattern, replacement, theirs, count=1, flags=re.DOTALL)
        if changed != theirs:
            used.append(reason)
            theirs = changed
    return used if ours == theirs else None


def random_conversation(chance):
    """Messages of a random conversation. Contents do not begin with white space, which templates drop
    only without thoughts."""
    words = ["Hello.", "ok", "a\nb", "é漢", "no!", "{x}", "<b>", "1", "yes\n", "two  words"]
    made = [SYSTEM] * (chance.random() < 0.25) + [reply(chance.choice(words))] * (chance.random() < 0.15)
    for _ in range(chance.randint(1, 4)):
        made.append(user(chance.choice(words)))
        if chance.random() < 0.3:
            made += [thinks("Hm.", "", **CALL) if chance.random() < 0.4 else reply("", **CALL), ANSWER]
        content = chance.choice(words)
        made.append(chance.choice([reply(content), reply(content), thinks("so\nit is", content),
                                   reply(f"<think>\nhm\n</think>\n\n{content}")]))
    return made + [user("end")] * (chance.random() < 0.1)


def random_conversations(seed):
    made = random_conversation(random.Random(seed))
    return {"random call" if any("tool_calls" in message for message in made) else "random": made}


def compare(name, template, conversations, seen, recorded):
    """Compares conversations with a template. Returns lines about unknown differences."""
    path = TEMPLATES / f"{name}_training.jinja"
    training = path.read_text(encoding="utf-8") if path.exists() else None
    tokenizer = tokenizer_of(name, template + (training or ""))
    tokenizer.chat_template = template
    wrong = []
    for conversation, messages in conversations.items():
        tokenizer.apply_chat_template = recorder = Recorder(tokenizer)
        row = row_of(conversation, messages)
        try:
            ids, mask = Preparer(tokenizer, "assistant").document(json.dumps(row))
            ours = runs_of(tokenizer, ids, mask)
        except Refusal as refusal:
            ours = None
            seen[f"refused: {str(refusal)[:60]}"] += 1
        del tokenizer.apply_chat_template
        if ours is None:
            continue
        if "{% generation" not in template and "{%- generation" not in template:
            as_text = "arguments is string" if re.search(r"arguments\s+is\s+(not\s+)?string", template) else ""
            recorded.append({"template": name, "source": f"tool_calls tools {as_text}", "conversation": conversation, "row": row, "trained": ours,
                             "end": tokenizer.eos_token, "calls": recorder.calls, "special": [
                                 str(token) for token in tokenizer.added_tokens_decoder.values()
                                 if token.special]})
        theirs = of_trl(tokenizer, training, conversation, messages) if training else None
        if theirs is None:
            seen["no reply of TRL to compare with"] += 1
            continue
        if (name, conversation) in OTHERS:
            seen[OTHERS[name, conversation]] += 1
            continue
        pairs = [differences(*pair) for pair in zip(ours, theirs)]
        if len(ours) != len(theirs) or None in pairs:
            wrong.append(f"{name}, {conversation}\n  ours {ours}\n  TRL  {theirs}")
        for used in pairs:
            seen.update(dict.fromkeys(used or (), 1) or {"the same": 1})
    return wrong


def without_beginning(entry):
    """A recorded entry without what all its texts begin with."""
    texts = [text for text in entry["calls"].values() if text is not None]
    shared = os.path.commonprefix(texts)
    shared = max((match.start() for match in SPECIAL.finditer(shared)), default=0)
    calls = {key: text and text[shared:] for key, text in entry["calls"].items()}
    return entry | {"calls": calls}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--record", action="store_true", help="write the fixture of the test")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="compare random conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the names of templates")
    arguments = parser.parse_args()
    seen, recorded, wrong = collections.Counter(), [], []
    paths = [path for path in sorted(TEMPLATES.glob("*.jinja"))
             if arguments.only in path.stem and not path.stem.endswith("_training")]
    if arguments.random:
        paths = random.Random(arguments.seed).choices(paths, k=arguments.random)
    for number, path in enumerate(paths, arguments.seed):
        conversations = random_conversations(number) if arguments.random else CONVERSATIONS
        wrong += compare(path.stem, path.read_text(encoding="utf-8"), conversations, seen, recorded)
    for reason, count in seen.most_common():
        print(f"{count:5} {reason}")
    if arguments.record:
        text = json.dumps([without_beginning(entry) for entry in recorded], ensure_ascii=False)
        made = gzip.compress(text.encode(), 9, mtime=0)
        (ROOT / "tests/data/chats/trained.json.gz").write_bytes(made)
        print(f"{len(recorded)} documents, {len(text):,} bytes, {len(made):,} compressed")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
