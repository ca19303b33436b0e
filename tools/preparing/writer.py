"""The file of documents: a safetensors file of tokens, masks and the documents' bounds."""

import array
import json
import os
import pathlib
import struct
import sys

from .output import check_output, create, publish, temporary_of
from .report import Refusal

FORMAT = "ballast documents"
HEADER_BYTES = 4096  # size of the file's header, so that the tokens start on a page


def is_file_of_documents(path):
    """Whether a file's metadata says that DocumentWriter has made it."""
    try:
        with open(path, "rb") as file:
            length, = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length < HEADER_BYTES else {}
        return header["__metadata__"]["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return False


class DocumentWriter:
    """Writes a file of documents. It is FILE.tmp-PID until finish() renames it, and is removed
    after a failure. Refuses to replace a file of another kind without `overwrite`, and one of
    `inputs` even then (check_output)."""

    def __init__(self, path, wide, metadata, overwrite=False, inputs=()):
        self._path = pathlib.Path(path)
        self._rule = {"is_own": is_file_of_documents, "kind": "a file of documents",
                      "overwrite": overwrite, "inputs": inputs}
        check_output(self._path, **self._rule)
        self._code, self._dtype = ("I", "U32") if wide else ("H", "U16")
        self._metadata = metadata
        self._temporary = temporary_of(self._path)
        self._mask_path = temporary_of(self._path, ".mask")
        self._offsets = array.array("q", [0])
        self.targets = 0
        self._tokens = self._mask = None

    def __enter__(self):
        try:
            self._tokens = create(self._temporary)
            self._mask = create(self._mask_path, "x+b")
            self._tokens.write(b" " * HEADER_BYTES)
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for file, path in ((self._tokens, self._temporary), (self._mask, self._mask_path)):
            if file is None:
                continue
            try:
                file.close()
            except OSError:  # buffered data has no room on the disk; the file is removed anyway
                pass
            path.unlink(missing_ok=True)

    @property
    def documents(self):
        return len(self._offsets) - 1

    @property
    def tokens(self):
        return self._offsets[-1]

    def add(self, ids, mask):
        """Writes a document: token ids, and for each 1 if it is trained on as a target, else 0."""
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
        check_output(self._path, **self._rule)  # another process may have made it since
        publish(self._temporary, self._path)

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


def metadata_of(tokenizer_name, hashes, mask, pairs=False):
    """The metadata of a file. `hashes` are those of tokenizer.hashes_of."""
    made = {"format": FORMAT, "version": "1", "tokenizer": tokenizer_name, **hashes,
            "mask": mask}
    return made | {"pairs": "chosen, rejected"} if pairs else made
