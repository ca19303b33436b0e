"""Turns conversations and texts into a file of documents, which `data.documents` of a config names.

    python tools/prepare.py INPUT ... --model DIR --out FILE.safetensors
    ballast prepare INPUT ...                  the same, of the Python package

An input is a file of JSON lines, a JSON array (both may be compressed by gzip) or a Parquet file.
Each of its rows is an object and becomes one document:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "...", "completion": "..."}    both texts, or both lists of messages
    {"instruction": "...", "input": "...", "output": "..."}
    {"text": "..."}

With --pairs every row is a pair of preferences, for `data.pairs`, and becomes two documents, which
are trained on after the prompt (texts, or lists of messages). Without `prompt` it is the beginning that
both share:

    {"prompt": "...", "chosen": "...", "rejected": "..."}

Messages go through the chat template of the model, with `tools`, `system` and `chat_template_kwargs` of
the row if it has them. A reply with "weight": 0 or "train": false is not trained on. Texts get the
special tokens that the tokenizer adds, and end with its end-of-sequence token. Needs the Python package
transformers with a fast tokenizer, and pyarrow for Parquet; nothing is downloaded. The output does not
depend on the number of workers.
"""

import os
import pathlib
import signal
import sys
import time

from .arguments import Arguments
from .documents import Preparer
from .output import check_output
from .report import Refusal, Report, ends_of_replies, reason_of
from .tokenizer import has_wide_ids, hashes_of, load_tokenizer, stop_tokens_of
from .workers import results_of
from .writer import DocumentWriter, is_file_of_documents, metadata_of


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


class Ended(BaseException):
    """A signal that ends the program; not an error of a row."""


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_by_signal(number, _):
    for each in ENDING:  # timeout(1) signals twice; the part of a file is removed meanwhile
        signal.signal(each, signal.SIG_IGN)
    raise Ended(signal.Signals(number))


def prepare(preparer, paths, out, wide, metadata, workers, report=None, overwrite=False, model=None):
    """Writes the file of documents. Returns the numbers of documents, tokens and targets. Notes and
    skipped rows go into the report. `model` is a folder whose files are never replaced."""
    report = report or Report()
    progress = Progress(sum(os.path.getsize(path) for path in paths))
    inputs = [*paths, model] if model else paths
    with DocumentWriter(out, wide, metadata, overwrite, inputs) as writer:
        try:
            for (documents, problems, notes), done in results_of(preparer, paths, workers,
                                                                 report.skip_invalid):
                for ids, mask in documents:
                    writer.add(ids, mask)
                report.leave_out(problems)
                report.notes.merge(notes)
                progress.show(done, writer)
        finally:
            progress.end()
        if writer.documents == 0:
            names = ", ".join(map(str, paths))
            if report.left_out:
                raise Refusal(f"{names}: no row can be used; {report.first_left_out[0]}")
            raise Refusal(f"{names}: no line to prepare")
        writer.finish()
        return writer.documents, writer.tokens, writer.targets


def arguments_of(argv, name):
    parser = Arguments(
        prog=name, description="Turns conversations and texts into a file of documents.")
    parser.add_argument("inputs", nargs="+", type=pathlib.Path, metavar="INPUT",
                        help="JSON lines or a JSON array (also .gz), or Parquet")
    parser.add_argument("--model", required=True, type=pathlib.Path, metavar="DIR",
                        help="Hugging Face folder with the tokenizer and its chat template")
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="FILE",
                        help="file to write (.safetensors); a file of documents there is replaced")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace any other file at --out, too; never an input or a file of the model")
    parser.add_argument("--mask", choices=["assistant", "completion", "none"], default="assistant",
                        help="train on: all replies of the assistant and completions (default); the "
                             "last reply and completions; everything. Always on all of a 'text', and "
                             "never on replies with a weight of 0")
    parser.add_argument("--pairs", action="store_true",
                        help="rows have 'chosen' and 'rejected'; for data.pairs")
    parser.add_argument("--skip-invalid", action="store_true",
                        help="leave out rows that cannot be used, and say how many and which; without "
                             "it the first of them ends the run")
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
    # Checks this before it loads the tokenizer, which takes seconds.
    check_output(arguments.out, is_file_of_documents, "a file of documents", arguments.overwrite,
                 [*arguments.inputs, arguments.model])
    return arguments


def checked_arguments(argv, name):
    """Parses the arguments. Ends the program with status 2 if they are wrong."""
    try:
        return arguments_of(argv, name)
    except Refusal as refusal:
        print(f"{name}: {refusal}", file=sys.stderr)
        sys.exit(2)


def main(argv=None, name="prepare.py"):
    """`name`: that of the program, with which its messages begin."""
    for number in ENDING:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, end_by_signal)
    arguments = checked_arguments(argv, name)
    try:
        tokenizer = load_tokenizer(arguments.model)
        metadata = metadata_of(arguments.model.resolve().name, hashes_of(tokenizer, arguments.model),
                               "completion" if arguments.pairs else arguments.mask, arguments.pairs)
        stops = stop_tokens_of(tokenizer, arguments.model)
        report = Report(arguments.skip_invalid, stops)
        documents, tokens, targets = prepare(
            Preparer(tokenizer, arguments.mask, arguments.pairs, stops), arguments.inputs, arguments.out,
            has_wide_ids(tokenizer), metadata, arguments.workers, report, arguments.overwrite,
            arguments.model)
    except Refusal as refusal:
        print(f"{name}: {refusal}", file=sys.stderr)
        sys.exit(1 if arguments.model.is_dir() else 2)
    except OSError as error:
        sys.exit(f"{name}: {error.filename or arguments.out}: {error.strerror or reason_of(error)}")
    except MemoryError:
        sys.exit(f"{name}: there is not enough memory")
    except Ended as ended:
        [number] = ended.args
        print(f"{name}: ended by {number.name}", file=sys.stderr)
        sys.exit(128 + number)
    for line in report.lines():
        print(f"{name}: {line}", file=sys.stderr)
    rows = "row" if report.left_out == 1 else "rows"
    left_out = f", {report.left_out:,} {rows} left out" if report.left_out else ""
    ends = ends_of_replies(report.notes.ends)
    print(f"{arguments.out}: {documents:,} documents, {tokens:,} tokens, "
          f"{100 * targets / tokens:.1f}% trained on{', ' if ends else ''}{ends}{left_out}")
