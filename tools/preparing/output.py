"""The rule for a file that a script writes where its user says. It equals that of the program
(include/ballast/text/output_file.h)."""

import os
import pathlib

from .report import Refusal


def check_output(path, is_own, kind, overwrite=False, inputs=()):
    """Refuses to replace files of other kinds. A new name and an empty file are free. A file is
    replaced if `is_own(path)` recognises it as `kind`, or with `overwrite`. A symbolic link itself
    is replaced, not its target. Files of `inputs`, which may be folders, are never replaced."""
    path = pathlib.Path(path)
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise Refusal(f"{path}: there is no folder {path.parent}")
        return
    if path.exists():
        if not path.is_file():
            raise Refusal(f"{path} is not a regular file; choose another file")
        if any(_is_input(path, pathlib.Path(given)) for given in inputs):
            raise Refusal(f"{path} is an input of this command, so it is not replaced; choose another file")
    if overwrite:
        return
    if path.is_symlink():
        raise Refusal(f"{path} is a symbolic link: choose another file, or give --overwrite to replace the "
                      "link (its target stays)")
    if path.stat().st_size > 0 and not is_own(path):
        raise Refusal(f"{path} exists and is not {kind}: choose another file, or give --overwrite to "
                      "replace it")


def _is_input(path, given):
    if not given.exists():
        return False
    return path.samefile(given) or (given.is_dir() and path.resolve().is_relative_to(given.resolve()))


def temporary_of(path, middle=""):
    """Returns PATH.tmp-PID. Shortens the name if it would be too long for a file."""
    ending = f"{middle}.tmp-{os.getpid()}"
    name = path.name.encode()[:255 - len(ending)].decode(errors="ignore")
    return path.with_name(name + ending)


def create(path, mode="xb"):
    """Opens a new file. Removes what a killed process with the same number has left. Follows no
    link."""
    path.unlink(missing_ok=True)
    return open(path, mode)


def publish(temporary, path):
    """Gives the finished file its name, in a way that survives a power cut."""
    os.replace(temporary, path)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it has its name all the same
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
