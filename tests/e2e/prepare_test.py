#!/usr/bin/env python3
"""Tests tools/prepare.py with a tiny tokenizer that replaces those of transformers.

    prepare_test.py PATH_OF_PREPARE
"""

import gzip
import hashlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

from chats import Tokenizer, chat

SCRIPT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, os.path.dirname(SCRIPT))
sys.dont_write_bytecode = True
from preparing import command as prepare  # noqa: E402
from preparing.inputs import tasks_of  # noqa: E402
from preparing.report import Report  # noqa: E402
from preparing.tokenizer import vocabulary_hashes  # noqa: E402


def trained(line, mask="assistant", template="prefixes"):
    """The text of a line that is trained on, and that of the document."""
    tokenizer = Tokenizer(template)
    ids, bits = prepare.Preparer(tokenizer, mask).document(
        line if isinstance(line, str) else json.dumps(line))
    spelled = [tokenizer.words[token] for token in ids]
    return ("".join(word for word, bit in zip(spelled, bits) if bit), "".join(spelled))


class DocumentTest(unittest.TestCase):
    def test_pairs_are_trained_on_after_the_prompt(self):
        made = lambda line: [
            ("".join(tokenizer.words[i] for i, bit in zip(ids, mask) if bit), mask.index(1))
            for ids, mask in prepare.Preparer(tokenizer, "completion", True).documents(json.dumps(line))]
        tokenizer = Tokenizer()
        self.assertEqual(made({"prompt": "two and two", "chosen": " four", "rejected": " is five"}),
                         [(" four</s>", 4), (" is five</s>", 4)])
        # The last word of the prompt continues in one completion, so it is context of neither.
        self.assertEqual(made({"prompt": "a b", "chosen": "c", "rejected": " d"}),
                         [(" bc</s>", 2), (" b d</s>", 2)])
        user = [{"role": "user", "content": "hello"}]
        reply = lambda text: [{"role": "assistant", "content": text}]
        self.assertEqual(made({"prompt": user, "chosen": reply("yes"), "rejected": reply("no")}),
                         [("yes<|end|>\n", 8), ("no<|end|>\n", 8)])
        whole = lambda text: user + reply(text)
        for line in ({}, {"prompt": "hello"}, {"prompt": user}):  # the prompt is a shared beginning
            self.assertEqual(made(line | {"chosen": whole("yes"), "rejected": whole("no")}),
                             [("yes<|end|>\n", 8), ("no<|end|>\n", 8)])
        self.assertEqual(made({"chosen": "two and four", "rejected": "two and five"}),
                         [(" four</s>", 3), (" five</s>", 3)])
        self.assertEqual(made({"conversations": [{"from": "human", "value": "hello"}],
                               "chosen": {"from": "gpt", "value": "yes"},
                               "rejected": {"from": "gpt", "value": "no"}}),
                         [("yes<|end|>\n", 8), ("no<|end|>\n", 8)])
        for line, reason in (({"prompt": "a", "chosen": "b"}, "has no 'rejected'"),
                             ({"chosen": whole("a"), "rejected": whole("a")}, "are the same"),
                             ({"chosen": reply("a"), "rejected": reply("b")}, "there is no 'prompt'"),
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
        self.assertEqual(trained({**two, "tools": [{}, {}]}, template="tools")[1][:5], "<s>[2")

    def test_a_template_may_mark_the_replies(self):
        two = chat("hello", "good day", "ab", "yes")
        self.assertEqual(trained(two, template="{%- generation -%}")[0], "good dayyes")
        self.assertEqual(trained(two, "completion", "{%- generation -%}")[0], "yes<|end|>")

    def test_replies_are_found_although_a_template_writes_earlier_ones_in_another_way(self):
        thought = lambda text: f"<think>hm</think>{text}"
        two = chat("hello", thought("ha"), "ab", thought("no"))
        for template, replies in (
                ("thoughts", "ha<|end|><think>hm</think>no<|end|>"),
                ("thoughts, last ends", "ha<|end|><think>hm</think>no<s>"),
                ("no thoughts, prompts thoughts", "ha<|end|>no<|end|>"),
                ("thoughts, closed", "ha<|end|><think>hm</think>no<|end|>")):
            self.assertEqual(trained(two, template=template)[0], replies, template)
        # Two replies that look alike, one that is a beginning of the prompt's thoughts, and white
        # space. The empty thought that the template adds is not trained on.
        self.assertEqual(trained(chat("no", "no", "no", "no"), template="thoughts")[0],
                         "no<|end|>no<|end|>")
        self.assertEqual(trained(chat("ab", "<b> no", "hello", "<th"),
                                 template="no thoughts, prompts thoughts")[0], "<b> no<|end|><th<|end|>")
        self.assertEqual(trained(chat("ab", " no \n", "hello", "yes"), template="thoughts, closed")[0],
                         "no<|end|>yes<|end|>")
        self.assertEqual(trained(chat("ab", "no ", "hello", "yes"), template="closed")[0],
                         "no <|end|>yes<|end|>")
        self.assertEqual(trained(chat("ab", "no!", "hello", "yes!"), template="loud, last ends")[0],
                         "(loud)no!<|end|>(loud)yes!<s>")
        self.assertEqual(trained(chat("ab", "", "hello", " "), template="thoughts, closed")[0],
                         "<|end|><|end|>")
        self.assertEqual(trained(two, "completion", "thoughts")[0], "<think>hm</think>no<|end|>")
        begins = {"messages": chat("x", "welcome")["messages"][1:] + two["messages"]}
        self.assertEqual(trained(begins, template="thoughts")[0],
                         "welcome<|end|>ha<|end|><think>hm</think>no<|end|>")

    def test_a_reply_that_cannot_be_found_is_refused(self):
        with self.assertRaisesRegex(prepare.Refusal, "message 2, a reply, .*--mask none"):
            trained(chat("hello", "good", "ab", "no"), template="forgets")
        self.assertEqual(trained(chat("hello", "good", "ab", "no"), "completion", "forgets")[0],
                         "no<|end|>")

    def test_replies_of_weight_0_are_not_trained_on(self):
        def weighted(first, last):
            line = chat("hello", "bad", "ab", "yes")
            line["messages"][1].update(first)
            line["messages"][3].update(last)
            return line
        for first, last in (({"weight": 0}, {"weight": 1}), ({"train": False}, {}), ({"loss": 0.0}, {}),
                            ({"training": False}, {"weight": None}),
                            ({"masked": True}, {"masked": False})):
            line = weighted(first, last)
            self.assertEqual(trained(line)[0], "yes<|end|>")
            self.assertEqual(trained(line, template="{% generation %}")[0], "yes")
            whole, text = trained(line, "none")
            self.assertEqual(whole, text.replace("bad<|end|>", ""))
        for first, reason in (({"weight": 0.5}, "message 2 of 'messages' has weight 0.5; only 0 and 1"),
                              ({"weight": "0"}, "only 0 and 1"), ({"loss_mask": [1]}, "'loss_mask'"),
                              ({"weight": 0, "train": True}, "'train' says .* 'weight' that it is not")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                trained(weighted(first, {}))
        with self.assertRaisesRegex(prepare.Refusal, "its replies have the weight 0"):
            trained(weighted({"weight": 0}, {"weight": 0}))
        of_user = chat("hello", "yes")
        self.assertEqual(trained({"messages": [of_user["messages"][0] | {"weight": 0},
                                               of_user["messages"][1]]})[0], "yes<|end|>")
        with self.assertRaisesRegex(prepare.Refusal, "has the role 'user'"):
            trained({"messages": [of_user["messages"][0] | {"train": True}, of_user["messages"][1]]})
        for column in ({"labels": [1]}, {"weight": 0.5}, {"images": ["a"]}):
            with self.assertRaisesRegex(prepare.Refusal, f"has '{next(iter(column))}'"):
                trained(of_user | column)

    def test_rows_give_variables_tools_and_a_system_to_the_template(self):
        two = chat("hello", "yes")
        with_tone = two | {"chat_template_kwargs": {"tone": "dry"}}
        self.assertEqual(trained(with_tone)[1][:8], "<s>(dry)")
        for variables, reason in (({"tools": []}, "sets 'tools'"), ([], "not an object"), ("x", "not JSON")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                trained(two | {"chat_template_kwargs": variables})
        tools = [{"function": {"name": "f", "parameters": {"type": "object"}}}]
        inner = {"function": {"name": "f", "parameters": json.dumps({"type": "object"})}}
        for as_texts in ([inner], json.dumps([inner]), [json.dumps(inner)],
                         [{"function": json.dumps(inner["function"])}]):
            self.assertEqual(trained(two | {"tools": tools}, template="tools"),
                             trained(two | {"tools": as_texts}, template="tools"))
        self.assertEqual(trained(two), trained(two | {"tools": "[]"}))
        with self.assertRaisesRegex(prepare.Refusal, "'tools' is not JSON"):
            trained(two | {"tools": "f"})
        said = {"messages": [{"role": "system", "content": "be"}] + two["messages"]}
        self.assertEqual(trained(said), trained(two | {"system": "be"}))
        self.assertEqual(trained(said), trained(said | {"system": "be"}))
        with self.assertRaisesRegex(prepare.Refusal, "another message of the system"):
            trained(said | {"system": "no"})

    def test_tool_calls_are_trained_on(self):
        call = lambda arguments: {"messages": chat("hello", "x")["messages"][:1] + [
            {"role": "assistant", "content": None, "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": arguments}}]},
            {"role": "tool", "content": "yes"}, {"role": "assistant", "content": "no"}]}
        for arguments in ({"a": 1}, '{"a": 1}'):
            self.assertEqual(trained(call(arguments), template="tool_calls, object arguments")[0],
                             '<f {"a": 1}><|end|>no<|end|>')
        self.assertEqual(trained(call("a b"), template="tool_calls")[0], '<f "a b"><|end|>no<|end|>')
        self.assertEqual(trained(call({}), template="tool_calls, no thoughts, prompts thoughts")[0],
                         "<f {}><|end|>no<|end|>")
        both = call({})
        both["messages"][1]["tool_calls"] *= 2
        with self.assertRaisesRegex(prepare.Refusal, "does not write the call of 'f', tool call 2"):
            trained(both, template="tool_calls")
        thinks = call({})
        thinks["messages"][1]["content"] = "<think>hm</think>"
        self.assertEqual(trained(thinks, template="tool_calls, thoughts, unmarked")[0],
                         "<f {}><|tool|>no<|user|>")
        with self.assertRaisesRegex(prepare.Refusal, "'tool_calls', which the chat template does not"):
            trained(call({}))

    def test_contents_may_be_lists_of_texts(self):
        line = chat("hello there", "yes")
        parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]
        self.assertEqual(trained({"messages": [{"role": "user", "content": parts},
                                               line["messages"][1]]}), trained(line))
        self.assertEqual(trained(line, template="parts"), trained(line))  # templates that want
                                                                          # parts
        with self.assertRaisesRegex(prepare.Refusal, "message 1 .* part of type 'image_url'"):
            trained({"messages": [{"role": "user", "content": parts + [{"type": "image_url"}]},
                                  line["messages"][1]]})

    def test_other_forms_of_rows_become_conversations(self):
        two = chat("hello\nab", "yes", "ab", "no")
        turns = [message["content"] for message in two["messages"]]
        self.assertEqual(trained(two), trained({"conversations": [
            {"from": name, "value": text} for name, text in zip(("human", "gpt") * 2, turns)]}))
        self.assertEqual(trained(chat("hello", "good", "a\nb", "yes")), trained(
            {"instruction": "a", "input": "b", "output": "yes", "history": [["hello", "good"]]}))
        self.assertEqual(trained(chat("hello", "yes")),
                         trained({"instruction": "hello", "input": "", "output": "yes", "text": "all"}))
        for other in ({"prompt": "hello"}, {"text": "hello"}, {"prompt": None, "id": 5}):
            self.assertEqual(trained(two), trained(two | other))
        for row, reason in (({"conversations": [{"from": "who", "value": "a"}]}, "from 'who'; known are"),
                            ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--pairs"),
                            ({"question": "a", "answer": "b"}, "needs one of .*; has 'question', 'answer'"),
                            ({"prompt": "a", "completion": "b", "label": False}, "'label' false")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                trained(row)

    def test_what_is_not_used_is_noted(self):
        preparer = prepare.Preparer(Tokenizer("messages"), "assistant")
        line = chat("hello", "yes") | {"prompt": "hello", "tools": [{}]}
        line["messages"][1] |= {"reasoning_content": "hm", "mood\x1b": "good"}
        preparer.document(json.dumps(line))
        preparer.notes.end_row("a:1", True)
        self.assertEqual(preparer.notes.lines(), [
            "columns that are not used: 'prompt' (a:1)",
            "the chat template changes or leaves out: 'tools' (a:1), the reasoning of replies (a:1)",
            r"keys of messages that are not used: 'mood\x1b' (a:1)"])

        preparer = prepare.Preparer(Tokenizer("no thoughts, prompts thoughts"), "assistant")
        preparer.document(json.dumps(chat("hello", "yes")))
        preparer.notes.end_row("a:1", True)
        self.assertEqual(preparer.notes.lines(), [
            r"replies follow a generation prompt without its end: '<think>\n' (a:1)"])

    def test_prompts_and_completions(self):
        pair = {"prompt": "hello", "completion": " there"}
        for mask in ("assistant", "completion"):
            self.assertEqual(trained(pair, mask), (" there</s>", "<s>hello there</s>"))
        self.assertEqual(trained(pair, "none")[0], "<s>hello there</s>")
        # A token that straddles the end of the prompt belongs to the completion.
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
                ("{", "t", "not JSON"), ("[1]", "t", "not a JSON object"), ("{}", "t", "has no values"),
                ('{"text": "a", "text": "b"}', "t", "'text' is given twice"),
                ('{"text": "a\\ud800"}', "t", r"a lone surrogate, \\ud800"),
                ('{"text": ' + "[" * 100000, "t", "nested too deeply"),
                ('{"text": ' + "1" * 5000 + "}", "t", "not JSON"),
                ('{"text": "a", "messages": []}', "t", "not a list of messages"),
                ('{"prompt": "a"}', "t", "needs one of"), ('{"text": 5}', "t", "'text' is not a text"),
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

    def prepare(self, inputs, workers=1, wide=False, report=None):
        paths = []
        for number, lines in enumerate(inputs):
            paths.append(self.path / f"{number}.jsonl")
            paths[-1].write_text(lines)
        metadata = prepare.metadata_of("tiny", {"tokenizer_sha256": "abc"}, "assistant")
        return prepare.prepare(prepare.Preparer(Tokenizer(), "assistant"), paths, self.out, wide,
                               metadata, workers, report)

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

    def test_the_vocabulary_has_the_hashes_that_ballast_compares(self):
        def digest(text):
            return hashlib.sha256(text.encode()).hexdigest()

        tokenizer = {"added_tokens": [{"id": 3, "content": "<s>"}], "model": {}}
        for vocabulary in ({"ab": 2, "a": 0, "ä": 1}, [["a", 0.5], ["ä", 0.25], ["ab", 0.125]]):
            tokenizer["model"]["vocab"] = vocabulary
            (self.path / "tokenizer.json").write_text(json.dumps(tokenizer))
            self.assertEqual(vocabulary_hashes(self.path),
                             {"vocabulary_sha256": digest("0\ta\n1\tä\n2\tab\n"),
                              "added_tokens_sha256": digest("3\t<s>\n")})
        for text in ("{}", "[1]", "{", '{"model": {"vocab": 5}}'):
            (self.path / "tokenizer.json").write_text(text)
            self.assertEqual(vocabulary_hashes(self.path), {}, text)
        self.assertEqual(vocabulary_hashes(self.path / "elsewhere"), {})

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

    def test_a_signal_ends_it_and_others_do_not_disturb_the_end(self):
        for first in prepare.ENDING:
            for number in prepare.ENDING:
                before = signal.signal(number, prepare.end_by_signal)
                self.addCleanup(signal.signal, number, before)
            with self.assertRaises(prepare.Ended) as caught:
                os.kill(os.getpid(), first)
                time.sleep(1)
            self.assertEqual(caught.exception.args, (first,))
            for number in prepare.ENDING:
                os.kill(os.getpid(), number)

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

    def test_bad_rows_may_be_left_out(self):
        good = json.dumps(chat("hello", "good"))
        lines = [good, "{", good, '{"text": 1}', '{"text": "\\ud800"}'] + ["[" * 100000] * 5
        for workers in (1, 2):
            report = Report(skip_invalid=True)
            self.assertEqual(self.prepare(["\n".join(lines)], workers, report=report)[0], 2)
            said = report.lines()
            self.assertEqual((report.left_out, len(said)), (8, 6))
            self.assertRegex(said[0], "^left out: .*/0.jsonl:2: not JSON")
            self.assertEqual(said[5], "left out: and 3 more rows")
        with self.assertRaisesRegex(prepare.Refusal, "no row can be used; .*/0.jsonl:1: not JSON"):
            self.prepare(["{"], report=Report(skip_invalid=True))
        with self.assertRaisesRegex(prepare.Refusal, "0.jsonl:2: not JSON.*--skip-invalid"):
            self.prepare(["\n".join(lines)])

    def test_a_file_is_recognised_by_its_content(self):
        rows = [chat("hello", "good"), {"text": "ab"}]
        lines = "\ufeff" + "\r\n\r\n".join(map(json.dumps, rows))
        array = json.dumps(rows, indent=1)
        path = self.path / "data"
        for data in (lines, array, "\n" + json.dumps(rows)):
            for data in (data.encode(), gzip.compress(data.encode())):
                path.write_bytes(data)
                read = [json.loads(row if isinstance(row, str) else row.decode("utf-8-sig"))
                        for (_, task), _ in tasks_of([path]) for _, row in task]
                self.assertEqual(read, rows)
        self.assertEqual([number for (_, task), _ in tasks_of([path]) for number, _ in task], [2, 2])
        for data, reason in ((array.encode()[:-2], "data:1[0-9]: not a JSON array"),
                             (b"[{}]\n[{}]", "data:2: something follows"), (b"[{},]", "data:1: not a JSON"),
                             (b"[\n\xff", "data:2: not UTF-8"), (b"[\n" + b"[" * 100000, "data:2: nested"),
                             (gzip.compress(lines.encode())[:-9], "damaged gzip file"),
                             (b"PK\x03\x04", "a zip archive"), (b"ARROW1", "an Arrow file"),
                             ("a".encode("utf-16"), "UTF-16; convert it")):
            path.write_bytes(data)
            with self.assertRaisesRegex(prepare.Refusal, reason):
                list(tasks_of([path]))
        path.write_bytes(b'{"text": "ab"}\n{"text": "\xff"}\n')
        with self.assertRaisesRegex(prepare.Refusal, "data:2: not UTF-8"):
            prepare.prepare(prepare.Preparer(Tokenizer(), "assistant"), [path], self.out, False, {}, 1)

    def test_rows_of_parquet_have_no_nulls(self):
        path = self.path / "data"
        path.write_bytes(b"PAR1...PAR1")
        with unittest.mock.patch.dict(sys.modules, {"pyarrow": None}):
            with self.assertRaisesRegex(prepare.Refusal, "data: .* pip install pyarrow"):
                list(tasks_of([path]))
        line = chat("hello", "yes")
        nulls = {"text": None, "messages": [message | {"weight": None} for message in line["messages"]]}

        class File:  # class of pyarrow.parquet
            metadata = types.SimpleNamespace(num_rows=2)
            __init__ = lambda self, path: None
            __enter__ = lambda self: self
            __exit__ = lambda self, *_: None
            iter_batches = lambda self, **_: [types.SimpleNamespace(to_pylist=lambda: [nulls, nulls])]
        parquet = types.SimpleNamespace(ParquetFile=File)
        pyarrow = types.SimpleNamespace(parquet=parquet, ArrowException=ArithmeticError)
        with unittest.mock.patch.dict(sys.modules, {"pyarrow": pyarrow, "pyarrow.parquet": parquet}):
            self.assertEqual(list(tasks_of([path])), [((str(path), [(1, line), (2, line)]), 11)])

    def run_script(self, *arguments, **environment):
        return subprocess.run([sys.executable, "-B", SCRIPT, *map(str, arguments)], text=True,
                              capture_output=True, check=False, env={**os.environ, **environment})

    def assert_refused(self, done, *words, status=1):
        self.assertEqual(done.returncode, status, done.stderr)
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

        def refused(done, *words):
            self.assert_refused(done, *words, status=2)
        refused(run(**{"in": self.path / "none.jsonl"}), "none.jsonl is not a file")
        refused(run(model=self.path / "none"), "none is not a folder", "Hugging Face")
        refused(run(out=self.path / "x.bin"), "must end in .safetensors")
        refused(run("--workers", "0"), "--workers 0")
        refused(run("--workerz", "2"), "there is no option --workerz (did you mean '--workers'?)")
        refused(run("--mask", "all"), "--mask: invalid choice: 'all'", "see prepare.py --help")
        refused(self.run_script(self.path), "--model, --out")

    def test_other_files_are_replaced_only_with_overwrite(self):
        lines = '{"text": "ab"}\n'
        made = lambda out: prepare.prepare(prepare.Preparer(Tokenizer(), "assistant"), [source], out,
                                           False, metadata, 1, None, *more)
        metadata, more = prepare.metadata_of("tiny", {}, "assistant"), ()
        source = self.path / "in.jsonl"
        source.write_text(lines)
        model = self.path / "model"
        model.mkdir()
        weights = model / "model.safetensors"
        header = b'{"__metadata__":{"format":"pt"}}'
        weights.write_bytes(struct.pack("<Q", len(header)) + header)
        before = weights.read_bytes()
        for _ in range(2):  # the second replaces the first
            made(self.out)
        notes = self.path / "notes.safetensors"
        notes.write_text("mine")
        link = self.path / "link.safetensors"
        link.symlink_to(notes)
        (self.path / "hard.safetensors").hardlink_to(source)
        for out, reason in ((weights, "exists and is not a file of documents"), (notes, "--overwrite"),
                            (link, "is a symbolic link"), (model, "not a regular file"),
                            (self.path / "no/x.safetensors", "there is no folder"),
                            (self.path / "hard.safetensors", "is an input")):
            with self.assertRaisesRegex(prepare.Refusal, reason):
                made(out)
            done = self.run_script(source, "--model", self.path / "none", "--out", out)
            if out != model:
                self.assertRegex(done.stderr, f"\\Aprepare.py: .*{reason}.*\n\\Z")
        more = (True, model)
        for out in (weights, self.path / "hard.safetensors"):
            with self.assertRaisesRegex(prepare.Refusal, "is an input of this command"):
                made(out)
        made(link)
        self.assertFalse(link.is_symlink())
        self.assertEqual(notes.read_text(), "mine")
        self.assertEqual(weights.read_bytes(), before)
        self.assertEqual(source.read_text(), lines)
        made(notes)
        self.assertEqual(notes.read_bytes(), self.out.read_bytes())
        self.assertEqual(list(self.path.glob("*tmp*")), [])

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
