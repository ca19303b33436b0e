#!/usr/bin/env python3
"""Counts the system calls of the I/O queue under load with strace.

    io_syscalls_test.py IO_LOAD

IO_LOAD is the program that loads a queue (io_load.cpp). No file is opened or closed per operation,
and a call that submits carries at least 8 operations. Exits 77 (skipped) without strace.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

OPERATIONS = 4000
DEPTH = 32
TRACED = "io_uring_enter,openat,open,close,pread64,pwrite64"
# io_uring_enter(FD, TO_SUBMIT, ...). With -f a call may be printed in two parts; the first part
# matches.
ENTER = re.compile(r"io_uring_enter\(\d+, (\d+),")


def trace(program: str, backend: str, folder: str) -> str:
    log = pathlib.Path(folder) / "strace"
    command = ["strace", "-f", "-o", str(log), "-e", f"trace={TRACED}",
               program, folder, backend, str(OPERATIONS), str(DEPTH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        print(done.stdout.strip())
        sys.exit(77)
    assert done.returncode == 0, done.stderr
    return log.read_text()


def count(log: str, *calls: str) -> int:
    return sum(len(re.findall(rf"\b{call}\(", log)) for call in calls)


def main() -> int:
    program = sys.argv[1]
    if shutil.which("strace") is None:
        print("no strace here")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        # strace cannot run anything if ptrace is forbidden.
        if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True).returncode:
            print("strace may not trace here")
            return 77
        uring = trace(program, "io_uring", folder)
        threads = trace(program, "threads", folder)

    for name, log in (("io_uring", uring), ("threads", threads)):
        files = count(log, "openat", "open", "close")
        print(f"{name}: {files} opens and closes for {2 * OPERATIONS} operations")
        assert files < OPERATIONS / 10, f"{name} opens or closes files per operation"

    submissions = [int(number) for number in ENTER.findall(uring) if int(number) > 0]
    average = sum(submissions) / len(submissions)
    print(f"io_uring: {sum(submissions)} operations in {len(submissions)} submitting calls, "
          f"{average:.1f} each")
    assert sum(submissions) >= 2 * OPERATIONS, "operations that strace did not see submitted"
    assert average >= 8, f"only {average:.1f} operations per submitting call"
    assert count(uring, "pread64") < OPERATIONS / 10, "io_uring reads by other calls"
    assert count(threads, "pread64") >= OPERATIONS, "the thread pool does not read by pread"
    assert count(threads, "pwrite64") >= OPERATIONS, "the thread pool does not write by pwrite"
    return 0


if __name__ == "__main__":
    sys.exit(main())
