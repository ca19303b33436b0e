"""Prepares tasks of rows in several processes, in the order of the files."""

import collections
import concurrent.futures
import concurrent.futures.process
import multiprocessing
import signal

from .inputs import tasks_of
from .report import Notes, Refusal, Unprepared, reason_of


def documents_of_task(preparer, task, skip_invalid=False):
    """Documents of some rows of a file, "FILE:LINE: reason" of skipped rows, and notes. The first
    bad row ends the task unless such rows are skipped."""
    name, rows = task
    made, problems = [], []
    notes = preparer.notes = Notes()
    for number, row in rows:
        problem = None
        try:
            made += preparer.documents(row)
        except Unprepared:
            raise
        except Refusal as refusal:
            problem = str(refusal)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # tokenizers panics with another base class
            problem = f"cannot be prepared: {type(error).__name__}: {reason_of(error)}"
        notes.end_row(f"{name}:{number}", used=problem is None)
        if problem is not None:
            problems.append(f"{name}:{number}: {problem}")
            if not skip_invalid:
                break
    return made, problems, notes


_preparer = None  # the worker's Preparer, inherited by fork
_skip_invalid = False


def _work(task):
    return documents_of_task(_preparer, task, _skip_invalid)


def _leave_signals_to_the_parent():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def results_of(preparer, paths, workers, skip_invalid):
    """(result of documents_of_task, bytes read) of every task, in order. Few tasks are in
    flight."""
    global _preparer, _skip_invalid
    _preparer, _skip_invalid = preparer, skip_invalid
    if workers == 1:
        for task, done in tasks_of(paths):
            yield _work(task), done
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), _leave_signals_to_the_parent)
    try:
        pool.submit(int).result()  # forks before a reader starts threads
        running = collections.deque()
        for task, done in tasks_of(paths):
            running.append((pool.submit(_work, task), done))
            if len(running) == 8 * workers:
                future, done = running.popleft()
                yield future.result(), done
        for future, done in running:
            yield future.result(), done
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Refusal("a worker process was killed; is there enough memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)
