#!/usr/bin/env python3
"""Turns conversations and texts into a file of documents, which `data.documents` of a config names.

    python tools/prepare.py INPUT.jsonl ... --model DIR --out FILE.safetensors

Every line of an input is a JSON object and becomes one document:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}    both texts, or both lists of messages
    {"text": "..."}

With --pairs every line is a pair of preferences, for `data.pairs`, and becomes two documents, which
are trained on after the prompt (texts, or lists of messages):

    {"prompt": "...", "chosen": "...", "rejected": "..."}

Messages go through the chat template of the model, with `tools` of the line if it has them. Texts get
the special tokens that the tokenizer adds, and end with its end-of-sequence token. Needs the Python
package transformers with a fast tokenizer; nothing is downloaded. The output does not depend on the
number of workers.
"""

import argparse
import array
import collections
import concurrent.futures
import concurrent.futures.process
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import signal
import struct
import sys
import time

HEADER_BYTES = 4096  # of the file, so that the tokens start on a page
LINES_OF_A_TASK = 32
GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


class Refusal(Exception):
    """A line or an argument that cannot be used; its text is one line."""


def one_line(text):
    return " ".join(str(text).split())[:300]


class DocumentWriter:
    """Writes a file of documents: FILE.tmp-PID until finish() renames it, nothing after a failure."""

    def __init__(self, path, wide, metadata):
        self._path = pathlib.Path(path)
        self._code, self._dtype = ("I", "U32") if wide else ("H", "U16")
        self._metadata = metadata
        self._temporary = self._path.with_name(f"{self._path.name}.tmp-{os.getpid()}")
        self._mask_path = self._path.with_name(f"{self._path.name}.mask.tmp-{os.getpid()}")
        self._offsets = array.array("q", [0])
        self.targets = 0
        self._tokens = self._mask = None

    def __enter__(self):
        self._tokens = open(self._temporary, "wb")
        self._mask = open(self._mask_path, "w+b")
        self._tokens.write(b" " * HEADER_BYTES)
        return self

    def __exit__(self, *_):
        for file, path in ((self._tokens, self._temporary), (self._mask, self._mask_path)):
            file.close()
            path.unlink(missing_ok=True)

    @property
    def documents(self):
        return len(self._offsets) - 1

    @property
    def tokens(self):
        return self._offsets[-1]

    def add(self, ids, mask):
        """A document: token ids, and for each 1 if it is trained on as a target, else 0."""
        tokens = array.array(self._code, ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        self._tokens.write(tokens.tobytes())
        self._mask.write(bytes(mask))
        self._offsets.append(self._offsets[-1] + len(ids))
        self.targets += sum(mask[1:])

    def finish(self):
        self._mask.seek(0)
        while piece := self._mask.read(1 << 20):
            self._tokens.write(piece)
        offsets = array.array("q", self._offsets)
        if sys.byteorder == "big":
            offsets.byteswap()
        self._tokens.write(offsets.tobytes())
        self._tokens.seek(0)
        self._tokens.write(self._header())
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        os.replace(self._temporary, self._path)

    def _header(self):
        header = {"__metadata__": self._metadata}
        end = 0
        width = 2 if self._dtype == "U16" else 4
        for name, dtype, count, size in (("tokens", self._dtype, self.tokens, width),
                                         ("mask", "U8", self.tokens, 1),
                                         ("documents", "I64", len(self._offsets), 8)):
            header[name] = {"dtype": dtype, "shape": [count],
                            "data_offsets": [end, end + count * size]}
            end += count * size
        text = json.dumps(header, separators=(",", ":")).encode()
        length = HEADER_BYTES - 8
        if len(text) > length:
            raise Refusal("the name of the tokenizer is too long")
        return struct.pack("<Q", length) + text.ljust(length)


def metadata_of(tokenizer_name, tokenizer_hash, mask, pairs=False):
    made = {"format": "ballast documents", "version": "1", "tokenizer": tokenizer_name,
            "tokenizer_sha256": tokenizer_hash, "mask": mask}
    return made | {"pairs": "chosen, rejected"} if pairs else made


def common_prefix(first, second):
    """How many elements two lists begin with alike."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class Preparer:
    """Makes documents of lines with a tokenizer of transformers. `mask` says what is trained on:
    "assistant", all replies of the assistant; "completion", the completion or the last reply;
    "none" and plain texts, everything."""

    def __init__(self, tokenizer, mask, pairs=False):
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._mask = mask
        template = getattr(tokenizer, "chat_template", None)
        self._has_template = bool(template)
        self._marks_replies = bool(GENERATION_TAG.search(str(template)))

    def documents(self, line):
        """The documents of a line of JSON."""
        return self.pair(line) if self._pairs else [self.document(line)]

    def _entry(self, line):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise Refusal(f"not JSON: {one_line(error)}") from error
        if not isinstance(entry, dict):
            raise Refusal("not a JSON object")
        return entry

    def pair(self, line):
        """Token ids and masks of the chosen and the rejected completion. As by DPOTrainer of TRL, a
        completion begins where the tokens of one of them and those of the prompt alone part."""
        entry = self._entry(line)
        missing = [key for key in ("prompt", "chosen", "rejected") if key not in entry]
        if missing:
            raise Refusal(f"needs 'prompt', 'chosen' and 'rejected'; has no '{missing[0]}'")
        if isinstance(entry["prompt"], list):
            prompt, chosen, rejected = self._chat_pair(entry)
        else:
            text = self._string(entry, "prompt")
            prompt, _ = self._tokenize(text, special=True)
            chosen, _ = self._text(text + self._string(entry, "chosen"))
            rejected, _ = self._text(text + self._string(entry, "rejected"))
        known = min(common_prefix(prompt, chosen), common_prefix(prompt, rejected))
        made = [(ids, [0] * known + [1] * (len(ids) - known)) for ids in (chosen, rejected)]
        if any(not any(mask[1:]) for _, mask in made):
            raise Refusal("a completion has nothing to train on: no token after the prompt")
        return made

    def _chat_pair(self, entry):
        if not self._has_template:
            raise Refusal("the tokenizer has no chat template; give 'prompt', 'chosen' and 'rejected' "
                          "as texts")
        messages = self._messages(entry, "prompt")
        texts = [self._render(messages, entry.get("tools"), prompt=True)]
        for key in ("chosen", "rejected"):
            texts.append(self._render(messages + self._messages(entry, key), entry.get("tools")))
        return (self._tokenize(text, special=False)[0] for text in texts)

    def document(self, line):
        """Token ids and mask of a line of JSON."""
        entry = self._entry(line)
        kinds = [kind for kind in ("messages", "prompt", "text") if kind in entry]
        if len(kinds) != 1 or ("prompt" in entry) != ("completion" in entry):
            raise Refusal("needs exactly one of 'messages', 'prompt' with 'completion', and 'text'")
        if kinds == ["text"]:
            ids, mask = self._text(self._string(entry, "text"))
        elif kinds == ["messages"]:
            ids, mask = self._conversation(self._messages(entry, "messages"), entry.get("tools"),
                                           last_only=self._mask == "completion")
        else:
            ids, mask = self._completion(entry)
        if not any(mask[1:]):
            raise Refusal("has nothing to train on: no reply of the assistant, or fewer than two "
                          "tokens")
        return ids, mask

    def _completion(self, entry):
        if isinstance(entry["prompt"], list):
            messages = self._messages(entry, "prompt") + self._messages(entry, "completion")
            return self._conversation(messages, entry.get("tools"),
                                      known=len(entry["prompt"]))
        prompt = self._string(entry, "prompt")
        return self._text(prompt + self._string(entry, "completion"), len(prompt))

    def _text(self, text, prompt=0):
        """A text that starts with `prompt` characters that are not trained on."""
        ids, offsets = self._tokenize(text, special=True)
        end = self._tokenizer.eos_token_id
        if end is None:
            raise Refusal("the tokenizer has no end-of-sequence token")
        if not ids or ids[-1] != end:
            ids, offsets = ids + [end], offsets + [(len(text), len(text))]
        if self._mask == "none" or prompt == 0:
            return ids, [1] * len(ids)
        # A token across the end of the prompt is trained on.
        return ids, [int(last > prompt) for _, last in offsets[:-1]] + [1]

    def _conversation(self, messages, tools, last_only=False, known=0):
        """`known` first messages and, with `last_only`, all replies but the last are not trained
        on."""
        if not self._has_template:
            raise Refusal("the tokenizer has no chat template; give 'text', or texts as 'prompt' "
                          "and 'completion'")
        if self._mask == "none":
            ids, _ = self._tokenize(self._render(messages, tools), special=False)
            return ids, [1] * len(ids)
        replies = [i for i, message in enumerate(messages)
                   if message["role"] == "assistant" and i >= known]
        if last_only:
            replies = replies[-1:]
        if self._marks_replies and not last_only and known == 0:
            return self._marked(messages, tools)
        whole = self._render(messages, tools)
        ranges = [self._range_of(messages, tools, i, whole) for i in replies]
        ids, offsets = self._tokenize(whole, special=False)
        mask = [0] * len(ids)
        at = 0
        for start, end in ranges:
            while at < len(ids) and offsets[at][1] <= start:
                at += 1
            while at < len(ids) and offsets[at][0] < end:
                mask[at] = int(offsets[at][1] > offsets[at][0])
                at += 1
        return ids, mask

    def _marked(self, messages, tools):
        """The template marks the replies itself."""
        try:
            made = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True)
        except ImportError as error:
            raise Refusal(f"a Python package is missing: {one_line(error)}") from error
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the chat template fails: {one_line(error)}") from error
        return list(made["input_ids"]), [int(bit) for bit in made["assistant_masks"]]

    def _range_of(self, messages, tools, index, whole):
        """Characters of `whole` that are reply `index`, from what the template makes of the messages
        before it and up to it."""
        before = self._render(messages[:index], tools, prompt=True)
        upto = self._render(messages[:index + 1], tools)
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise Refusal(f"the chat template changes what it wrote for the first messages once "
                          f"message {index + 1} or later ones follow, so the replies cannot be found; "
                          f"use --mask none, one reply per conversation, or a template with "
                          f"{{% generation %}}")
        reply = upto[len(before):]
        # White space after the reply's end token belongs to the template.
        stripped = reply.rstrip()
        if any(stripped.endswith(token) for token in self._tokenizer.all_special_tokens):
            reply = stripped
        return len(before), len(before) + len(reply)

    def _render(self, messages, tools, prompt=False):
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except ImportError as error:
            raise Refusal(f"a Python package is missing: {one_line(error)}") from error
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the chat template fails: {one_line(error)}") from error

    def _tokenize(self, text, special):
        made = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(made["input_ids"]), [tuple(pair) for pair in made["offset_mapping"]]

    @staticmethod
    def _string(entry, key):
        if not isinstance(entry[key], str):
            raise Refusal(f"'{key}' is not a text")
        return entry[key]

    @staticmethod
    def _messages(entry, key):
        messages = entry[key]
        if not isinstance(messages, list) or not messages:
            raise Refusal(f"'{key}' is not a list of messages")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise Refusal(f"message {number} of '{key}' is not an object with a 'role'")
            if "content" not in message and "tool_calls" not in message:
                raise Refusal(f"message {number} of '{key}' has no 'content'")
        return messages


def documents_of_task(preparer, task):
    """Documents of some lines of a file; at the first bad line "FILE:LINE: reason" instead."""
    name, lines = task
    made = []
    for number, line in lines:
        try:
            made += preparer.documents(line)
        except Refusal as refusal:
            return made, f"{name}:{number}: {refusal}"
    return made, None


def tasks_of(paths):
    """(file, [(line number, line)]) and the bytes read so far, without blank lines."""
    done = 0
    for path in paths:
        lines = []
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                done += len(line)
                if not line.strip():
                    continue
                try:
                    lines.append((number, line.decode("utf-8-sig" if number == 1 else "utf-8")))
                except UnicodeDecodeError as error:
                    raise Refusal(f"{path}:{number}: not UTF-8") from error
                if len(lines) == LINES_OF_A_TASK:
                    yield (str(path), lines), done
                    lines = []
        if lines:
            yield (str(path), lines), done


_preparer = None  # of a worker: inherited by fork


def _work(task):
    return documents_of_task(_preparer, task)


def _leave_interrupts_to_the_parent():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def results_of(preparer, paths, workers):
    """((documents, error), bytes read) of every task, in order. Few tasks are in flight."""
    global _preparer
    _preparer = preparer
    if workers == 1:
        for task, done in tasks_of(paths):
            yield _work(task), done
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), _leave_interrupts_to_the_parent)
    try:
        running = collections.deque()
        for task, done in tasks_of(paths):
            running.append((pool.submit(_work, task), done))
            if len(running) == 8 * workers:
                future, done = running.popleft()
                yield future.result(), done
        for future, done in running:
            yield future.result(), done
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Refusal("a worker process was killed; is there enough memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A line on the terminal, at most five times a second."""

    def __init__(self, total):
        self._total = max(total, 1)
        self._shown = 0.0
        self._live = sys.stderr.isatty()

    def show(self, done, writer):
        now = time.monotonic()
        if not self._live or now - self._shown < 0.2:
            return
        self._shown = now
        share = done / self._total
        bar = ("#" * int(30 * share)).ljust(30)
        sys.stderr.write(f"\r[{bar}] {100 * share:3.0f}%  {writer.documents:,} documents, "
                         f"{writer.tokens:,} tokens ")
        sys.stderr.flush()

    def end(self):
        if self._live and self._shown > 0:
            sys.stderr.write("\r\x1b[K")


def prepare(preparer, paths, out, wide, metadata, workers):
    """Writes the file of documents; returns the numbers of documents, tokens and targets."""
    progress = Progress(sum(os.path.getsize(path) for path in paths))
    with DocumentWriter(out, wide, metadata) as writer:
        try:
            for (documents, error), done in results_of(preparer, paths, workers):
                for ids, mask in documents:
                    writer.add(ids, mask)
                if error:
                    raise Refusal(error)
                progress.show(done, writer)
        finally:
            progress.end()
        if writer.documents == 0:
            raise Refusal(f"{', '.join(map(str, paths))}: no line to prepare")
        writer.finish()
        return writer.documents, writer.tokens, writer.targets


def load_tokenizer(folder):
    """The tokenizer of a model's folder and the SHA-256 of its vocabulary and merges."""
    if not folder.is_dir():
        raise Refusal(f"--model {folder} is not a folder; give the folder of a model of Hugging Face. "
                      f"Nothing is downloaded here; `hf download ID --local-dir DIR` does that")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import tokenizers  # noqa: F401
        import transformers
    except ImportError as error:
        raise Refusal(f"needs the Python packages transformers, tokenizers and jinja2 "
                      f"({one_line(error)}): pip install transformers jinja2") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # of many kinds
        raise Refusal(f"--model {folder}: cannot load a tokenizer: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise Refusal(f"--model {folder}: the tokenizer is not a fast one (no tokenizer.json), so "
                      f"places in the text are not known")
    tokenizer.model_max_length = sys.maxsize
    return tokenizer, hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def arguments_of(argv):
    parser = argparse.ArgumentParser(
        prog="prepare.py", description="Turns conversations and texts into a file of documents.")
    parser.add_argument("inputs", nargs="+", type=pathlib.Path, metavar="INPUT.jsonl")
    parser.add_argument("--model", required=True, type=pathlib.Path, metavar="DIR",
                        help="folder of Hugging Face with the tokenizer and its chat template")
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="FILE",
                        help="file to write (.safetensors)")
    parser.add_argument("--mask", choices=["assistant", "completion", "none"], default="assistant",
                        help="train on: all replies of the assistant and completions (default); the "
                             "last reply and completions; everything. Always on all of a 'text'")
    parser.add_argument("--pairs", action="store_true",
                        help="lines have 'prompt', 'chosen' and 'rejected'; for data.pairs")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes (default: one per CPU)")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        raise Refusal(f"--workers {arguments.workers}: give 1 or more")
    if arguments.out.suffix != ".safetensors":
        raise Refusal(f"--out {arguments.out}: the name must end in .safetensors")
    for path in arguments.inputs:
        if not path.is_file():
            raise Refusal(f"{path} is not a file")
    return arguments


def main(argv=None):
    try:
        arguments = arguments_of(argv)
        tokenizer, tokenizer_hash = load_tokenizer(arguments.model)
        metadata = metadata_of(arguments.model.resolve().name, tokenizer_hash,
                               "completion" if arguments.pairs else arguments.mask, arguments.pairs)
        documents, tokens, targets = prepare(
            Preparer(tokenizer, arguments.mask, arguments.pairs), arguments.inputs, arguments.out,
            len(tokenizer) > 65536, metadata, arguments.workers)
    except Refusal as refusal:
        sys.exit(f"prepare.py: {refusal}")
    except OSError as error:
        sys.exit(f"prepare.py: {error.filename or arguments.out}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("prepare.py: interrupted")
    print(f"{arguments.out}: {documents:,} documents, {tokens:,} tokens, "
          f"{100 * targets / tokens:.1f}% trained on")


if __name__ == "__main__":
    main()
