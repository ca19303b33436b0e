#!/usr/bin/env python3
"""Tests ballast eval: the loss of a config, a run or a Hugging Face folder, without training.

    eval_test.py PATH_OF_BALLAST FOLDER_OF_FIXTURES
"""

import hashlib
import json
import math
import pathlib
import random
import shutil
import struct
import sys

from runs import TINY, RunTest, main, write_file

FIXTURES = pathlib.Path(sys.argv.pop(2)).resolve()
DOCUMENTS = FIXTURES.parent / "documents/conversations.safetensors"
LLAMA = {"model_type": "llama", "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 136,
         "max_position_embeddings": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
         "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
ON_HOST = ("--set", "ballast.device=host")
FP32 = {"bf16": {"enabled": False}}
# The held-out data are 16 micro-batches of 2 sequences of 32 tokens.
DATA = {"text": ["text.txt"], "sequence_length": 32, "eval": ["held.txt"]}
HELD_OUT_BYTES = 16 * 2 * 32 + 1


class Eval(RunTest):
    def setUp(self):
        super().setUp()
        letters = random.Random(7)
        self.write("held.txt", HELD_OUT_BYTES, letters)
        self.still = {**TINY["ballast"], "eval_batches": 1000, "steps": 1}

    def write(self, name, size, letters):
        (self.path / name).write_text("".join(letters.choice("the quick fox ") for _ in range(size)))

    def evaluate(self, path, *arguments):
        done = self.run_ballast("eval", path, "--json", *ON_HOST, *arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads(done.stdout)

    def refused(self, *arguments, words, status=2):
        self.assert_fails(self.run_ballast("eval", *ON_HOST, *arguments), status, *words)

    def eval_loss(self):
        return self.rows()[-1]["eval_loss"]

    def folder(self):
        model = self.path / "model"
        model.mkdir()
        shutil.copy(FIXTURES / "llama.initial.safetensors", model / "model.safetensors")
        (model / "config.json").write_text(json.dumps(LLAMA))
        return model

    def test_an_untrained_config_has_the_loss_of_a_run_that_learns_nothing(self):
        # 16 micro-batches are not a multiple of every accumulation.
        for type_of_run in (FP32, {}, {**FP32, "gradient_accumulation_steps": 3},
                            {"gradient_accumulation_steps": 5}):
            done = self.train("--overwrite", data=DATA, ballast=self.still, **type_of_run,
                              optimizer={"type": "SGD", "params": {"lr": 1e-30, "weight_decay": 0}})
            self.assertEqual(done.returncode, 0, done.stderr)
            found = self.evaluate(self.path / "config.json")
            self.assertEqual(found["loss"], self.eval_loss())
            self.assertEqual(found["perplexity"], math.exp(found["loss"]))
            self.assertEqual((found["targets"], found["sequences"]), (32 * 32, 32))

    def test_the_held_out_loss_does_not_depend_on_how_micro_batches_are_grouped(self):
        still = {"optimizer": {"type": "SGD", "params": {"lr": 1e-30, "weight_decay": 0}}, **FP32}
        for batches in (1, 3, 5, 1000):
            losses = []
            for accumulation in (1, 2, 7, 40):
                done = self.train("--overwrite", data=DATA, **still,
                                  gradient_accumulation_steps=accumulation,
                                  ballast={**self.still, "eval_batches": batches})
                self.assertEqual(done.returncode, 0, done.stderr)
                losses.append(self.eval_loss())
            for loss in losses:
                self.assertAlmostEqual(loss, losses[0], delta=1e-13)
        # Micro-batches of 5 sequences: the last one has 2.
        found = self.evaluate(self.path / "config.json", "--set", "train_micro_batch_size_per_gpu=5")
        self.assertAlmostEqual(found["loss"], losses[0], delta=1e-6)

    def test_a_run_has_the_loss_of_its_last_evaluation(self):
        for type_of_run in (FP32, {}):
            done = self.train("--overwrite", data=DATA, **type_of_run,
                              ballast={**self.still, "steps": 20, "save_weights": True})
            self.assertEqual(done.returncode, 0, done.stderr)
            loss = self.eval_loss()
            self.assertEqual(self.evaluate("run")["loss"], loss)
            self.assertEqual(self.evaluate("run", "--data", "held.txt")["loss"], loss)
            # Random weights are worse.
            self.assertGreater(self.evaluate("config.json")["loss"], loss)

    def test_documents_are_evaluated_whole(self):
        data = {"text": [], "documents": [str(DOCUMENTS)], "sequence_length": 64, "held_out": 0.3}
        model = {**TINY["model"], "vocab_size": 131}
        done = self.train(data=data, model=model, ballast={**self.still, "save_weights": True})
        self.assertEqual(done.returncode, 0, done.stderr)
        held_out = self.evaluate("run")
        self.assertEqual(held_out["loss"], self.eval_loss())
        # All documents instead of a share of them. Only replies count.
        found = self.evaluate("run", "--data", DOCUMENTS)
        self.assertGreater(found["targets"], held_out["targets"])
        self.assertEqual(found["sequences"], 33)
        self.assertLess(found["targets"], 33 * 64 / 2)

    def test_documents_have_the_same_loss_whatever_they_are_packed_with(self):
        # The documents have 4 to 72 tokens, so some are longer than the trained length.
        factors = {"short_factor": [1] * 8, "long_factor": [4] * 8, "factor": 2}
        losses = []
        for scaling in ({"rope_type": "dynamic", "factor": 8}, {"rope_type": "longrope", **factors}):
            scaling["original_max_position_embeddings"] = 32
            model = {**TINY["model"], "vocab_size": 131, "head_dim": 16,
                     "max_sequence": 200, "init_stddev": 0.3, "rope_scaling": scaling}
            self.config(model=model, data={"text": [], "documents": [str(DOCUMENTS)],
                                           "sequence_length": 72}, **FP32)
            same = [self.evaluate("config.json", "--data", DOCUMENTS, "--sequence-length", length)["loss"]
                    for length in (72, 100, 200)]
            for loss in same:
                self.assertAlmostEqual(loss, same[0], delta=2e-6)
            losses.append(same[0])
        self.assertGreater(abs(losses[0] - losses[1]), 1e-3)

    def test_weights_on_any_tier_give_the_same_bits(self):
        wide = {"model": {**TINY["model"], "hidden_size": 256, "num_layers": 6}, "data": DATA,
                "ballast": {**self.still, "device_bytes": "64MiB"}}
        results = {}
        for tier, budget in (("none", "64MiB"), ("cpu", "6MiB"), ("nvme", "6MiB"), ("auto", "6MiB")):
            for order in ("layer_major", "micro_batch_major"):
                zero = {"stage": 3, "offload_param": {"device": tier}}
                config = self.config(**{**wide, "zero_optimization": zero})
                results[tier, order] = self.evaluate(
                    config, "--set", f"ballast.device_bytes={budget}", "--set",
                    f"ballast.order={order}")
        self.assertEqual({result["loss"] for result in results.values()},
                         {results["none", "layer_major"]["loss"]})
        whole, passing = results["none", "layer_major"]["bytes"], results["nvme", "layer_major"]["bytes"]
        weights = sum(math.prod(shape) for shape in [(256, 256)] * 2 + 6 * [(256, 256 * 2)])
        self.assertGreater(whole["device"], 6 << 20)
        self.assertLessEqual(passing["device"], 6 << 20)
        self.assertEqual(whole["nvme"], 0)
        # Only the weights in bf16: no remainders, no moments.
        self.assertGreater(passing["nvme"], 2 * weights)
        self.assertLess(passing["nvme"], whole["device"])
        # The swap directory was made for the evaluation.
        self.assertFalse((self.path / "run").exists())
        # A model that does not fit is refused.
        self.refused("config.json", "--set", "ballast.device_bytes=6MiB", "--set",
                     "zero_optimization.offload_param.device=none", status=1,
                     words=["the device budget of 6.00 MiB is", "too small", "weights"])
        self.refused("config.json", "--set", "ballast.device_bytes=10KiB", status=1,
                     words=["the device budget of 10.0 KiB is", "too small", "sets the budget"])
        # The tier of gradients has no effect.
        self.assertEqual(self.evaluate("config.json", "--set", "ballast.gradients=nvme")["loss"],
                         results["none", "layer_major"]["loss"])

    def test_a_folder_is_evaluated_on_tokens(self):
        self.folder()
        tokens = FIXTURES / "tokens.u16.bin"
        with_config = self.config(
            model={"path": "model"}, data={"text": [], "tokens": [str(tokens)], "eval": [str(tokens)],
                                           "sequence_length": 48})
        config = json.loads(with_config.read_text())
        config["model"] = {"path": "model"}
        with_config.write_text(json.dumps(config))
        wanted = self.evaluate(with_config)
        found = self.evaluate("model", "--data", tokens)
        self.assertEqual(found["sequence_length"], 48)  # the model's longest sequence
        self.assertEqual((found["targets"], found["sequences"]),
                         (wanted["targets"], wanted["sequences"]))
        self.assertAlmostEqual(found["loss"], wanted["loss"], delta=1e-4)  # other micro-batches
        # All of a short file counts, although it does not fill a micro-batch.
        (self.path / "short.bin").write_bytes(struct.pack("<50H", *range(50)))
        short = self.evaluate("model", "--data", "short.bin", "--sequence-length", 7)
        self.assertEqual((short["targets"], short["sequences"]), (49, 7))
        text = self.run_ballast("eval", "model", "--data", tokens).stdout
        self.assertRegex(text, rf"loss +{found['loss']:.6f} nats per target\n")

    def test_data_of_other_kinds_are_refused(self):
        model = {**TINY["model"], "vocab_size": 300}
        done = self.train("--out", "first", data=DATA, model=model, ballast={**self.still, "save_weights": True})
        self.assertEqual(done.returncode, 0, done.stderr)
        weights = self.path / "first" / "weights"
        (self.path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 9)
        (self.path / "tokens.npz").write_bytes(b"PK\3\4" + bytes(22) + b"\5\0\0\0a.npy" + bytes(40))
        self.refused("first", "--data", "chat.jsonl", status=1,
                     words=["chat.jsonl", "JSON Lines", "prepare.py", f"--model {weights}"])
        self.refused("first", "--data", "tokens.npz", status=1, words=["tokens.npz", "NumPy archive"])
        self.evaluate("first", "--data", "held.txt")
        # A model with a tokenizer does not read bytes of text.
        (weights / "tokenizer.json").write_text("{}")
        self.refused("first", "--data", "held.txt", status=1,
                     words=["held.txt", "byte by byte", "tokenizer.json", "prepare.py", "data.as_is"])
        self.evaluate("first", "--data", "held.txt", "--set", "data.as_is=true")
        self.assert_fails(self.train("--overwrite", "--out", "next", data=DATA,
                                     model={**model, "weights": str(weights)}), 1,
                          "data.text: ", "tokenizer.json", "data.as_is")

    def test_documents_of_another_tokenizer(self):
        model = self.folder()
        vocabulary = {"a": 0, "b": 1}
        tokenizer = {"added_tokens": [{"id": 2, "content": "<s>"}],
                     "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))

        def documents(**metadata):
            path = self.path / "d.safetensors"
            write_file(path, {"tokens": ("U16", [40], struct.pack("<40H", *range(40))),
                              "documents": ("I64", [2], struct.pack("<2q", 0, 40))},
                       {"format": "ballast documents", "version": "1", "tokenizer": "other", **metadata})
            return self.run_ballast("eval", "model", "--json", *ON_HOST, "--data", path, "--set",
                                    f"data.as_is={'true' if metadata.get('mask') else 'false'}")

        def digest(text):
            return hashlib.sha256(text.encode()).hexdigest()

        serialised = digest(json.dumps(tokenizer, separators=(",", ":")))
        words, added = digest("0\ta\n1\tb\n"), digest("2\t<s>\n")
        for metadata in ({}, {"tokenizer_sha256": serialised},
                         {"tokenizer_sha256": "0", "vocabulary_sha256": words, "added_tokens_sha256": added},
                         {"tokenizer_sha256": "0", "vocabulary_sha256": "0", "mask": "accepted"}):
            done = documents(**metadata)
            self.assertEqual((done.returncode, done.stderr), (0, ""), metadata)
        for metadata in ({"tokenizer_sha256": "0"}, {"tokenizer_sha256": "0", "vocabulary_sha256": words,
                                                     "added_tokens_sha256": "0"}):
            done = documents(**metadata)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stderr, "warning: .*tokenizer of 'other' .*tokenizer.json")
        self.assert_fails(documents(tokenizer_sha256="0", vocabulary_sha256="0"), 1, "d.safetensors",
                          "tokenizer of 'other'", "tokenizer.json", "another vocabulary", "data.as_is")

    def test_bad_requests_are_one_line(self):
        model = self.folder()
        self.refused("model", words=["model", "--data"])
        self.refused("model", "--data", "held.txt", words=["model.vocab_size", "256"])
        (self.path / "far.bin").write_bytes(struct.pack("<100H", *[140] * 100))
        self.refused("model", "--data", "far.bin", status=1, words=["far.bin", "140", "131"])
        self.refused("model", "--data", "far.bin", "held.txt", words=["far.bin", "held.txt", "one kind"])
        self.refused("model", "--data", "absent.bin", words=["absent.bin"])
        (self.path / "few.bin").write_bytes(struct.pack("<5H", *range(5)))
        self.refused("model", "--data", "few.bin", status=1,
                     words=["few.bin", "sequence of 48 tokens", "--sequence-length"])
        self.refused("absent", "--data", "far.bin", words=["absent"])
        (self.path / "empty").mkdir()
        self.refused("empty", "--data", "far.bin", words=["empty", "config.json"])
        (model / "model.safetensors").unlink()
        self.refused("model", "--data", "few.bin", status=1, words=["model"])
        done = self.train(ballast=self.still)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.refused("run", status=1, words=["run", "without weights"])


if __name__ == "__main__":
    main()
