"""A parser of command lines whose error messages are one line each."""

import argparse
import difflib
import sys


class Arguments(argparse.ArgumentParser):
    """Reports an unknown option before anything that is missing, and does not print the usage."""

    def parse_args(self, args=None, namespace=None):
        words = list(sys.argv[1:] if args is None else args)
        known = [name for action in self._actions for name in action.option_strings]
        for word in words:
            name = word.split("=", 1)[0]
            if word == "--":
                break
            # argparse accepts abbreviated names.
            if name.startswith("--") and not any(one.startswith(name) for one in known):
                near = difflib.get_close_matches(name, known, 1)
                self.error(f"there is no option {name}" + (f" (did you mean '{near[0]}'?)" if near else ""))
        return super().parse_args(words, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
