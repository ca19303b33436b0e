#!/usr/bin/env python3
"""Fails on habits of prose that .github/CONTRIBUTING.md bans, in comments, messages and documents.

    prose.py SOURCE_ROOT [--list [FOLDER]]

Comments of C++, Python, shell and meson files, string literals of C++ and Python, and Markdown are
read; code, `quoted code` and blocks of code are not. --list prints the findings.
"""

import pathlib
import re
import sys

FOLDERS = ("include", "src", "aio", "cpu_adam", "tools", "tests", "configs", ".github")
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".sh", ".build", ".md"}

# A comment that begins with one of these is a fragment, or makes the reader look for its noun.
BEGINNING = re.compile(r"(Of|What|The same|As|From|Those|Likewise|Beside|Besides)\b")
TRAILING = re.compile(r"(of|what|the same|as|those|likewise)\b", re.I)
PHRASE = re.compile(r"\b(so many|(?<!times )as many|of its own|of their own|by itself|by themselves|in vain|"
                    r"likewise|beside|goes on|go on|going on|in place of|are told|is told)\b", re.I)

COMMENT = re.compile(r'R"(\w*)\((?P<raw>.*?)\)\1"|"(?P<text>(?:\\.|[^"\\\n])*)"'
                     r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"
                     r"|(?P<line>(?:^[ \t]*//[^\n]*\n)+|//[^\n]*)|/\*(?P<block>.*?)\*/", re.S | re.M)
PYTHON = re.compile(r'(?P<doc>"""(?:.*?)""")|"(?P<text>(?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\\n])*\''
                    r"|(?P<line>(?:^[ \t]*#[^\n]*\n)+|#[^\n]*)", re.S | re.M)


def cleaned(comment: str) -> str:
    """The words of a comment: without its marks, and without quoted code."""
    words = re.sub(r"^[ \t]*(?:///<?|//|#!?|\*)", " ", comment, flags=re.M)
    return " ".join(re.sub(r"`[^`]*`", "`", words).split())


def findings_of(path: pathlib.Path) -> list[tuple[int, str]]:
    text = path.read_text(errors="replace")
    found: list[tuple[int, str]] = []

    def judge(at: int, words: str, beginning: re.Pattern[str] | None) -> None:
        line = text.count("\n", 0, at) + 1
        if beginning and (match := beginning.match(words)):
            found.append((line, f"begins with '{match.group()}': {words[:70]}"))
        for match in PHRASE.finditer(words):
            found.append((line, f"'{match.group()}': {words[max(0, match.start() - 30):match.end() + 30]}"))

    if path.suffix == ".md":
        body = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), text, flags=re.S)
        for number, line in enumerate(body.split("\n"), 1):
            words = re.sub(r"`[^`]*`", "`", line)
            found += [(number, f"'{match.group()}': {words[max(0, match.start() - 30):match.end() + 30]}")
                      for match in PHRASE.finditer(words)]
        return found
    script = path.suffix in {".py", ".pyi", ".sh", ".build"}
    for match in (PYTHON if script else COMMENT).finditer(text):
        parts = match.groupdict()
        if parts.get("line"):
            comment = parts["line"]
            own_line = not text[text.rfind("\n", 0, match.start()) + 1:match.start()].strip()
            judge(match.start() + len(comment) - len(comment.lstrip()), cleaned(comment),
                  BEGINNING if own_line else TRAILING if comment.startswith("///<") else None)
        elif parts.get("block") or parts.get("doc"):
            judge(match.start(), cleaned((parts.get("block") or parts["doc"]).strip('"')), BEGINNING)
        else:
            judge(match.start(), parts.get("raw") or parts.get("text") or "", None)
    return found


def area_of(name: pathlib.PurePath) -> str:
    depth = 3 if name.parts[0] in ("include", "tests") else 2
    return "/".join(name.parts[:-1][:depth]) or name.name


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))
             if path.suffix in SOURCES and "data" not in path.relative_to(root).parts[:2]]
    files += [root / "README.md", root / "CHANGELOG.md"]
    counts: dict[str, int] = {}
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    for path in files:
        name = path.relative_to(root)
        if name == pathlib.PurePath("tests/arch/prose.py") or name.name == "CONTRIBUTING.md":
            continue
        for line, finding in findings_of(path):
            counts[area_of(name)] = counts.get(area_of(name), 0) + 1
            if "--list" in sys.argv and str(name).startswith(wanted):
                print(f"{name}:{line}: {finding}")
    if "--list" in sys.argv:
        print(dict(sorted(counts.items())), sum(counts.values()))
        return 0
    problems = [f"{area}: {count} findings; --list shows them" for area, count in sorted(counts.items())]
    # The check must be able to fail.
    if not BEGINNING.match("Of a layer") or not PHRASE.search("it goes on") or len(files) < 100:
        problems.append("the check finds nothing")
    for problem in problems:
        print(problem)
    print(f"{len(files)} files, {sum(counts.values())} findings")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
