"""Forks, threads and the end of the interpreter."""

import textwrap
import unittest

from support import CONFIG, FolderTest

WRITE = """
    import os, sys, ballast
    from ballast import aio
    file = aio.File("out.bin", "w")
    memory = aio.empty(8 << 20)
    memory[:] = b"x" * len(memory)
"""


class End(FolderTest):
    def program(self, text):
        return textwrap.dedent(WRITE) + textwrap.dedent(text)

    def test_writes_in_flight_are_finished(self):
        self.run_python(self.program("""
            for i in range(16):
                file.write_from(memory, i * len(memory))
                file.write_from(memory[1:1000], i * len(memory) + 5)
        """))
        content = (self.path / "out.bin").read_bytes()
        self.assertEqual(len(content), 128 << 20)
        self.assertEqual(content.count(b"x"), len(content))

    def test_with_futures_threads_and_globals(self):
        for _ in range(5):
            self.run_python(self.program("""
                import threading, asyncio
                kept = [file.write_from(memory, i * len(memory)) for i in range(8)]
                threading.Thread(target=kept[-1].result, daemon=True).start()
                cycle = [kept]; cycle.append(cycle)
                sys.modules["kept"] = cycle
            """))

    def test_after_an_exception(self):
        self.run_python(self.program("""
            future = file.write_from(memory)
            raise SystemExit(7)
        """), status=7)

    def test_use_at_exit_is_refused(self):
        printed = self.run_python(self.program("""
            import atexit
            file.write_from(memory)
            class Late:
                def __del__(self):
                    try:
                        file.write_from(memory)
                    except RuntimeError as error:
                        os.write(1, str(error).encode())
            late = Late()
        """))
        self.assertTrue(printed == "" or "interpreter ends" in printed, printed)

    def test_after_a_run(self):
        self.run_python(f"""
            import ballast
            ballast.train({CONFIG!r}, out="run")
        """)

    def test_no_thread_is_left(self):
        printed = self.run_python(self.program("""
            import atexit
            # Registered before the package's own function: runs after it.
        """) + textwrap.dedent("""
            file.write_from(memory).result()
            print(any("aio" in open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")))
        """))
        self.assertEqual(printed, "True\n")
        printed = self.run_python("""
            import atexit, os
            def look():
                names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
                print(any("aio" in name for name in names))
            atexit.register(look)
            from ballast import aio
            file = aio.File("out.bin", "w")
            file.write_from(bytes(1000)).result()
        """)
        self.assertEqual(printed, "False\n")


class Forks(FolderTest):
    def test_before_the_first_use(self):
        printed = self.run_python("""
            import os, ballast
            from ballast import aio
            child = os.fork()
            file = aio.File("parent.bin" if child else "child.bin", "w")
            assert file.write_from(b"abc").result() == 3
            if child:
                assert os.waitpid(child, 0)[1] == 0
                print("both")
        """)
        self.assertEqual(printed, "both\n")

    def test_after_the_first_use(self):
        printed = self.run_python("""
            import os, sys, ballast
            from ballast import aio
            file = aio.File("out.bin", "w")
            memory = aio.empty(8 << 20)
            futures = [file.write_from(memory, i << 23) for i in range(8)]
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                for call in (futures[-1].result, futures[-1].done, lambda: file.write_from(memory),
                             file.close, lambda: ballast.plan({}),
                             lambda: aio.File("other.bin", "w").write_from(b"x")):
                    try:
                        call()
                        print("no error")
                    except RuntimeError as error:
                        assert "forked" in str(error), error
                del futures, memory
                print("refused")
                sys.exit(3)  # the interpreter ends as usual
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            assert all(future.result() == 8 << 20 for future in futures)
            print("parent")
        """)
        self.assertEqual(printed, "refused\nparent\n")

    def test_multiprocessing(self):
        (self.path / "worker.py").write_text(textwrap.dedent("""
            from ballast import aio

            def write(name):
                with aio.File(name, "w") as file:
                    return file.write_from(b"abc").result()
        """))
        printed = self.run_python("""
            import multiprocessing, worker
            worker.write("own.bin")
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(worker.write, ["a.bin", "b.bin"]))
        """)
        self.assertEqual(printed, "[3, 3]\n")


if __name__ == "__main__":
    unittest.main()
