#!/usr/bin/env python3
"""Tests which tokens of replies tools/prepare.py trains on: the token that ends a reply is, an empty thought
is not.

    prepare_replies_test.py PATH_OF_PREPARE
"""

import collections
import gzip
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import types
import unittest

from chats import Added, Tokenizer, chat

SCRIPT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, os.path.dirname(SCRIPT))
sys.dont_write_bytecode = True
from preparing import command as prepare  # noqa: E402
from preparing.report import Report, ends_of_replies  # noqa: E402
from preparing.thoughts import after_empty_thought  # noqa: E402
from preparing.tokenizer import stop_tokens_of  # noqa: E402

RECORDED = pathlib.Path(__file__).resolve().parents[1] / "data/chats/trained.json.gz"
# BALLAST_TEST_CHATS=20000 draws more conversations, BALLAST_TEST_SEED=7 repeats those of a failure.
ROUNDS = int(os.environ.get("BALLAST_TEST_CHATS", "100"))
SEED = int(os.environ.get("BALLAST_TEST_SEED", random.randrange(1 << 30)))
NEXT_ENDS = "unmarked tool_calls"  # the next message begins with the token that ends a reply


def prepared(row, template, mask="assistant", stops=None, tokenizer=None):
    """The text of a row, with brackets around what is trained on, and the Notes."""
    tokenizer = tokenizer or Tokenizer(template)
    preparer = prepare.Preparer(tokenizer, mask, "chosen" in row, stops)
    texts = []
    for ids, bits in preparer.documents(json.dumps(row)):
        words = [tokenizer.words[token] for token in ids]
        marked = [("[[" if bit and not before else "]]" if before and not bit else "") + word
                  for word, bit, before in zip(words, bits, [0, *bits])]
        texts.append("".join(marked) + ("]]" if bits[-1] else ""))
    preparer.notes.end_row("a:1", True)
    return " / ".join(texts), preparer.notes


class StopTokenTest(unittest.TestCase):
    def test_the_first_token_of_the_next_message_ends_a_reply(self):
        self.assertEqual(prepared(chat("a", "b", "c", "d"), NEXT_ENDS)[0],
                         "<s><|user|>\na<|assistant|>\n[[b<|user|>]]\nc<|assistant|>\n[[d<|user|>]]")
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        asked = chat("a")["messages"][:1] + [call]
        answered = asked + [{"role": "tool", "content": "e"}, {"role": "assistant", "content": "d"}]
        self.assertEqual(prepared({"messages": answered}, NEXT_ENDS)[0],
                         "<s><|user|>\na<|assistant|>\n[[<f {}><|tool|>]]\ne<|assistant|>\n[[d<|user|>]]")
        self.assertEqual(prepared({"messages": asked}, NEXT_ENDS)[0],
                         "<s><|user|>\na<|assistant|>\n[[<f {}><|tool|>]]")
        for mask, marked in (("completion", "<s><|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\n[[d<|user|>]]"),
                             ("none", "[[<s><|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd<|user|>]]")):
            self.assertEqual(prepared(chat("a", "b", "c", "d"), NEXT_ENDS, mask)[0], marked)
        user = chat("a")["messages"][:1]
        pair = {key: user + [{"role": "assistant", "content": text}]
                for key, text in (("chosen", "b"), ("rejected", "d"))}
        self.assertEqual(prepared(pair, NEXT_ENDS)[0],
                         "<s><|user|>\na<|assistant|>\n[[b<|user|>]] / <s><|user|>\na<|assistant|>\n[[d<|user|>]]")
        # Thoughts of earlier replies are dropped, so the text with a further message differs.
        self.assertEqual(prepared(chat("a", "<think>hm</think>b"), "thoughts, unmarked")[0],
                         "<s><|user|>\na<|assistant|>\n[[<think>hm</think>b<|user|>]]")

    def test_a_token_between_messages_ends_the_last_reply_too(self):
        for row, text in ((chat("a", "b"), "<s><|user|>\na</s><|assistant|>\n[[b</s>]]"),
                          (chat("a", "b", "c", "d"), "<s><|user|>\na</s><|assistant|>\n[[b</s>]]<|user|>\nc</s>"
                                                     "<|assistant|>\n[[d</s>]]")):
            self.assertEqual(prepared(row, "between")[0], text)

    def test_only_listed_stop_tokens_end_replies(self):
        two = chat("a", "b", "c", "d")
        for stops, marked in (({"<|user|>", "</s>"}, "[[b<|user|>]] [[d<|user|>]]"),
                              ({"</s>"}, "[[b]] [[d]]"), ({"<|tool|>"}, "[[b]] [[d]]")):
            text, notes = prepared(two, NEXT_ENDS, stops=stops)
            self.assertEqual(" ".join(re.findall(r"\[\[.*?\]\]", text)), marked)
            report = Report(stops=stops)
            report.notes = notes
            self.assertEqual(len(report.lines()), 0 if "<|user|>" in stops else 1)
        self.assertRegex(report.lines()[0], r"warning: no reply ends with a stop token of generation_config.json "
                                            r"\('<\|tool\|>'\), so the model does not learn to stop")
        # A template that ends all replies alike does not take tokens of the next message.
        self.assertEqual(prepared(chat("a", "b", "c", "d"), "prefixes")[0],
                         "<s><|user|>\na<|end|>\n<|assistant|>\n[[b<|end|>]]\n<|user|>\nc<|end|>\n<|assistant|>\n"
                         "[[d<|end|>]]\n")

    def test_generation_config_lists_stop_tokens(self):
        tokenizer = types.SimpleNamespace(get_vocab=lambda: {"<a>": 1, "<b>": 2, "</s>": 3}, eos_token="</s>")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "generation_config.json"
            self.assertIsNone(stop_tokens_of(tokenizer, path.parent))
            for ids, stops in (([1, 2], {"<a>", "<b>", "</s>"}), (2, {"<b>", "</s>"}), ([9], None), (None, None)):
                path.write_text(json.dumps({"eos_token_id": ids}))
                self.assertEqual(stop_tokens_of(tokenizer, path.parent), stops)
            for text in ("{}", "{", "[]", "[" * 100000):
                path.write_text(text)
                self.assertIsNone(stop_tokens_of(tokenizer, path.parent))

    def test_a_reply_before_which_there_is_no_message_ends_too(self):
        begins = {"messages": [{"role": "assistant", "content": "a"}] + chat("b", "c")["messages"]}
        opened = prepared(begins, "needs users, no thoughts, prompts thoughts")
        self.assertEqual(opened[0], "<s><|assistant|>\n[[a<|end|>]]\n<|user|>\nb<|end|>\n<|assistant|>\n"
                                    "[[c<|end|>]]\n")
        for template, text in (("needs users", "<s><|assistant|>\n[[a<|end|>]]\n<|user|>\nb<|end|>\n"
                                               "<|assistant|>\n[[c<|end|>]]\n"),
                               ("needs users, unmarked", "<s><|assistant|>\n[[a<|user|>]]\nb<|assistant|>\n"
                                                         "[[c<|user|>]]")):
            self.assertEqual(prepared(begins, template)[0], text)

    def test_ends_of_replies_are_counted_and_missing_ones_are_a_warning(self):
        report = Report()
        report.notes = prepared(chat("a", "b", "c", "d"), "last ends")[1]
        self.assertEqual(ends_of_replies(report.notes.ends), "replies end with '<s>' (1), '<|end|>' (1)")
        self.assertEqual(report.lines(), [])
        other = prepare.Preparer(Tokenizer("prefixes"), "assistant")
        other.document(json.dumps(chat("a", "b")))
        other.notes.end_row("a:2", False)  # a row that is not used
        report.notes.merge(other.notes)
        self.assertEqual(sum(report.notes.ends.values()), 2)
        self.assertEqual(ends_of_replies(collections.Counter()), "")
        report.notes = prepared(chat("a", "b"), "unmarked", tokenizer=plain_tokenizer())[1]
        self.assertEqual(ends_of_replies(report.notes.ends), "replies end with no end token (1)")
        self.assertRegex(report.lines()[0], "warning: no token that ends a reply is trained on.*does not learn to stop")
        self.assertEqual(prepared({"prompt": "a", "completion": "b"}, "t")[1].ends, {"</s>": 1})
        self.assertEqual(prepared({"text": "a"}, "t")[1].ends, {})
        marked = prepared(chat("a", "b", "c", "d"), "{%- generation -%}, last ends")[1]
        self.assertEqual(marked.ends, {None: 2})

    def test_a_beginning_token_that_only_texts_have_is_noted(self):
        for row, template, note in (
                (chat("a", "b"), "prefixes", []),
                (chat("a", "b"), "no begin", ["documents begin with: no '<s>', which the tokenizer adds to texts "
                                              "and the chat template does not write (a:1)"]),
                ({"text": "<s>a"}, "t", ["documents begin with: '<s>' twice, because the tokenizer adds it to texts "
                                         "that have it (a:1)"]),
                ({"text": "a"}, "t", [])):
            tokenizer = Tokenizer(template)
            tokenizer.bos_token, tokenizer.bos_token_id = "<s>", 0
            self.assertEqual(prepared(row, template, tokenizer=tokenizer)[1].lines(), note)


def plain_tokenizer():
    """A tokenizer whose template has no special tokens."""
    tokenizer = Tokenizer("unmarked")
    tokenizer.all_special_tokens = ["</s>"]
    return tokenizer


class ThoughtTest(unittest.TestCase):
    def test_an_empty_thought_is_not_trained_on(self):
        thought = "<think>\n\n</think>\n\n"
        one = "<s><|user|>\na<|end|>\n<|assistant|>\n" + thought + "[[b<|end|>]]\n"
        for row in (chat("a", "b"), chat("a", "<think></think>b"),
                    {"prompt": chat("a")["messages"][:1], "completion": chat("a", "b")["messages"][1:]}):
            for template in ("empty thoughts", "empty thoughts, prompts thoughts"):
                self.assertEqual(prepared(row, template)[0], one)
        # The template replaces a dropped thought by an empty one.
        two = chat("a", "<think>hm</think>b", "c", "<think>so</think>d")
        self.assertEqual(prepared(two, "empty thoughts, prompts thoughts")[0],
                         one.removesuffix("\n") + "\n<|user|>\nc<|end|>\n<|assistant|>\n<think>\n"
                         "[[so\n</think>\n\nd<|end|>]]\n")
        self.assertEqual(prepared(two, "empty thoughts", "none")[0].count("[["), 1)
        user = chat("a")["messages"][:1]
        pair = {key: user + [{"role": "assistant", "content": text}]
                for key, text in (("chosen", "b"), ("rejected", "<think>hm</think>d"))}
        pair_of_one = one.replace("]]\n", "\n]]")  # the text after the prompt is trained on to its end
        self.assertEqual(prepared(pair, "empty thoughts")[0], pair_of_one + " / " + pair_of_one.replace(
            thought + "[[b", "[[<think>\nhm\n</think>\n\nd"))

    def test_thoughts_have_many_spellings(self):
        for opening, closing in (
                ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<seed:think>", "</seed:think>"),
                ("<thought>", "</thought>"), ("<longcat_think>", "</longcat_think>"), ("[THINK]", "[/THINK]"),
                ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
                ("<|channel>thought", "<channel|>"), ("◁think▷", "◁/think▷"), ("<reasoning>", "</reasoning>"),
                ("<|inner_prefix|>", "<|inner_suffix|>")):
            for written in (opening + closing, f"\n{opening}\n\n{closing}\n\n", f"\n{closing}\n"):
                text = "x" + written + "b" + opening + closing
                self.assertEqual(after_empty_thought(text, 1, len(text)), 1 + len(written), written)
            for written in (f"{opening}hm{closing}b", "b" + closing, opening, opening + "</other>"):
                self.assertEqual(after_empty_thought("x" + written, 1, 1 + len(written)), 1, written)
        header = "<|channel|>final<|message|>"
        for written, length in (("<|channel|>analysis<|message|><|end|><|start|>assistant", 56),
                                ("<|channel|>analysis<|message|>hm<|end|>", 0), ("<|end|>", 0),
                                (" to=self<|message|><|eom|><|start|>assistant", 45)):
            length = len(written) if length else 0
            self.assertEqual(after_empty_thought(written + header, 0, 100), length)


class RandomTest(unittest.TestCase):
    """Random conversations in random habits of templates. The test writes each reply itself."""
    ENDS = {"prefixes": "<|end|>", "unmarked": None, "between": "</s>", "last ends": "<|end|>"}
    WORDS = ("a", "b c", "no!", "<b>", "x\ny", "é", "so  so", "yes")

    def conversation(self, chance):
        roles = ["assistant"] * (chance.random() < 0.2) + ["user", "assistant"] * chance.randint(1, 4)
        messages = [{"role": role, "content": chance.choice(self.WORDS)}
                    for role in roles + ["user"] * (chance.random() < 0.2)]
        for message in messages:
            if message["role"] == "assistant" and chance.random() < 0.4:
                thought = chance.choice(("hm", "a b", "", "\n"))
                message["content"] = f"<think>{thought}</think>{message['content']}"
        return messages

    def expected(self, messages, habit, thoughts, prompts):
        """Returns the text of each reply that is trained on."""
        made = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            last = index + 1 == len(messages)
            thought, _, content = message["content"].rpartition("</think>")
            thought = thought.removeprefix("<think>")
            if thoughts and last and thought.strip():
                inner = f"\n{thought}\n</think>\n\n"
                content = (inner.removeprefix("\n") if prompts else "<think>" + inner) + content
            elif not thoughts and thought.strip():
                content = f"<think>{thought}</think>{content}"
            following = "<|user|>" if last else f"<|{messages[index + 1]['role']}|>"
            end = "<s>" if habit == "last ends" and last else self.ENDS[habit] or following
            made.append(content + end)
        return made

    def test_replies_are_trained_on_with_their_end_and_without_empty_thoughts(self):
        for round_ in range(ROUNDS):
            chance = random.Random(SEED + round_)
            habit = chance.choice(list(self.ENDS))
            thoughts, prompts, users = (chance.random() < share for share in (0.6, 0.5, 0.3))
            template = ", ".join([habit] + ["empty thoughts"] * thoughts
                                 + ["prompts thoughts"] * (thoughts and prompts) + ["needs users"] * users)
            messages = self.conversation(chance)
            with self.subTest(seed=SEED + round_, template=template, messages=messages):
                text, _ = prepared({"messages": messages}, template)
                self.assertEqual(re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL),
                                 self.expected(messages, habit, thoughts, prompts))


class Recorded(Tokenizer):
    """A tokenizer that repeats what a chat template wrote when tests/data/compare_trained_tokens.py ran."""
    added_tokens_decoder = dict(enumerate(map(Added, (
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"))))

    class Missing(BaseException):
        """A call that was not recorded; not an error of a template."""

    def __init__(self, entry):
        super().__init__(entry["source"])
        self.all_special_tokens = entry["special"]
        self.eos_token, self.bos_token_id = entry["end"], None
        self.calls = entry["calls"]
        longest_first = sorted([*entry["special"], *self.added_tokens_decoder.values()], key=lambda token: (-len(token), token))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) + "|.", re.DOTALL)

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        offsets = [match.span() for match in self.pattern.finditer(text)]
        self.words = dict(enumerate(text[start:end] for start, end in offsets))
        return {"input_ids": list(self.words), "offset_mapping": offsets}

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False):
        key = json.dumps([messages, add_generation_prompt], sort_keys=True)
        if key not in self.calls:
            raise self.Missing(f"record again: tests/data/compare_trained_tokens.py --record; {key}")
        if self.calls[key] is None:
            raise ValueError("refused")
        return self.calls[key]


class RecordedTest(unittest.TestCase):
    def test_templates_of_models_train_as_in_trl(self):
        entries = json.loads(gzip.decompress(RECORDED.read_bytes()))
        self.assertGreater(len({entry["template"] for entry in entries}), 35)
        for entry in entries:
            with self.subTest(template=entry["template"], conversation=entry["conversation"]):
                text, _ = prepared(entry["row"], "", tokenizer=Recorded(entry))
                self.assertEqual(re.findall(r"\[\[(.*?)\]\](?!\])", text, re.DOTALL), entry["trained"])


if __name__ == "__main__":
    unittest.main()
