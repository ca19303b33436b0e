#!/usr/bin/env python3
"""Tests `ballast doctor`: what it says of limits and folders of a machine is what a run meets.

    doctor_test.py PATH_OF_BALLAST
"""

import re
import resource
import shutil
import subprocess

from runs import RunTest, main


class Doctor(RunTest):
    def doctor(self, *arguments, **settings):
        """Returns verdict and text of every check, and what the command returned."""
        done = self.run_ballast("doctor", *arguments, **settings)
        lines = re.findall(r"^(.{14}) (ok   |hint |fault) (\S.*)$", done.stdout, re.M)
        self.assertEqual(len(lines), len(done.stdout.splitlines()), done.stdout)
        return {name.strip(): (verdict.strip(), text) for name, verdict, text in lines}, done

    def test_doctor_has_a_line_for_each_part_of_the_machine(self):
        found, done = self.doctor(self.config(), "--set",
                                  f'zero_optimization.offload_optimizer.nvme_path="{self.path}"')
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertEqual(list(found), ["CPU", "instructions", "memory", "locked memory",
                                       "file size", "open files", "threads", "shared memory",
                                       "huge pages", "file I/O", "swap folder", "run directory",
                                       "cache", "MPI", "GPU"])
        self.assertEqual(found["GPU"][1], "not used, because ballast.device is \"host\"")
        self.assertNotIn("fault", [verdict for verdict, _ in found.values()])

    def test_doctor_says_what_would_be_faster(self):
        found, done = self.doctor(environment={"BALLAST_IO_DISABLE": "io_uring"},
                                  limits=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK,
                                                                    (65536, 65536)))
        self.assertEqual(found["file I/O"][0], "hint")
        self.assertRegex(found["file I/O"][1], "^threads; faster would be io_uring, but ")
        self.assertEqual(found["locked memory"][0], "hint")
        self.assertRegex(found["locked memory"][1], r"^64\.0 KiB \(ulimit -l\); .*unlimited")

    def test_doctor_fails_for_a_folder_that_cannot_be_used(self):
        for folder, word in (("/dev/shm", "tmpfs"), (self.path / "no/ne", "no/ne")):
            found, done = self.doctor(
                self.config(), "--set", "aio.any_file_system=false",
                "--set", f'zero_optimization.offload_optimizer.nvme_path="{folder}"')
            self.assertEqual(found["swap folder"][0], "fault")
            self.assertIn(word, found["swap folder"][1])
            self.assert_fails(done, 1, "1 check of this machine failed")

    def test_doctor_fails_for_limits_that_end_a_run(self):
        for limit, value, name, word in (
                (resource.RLIMIT_FSIZE, 64 << 10, "file size", "a run writes files of about"),
                (resource.RLIMIT_NOFILE, 14, "open files", "ulimit -n 4096")):
            found, done = self.doctor(self.config(), limits=lambda limit=limit, value=value:
                                      resource.setrlimit(limit, (value, value)))
            self.assertEqual(found[name][0], "fault", done.stdout)
            self.assertIn(word, found[name][1])
            self.assertEqual(done.returncode, 1)

    def test_doctor_writes_to_the_folders_and_leaves_nothing(self):
        config = self.config()
        found, done = self.doctor(config, environment={"BALLAST_IO_FAULTS": "eio:on=write"})
        self.assertEqual(found["swap folder"][0], "fault", done.stdout)
        self.assertIn("Input/output error", found["swap folder"][1])
        (self.path / "text").touch()
        found, done = self.doctor(config, "--set", "ballast.out=text/run")
        self.assertEqual(found["run directory"][0], "fault", done.stdout)
        self.assertIn("--out", found["run directory"][1])
        found, _ = self.doctor(config, environment={"XDG_CACHE_HOME": str(self.path / "text")})
        self.assertEqual(found["cache"][0], "hint")
        self.assertEqual({entry.name for entry in self.path.iterdir()},
                         {"config.json", "text.txt", "text"})

    def test_doctor_fails_for_a_read_only_file_system(self):
        folder = self.path / "folder"
        folder.mkdir()
        mount = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind '
                 '"$0" && exec "$@"', folder]
        if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
            self.skipTest("this user may not mount a file system")
        done = subprocess.run(
            [*mount, self.ballast, "doctor", self.config(), "--set",
             f'zero_optimization.offload_optimizer.nvme_path="{folder}"'],
            capture_output=True, text=True, check=False)
        self.assertRegex(done.stdout, r"(?m)^swap folder    fault .*not writable; .*Read-only")

    def test_doctor_fails_for_a_full_disk(self):
        image = self.path / "image"
        with image.open("wb") as file:
            file.truncate(16 << 20)
        folder = self.path / "full"
        folder.mkdir()
        made = shutil.which("mkfs.ext4") and subprocess.run(
            ["mkfs.ext4", "-q", image], capture_output=True, check=False).returncode == 0
        mount = ["unshare", "-m", "sh", "-c", 'mount -o loop "$0" "$1" && shift && exec "$@"', image,
                 folder]
        if not made or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
            self.skipTest("this user may not mount a file system")
        config = self.config()
        done = subprocess.run(
            [*mount, "sh", "-c", 'dd if=/dev/zero of="$0/fill" 2> /dev/null; exec "$@"', folder,
             self.ballast, "doctor", config, "--set", "aio.any_file_system=true", "--set",
             f'zero_optimization.offload_optimizer.nvme_path="{folder}"'],
            capture_output=True, text=True, check=False)
        self.assertRegex(done.stdout, r"(?m)^swap folder    fault .*: ext[234], 0 B free; nothing can "
                                      r"be swapped or saved there: free some space$")
        self.assert_fails(done, 1, "1 check of this machine failed")


if __name__ == "__main__":
    main()
