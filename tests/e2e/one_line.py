"""Checks the report of a failure: one line on stderr that gives the mistake, its place and a
remedy."""


def assert_one_line(case, done, status, words, ignored=""):
    """Expects that `done` (a CompletedProcess with text) has `status` and one line on stderr with
    all
    `words`. Ignores lines that contain `ignored`, if given."""
    lines = [line for line in done.stderr.splitlines() if not ignored or ignored not in line]
    case.assertEqual(len(lines), 1, done.stderr)
    case.assertTrue(lines[0].startswith("ballast: error: "), done.stderr)
    for word in words:
        case.assertIn(word, lines[0])
    case.assertEqual(done.returncode, status, done.stderr)
