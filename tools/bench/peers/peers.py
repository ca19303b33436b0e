"""Helpers that the scripts which measure peers share."""

import argparse
import pathlib
import re
import sys

SCALES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
NOISY = 1.2  # best round over worst from which a table warns


def fail(message):
    print(f"{pathlib.Path(sys.argv[0]).stem}: error: {message}", file=sys.stderr)
    sys.exit(2)


def size(text):
    match = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB)", text)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size; write a size such as 4096, 1MiB or 24GiB")
    return int(match[1]) * SCALES[match[2]]
