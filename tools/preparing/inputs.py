"""Rows of input files: JSON lines, a JSON array, both optionally compressed by gzip, and Parquet.
The format of a file is detected from its content."""

import codecs
import gzip
import json
import os
import zlib

from .report import Refusal, Unprepared, one_line, reason_of

ROWS_OF_A_TASK = 32

# First bytes of files that cannot be read as rows, their format, and what to do.
FOREIGN = (
    (b"ARROW1", "an Arrow file", "write it with to_parquet or to_json of the Python package datasets"),
    (b"\xff\xff\xff\xff", "an Arrow file",
     "write it with to_parquet or to_json of the Python package datasets"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it: zstd -d"),
    (b"BZh", "compressed by bzip2", "decompress it: bunzip2"),
    (b"\xfd7zXZ", "compressed by xz", "decompress it: unxz"),
    (b"PK\x03\x04", "a zip archive", "unpack it: unzip"),
    (b"\x93NUMPY", "a NumPy file", "give rows of texts or messages"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data", "fetch the data: git lfs pull"),
    (codecs.BOM_UTF16_LE, "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
)


def tasks_of(paths):
    """(file, [(row number, row)]) and the bytes read so far. A row is the bytes or the text of a
    JSON value, numbered by its line, or a dict of a Parquet file, numbered from 1."""
    before = 0
    for path in paths:
        rows, done = [], 0
        for number, row, done in _rows_of(path):
            rows.append((number, row))
            if len(rows) == ROWS_OF_A_TASK:
                yield (str(path), rows), before + done
                rows = []
        before += os.path.getsize(path)
        if rows:
            yield (str(path), rows), before


def row_of(data):
    """The object of a row as `tasks_of` gives it."""
    if isinstance(data, dict):
        return data
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Refusal("not UTF-8") from error
    row = parse(data)
    if not isinstance(row, dict):
        raise Refusal("not a JSON object")
    return row


def parse(text, what=""):
    """The value of a JSON text. `what` starts the error message if it is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise Refusal(f"{what}nested too deeply") from error
    except ValueError as error:
        hint = ""
        if not what and text.lstrip()[:1] == "{" and getattr(error, "pos", 0) >= len(text.rstrip()):
            hint = "; a row is one line (jq -c . writes it so)"
        raise Refusal(f"{what}not JSON: {one_line(error)}{hint}") from error


def _object(pairs):
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refusal(f"the key '{one_line(twice)}' is given twice")
    return made


def _rows_of(path):
    """(number, row, bytes of the file read so far)"""
    with open(path, "rb") as raw:
        head = raw.read(32)
        raw.seek(0)
        if head.startswith(b"PAR1"):
            yield from _parquet_rows(path)
            return
        for magic, form, advice in FOREIGN:
            if head.startswith(magic):
                raise Refusal(f"{path}: {form}; {advice}")
        if not head.startswith(b"\x1f\x8b"):
            yield from _text_rows(path, raw, raw)
            return
        try:
            with gzip.open(raw) as file:
                yield from _text_rows(path, file, raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Refusal(f"{path}: damaged gzip file: {reason_of(error)}") from error


def _text_rows(path, file, raw):
    first = True
    for number, line in enumerate(file, 1):
        if number == 1 and line.startswith(codecs.BOM_UTF8):
            line = line[len(codecs.BOM_UTF8):]
        if not line.strip():
            continue
        if first and line.lstrip().startswith(b"["):
            yield from _array_rows(path, number, line + file.read(), raw)
            return
        first = False
        yield number, line, raw.tell()


def _array_rows(path, line, data, raw):
    """The elements of a JSON array that begins in a line."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}:{line + data.count(10, 0, error.start)}: not UTF-8") from error
    decoder = json.JSONDecoder()
    counted, at = 0, _after_space(text, text.index("[") + 1)
    more = text[at:at + 1] != "]"
    while more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            _, end = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise Refusal(f"{path}:{line}: nested too deeply") from error
        except ValueError as error:
            line += text.count("\n", at, getattr(error, "pos", at))
            raise Refusal(f"{path}:{line}: not a JSON array: {getattr(error, 'msg', error)}") from error
        yield line, text[at:end], raw.tell()
        at = _after_space(text, end)
        more = text[at:at + 1] == ","
        if more:
            at = _after_space(text, at + 1)
    line += text.count("\n", counted, at)
    if text[at:at + 1] != "]":
        raise Refusal(f"{path}:{line}: not a JSON array: no ',' or ']' after an element")
    end = _after_space(text, at + 1)
    if end < len(text):
        line += text.count("\n", at, end)
        raise Refusal(f"{path}:{line}: something follows the JSON array; give one array, or one object "
                      f"per line")


def _after_space(text, at):
    while text[at:at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _parquet_rows(path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise Unprepared(f"{path}: a Parquet file needs the Python package pyarrow: pip install "
                         f"pyarrow") from error
    number = 0
    size = os.path.getsize(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=1024, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row), size * number // total
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: cannot be read as Parquet: {reason_of(error)}") from error


def _without_nulls(value):
    """Parquet gives each object of a list the keys of all of them, so null means a missing key."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value
