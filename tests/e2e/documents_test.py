#!/usr/bin/env python3
"""Training on files of documents, evaluation files and other token files.

    documents_test.py PATH_OF_BALLAST FOLDER_OF_FIXTURES
"""

import math
import pathlib
import struct
import sys

from runs import RunTest, main

FIXTURE = pathlib.Path(sys.argv.pop(2)).resolve() / "conversations.safetensors"
MODEL = {"family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
         "num_kv_heads": 2}


def documents_data(**keys):
    return {"text": [], "documents": [str(FIXTURE)], "sequence_length": 64, **keys}


class DocumentsTest(RunTest):
    def losses(self, **sections):
        done = self.train("--overwrite", model=MODEL, **sections)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [(row["loss"], row["grad_norm"], row.get("eval_loss")) for row in self.rows()]

    def test_documents_are_packed_and_their_tokens_counted(self):
        done = self.train(model=MODEL, data=documents_data(held_out=0),
                          ballast={"steps": 9, "eval_every": 0})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        self.assertIn("1 file, 2.07k tokens to train on, 0 held out", done.stdout)
        self.assertIn("60 documents packed into 33 sequences, 2.18% padding", done.stdout)
        rows = self.rows()
        # 9 steps of 4 sequences are one epoch of 33 and 3 sequences of the next.
        tokens = [row["tokens"] for row in rows]
        self.assertTrue(all(150 < count <= 256 for count in tokens), tokens)
        self.assertLess(sum(tokens), 9 * 256)
        self.assertGreaterEqual(sum(tokens[:8]) + 64, 2066 - 64)
        for row in rows:
            self.assertAlmostEqual(row["tokens_per_second"], row["tokens"] / row["step_seconds"],
                                   delta=1e-6 * row["tokens_per_second"])

    def test_placement_and_micro_batches_in_flight_keep_the_bits(self):
        data = documents_data(eval=[str(FIXTURE)])
        ballast = {"steps": 4, "eval_every": 2, "eval_batches": 100}
        expected = self.losses(data=data, ballast=ballast)
        self.assertIsNotNone(expected[1][2])
        for more in ({"order": "micro_batch_major"}, {"activations": "nvme", "recompute": False},
                     {"delay_seed": 3}):
            self.assertEqual(self.losses(data=data, ballast={**ballast, **more}), expected, more)
        self.assertEqual(self.losses(data=data, ballast=ballast, zero_optimization={
            "stage": 1, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}),
            expected)

    def test_evaluation_files_and_perplexity(self):
        done = self.train(model=MODEL, data=documents_data(eval=[str(FIXTURE)]),
                          ballast={"eval_batches": 100})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2.07k tokens to train on, 2.07k held out", done.stdout)
        last = self.rows()[-1]
        self.assertAlmostEqual(last["eval_perplexity"], math.exp(last["eval_loss"]))
        self.assertIn(f"perplexity {last['eval_perplexity']:.4g}", done.stdout)

    def test_evaluation_texts(self):
        (self.path / "eval.txt").write_text("another text of some length " * 10)
        done = self.train(data={"eval": ["eval.txt"]})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("18.0k tokens to train on", done.stdout)
        self.assertIn("280 held out", done.stdout)
        self.assertIn("eval_loss", self.rows()[-1])
        (self.path / "eval.txt").write_text("short")
        done = self.train("--overwrite", data={"eval": ["eval.txt"]})
        self.assertIn("the files of data.eval have 5 tokens, but an evaluation needs 33", done.stderr)

    def test_a_share_of_the_documents_is_held_out(self):
        done = self.train(model=MODEL, data=documents_data(eval=0.2))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("eval_loss", self.rows()[-1])
        done = self.train("--overwrite", model=MODEL, data=documents_data(held_out=0.001))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no document is as short as data.held_out 0.001", done.stderr)

    def test_what_is_wrong_with_a_file_is_said_in_one_line(self):
        self.assert_fails(self.train(model=MODEL | {"vocab_size": 50}, data=documents_data()), 1,
                          "data.documents: ", FIXTURE.name, "tensor 'tokens' holds id", "is 50")
        cut = self.path / "cut.safetensors"
        cut.write_bytes(FIXTURE.read_bytes()[:5000])
        self.assert_fails(self.train(model=MODEL, data=documents_data(eval=[str(cut)])), 1,
                          "data.eval: ", "cut.safetensors", "truncated")

    def test_megatron_and_llmc_files_are_token_files(self):
        ids = list(b"a stream of tokens, " * 60)
        tokens = struct.pack(f"<{len(ids)}H", *ids)
        (self.path / "m.bin").write_bytes(tokens)
        (self.path / "m.idx").write_bytes(
            b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, len(ids), 0, 0, 1))
        header = struct.pack("<256I", 20240520, 1, len(ids), *[0] * 253)
        (self.path / "l.bin").write_bytes(header + tokens)
        (self.path / "plain.bin").write_bytes(tokens)
        losses = {}
        for name in ("m.bin", "l.bin", "plain.bin"):
            losses[name] = self.losses(data={"text": [], "tokens": [name], "held_out": 0})
        self.assertEqual(losses["m.bin"], losses["plain.bin"])
        self.assertEqual(losses["l.bin"], losses["plain.bin"])


    def test_numpy_files_are_token_files(self):
        ids = list(b"a stream of tokens, " * 60)
        header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({len(ids)},), }}".ljust(117)
        (self.path / "n.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", 118) +
                                          header.encode() + b"\n" + struct.pack(f"<{len(ids)}q", *ids))
        losses = [self.losses(data={"text": [], "tokens": [name], "held_out": 0})
                  for name in ("n.npy", self.tokens())]
        self.assertEqual(losses[0], losses[1])

    def test_files_of_other_kinds_are_named(self):
        chat = '{"messages": [{"role": "user", "content": "hi"}]}\n'
        (self.path / "chat.jsonl").write_text(chat * 40)
        plain = list(range(100)) * 40
        (self.path / "plain.bin").write_bytes(struct.pack(f"<{len(plain)}H", *plain))
        for key, name, words in (("tokens", "chat.jsonl", ["JSON Lines", "prepare.py", "data.documents"]),
                                 ("documents", "chat.jsonl", ["JSON Lines", "prepare.py"]),
                                 ("tokens", FIXTURE, ["name it as data.documents"]),
                                 ("text", FIXTURE, ["name it as data.documents"])):
            self.assert_fails(self.train(model=MODEL | {"vocab_size": 500}, data={
                "text": [], key: [str(name)]}), 1, f"data.{key}: ", *words)
        self.assert_fails(self.train(model=MODEL, data={
            "text": [], "tokens": ["plain.bin"], "eval": ["chat.jsonl"]}), 1, "data.eval: ", "JSON Lines")
        done = self.train(model=MODEL, data={"text": [], "tokens": [str(FIXTURE)], "as_is": True,
                                             "token_type": "u16"})
        self.assert_fails(done, 1, "holds token id", "model.vocab_size is 131")

    def test_an_id_beyond_the_vocabulary_ends_a_run_before_its_first_step(self):
        ids = [5] * 20000 + [131] + [6] * 20000
        (self.path / "far.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
        (self.path / "near.bin").write_bytes(struct.pack("<20000H", *ids[:20000]))
        for data, key in (({"tokens": ["far.bin"]}, "tokens"),
                          ({"tokens": ["near.bin"], "eval": ["far.bin"]}, "eval")):
            self.assert_fails(self.train(model=MODEL, data={"text": [], "held_out": None, **data}), 1,
                              f"data.{key}: ", "far.bin", "id 131", "(token 20000)", "vocab_size is 131")
        self.assertFalse((self.path / "run").exists())

    def test_an_id_beyond_the_vocabulary_ends_a_run_before_it_is_reached(self):
        # Longer than what is read before the first step. The id is in none of the samples, and the
        # run would evaluate only after its last step.
        with open(self.path / "long.bin", "wb") as file:
            file.truncate(2 * (18 << 20))
            file.seek(2 * 340000)
            file.write(struct.pack("<H", 131))
        done = self.train(model=MODEL, ballast={"steps": 1 << 20, "eval_every": 0}, data={
            "text": [], "tokens": [self.tokens()], "eval": ["long.bin"], "held_out": None})
        self.assert_fails(done, 1, "data.eval: ", "long.bin", "id 131 at byte 680000 (token 340000)")

    def tokens(self):
        ids = list(b"a stream of tokens, " * 60)
        (self.path / "plain.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
        return "plain.bin"


if __name__ == "__main__":
    main()
