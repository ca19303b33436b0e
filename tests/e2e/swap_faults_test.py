"""Tests failures of swap space in real runs: each ends with one line that gives the fault, its
place and its reason, leaves no file, and keeps the metrics that the run had written before."""
import json
import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

BALLAST = pathlib.Path(sys.argv.pop(1)).resolve()

TINY = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 64, "num_layers": 2,
              "num_heads": 4, "num_kv_heads": 2},
    "data": {"text": ["text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 4},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
FOR_EVER = 1000000
PATIENCE = 120.0


def has_a_row(metrics):
    return metrics.exists() and "\n" in metrics.read_text()


class SwapTest(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-swap-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        self.swap = self.path / "swap"
        self.swap.mkdir()
        (self.path / "text.txt").write_text(TEXT)

    def config(self, swap=None, steps=4, out="run", aio=None, **sections):
        """A config that swaps weights and states to `swap` (a path or several)."""
        swap = [self.swap] if swap is None else swap if isinstance(swap, list) else [swap]
        offload = {"device": "nvme", "nvme_path": [str(path) for path in swap]}
        config = {**TINY, "zero_optimization": {"stage": 1, "offload_optimizer": offload,
                                                "offload_param": {"device": "nvme"}},
                  "aio": {"any_file_system": True, **(aio or {})}, **sections}
        config["ballast"] = {**config["ballast"], "steps": steps, "out": out}
        file = self.path / f"{out}.json"
        file.write_text(json.dumps(config))
        return file

    def train(self, *arguments, faults=None, limits=None, **config):
        environment = {**os.environ, **({"BALLAST_IO_FAULTS": faults} if faults else {})}
        return subprocess.run([BALLAST, "-v", "train", self.config(**config), *arguments],
                              cwd=self.path, env=environment, capture_output=True, text=True,
                              timeout=PATIENCE, preexec_fn=limits, check=False)

    def launch(self, ready, what, **config):
        """Starts a run in the background. Waits until its metrics satisfy `ready`, or until its
        end."""
        process = subprocess.Popen([BALLAST, "train", self.config(**config)], cwd=self.path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        metrics = self.path / "run/metrics.jsonl"
        self.wait_for(lambda: process.poll() is not None or ready(metrics), what)
        return process

    def start(self, **config):
        """Starts a long run and waits for two steps."""
        process = self.launch(
            lambda metrics: metrics.exists() and metrics.read_text().count("\n") >= 2, "two steps",
            steps=FOR_EVER, **config)
        self.assertIsNone(process.poll(), "the run ended early")
        return process

    @staticmethod
    def end(process):
        if process.poll() is None:
            process.kill()
        process.communicate()

    def wait_for(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                self.fail("waited too long for " + what)
            time.sleep(0.01)

    def finish(self, process):
        """The result of a started run, like that of subprocess.run."""
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def swap_files(self, process):
        """The open nameless files of the run below the test's directory."""
        found = []
        folder = pathlib.Path(f"/proc/{process.pid}/fd")
        for link in folder.iterdir():
            target = os.readlink(link)
            if target.startswith(str(self.path)) and target.endswith(" (deleted)"):
                found.append(link)
        return found

    def assert_fails(self, done, *words, status=1):
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("ballast: error: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertEqual(done.stderr.splitlines()[-1], lines[0])
        for word in words:
            self.assertIn(word, lines[0])
        for word in ("Traceback", "terminate called", "core dumped"):
            self.assertNotIn(word, done.stderr)
        self.assert_nothing_left()
        return lines[0]

    def assert_nothing_left(self):
        """Expects no file in the swap directory and only complete lines in the metrics."""
        if self.swap.exists():
            left = [entry for entry in self.swap.iterdir() if entry.name != "lost+found"]
            self.assertEqual(left, [])
        metrics = self.path / "run/metrics.jsonl"
        if metrics.exists():
            text = metrics.read_text()
            self.assertTrue(text == "" or text.endswith("\n"))
            steps = [json.loads(line)["step"] for line in text.splitlines()]
            self.assertEqual(steps, list(range(1, len(steps) + 1)))

    def losses(self, done, out="run"):
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = (self.path / out / "metrics.jsonl").read_text().splitlines()
        return [(json.loads(line)["loss"], json.loads(line)["grad_norm"]) for line in lines]


class BeforeTheFirstByte(SwapTest):
    def assert_planning_fails(self, *words, **config):
        self.assert_fails(self.train(**config), *words)
        self.assertFalse((self.path / "run").exists(), "the run directory was made all the same")

    def test_missing(self):
        self.assert_planning_fails(f"{self.path}/none/swap: no such directory", "create it",
                                   swap=self.path / "none/swap")

    def test_one_of_two_missing(self):
        self.assert_planning_fails("none/swap: no such directory",
                                   swap=[self.swap, self.path / "none/swap"])

    def test_a_file(self):
        self.assert_planning_fails("text.txt is not a directory", swap=self.path / "text.txt")

    def test_tmpfs_is_refused_unless_wanted(self):
        if not os.access("/dev/shm", os.W_OK) or "tmpfs" not in subprocess.run(
                ["stat", "-f", "-c", "%T", "/dev/shm"], capture_output=True, text=True,
                check=False).stdout:
            self.skipTest("no tmpfs to write to")
        self.assert_planning_fails("/dev/shm is on a tmpfs", "aio.any_file_system",
                                   swap="/dev/shm", aio={"any_file_system": False})
        done = self.train(swap="/dev/shm", aio={"any_file_system": True, "buffered": True})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
        self.assert_planning_fails(str(self.swap), "file-size limit of 65536 bytes", "ulimit -f",
                                   limits=limit)

    def test_more_than_is_free(self):
        # 6.6e9 parameters of 12 bytes do not fit. The test allocates nothing.
        if os.statvfs(self.swap).f_bavail * os.statvfs(self.swap).f_frsize > 300e9:
            self.skipTest("more than 300 GB are free")
        model = {**TINY["model"], "hidden_size": 8192, "num_layers": 40, "num_heads": 64}
        self.assert_planning_fails(
            f"{self.swap}: swapping needs ", "are free; ", "another nvme_path", "No space left",
            model=model, ballast={**TINY["ballast"], "device_bytes": "512GiB",
                                  "host_bytes": "512GiB", "save_weights": False})

    def test_the_same_path_twice_is_a_config_error(self):
        self.assert_fails(self.train(swap=[self.swap, f"{self.swap}/"]), "is listed twice",
                          status=2)


class SmallDisk(SwapTest):
    """A separate ext4 file system."""

    def setUp(self):
        super().setUp()
        self.disk = self.path / "disk"
        self.disk.mkdir()

    def mount(self, mebibytes, *options):
        image = self.path / "image"
        with open(image, "wb") as file:
            file.truncate(mebibytes << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image],
                              capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest("cannot make an ext4 image: " + made.stderr.strip())
        mounted = subprocess.run(["mount", "-o", ",".join(["loop", *options]), image, self.disk],
                                 capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            self.skipTest("may not mount: " + mounted.stderr.strip())
        self.addCleanup(subprocess.run, ["umount", "-l", self.disk], check=True)
        self.swap = self.disk

    def test_too_small(self):
        self.mount(2)
        self.assert_fails(self.train(), f"{self.disk}: swapping needs ", "are free; ")
        self.assertFalse((self.path / "run").exists())

    def test_read_only(self):
        self.mount(16, "ro")
        self.assert_fails(self.train(), str(self.disk), "Read-only file system")

    def test_two_paths_share_the_space(self):
        self.mount(8)
        ways = [self.disk / "a", self.disk / "b"]
        for way in ways:
            way.mkdir()
        rates = [{"path": str(way), "read_gbps": 1, "write_gbps": 1} for way in ways]
        # Twice the model: each half fits, but not both.
        model = {**TINY["model"], "hidden_size": 192}
        self.swap = ways[0]
        done = self.train(swap=ways, aio={"paths": rates}, model=model)
        self.assert_fails(done, "a and ", "b on one file system: swapping needs ")

    def test_a_disk_that_fills_up_later_does_not_matter(self):
        self.mount(16)
        quiet = self.losses(self.train(steps=30, out="quiet"), "quiet")
        process = self.launch(has_a_row, "the first step", steps=30)
        filler = self.disk / "filler"
        with open(filler, "wb", buffering=0) as file:
            with self.assertRaises(OSError):
                while True:
                    file.write(bytes(4096))
        self.assertEqual(self.losses(self.finish(process)), quiet)
        filler.unlink()
        self.assert_nothing_left()


class WhileRunning(SwapTest):
    def spoil(self, process, act):
        """Repeats `act` on the run's swap file until the run ends, since a single change may be
        overwritten before it is read."""
        files = self.swap_files(process)
        self.assertEqual(len(files), 1)
        deadline = time.monotonic() + PATIENCE
        with open(files[0], "r+b", buffering=0) as file:
            while process.poll() is None and time.monotonic() < deadline:
                act(file)
        return self.finish(process)

    def test_a_flipped_bit(self):
        def flip(file):
            size = os.fstat(file.fileno()).st_size
            for offset in range(0, size, 1 << 18):
                byte = os.pread(file.fileno(), 1, offset)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
        self.assert_fails(self.spoil(self.start(), flip), "fetch", str(self.swap), "offset=",
                          "length=", "checksum mismatch", "check the drive")

    def test_a_truncated_file(self):
        line = self.assert_fails(
            self.spoil(self.start(), lambda file: os.ftruncate(file.fileno(), 0)), "fetch",
            str(self.swap), "offset=", "length=")
        self.assertTrue("file ends" in line or "Input/output error" in line or "checksum" in line, line)

    def test_a_removed_directory_does_not_matter(self):
        quiet = self.losses(self.train(steps=30, out="quiet"), "quiet")
        process = self.launch(has_a_row, "the first step", steps=30)
        self.swap.rmdir()
        self.assertEqual(self.losses(self.finish(process)), quiet)

    def test_a_file_size_limit_that_comes_later(self):
        process = self.start()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        self.assert_fails(self.finish(process), "File too large")

    def test_sigkill_leaves_nothing(self):
        process = self.start()
        self.assertEqual(len(self.swap_files(process)), 1)
        process.send_signal(signal.SIGKILL)
        self.assertEqual(self.finish(process).returncode, -signal.SIGKILL)
        self.assertEqual(list(self.swap.iterdir()), [])

    def test_sigterm_leaves_nothing(self):
        process = self.start()
        process.send_signal(signal.SIGTERM)
        done = self.finish(process)
        self.assertNotEqual(done.returncode, 0)
        self.assertGreaterEqual(done.returncode, 0, "the signal was not handled")
        self.assertIn("\ninterrupted after step ", done.stdout)
        self.assert_nothing_left()

    def test_what_a_dead_run_left_is_removed(self):
        left = self.swap / ".ballast-swap-4194304-1"
        left.write_bytes(bytes(8192))
        mine = self.swap / ".ballast-swap-notes"
        mine.write_text("keep")
        done = self.train()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"removed 1 swap file (8.00 KiB) of crashed runs from {self.swap}", done.stderr)
        self.assertFalse(left.exists())
        self.assertTrue(stat.S_ISREG(mine.stat().st_mode))


class Injected(SwapTest):
    """Faults that only the library itself can inject (aio/README.md)."""
    # Numbers of writes that are read again: those of the first step and of the second. The fill
    # writes weights and states of four blocks, and so does a step.
    READ_AGAIN = (10, 18)

    def assert_stops(self, faults, stage, cause):
        self.assert_fails(self.train(faults=faults), stage, str(self.swap), "offset=", "length=",
                          cause)

    def test_a_mistake_in_them(self):
        self.assert_fails(self.train(faults="no-such-fault"), "BALLAST_IO_FAULTS", "no-such-fault",
                          status=2)

    def test_a_write_error(self):
        self.assert_stops("eio:on=write:after=20:times=1", "writeback", "Input/output error")

    def test_a_read_error(self):
        self.assert_stops("eio:on=read:after=5:times=1", "fetch", "Input/output error")

    def test_a_write_error_in_the_first_fill(self):
        self.assert_stops("eio:on=write:times=1", "writeback", "Input/output error")

    def test_a_disk_that_runs_full(self):
        self.assert_stops("enospc:on=write:after=20:times=1", "writeback",
                          "No space left on device")

    def test_a_flipped_bit(self):
        self.assert_stops("flip:on=read:after=5:times=1", "fetch", "checksum mismatch")

    def test_a_torn_write(self):
        after = self.READ_AGAIN[0]
        self.assert_fails(self.train(faults=f"torn:on=write:after={after}:times=1"), "fetch",
                          str(self.swap), "checksum mismatch")

    def test_a_lost_write(self):
        for after in self.READ_AGAIN:
            self.assert_fails(self.train(faults=f"lost:on=write:after={after}:times=1", out=f"{after}"),
                              "fetch", str(self.swap), "checksum mismatch")

    def test_a_device_that_hangs(self):
        done = self.train(faults="hang:on=read:after=5:times=1",
                          aio={"stall_seconds": 1, "abandon_seconds": 3})
        self.assert_fails(done, "fetch", str(self.swap), "offset=", "length=", "no answer from the device")

    def test_faults_that_the_queue_handles_change_nothing(self):
        quiet = self.losses(self.train(out="quiet"), "quiet")
        done = self.train(faults="short:bytes=4096:every=3,eintr:every=5,late:reaps=2:every=7")
        self.assertEqual(self.losses(done), quiet)


class InjectedWithGradients(Injected):
    """A step writes the gradients of four blocks before their weights and states."""
    READ_AGAIN = (8, 20)

    def config(self, **given):
        given.setdefault("ballast", {**TINY["ballast"], "gradients": "nvme"})
        return super().config(**given)

    def test_damaged_gradients(self):
        for fault in ("lost", "torn"):
            # Half of the embedding is zero, which a torn write leaves, too.
            for number, block in enumerate(("head", "layer 1", "layer 0")):
                done = self.train(faults=f"{fault}:on=write:after={8 + number}:times=1",
                                  out=f"{fault}{number}")
                self.assert_fails(done, f"fetch gradient of {block}", str(self.swap),
                                  "checksum mismatch")


class InjectedWithSpeculation(Injected):
    """Every block has two slots, which take turns. The fill writes both."""
    READ_AGAIN = (18, 26)
    CLIPPING = 0

    def config(self, **given):
        given.setdefault("gradient_clipping", self.CLIPPING)
        given.setdefault("ballast", {**TINY["ballast"], "speculative_updates": 4})
        return super().config(**given)


class InjectedWithRollbacks(InjectedWithSpeculation):
    """Every step is clipped, so that a rollback reads the slot before it and writes the other again."""
    READ_AGAIN = (26, 42)
    CLIPPING = 1e-3

    def test_a_flipped_bit_in_the_slot_before(self):
        # A step fetches weights and states of four blocks. The rollback after it fetches them
        # again.
        faults = "flip:on=read:after={}:times=1"
        lines = [self.assert_fails(self.train(faults=faults.format(after), out=f"{after}"), "fetch",
                                   "checksum mismatch") for after in range(8, 18, 3)]
        self.assertTrue(any("states" in line or "weights" in line for line in lines), lines)


class SeveralPaths(SwapTest):
    def test_give_the_bits_of_one(self):
        ways = [self.path / f"way{i}" for i in range(3)]
        for way in ways:
            way.mkdir()
        model = {**TINY["model"], "hidden_size": 256}
        expected = self.losses(self.train(out="one", model=model), "one")
        rates = [{"path": str(way), "read_gbps": 1 + i, "write_gbps": 2, "queue_depth": 4 * (i + 1),
                  "block_size": 65536 << i} for i, way in enumerate(ways)]
        for name, aio in (("measured", {}), ("known", {"paths": rates}),
                          ("threads", {"paths": rates[:2], "backend": "threads"})):
            done = self.train(swap=ways, out=name, model=model, aio=aio)
            self.assertEqual(self.losses(done, name), expected)
            for way in ways:
                self.assertEqual(list(way.iterdir()), [])
        line = (self.path / "known/metrics.jsonl").read_text().splitlines()[-1]
        one = (self.path / "one/metrics.jsonl").read_text().splitlines()[-1]
        # Not nvme_bytes_written: updates of the last step may still run when its line is written.
        self.assertEqual(json.loads(line)["peak_bytes"], json.loads(one)["peak_bytes"])


if __name__ == "__main__":
    unittest.main()
