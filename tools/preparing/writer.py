"""The file of documents: a safetensors file of tokens, masks and the documents' bounds."""

import array
import json
import os
import pathlib
import struct
import sys

from preparing.report import Refusal

HEADER_BYTES = 4096  # of the file, so that the tokens start on a page


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


def metadata_of(tokenizer_name, hashes, mask, pairs=False):
    """The metadata of a file; `hashes` are those of tokenizer.hashes_of."""
    made = {"format": "ballast documents", "version": "1", "tokenizer": tokenizer_name, **hashes,
            "mask": mask}
    return made | {"pairs": "chosen, rejected"} if pairs else made
