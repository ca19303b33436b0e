#!/usr/bin/env python3
"""Writes documents/conversations.safetensors, a small file of documents with masks, as tools/prepare.py
does. Needs no package.

    python3 -B tests/data/make_documents_fixture.py [OUTPUT_FOLDER]

60 documents of 4 to 90 tokens below 131. In each, stretches of a question (mask 0) and its answer
(mask 1) follow each other; an answer repeats its question in steps of 3, so a model can learn it.
"""

import pathlib
import random
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tools"))
from preparing import command as prepare  # noqa: E402


def conversation(source):
    ids, mask = [], []
    for _ in range(source.randint(1, 5)):
        question = [source.randrange(1, 100) for _ in range(source.randint(2, 9))]
        answer = [token + 3 for token in question]
        ids += question + answer
        mask += [0] * len(question) + [1] * len(answer)
    return ids, mask


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "documents"
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(1)
    metadata = prepare.metadata_of("made up", {"tokenizer_sha256": ""}, "assistant")
    with prepare.DocumentWriter(folder / "conversations.safetensors", False, metadata) as writer:
        for _ in range(60):
            writer.add(*conversation(source))
        writer.finish()
    print(f"{writer.documents} documents, {writer.tokens} tokens, {writer.targets} targets")


if __name__ == "__main__":
    main()
