"""The tokenizer of a model's folder."""

import hashlib
import json
import os
import sys

from .report import Refusal, one_line, reason_of


def load_tokenizer(folder):
    """The tokenizer of a model's folder."""
    if not folder.is_dir():
        raise Refusal(f"--model {folder} is not a folder; give the folder of a Hugging Face model. "
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
        raise Refusal(f"--model {folder}: cannot load a tokenizer: {reason_of(error)}") from error
    if not tokenizer.is_fast:
        raise Refusal(f"--model {folder}: the tokenizer is not a fast one (no tokenizer.json), so "
                      f"places in the text are not known")
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def stop_tokens_of(tokenizer, folder):
    """The tokens at which the model stops: those of `eos_token_id` in generation_config.json and the
    tokenizer's end-of-sequence token. None if the folder does not say."""
    try:
        ids = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    ids = ids if isinstance(ids, list) else [ids]
    spelled = {number: token for token, number in tokenizer.get_vocab().items()}
    listed = {spelled[number] for number in ids if isinstance(number, int) and number in spelled}
    return listed | ({tokenizer.eos_token} - {None}) if listed else None


def hashes_of(tokenizer, folder):
    """Identifies the tokenizer of a folder, as metadata of a file of documents: the SHA-256 of its
    serialised form, which transformers changes with its class and version, and those of its
    vocabulary."""
    return {"tokenizer_sha256": _sha256(tokenizer.backend_tokenizer.to_str()),
            **vocabulary_hashes(folder)}


def vocabulary_hashes(folder):
    """SHA-256 of the tokens and of the added tokens in tokenizer.json, as lines "ID TAB TOKEN LF" by
    ascending id. Ballast compares them with those of the model. Empty without such a file."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = [(number, token) for token, number in vocabulary.items()]
        else:  # of a unigram model: tokens with their scores
            tokens = [(number, entry[0]) for number, entry in enumerate(vocabulary)]
        added = [(entry["id"], entry["content"]) for entry in content.get("added_tokens") or []]
        return {"vocabulary_sha256": _sha256(_lines(tokens)), "added_tokens_sha256": _sha256(_lines(added))}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _lines(tokens):
    return "".join(f"{number}\t{token}\n" for number, token in sorted(tokens))


def _sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def has_wide_ids(tokenizer):
    """Whether an id of the tokenizer needs more than 16 bits."""
    return max(tokenizer.get_vocab().values(), default=0) > 65535
