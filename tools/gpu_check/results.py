#!/usr/bin/env python3
"""Results of tools/gpu_check.sh: verdicts and figures from logs, and one line of JSON per check.

    results.py check RESULTS PART NAME LIMIT SHARDS LOG    prints verdict, seconds and text
    results.py skip RESULTS PART NAME REASON
    results.py begin RESULTS PART VERSION GPUS             facts about the machine
    results.py reason LOG                                  why the tests of a log were skipped
    results.py same RESULTS PART FIELD NAME NAME...        exit status 0 if the checks have equal figures

A shard's output is LOG.SHARD; LOG.SHARD.end has its exit status and seconds, and LOG.command the
command. RESULTS gets one JSON object per line: part, check, verdict, seconds, text, command, and
`rows`, the array that a benchmark with --json has printed.
"""

import json
import pathlib
import re
import sys

FAULT = re.compile(r"error|Failure|FAILED|ERROR SUMMARY: [1-9]|cannot|Assertion|terminate|\bfault\b")


def lines_of(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def skip_reason(text):
    """Returns the line below Google Test's "Skipped", or else the first line."""
    lines = lines_of(text)
    below = [after for line, after in zip(lines, lines[1:]) if line.endswith(": Skipped")]
    return (below or lines or ["no reason given"])[0]


def failure_reason(text):
    lines = lines_of(text)
    return ([line for line in lines if FAULT.search(line)] or lines[-1:] or ["no output"])[0]


def last_line(text):
    lines = lines_of(text)
    return lines[-1] if lines and not lines[-1].startswith(("[", "{", "]", "}")) else ""


def rows_of(text):
    """Returns the JSON array of a benchmark, or []."""
    for start in re.finditer(r"^\[", text, re.MULTILINE):
        try:
            rows = json.JSONDecoder().raw_decode(text[start.start():])[0]
        except ValueError:
            continue
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    return []


def step_figure(row):
    words = [f"{row['tokens_per_second']:,.0f} tok/s", f"{row['step_seconds']:.3f} s per step",
             f"{row['model_percent_of_gemm_peak']:.1f}% of the GEMM peak", f"loss {row['loss']:.4f}"]
    if "micro_batch" in row:
        words.append(f"{row['micro_batch']} x {row['accumulation']}")
    if "waiting_seconds" in row:
        words.append(f"waits {row['waiting_seconds']:.3f} s")
    if "recomputed_layers" in row:
        words.append(f"{row['recomputed_layers']} layers recomputed")
    if "device_bytes" in row:
        words.append(f"{row['device_bytes'] / 2**30:.1f} GiB device, {row['host_bytes'] / 2**30:.1f} GiB host")
    if "product_algorithms" in row:
        words.append(f"products {row['product_algorithms']}")
    if row.get("rolled_back"):
        words.append(f"{row['rolled_back']} of {row['steps']} steps rolled back")
    return ", ".join(words)


def figure(rows):
    """Returns the figures of a benchmark in a few words, or ""."""
    try:
        if "step_seconds" in rows[0]:
            return step_figure(rows[0])
        if "tflop_per_second" in rows[0]:
            return ", ".join(f"{row['pass']} {row['by']} {row['tflop_per_second']:.0f}" for row in rows
                             ) + " TFLOP/s"
        if "gb_per_second" in rows[0]:
            return ", ".join(f"{row['way']} {row['gb_per_second']:.1f}" for row in rows) + " GB/s"
        if "ratio" in rows[-1]:
            return "; ".join(f"{row['program']} {row['tokens_per_second']:,.0f} tok/s" for row in rows
                             if "tokens_per_second" in row)
        if "tokens_per_second" in rows[0]:
            return f"{rows[0]['tokens_per_second']:,.0f} tok/s"
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    return ""


def count(texts, verdict):
    """Number of tests in the summaries of Google Test, or None without a summary."""
    found = [int(number) for text in texts
             for number in re.findall(rf"^\[  {verdict} \] (\d+) test", text, re.MULTILINE)]
    return sum(found) if found else None


def counts(texts):
    """Returns "7 tests passed, 2 skipped: no engine", or "" if the program has printed no summary."""
    passed, skipped = count(texts, "PASSED "), count(texts, "SKIPPED")
    if passed is None:
        return ""
    words = f"{passed} test{'' if passed == 1 else 's'} passed"
    if skipped:
        reason = next(skip_reason(text) for text in texts if "[  SKIPPED ]" in text)
        words += f", {skipped} skipped: {reason}"
    return words


def was_skipped(text, status):
    return status == 77 or (status == 0 and "[  SKIPPED ]" in text and "[       OK ]" not in text)


def judge(shards, most):
    """Returns verdict, seconds and text from [(output, status, seconds)]."""
    seconds = max(shard[2] for shard in shards)
    of = f" in shard {{}} of {len(shards)}" if len(shards) > 1 else ""
    for number, (text, status, _) in enumerate(shards):
        if status in (124, 137):
            return "FAILED", seconds, f"not done after {most} s (status {status})" + of.format(number)
        if status not in (0, 77):
            return "FAILED", seconds, f"status {status}{of.format(number)}: {failure_reason(text)}"
    if all(was_skipped(text, status) for text, status, _ in shards):
        return "skipped", seconds, skip_reason(shards[0][0])
    texts = [shard[0] for shard in shards]
    return "ok", seconds, figure(rows_of(texts[0])) or counts(texts) or last_line(texts[0])


def append(file, fields):
    with open(file, "a", encoding="utf-8") as results:
        results.write(json.dumps(fields) + "\n")


def read(file):
    path = pathlib.Path(file)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def conclude(file, part, name, most, shards, log):
    ends = []
    for shard in range(int(shards)):
        status, seconds = (read(f"{log}.{shard}.end") or "137 0").split()
        ends.append((read(f"{log}.{shard}"), int(status), int(seconds)))
    verdict, seconds, text = judge(ends, most)
    text = " ".join(text.split())
    append(file, {"part": part, "check": name, "verdict": verdict, "seconds": seconds, "text": text,
                  "command": read(f"{log}.command").strip(), "rows": rows_of(ends[0][0])})
    print(verdict, seconds, text, sep="\t")


def same(file, field, names):
    """Returns the exit status; 77 if a check has no figures."""
    found = {}
    for line in lines_of(read(file)):
        entry = json.loads(line)
        if entry.get("check") in names and entry["rows"]:
            found[entry["check"]] = entry["rows"][0][field]
    if len(found) < len(set(names)):
        print(f"a figure is missing: {', '.join(name for name in names if name not in found)}")
        return 77
    print("; ".join(f"{name}: {value!r}" for name, value in found.items()))
    if len(set(found.values())) == 1:
        return 0
    print(f"error: {field} differs: {found}")
    return 1


def main():
    mode, *rest = sys.argv[1:]
    if mode == "check":
        conclude(*rest)
    elif mode == "skip":
        file, part, name, reason = rest
        append(file, {"part": part, "check": name, "verdict": "skipped", "seconds": 0, "text": reason,
                      "command": "", "rows": []})
    elif mode == "begin":
        file, part, version, gpus = rest
        append(file, {"part": part, "version": lines_of(version), "gpus": lines_of(gpus)})
    elif mode == "reason":
        print(skip_reason(read(rest[0])))
    elif mode == "same":
        return same(rest[0], rest[2], rest[3:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
