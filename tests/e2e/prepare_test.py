#!/usr/bin/env python3
"""tools/prepare.py with a tiny tokenizer that stands for those of transformers.

    prepare_test.py PATH_OF_PREPARE
"""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, os.path.dirname(SCRIPT))
import prepare  # noqa: E402

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]


class Tokenizer:
    """Special tokens, words with the space before them, and single characters."""
    eos_token_id = SPECIAL.index("</s>")
    all_special_tokens = SPECIAL
    pattern = re.compile("|".join(map(re.escape, SPECIAL)) + r"| ?[a-z]+|.", re.DOTALL)

    def __init__(self, template="prefixes"):
        self.chat_template = template
        self.words = dict(enumerate(SPECIAL))  # by id

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        assert return_offsets_mapping
        ids, offsets = ([0], [(0, 0)]) if add_special_tokens else ([], [])
        for match in self.pattern.finditer(text):
            word = match.group()
            ids.append(SPECIAL.index(word) if word in SPECIAL
                       else 5 + sum(ord(c) * 31 ** i for i, c in enumerate(word)) % 60000)
            offsets.append(match.span())
            self.words[ids[-1]] = word
        return {"input_ids": ids, "offset_mapping": offsets}

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False,
                            return_dict=False, return_assistant_tokens_mask=False):
        if self.chat_template == "alternating":
            for message, role in zip(messages, ["user", "assistant"] * len(messages)):
                if message["role"] != role:
                    raise ValueError("roles must\nalternate")
        text = "<s>" + (f"[{len(tools)}]" if tools else "")
        spans = []
        for i, message in enumerate(messages):
            content = message["content"]
            if self.chat_template == "last only" and i + 1 < len(messages):
                content = content.split("!")[-1]  # earlier replies lose their thoughts
            start = len(text) + len(f"<|{message['role']}|>\n")
            text += f"<|{message['role']}|>\n{content}<|end|>\n"
            if message["role"] == "assistant":
                spans.append((start, start + len(content)))
        if add_generation_prompt:
            text += "<|assistant|>\n"
        if not tokenize:
            return text
        made = self(text, False, True)
        return {"input_ids": made["input_ids"],
                "assistant_masks": [int(any(a <= start and end <= b for a, b in spans))
                                    for start, end in made["offset_mapping"]]}


def trained(line, mask="assistant", template="prefixes"):
    """The text that is trained on of a line, and that of the document."""
    tokenizer = Tokenizer(template)
    ids, bits = prepare.Preparer(tokenizer, mask).document(json.dumps(line))
    spelled = [tokenizer.words[token] for token in ids]
    return ("".join(word for word, bit in zip(spelled, bits) if bit), "".join(spelled))


def chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": content}
                         for role, content in zip(roles, contents)]}


class DocumentTest(unittest.TestCase):
    def test_pairs_are_trained_on_behind_the_prompt(self):
        made = lambda line: [
            ("".join(tokenizer.words[i] for i, bit in zip(ids, mask) if bit), mask.index(1))
            for ids, mask in prepare.Preparer(tokenizer, "completion", True).documents(json.dumps(line))]
        tokenizer = Tokenizer()
        self.assertEqual(made({"prompt": "two and two", "chosen": " four", "rejected": " is five"}),
                         [(" four</s>", 4), (" is five</s>", 4)])
        # The last word of the prompt goes on in one completion, so it is no context of either.
        self.assertEqual(made({"prompt": "a b", "chosen": "c", "rejected": " d"}),
                         [(" bc</s>", 2), (" b d</s>", 2)])
        user = [{"role": "user", "content": "hello"}]
        reply = lambda text: [{"role": "assistant", "content": text}]
        self.assertEqual(made({"prompt": user, "chosen": reply("yes"), "rejected": reply("no")}),
                         [("yes<|end|>\n", 8), ("no<|end|>\n", 8)])
        for line, reason in (({"prompt": "a", "chosen": "b"}, "has no 'rejected'"),
                             ({"prompt": "a", "chosen": 1, "rejected": "c"}, "'chosen' is not a text"),
                             ({"prompt": user, "chosen": "b", "rejected": "c"}, "is not a list")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                made(line)

    def test_replies_and_their_end_are_trained_on(self):
        two = chat("hello", "good day", "ab", "yes")
        self.assertEqual(trained(two)[0], "good day<|end|>yes<|end|>")
        self.assertEqual(trained(two)[1], "<s><|user|>\nhello<|end|>\n<|assistant|>\ngood day<|end|>\n"
                                          "<|user|>\nab<|end|>\n<|assistant|>\nyes<|end|>\n")
        self.assertEqual(trained(two, "completion")[0], "yes<|end|>")
        whole, text = trained(two, "none")
        self.assertEqual(whole, text)
        self.assertEqual(trained({**two, "tools": [1, 2]})[1][:6], "<s>[2]")

    def test_a_template_may_mark_the_replies(self):
        two = chat("hello", "good day", "ab", "yes")
        self.assertEqual(trained(two, template="{%- generation -%}")[0], "good dayyes")
        self.assertEqual(trained(two, "completion", "{%- generation -%}")[0], "yes<|end|>")

    def test_a_template_that_changes_earlier_messages_is_refused(self):
        one = chat("hello", "abc!yes")
        self.assertEqual(trained(one, template="last only")[0], "abc!yes<|end|>")
        two = chat("hello", "abc!yes", "ab", "no")
        for mask in ("assistant", "completion"):
            if mask == "completion":  # the last reply is found
                self.assertEqual(trained(two, mask, "last only")[0], "no<|end|>")
                continue
            with self.assertRaisesRegex(prepare.Refusal, "message 2 .*--mask none"):
                trained(two, mask, "last only")

    def test_prompts_and_completions(self):
        pair = {"prompt": "hello", "completion": " there"}
        for mask in ("assistant", "completion"):
            self.assertEqual(trained(pair, mask), (" there</s>", "<s>hello there</s>"))
        self.assertEqual(trained(pair, "none")[0], "<s>hello there</s>")
        # A token across the end of the prompt belongs to the completion.
        self.assertEqual(trained({"prompt": "ab", "completion": "c hello"})[0], "abc hello</s>")
        lists = {"prompt": chat("hello", "good")["messages"] + chat("ab")["messages"],
                 "completion": [{"role": "assistant", "content": "yes"}]}
        self.assertEqual(trained(lists)[0], "yes<|end|>")

    def test_texts_are_trained_on_whole_and_end(self):
        for mask in ("assistant", "completion", "none"):
            self.assertEqual(trained({"text": "hello there"}, mask)[0], "<s>hello there</s>")
        self.assertEqual(trained({"text": "hello</s>"})[1], "<s>hello</s>")

    def test_bad_lines_are_refused_with_a_reason(self):
        for line, template, reason in (
                ("{", "t", "not JSON"), ("[1]", "t", "not a JSON object"), ("{}", "t", "exactly one"),
                ('{"text": "a", "messages": []}', "t", "exactly one"),
                ('{"prompt": "a"}', "t", "exactly one"), ('{"text": 5}', "t", "'text' is not a text"),
                ('{"messages": []}', "t", "not a list of messages"),
                ('{"messages": [{"content": "a"}]}', "t", "message 1 .* 'role'"),
                ('{"messages": [{"role": "user"}]}', "t", "no 'content'"),
                ('{"messages": [{"role": "user", "content": "a"}]}', "t", "nothing to train on"),
                (json.dumps(chat("a", "b")), "", "no chat template"),
                ('{"messages": [{"role": "assistant", "content": "a"}]}', "alternating",
                 "the chat template fails: roles must alternate$")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                prepare.Preparer(Tokenizer(template), "assistant").document(line)


class FileTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-prepare-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.out = self.path / "out.safetensors"

    def prepare(self, inputs, workers=1, wide=False):
        paths = []
        for number, lines in enumerate(inputs):
            paths.append(self.path / f"{number}.jsonl")
            paths[-1].write_text(lines)
        metadata = prepare.metadata_of("tiny", "abc", "assistant")
        return prepare.prepare(prepare.Preparer(Tokenizer(), "assistant"), paths, self.out, wide,
                               metadata, workers)

    def read(self):
        data = self.out.read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:begin])
        metadata = header.pop("__metadata__")
        self.assertEqual(begin, 4096)
        self.assertEqual(max(entry["data_offsets"][1] for entry in header.values()),
                         len(data) - begin)
        codes = {"U16": "H", "U32": "I", "U8": "B", "I64": "q"}
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = list(struct.unpack(
                f"<{entry['shape'][0]}{codes[entry['dtype']]}", data[begin + first:begin + last]))
        return tensors, metadata, header["tokens"]["dtype"]

    def test_the_file_has_the_documents_in_order(self):
        lines = [chat("hello", "good"), {"text": "ab"}, {"prompt": "a", "completion": "b"}]
        text = "\n".join(map(json.dumps, lines)) + "\n\n"
        for wide in (False, True):
            done = self.prepare([text, json.dumps(lines[1])], wide=wide)
            tensors, metadata, dtype = self.read()
            made = [prepare.Preparer(Tokenizer(), "assistant").document(json.dumps(line))
                    for line in lines + [lines[1]]]
            self.assertEqual(tensors["tokens"], [token for ids, _ in made for token in ids])
            self.assertEqual(tensors["mask"], [bit for _, mask in made for bit in mask])
            ends = [sum(len(ids) for ids, _ in made[:i]) for i in range(5)]
            self.assertEqual(tensors["documents"], ends)
            self.assertEqual(dtype, "U32" if wide else "U16")
            self.assertEqual(metadata, {"format": "ballast documents", "version": "1",
                                        "tokenizer": "tiny", "tokenizer_sha256": "abc",
                                        "mask": "assistant"})
            self.assertEqual(done, (4, ends[-1], sum(sum(mask[1:]) for _, mask in made)))

    def test_the_number_of_workers_does_not_change_the_file(self):
        lines = [json.dumps(chat("hello " * (i % 7), "good " * (i % 11 + 1))) for i in range(700)]
        files = set()
        for workers in (1, 2, 5):
            self.prepare(["\n".join(lines[:300]), "\n".join(lines[300:])], workers)
            files.add(self.out.read_bytes())
        self.assertEqual(len(files), 1)

    def test_the_first_bad_line_is_named_and_no_file_is_left(self):
        good = json.dumps(chat("hello", "good"))
        lines = [good] * 400
        lines[250] = lines[390] = '{"text": 1}'
        for workers in (1, 3):
            with self.assertRaisesRegex(prepare.Refusal, r"/1\.jsonl:251: 'text' is not a text"):
                self.prepare([good, "\n".join(lines)], workers)
        with self.assertRaisesRegex(prepare.Refusal, "no line to prepare"):
            self.prepare(["\n \n"])
        self.assertEqual({path.suffix for path in self.path.iterdir()}, {".jsonl"})
        (self.path / "0.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xff"}\n')
        with self.assertRaisesRegex(prepare.Refusal, "0.jsonl:2: not UTF-8"):
            list(prepare.tasks_of([self.path / "0.jsonl"]))

    def run_script(self, *arguments, **environment):
        return subprocess.run([sys.executable, "-B", SCRIPT, *map(str, arguments)], text=True,
                              capture_output=True, check=False, env={**os.environ, **environment})

    def assert_refused(self, done, *words):
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("prepare.py: "), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse(self.out.exists())

    def test_wrong_arguments_are_refused_in_one_line(self):
        (self.path / "in.jsonl").write_text('{"text": "a"}\n')
        given = {"in": self.path / "in.jsonl", "model": self.path, "out": self.out}

        def run(*more, **changed):
            all_ = {**given, **changed}
            return self.run_script(all_["in"], "--model", all_["model"], "--out", all_["out"], *more)
        self.assert_refused(run(**{"in": self.path / "none.jsonl"}), "none.jsonl is not a file")
        self.assert_refused(run(model=self.path / "none"), "none is not a folder", "Hugging Face")
        self.assert_refused(run(out=self.path / "x.bin"), "must end in .safetensors")
        self.assert_refused(run("--workers", "0"), "--workers 0")

    def test_a_missing_package_is_named_in_one_line(self):
        (self.path / "in.jsonl").write_text('{"text": "a"}\n')
        for missing in ("transformers", "tokenizers"):
            packages = self.path / missing
            packages.mkdir()
            for name in ("transformers", "tokenizers"):
                (packages / f"{name}.py").write_text(
                    f"raise ModuleNotFoundError(\"No module named '{name}'\")\n"
                    if name == missing else "")
            self.assert_refused(
                self.run_script(self.path / "in.jsonl", "--model", self.path, "--out", self.out,
                                PYTHONPATH=str(packages)),
                f"No module named '{missing}'", "pip install transformers")


if __name__ == "__main__":
    unittest.main()
