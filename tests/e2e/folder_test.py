#!/usr/bin/env python3
"""Tests Hugging Face folders as input and output: model.path, the weights of a run, export and
inspect.

    folder_test.py PATH_OF_BALLAST FOLDER_OF_FIXTURES
"""

import json
import pathlib
import resource
import shutil
import struct
import sys

from runs import RUN_FILES, TINY, RunTest, main, write_file

FIXTURES = pathlib.Path(sys.argv.pop(2)).resolve()
FAMILIES = FIXTURES.parent / "families"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131,
         "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "intermediate_size": 136, "max_position_embeddings": 48,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
         "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
GPT2 = {"model_type": "gpt2", "vocab_size": 131, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_inner": None, "n_positions": 48, "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1,
        "activation_function": "gelu_new"}
GPT_NEOX = {"model_type": "gpt_neox", "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 48,
            "layer_norm_eps": 1e-5, "rotary_pct": 0.5, "rotary_emb_base": 1000, "hidden_act": "gelu",
            "tie_word_embeddings": False, "torch_dtype": "float32"}
GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
           "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
           "max_position_embeddings": 48, "rms_norm_eps": 1e-5, "num_local_experts": 4,
           "num_experts_per_tok": 2, "swiglu_limit": 0.9, "rope_theta": 1500.0,
           "tie_word_embeddings": False}
# A learning rate so small that no weight changes, not even one that is 0.
STILL = {"type": "AdamW", "params": {"lr": 1e-60, "weight_decay": 0}}
MOVING = {"type": "AdamW", "params": {"lr": 0.01}}
INDEX = "model.safetensors.index.json"


def read_file(path, aligned=True):
    """Tensors of a safetensors file: name to type, shape and bytes."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    assert begin % 4096 == 0 or path.parent.name == "training" or not aligned, "not aligned"
    return {name: (entry["dtype"], entry["shape"],
                   data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def read_types(folder):
    return {name: tensor[:2] for path in folder.glob("*.safetensors")
            for name, tensor in read_file(path, aligned=False).items()}


def read_folder(folder):
    if not (folder / INDEX).exists():
        return read_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        part = read_file(folder / name)
        assert {index["weight_map"][tensor] for tensor in part} == {name}
        tensors.update(part)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    return tensors


def to_half(tensors, dtype):
    """F32 values as BF16 (truncated) or F16."""
    def convert(data):
        if dtype == "BF16":
            return b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
        return struct.pack(f"<{len(data) // 4}e", *struct.unpack(f"<{len(data) // 4}f", data))
    return {name: (dtype, shape, convert(data)) for name, (_, shape, data) in tensors.items()}


def without_signs_of_zeros(data):
    """BF16 values without -0, which an update of 0 changes to 0."""
    return b"".join(b"\0\0" if data[i:i + 2] == b"\0\x80" else data[i:i + 2]
                    for i in range(0, len(data), 2))


class Folder(RunTest):
    def setUp(self):
        super().setUp()
        self.model = self.path / "model"
        self.model.mkdir()
        (self.model / "tokenizer.json").write_text('{"version": "1.0"}')
        (self.model / "generation_config.json").write_text('{"temperature": 0.6}')
        (self.model / "README.md").write_text("the card of another model")

    def llama(self, dtype="BF16", files=3, **changes):
        """Makes the folder of a small Llama. Returns its tensors."""
        tensors = to_half(read_file(FIXTURES / "llama.initial.safetensors"), dtype)
        (self.model / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        weight_map = {}
        for i in range(files):
            name = f"model-{i + 1:05}-of-{files:05}.safetensors"
            part = dict(list(tensors.items())[i::files])
            write_file(self.model / name, part)
            weight_map.update(dict.fromkeys(part, name))
        (self.model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return tensors

    def saving(self, *arguments, model=None, limits=None, steps=2, environment=None, **sections):
        """Trains the folder, or another `model`, and saves its weights."""
        config = {**TINY, "model": model or {"path": "model"}, "optimizer": STILL,
                  "data": {"tokens": [str(FIXTURES / "tokens.u16.bin")], "sequence_length": 32},
                  "ballast": {**TINY["ballast"], "steps": steps, "save_weights": True}, **sections}
        (self.path / "config.json").write_text(json.dumps(config))
        return self.run_ballast("train", "config.json", *arguments, limits=limits,
                                environment=environment)

    def run_well(self, *arguments, **options):
        done = self.run_ballast(*arguments, **options)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def assert_nothing_left(self):
        for entry in (self.path / "run").glob("*"):
            self.assertIn(entry.name, RUN_FILES | {"weights"})

    def test_an_untrained_import_is_exported_byte_for_byte(self):
        tensors = self.llama()
        done = self.saving()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"weights in {self.path}/run/weights", done.stdout)
        out = self.run_well("export", "run", "--out", "out", "--shard-size", "40kB")
        self.assertRegex(out, r"out: 21 tensors, 126 KiB in \d files\n")
        self.assertEqual(read_folder(self.path / "out"), tensors)
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            self.assertEqual((self.path / "out" / name).read_bytes(),
                             (self.model / name).read_bytes(), name)
        self.assertFalse((self.path / "out/README.md").exists())
        self.run_well("export", "run", "--out", "wide/", "--dtype", "fp32")
        wide = read_folder(self.path / "wide")
        self.assertEqual({name: data[0] for name, data in wide.items()},
                         dict.fromkeys(tensors, "F32"))
        self.assertEqual(to_half(wide, "BF16"), tensors)
        self.assertEqual(json.loads((self.path / "wide/config.json").read_text())["torch_dtype"],
                         "float32")

    def test_tiles_of_the_vocabulary_are_whole_tensors_in_files(self):
        tensors = self.llama()
        for cut in ("1", "3"):
            done = self.saving("--set", "model.vocabulary_tiles=" + cut, "--out", "imported" + cut)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.run_well("export", "imported" + cut, "--out", "out" + cut)
            self.assertEqual(read_folder(self.path / ("out" + cut)), tensors, cut)
        gpt2 = {"family": "gpt2", "vocab_size": 131, "hidden_size": 64, "num_layers": 2,
                "num_heads": 4, "max_sequence": 48}
        made = []
        for cut in (1, 4):
            done = self.saving("--out", f"made{cut}", model={**gpt2, "vocabulary_tiles": cut})
            self.assertEqual(done.returncode, 0, done.stderr)
            made.append(read_folder(self.path / f"made{cut}/weights"))
        self.assertEqual(made[0], made[1])

    def test_tiles_of_layers_are_whole_tensors_in_files(self):
        tensors = self.llama()
        for cut in ("2", "3"):
            for bf16 in ("true", "false"):
                with self.subTest(cut, bf16=bf16):
                    done = self.saving("--set", "model.layer_tiles=" + cut,
                                       "--set", "bf16.enabled=" + bf16, "--overwrite")
                    self.assertEqual(done.returncode, 0, done.stderr)
                    out = f"out{cut}-{bf16}"
                    self.run_well("export", "run", "--out", out)
                    self.assertEqual(read_folder(self.path / out), tensors)

    def test_tiles_of_all_families_are_whole_tensors_in_files(self):
        """Saved by a run in tiles, and imported and exported by another."""
        shape = {"vocab_size": 131, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
                 "intermediate_size": 136}
        families = {"llama": {"num_kv_heads": 2}, "gpt2": {"max_sequence": 48},
                    "phi3": {"num_kv_heads": 2}, "gpt_neox": {"use_parallel_residual": False}}
        for family, keys in families.items():
            with self.subTest(family):
                made = []
                for cut in (1, 3):
                    model = {"family": family, **shape, **keys, "layer_tiles": cut,
                             "vocabulary_tiles": cut}
                    done = self.saving("--out", f"{family}{cut}", model=model)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    made.append((self.path / f"{family}{cut}/weights/model.safetensors").read_bytes())
                self.assertTrue(made[0] == made[1])
                model = {"path": f"{family}1/weights", "layer_tiles": 2}
                done = self.saving("--overwrite", model=model)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.run_well("export", "run", "--out", f"out-{family}", "--dtype", "fp32")
                self.assertTrue(read_folder(self.path / f"out-{family}") ==
                                read_folder(self.path / f"{family}1/weights"))

    def few_tokens(self, vocabulary):
        path = self.path / "few.bin"
        path.write_bytes(struct.pack("<4000H", *(i * i % vocabulary for i in range(4000))))
        return {"tokens": [str(path)], "sequence_length": 32}

    def test_other_orders_in_memory_are_exported_byte_for_byte(self):
        """Covers GPT-NeoX's queries, keys and values, and the experts of gpt-oss, which are one
        tensor."""
        wanted = lambda name: not name.startswith(("gradient.", "final.", "logits", "packed."))
        for family, config in (("gpt_neox", GPT_NEOX), ("gpt_oss", GPT_OSS)):
            stored = read_file(FAMILIES / f"{family}.safetensors", aligned=False)
            tensors = {name: tensor for name, tensor in stored.items() if wanted(name)}
            for name, stored, bf16 in (("float32", tensors, False), ("float32", tensors, True),
                                       ("bfloat16", to_half(tensors, "BF16"), True),
                                       ("float16", to_half(tensors, "F16"), True)):
                with self.subTest(family, name=name, bf16=bf16):
                    write_file(self.model / "model.safetensors", stored)
                    (self.model / "config.json").write_text(json.dumps({**config, "torch_dtype": name}))
                    done = self.saving("--overwrite", bf16={"enabled": bf16}, data=self.few_tokens(61))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    out = f"out-{family}-{name}-{bf16}"
                    self.run_well("export", "run", "--out", out)
                    self.assertEqual(read_folder(self.path / out), stored)

    def check_base_of_adapters(self, loss):
        """If the model that adapter_config.json names is missing, --set names another."""
        folder = self.path / "moved"
        shutil.copytree(self.path / "adapters", folder)
        settings = json.loads((folder / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = "org/base"
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        words = ["eval", "moved", "--data", "few.bin", "--sequence-length", "32",
                 "--set", "bf16.enabled=false", "--set", "ballast.device=host"]
        self.assert_fails(self.run_ballast(*words), 2, "org/base does not exist here",
                          "download the model", "name it with --set model.path=DIR")
        out = self.run_well(*words, "--set", f"model.path={self.model}")
        self.assertEqual(float(out.split("loss")[1].split()[0]), loss)

    def test_adapters(self):
        """The trained weights are those that are evaluated, merged and resumed from."""
        wanted = lambda name: not name.startswith(("gradient.", "final.", "logits", "packed."))
        stored = read_file(FAMILIES / "gpt_neox.safetensors", aligned=False)
        write_file(self.model / "model.safetensors",
                   {name: tensor for name, tensor in stored.items() if wanted(name)})
        (self.model / "config.json").write_text(json.dumps(GPT_NEOX))
        adapters = {"targets": "all-linear", "rank": 3, "alpha": 30, "dora": True,
                    "modules_to_save": "final_layer_norm"}
        ballast = {**TINY["ballast"], "steps": 4, "save_weights": True, "train": "adapters"}
        sections = {"bf16": {"enabled": False}, "data": self.few_tokens(61)}
        done = self.saving(ballast={**ballast, "adapters": adapters}, **sections,
                           optimizer={"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.run_well("export", "run", "--out", "merged", "--merged")
        self.run_well("export", "run", "--out", "adapters")
        merged = read_folder(self.path / "merged")
        before = read_folder(self.model)
        self.assertEqual(merged.keys(), before.keys())
        changed = {name for name in merged if merged[name] != before[name]}
        self.assertEqual(len(changed), 2 * 4 + 2)
        losses = []
        for folder in ("run", "merged", "model", "adapters"):
            out = self.run_well("eval", folder, "--data", "few.bin", "--sequence-length", "32",
                                "--set", "bf16.enabled=false", "--set", "ballast.device=host")
            losses.append(float(out.split("loss")[1].split()[0]))
        self.assertAlmostEqual(losses[0], losses[1], delta=2e-5)
        self.assertGreater(abs(losses[0] - losses[2]), 0.01)
        self.assertEqual(losses[3], losses[0])
        self.check_base_of_adapters(losses[0])
        done = self.saving("--out", "again", **sections,
                           ballast={**ballast, "adapters": {"path": "adapters"}})
        self.assertEqual(done.returncode, 0, done.stderr)
        name = "weights/adapter_model.safetensors"
        self.assertEqual(read_file(self.path / "again" / name), read_file(self.path / "run" / name))
        done = self.saving("--out", "other", **sections,
                           ballast={**ballast, "adapters": {"path": "adapters", "rank": 4}})
        self.assert_fails(done, 2, "ballast.adapters.rank: is 4, but the adapters at", "have 3")
        done = self.saving("--out", "other", **sections,
                           ballast={**ballast, "adapters": {"path": "adapters",
                                                            "targets": "query_key_value"}})
        self.assert_fails(done, 1, "ballast.adapters.path: ", "belongs to nothing that")

    def test_experts_in_mxfp4_are_decoded(self):
        folder = FIXTURES.parent / "mxfp4"
        decoded = {name: tensor for name, tensor in
                   read_file(folder / "decoded.safetensors", aligned=False).items() if "layers" in name}
        for bf16 in (True, False):
            done = self.saving("--overwrite", model={"path": str(folder / "model")},
                               bf16={"enabled": bf16}, data=self.few_tokens(23))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.run_well("export", "run", "--out", f"trained-{bf16}", "--dtype", "bf16")
            found = read_folder(self.path / f"trained-{bf16}")
            for name, (dtype, shape, data) in decoded.items():
                self.assertEqual(found[name][:2], (dtype, shape))
                self.assertEqual(without_signs_of_zeros(found[name][2]), without_signs_of_zeros(data))
            config = json.loads((self.path / f"trained-{bf16}/config.json").read_text())
            self.assertNotIn("quantization_config", config)
            self.assertEqual(config["num_local_experts"], 3)
        self.run_well("export", str(folder / "model"), "--out", "copied", "--dtype", "bf16")
        copied = read_folder(self.path / "copied")
        self.assertEqual({name: copied[name] for name in decoded}, decoded)
        self.assertEqual({name: found[name] for name in copied.keys() - decoded.keys()},
                         {name: copied[name] for name in copied.keys() - decoded.keys()})
        self.assertIn("MXFP4", self.run_well("inspect", str(folder / "model")))

    def eval_loss(self, folder, tokens):
        out = self.run_well("eval", folder, "--data", tokens, "--sequence-length", "32",
                            "--set", "bf16.enabled=false", "--set", "ballast.device=host")
        return float(out.split("loss")[1].split()[0])

    def test_models_of_text_and_images_come_back_byte_for_byte(self):
        """The text model computes what transformers computes; towers and layers for multi-token
        prediction pass through."""
        passing = FIXTURES.parent / "passing"
        shutil.copyfile(passing / "tokens.u16", self.path / "one.bin")
        for name, loss in json.loads((passing / "losses.json").read_text()).items():
            with self.subTest(name):
                self.assertAlmostEqual(self.eval_loss(passing / name, "one.bin"), loss, delta=2e-6)
                done = self.saving("--overwrite", model={"path": str(passing / name)},
                                   data=self.few_tokens(61))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.run_well("export", "run", "--out", name)
                shares = json.loads(self.run_well("inspect", "run", "--json"))["shares"]
                stored = {}
                for file in (passing / name).glob("*.safetensors"):
                    stored.update(read_file(file, aligned=False))
                self.assertEqual(read_folder(self.path / name), stored)
                self.assertEqual(sum(share["tensors"] for share in shares), len(stored))
                files = {file.name for file in (passing / name).iterdir()}
                self.assertEqual({file.name for file in (self.path / name).iterdir()}, files)
                for file in files - {INDEX}:
                    if file.endswith(".safetensors"):
                        continue
                    self.assertEqual((self.path / name / file).read_bytes(),
                                     (passing / name / file).read_bytes(), file)

    def check_names_of_adapters(self, folder, ballast):
        """They are those of the class of the whole model, and are read again."""
        saved = read_file(self.path / "run/weights/adapter_model.safetensors")
        layers = "model.language_model.layers."
        self.assertEqual(len(saved), 2 * 2 * 7)
        self.assertTrue(all(name.startswith("base_model.model." + layers) for name in saved))
        settings = json.loads((self.path / "run/weights/adapter_config.json").read_text())
        targets = settings["target_modules"]
        self.assertEqual(len(targets), 2 * 7)
        self.assertTrue(all(name.startswith(layers) for name in targets))
        done = self.saving("--out", "again", model={"path": str(folder)}, data=self.few_tokens(61),
                           ballast={**ballast, "adapters": {"path": "run/weights"}})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(read_file(self.path / "again/weights/adapter_model.safetensors"), saved)

    def test_what_passes_through_is_shown_and_merged(self):
        folder = FIXTURES.parent / "passing/qwen3_vl"
        stored = {}
        for file in folder.glob("*.safetensors"):
            stored.update(read_file(file, aligned=False))
        ballast = {**TINY["ballast"], "steps": 2, "save_weights": True, "train": "adapters",
                   "adapters": {"targets": "all-linear", "rank": 2}}
        done = self.saving(model={"path": str(folder)}, data=self.few_tokens(61), ballast=ballast,
                           optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0}})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_names_of_adapters(folder, ballast)
        self.run_well("export", "run", "--out", "merged", "--merged")
        merged = read_folder(self.path / "merged")
        self.assertEqual(merged.keys(), stored.keys())
        changed = {name for name in merged if merged[name] != stored[name]}
        self.assertEqual(len(changed), 2 * 7)
        self.assertTrue(all(name.startswith("model.language_model.layers.") for name in changed))
        shares = {share["share"]: share for share in
                  json.loads(self.run_well("inspect", folder, "--json"))["shares"]}
        self.assertEqual(shares["MTP layers (passing through)"],
                         {"share": "MTP layers (passing through)", "tensors": 4, "elements": 56,
                          "bytes": 109})
        self.assertEqual(sum(share["tensors"] for share in shares.values()), len(stored))
        self.assertIn("text model: 25 tensors", self.run_well("inspect", folder))
        rates = next((FIXTURES.parent.parent.parent / "configs/rates").glob("*.json"))
        plan = json.loads(self.run_well("plan", "config.json", "--rates", rates, "--json"))
        self.assertEqual(plan["passing"][0], {"part": "MTP layers", "parameters": 56, "bytes": 109})
        self.assertEqual(plan["trained_parameters"] + plan["frozen_parameters"], plan["parameters"])
        self.assertGreater(plan["frozen_bytes"], plan["trained_bytes"])
        text = self.run_well("plan", "config.json", "--rates", rates)
        self.assertRegex(text, r"\n  passes through    vision: \S+ \S* ?parameters, \S+ KiB\n")

    def test_matrices_in_fp8_are_decoded(self):
        folder = FIXTURES.parent / "fp8"
        shutil.copyfile(folder / "tokens.u16", self.path / "one.bin")
        loss = json.loads((folder / "loss.json").read_text())
        self.assertAlmostEqual(self.eval_loss(folder / "model", "one.bin"), loss, delta=2e-6)
        self.run_well("export", folder / "model", "--out", "decoded", "--dtype", "bf16")
        self.assertAlmostEqual(self.eval_loss("decoded", "one.bin"), loss, delta=2e-6)
        self.assertIn(" FP8 ", self.run_well("inspect", folder / "model"))
        done = self.saving(model={"path": str(folder / "model")}, data=self.few_tokens(23))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.run_well("export", "run", "--out", "trained")
        values = lambda name: {name: without_signs_of_zeros(data) for name, (_, _, data)
                               in read_folder(self.path / name).items()}
        self.assertEqual(values("trained"), values("decoded"))
        out = self.run_well("export", "run", "--out", "codes", "--codes")
        self.assertRegex(out, r"\n7 tensors quantised: error 0\.1\d% of the weights \(rms\), at most "
                              r"0\.2\d% of the largest weight of a block\n")
        self.assertEqual(read_types(self.path / "codes"), read_types(folder / "model"))
        self.assertAlmostEqual(self.eval_loss("codes", "one.bin"), loss, delta=0.05)

    def test_a_scale_for_each_matrix_in_fp8(self):
        folder = FIXTURES.parent / "fp8"
        shutil.copyfile(folder / "tokens.u16", self.path / "one.bin")
        loss = json.loads((folder / "matrices.json").read_text())
        self.assertAlmostEqual(self.eval_loss(folder / "matrices", "one.bin"), loss, delta=2e-6)
        scale = "model.layers.0.mlp.up_proj.activation_scale"
        codes = "model.layers.0.mlp.up_proj.weight"
        # Trained matrices are dequantised, and their scales of activations go. Frozen ones keep both.
        for name, patterns in {"all": "all", "frozen": ["*.self_attn.*"]}.items():
            done = self.saving(model={"path": str(folder / "matrices")}, data=self.few_tokens(23),
                               ballast={**TINY["ballast"], "steps": 2, "save_weights": True,
                                        "train": patterns})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.run_well("export", "run", "--out", name)
            types = {key: value[0] for key, value in read_folder(self.path / name).items()}
            self.assertEqual(types[codes], "F8_E4M3" if name == "frozen" else "BF16")
            self.assertEqual(scale in types, name == "frozen")
            self.assertNotIn("model.layers.0.self_attn.q_proj.activation_scale", types)
            self.assertAlmostEqual(self.eval_loss(name, "one.bin"), loss, delta=2e-4)  # rounded to bf16
            shutil.rmtree(self.path / "run")
        done = self.saving(model={"path": str(folder / "matrices")}, data=self.few_tokens(23))
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.run_ballast("export", "run", "--out", "codes", "--codes")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("has scales [], but Ballast quantises FP8 only in blocks of 128 x 128", done.stderr)

    def test_a_run_that_trained_the_pad_token_continues_to(self):
        self.llama(pad_token_id=2)
        data = self.few_tokens(23)
        losses = lambda name: [json.loads(row)["loss"] for row
                               in (self.path / name / "metrics.jsonl").read_text().splitlines()]

        def train(name, *arguments, steps, model=None):
            done = self.saving(*arguments, "--out", name, model=model, data=data, optimizer=MOVING,
                               ballast={**TINY["ballast"], "steps": steps, "checkpoint_every": 2})
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout + done.stderr

        off = {"path": "model", "pad_token_id": None}
        train("off", steps=4, model=off)
        train("on", steps=4)
        self.assertNotEqual(losses("off")[2:], losses("on")[2:])
        train("part", steps=2, model=off)
        shutil.copytree(self.path / "part", self.path / "changed")
        line = "was written without model.pad_token_id, so the run continues to train the row of token 2"
        self.assertIn(line, train("part", "--resume", steps=4))
        self.assertEqual(losses("part"), losses("off"))
        allowed = train("changed", "--resume", "--allow-change", "model.pad_token_id", steps=4)
        self.assertNotIn(line, allowed)
        self.assertNotEqual(losses("changed"), losses("off"))
        refused = self.saving("--out", "on", "--resume", model=off, data=data, steps=6,
                              optimizer=MOVING)
        self.assertIn("model.pad_token_id 2 -> none", refused.stderr)

    def test_halves_and_a_single_file_too(self):
        tensors = self.llama("F16", torch_dtype="float16")
        self.assertEqual(self.saving().returncode, 0)
        self.run_well("export", "run", "--out", "out")
        self.assertEqual(read_folder(self.path / "out"), tensors)
        self.assertEqual(sorted(path.name for path in (self.path / "out").iterdir()),
                         sorted(path.name for path in self.model.iterdir() if path.name != "README.md"))
        self.run_well("export", "run", "--out", "one", "--shard-size", "1GB")
        self.assertEqual(read_file(self.path / "one/model.safetensors"), tensors)

    def test_a_model_of_sizes_has_a_config_and_can_be_imported(self):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "shared_expert_intermediate_size": 16}
        for family, more in (("llama", {}), ("gpt2", {}), ("qwen2_moe", experts)):
            model = {**TINY["model"], "family": family, "num_kv_heads": None, "max_sequence": 40,
                     **more}
            config = self.saving("--overwrite", "--out", family, model=model,
                                 optimizer=TINY["optimizer"])
            self.assertEqual(config.returncode, 0, config.stderr)
            trained = self.rows(family)[-1]
            done = self.saving("--overwrite", model={"path": f"{family}/weights"}, steps=1)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(read_folder(self.path / "run/weights"),
                             read_folder(self.path / family / "weights"))
            # The weights that the first run ended with, evaluated on the same data.
            self.assertEqual(self.rows()[-1]["eval_loss"], trained["eval_loss"])
            self.assertEqual((self.path / "run/weights/config.json").read_bytes(),
                             (self.path / family / "weights/config.json").read_bytes())

    def test_plan_print_config_and_the_frozen_config_know_the_model(self):
        self.llama()
        self.assertEqual(self.saving("--set", "optimizer.params.lr=1e-3").returncode, 0)
        printed = json.loads(self.run_well("train", "config.json", "--print-config"))["model"]
        self.assertEqual((printed["hidden_size"], printed["weights"]), (48, str(self.model)))
        frozen = self.path / "run/config.json"
        self.assertEqual(json.loads(frozen.read_text())["model"], printed)
        losses = [row["loss"] for row in self.rows()]
        self.run_well("train", frozen, "--out", "again")
        self.assertEqual([row["loss"] for row in self.rows("again")], losses)
        self.assertEqual(read_folder(self.path / "again/weights"),
                         read_folder(self.path / "run/weights"))
        rates = next((FIXTURES.parent.parent.parent / "configs/rates").glob("*.json"))
        plan = self.run_well("plan", "config.json", "--rates", rates, "--json")
        self.assertGreater(len(json.loads(plan)), 0)

    def test_options_name_the_model_and_the_data(self):
        self.llama()
        self.assertEqual(self.saving().returncode, 0)
        config = json.loads((self.path / "config.json").read_text())
        tokens = config.pop("data")["tokens"][0]
        del config["model"]
        (self.path / "deepspeed.json").write_text(json.dumps(config))
        named = ("deepspeed.json", "--model", "model", "--data", tokens)
        self.run_well("train", *named, "--sequence-length", "32", "--out", "named")
        self.assertEqual([row["loss"] for row in self.rows("named")], [row["loss"] for row in self.rows()])
        printed = json.loads(self.run_well("train", *named, "--print-config"))
        self.assertEqual(printed["data"]["sequence_length"], 48)  # the model's longest
        printed = json.loads(self.run_well("train", *named, "--set", "data.sequence_length=24", "--print-config"))
        self.assertEqual(printed["data"]["sequence_length"], 24)
        (self.path / "text.txt").write_text("text")
        done = self.run_ballast("train", *named, "--data", "text.txt")
        self.assertEqual(done.returncode, 2)
        self.assertIn("text.txt one of text; give one kind", done.stderr)

    def test_gpt2_notes_dropout(self):
        write_file(self.model / "model.safetensors", read_file(FIXTURES / "gpt2.initial.safetensors"))
        (self.model / "config.json").write_text(json.dumps(GPT2))
        done = self.saving()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("attn_pdrop is 0.1", done.stderr)
        self.run_well("export", "run", "--out", "out")
        self.assertEqual(read_folder(self.path / "out"), read_folder(self.model))
        # Names of the hub: without "transformer.", with causal masks.
        tensors = {name.removeprefix("transformer."): tensor
                   for name, tensor in read_folder(self.model).items()}
        tensors["h.0.attn.bias"] = ("U8", [1, 1, 48, 48], bytes(48 * 48))
        write_file(self.model / "model.safetensors", tensors)
        self.assertEqual(self.saving("--overwrite").returncode, 0)
        self.run_well("export", "run", "--out", "headless")
        self.assertEqual(read_folder(self.path / "headless"), tensors)

    def test_bad_folders_are_one_line(self):
        self.llama(decoder=4096)
        self.assert_fails(self.saving(), 2, "model.path", "config.json: decoder is 4096")
        self.llama(num_hidden_layers=3)
        self.assert_fails(self.saving(), 1, "model.weights", INDEX, "has no tensor 'model.layers.2.")
        self.llama()
        (self.model / "model-00002-of-00003.safetensors").unlink()
        for done in (self.saving(), self.run_ballast("inspect", "model"),
                     self.run_ballast("export", "model", "--out", "out")):
            self.assert_fails(done, 1, "names 3 files, of which 1 is missing",
                              "(model-00002-of-00003.safetensors); download it")
        self.llama()
        done = self.saving("--set", "model.hidden_size=64")
        self.assert_fails(done, 2, "model.hidden_size", "model.path (", "remove one")
        self.assertFalse((self.path / "out").exists())
        self.assertFalse((self.path / "run").exists())

    def test_a_failed_export_leaves_nothing(self):
        self.llama()
        before = set(self.path.iterdir())

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
        done = self.run_ballast("export", "model", "--out", "out", "--dtype", "fp32", limits=limit)
        self.assert_fails(done, 1, "out.tmp-", "-of-00003.safetensors", "File too large")
        (self.path / "full").mkdir()
        (self.path / "full/file").write_text("mine")
        for out, words in (("full", "exists"), ("full/file", "is a file, not a folder"),
                           ("model", "exists")):
            self.assert_fails(self.run_ballast("export", "model", "--out", out), 2, out, words)
        self.assertEqual(set(self.path.iterdir()), before | {self.path / "full"})
        self.assert_fails(self.run_ballast("export", "model", "--out", "x", "--dtype", "int8"), 2,
                          "--dtype")

    def test_a_run_that_cannot_save_keeps_its_metrics(self):
        self.llama()

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        done = self.saving(limits=limit, zero_optimization={"stage": 1})
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\Aballast: error: .*model.safetensors: File too large\n\Z")
        self.assertIn("done in", done.stdout)
        self.assertNotIn("weights in", done.stdout)
        self.assertEqual({entry.name for entry in (self.path / "run").iterdir()}, RUN_FILES)
        self.assert_fails(self.run_ballast("export", "run", "--out", "out"), 1,
                          "is a run without weights")
        self.assertEqual(self.saving("--overwrite").returncode, 0)
        self.assertEqual(len(read_folder(self.path / "run/weights")), 21)

    def test_overwriting_replaces_only_files_of_a_model(self):
        self.llama()
        (self.path / "run/weights").mkdir(parents=True)
        (self.path / "run/weights/thesis.txt").write_text("mine")
        self.assert_fails(self.saving(), 2, "run/weights exists", "--overwrite")
        self.assert_fails(self.saving("--overwrite"), 2, "run/weights is not from a run")
        (self.path / "run/metrics.jsonl").write_text("")  # metrics of a run without steps
        self.assert_fails(self.saving("--overwrite"), 2, "weights/thesis.txt is not a file of a model")
        (self.path / "run/weights/thesis.txt").unlink()
        (self.path / "run/weights/model-00001-of-00002.safetensors").write_text("old")
        self.assertEqual(self.saving("--overwrite").returncode, 0)
        self.assertEqual({entry.name for entry in (self.path / "run/weights").iterdir()},
                         {"config.json", "generation_config.json", "tokenizer.json",
                          "model.safetensors", "imported_layout.json"})

    def test_inspect_lists_what_is_there(self):
        tensors = self.llama()
        for path in ("model", f"model/{INDEX}"):
            listed = json.loads(self.run_well("inspect", path, "--json"))
            self.assertEqual(listed["files"], 3)
            self.assertEqual(listed["bytes"], sum(len(data) for _, _, data in tensors.values()))
            self.assertEqual({entry["name"]: (entry["dtype"], entry["shape"], entry["bytes"])
                              for entry in listed["tensors"]},
                             {name: (dtype, shape, len(data))
                              for name, (dtype, shape, data) in tensors.items()})
        table = self.run_well("inspect", "model/model-00001-of-00003.safetensors").splitlines()
        self.assertRegex(table[1], r"^  \S+ +BF16 +\S+ \S+  \[[\d,]+\]$")
        self.assertRegex(table[-1], r"^7 tensors in 1 file, \S+ elements, \S+ KiB \(BF16 ")
        self.assert_fails(self.run_ballast("inspect", "text.txt"), 1, "text.txt is text, not safetensors")
        self.assert_fails(self.run_ballast("inspect", "."), 1, "neither model.safetensors nor")


if __name__ == "__main__":
    main()
