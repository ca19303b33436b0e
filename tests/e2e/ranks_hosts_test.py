#!/usr/bin/env python3
"""Ranks on several hosts, which here are network namespaces joined by a veth pair.

    ranks_hosts_test.py PATH_OF_BALLAST PATH_OF_MPIRUN

Needs root, iproute2 and Open MPI; where one of them is missing it is skipped (77).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

MPIRUN = sys.argv.pop(2)
BALLAST = pathlib.Path(sys.argv.pop(1)).resolve()
SKIPPED = 77
ADDRESSES = ["10.213.7.1", "10.213.7.2"]
PATIENCE = 240

CONFIG = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 128, "num_layers": 3,
              "num_heads": 4},
    "data": {"text": ["text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"},
                          "offload_param": {"device": "cpu"}},
    "aio": {"any_file_system": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 6},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400

# mpirun's remote shell: "hosts" are network namespaces with their own host names.
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec {prefix}"$host" unshare --uts sh -c "hostname node$host; $*"
"""


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          timeout=PATIENCE, check=False, **options)


class Hosts:
    """Two namespaces with one address each, joined by a cable."""

    def __init__(self):
        self.prefix = f"ballast{os.getpid()}-"
        self.made = []

    def make(self):
        for address in ADDRESSES:
            done = run("ip", "netns", "add", self.prefix + address)
            if done.returncode != 0:
                return False
            self.made.append(address)
        first, second = (self.prefix + address for address in ADDRESSES)
        steps = [("ip", "-n", first, "link", "add", "cable0", "type", "veth", "peer", "name",
                  "cable1", "netns", second)]
        for index, (name, address) in enumerate(zip((first, second), ADDRESSES)):
            steps.append(("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"cable{index}"))
            steps.append(("ip", "-n", name, "link", "set", "lo", "up"))
            steps.append(("ip", "-n", name, "link", "set", f"cable{index}", "up"))
        return all(run(*step).returncode == 0 for step in steps)

    def received_bytes(self):
        done = run("ip", "-n", self.prefix + ADDRESSES[0], "-j", "-s", "link", "show", "cable0")
        return json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"]

    def remove(self):
        for address in self.made:
            run("ip", "netns", "del", self.prefix + address)


def possible():
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare")):
        return False
    return "Open MPI" in run(MPIRUN, "--version").stdout


class RanksOnSeveralHosts(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-hosts-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        (self.path / "text.txt").write_text(TEXT)
        self.config = self.path / "config.json"
        self.config.write_text(json.dumps(CONFIG))

    def metrics(self, out):
        lines = (self.path / out / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "loss" in line]

    def train(self, out, *launcher):
        done = run(*launcher, "-n", 2, BALLAST, "train", self.config, "--out", self.path / out)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return self.metrics(out)

    def across_hosts(self):
        agent = self.path / "agent.sh"
        agent.write_text(AGENT.format(prefix=HOSTS.prefix))
        agent.chmod(0o755)
        network = ADDRESSES[0].rsplit(".", 1)[0] + ".0/24"
        mpirun = f'hostname node{ADDRESSES[0]}; exec "$@"'
        return ["ip", "netns", "exec", HOSTS.prefix + ADDRESSES[0], "unshare", "--uts", "sh", "-c",
                mpirun, "sh", MPIRUN, "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self",
                "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network,
                "--host", ",".join(f"{address}:1" for address in ADDRESSES)]

    def test_they_learn_the_same_over_a_cable(self):
        before = HOSTS.received_bytes()
        apart = self.train("apart", *self.across_hosts())
        received = HOSTS.received_bytes() - before
        together = self.train("together", MPIRUN)
        for name in ("loss", "grad_norm"):
            self.assertEqual([step[name] for step in apart], [step[name] for step in together])
        # Counts the bytes between the hosts, with little overhead.
        counted = sum(step["bytes"]["gather"] + step["bytes"]["reduce"] for step in apart)
        self.assertGreater(received, counted)
        self.assertLess(received, 1.5 * counted + 2**20)


if __name__ == "__main__":
    if not possible():
        sys.exit(SKIPPED)
    HOSTS = Hosts()
    try:
        if not HOSTS.make():
            sys.exit(SKIPPED)
        result = unittest.main(exit=False).result
    finally:
        HOSTS.remove()
    sys.exit(0 if result.wasSuccessful() else 1)
