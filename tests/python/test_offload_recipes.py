"""The recipes of the manual for frameworks, with the frameworks themselves. Needs torch."""

import contextlib
import importlib.util
import io
import os
import socket
import tempfile
import unittest

try:
    import torch
    import torch.distributed
    import torch.multiprocessing
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

import ballast
from offload_models import llama, same, state, tokens
from recipes import MANUAL, Door, check, quietly, recipe


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


def rows(count):
    return [{"input_ids": tokens(i)[0], "labels": tokens(i)[0]} for i in range(count)]


def words(seed, count):
    return " ".join(f"w{(seed * 7 + i * i) % 100}" for i in range(count))


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(100))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   unk_token="<unk>")


def losses_of(trainer):
    return [row[name] for row in trainer.state.log_history for name in ("loss", "eval_loss", "grad_norm")
            if name in row]


class Manual(unittest.TestCase):
    RECIPES = ("transformers", "TRL SFT", "TRL DPO", "PEFT", "Accelerate", "diffusers", "Lightning")

    def test_recipes_have_five_lines_at_most(self):
        for name in self.RECIPES:
            self.assertLessEqual(len(recipe(name).splitlines()), 5, name)

    def test_it_is_short(self):
        self.assertLessEqual(len(MANUAL.read_text(encoding="utf-8").splitlines()), 300)


@quietly
@needs("transformers", "accelerate")
class Transformers(unittest.TestCase):
    def names(self, folder, **more):
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(folder, **{
            "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 3,
            "eval_steps": 3, "eval_strategy": "steps", "gradient_checkpointing": True, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "disable_tqdm": True, **more})
        return {"model": llama(3), "arguments": arguments, "data": rows(16), "held_out": rows(4),
                "Trainer": Trainer}

    def test_trainer(self):
        def loop(door, folder):
            names = door.run("transformers", self.names(folder))
            names["trainer"].save_model(f"{folder}/last")
            read = type(names["model"]).from_pretrained(f"{folder}/last")
            return names["model"], [losses_of(names["trainer"]), state(read)]
        check(loop)

    def test_trainer_in_bf16_with_torch_s_optimizer(self):
        def loop(door, folder):
            names = self.names(folder, bf16=True, optim="adamw_torch")
            door.module.OffloadAdamW = torch.optim.AdamW
            names = door.run("transformers", names)
            return names["model"], losses_of(names["trainer"])
        check(loop)

    def test_resume_from_a_checkpoint(self):
        def loop(door, folder):
            first = door.run("transformers", self.names(folder))
            second = self.names(folder)
            door.offload(second["model"], None)
            trainer = first["Trainer"](
                second["model"], second["arguments"], train_dataset=second["data"], eval_dataset=second["held_out"],
                optimizer_cls_and_kwargs=(ballast.OffloadAdamW, {"lr": 1e-3}))
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
            same(state(first["model"]), state(second["model"]), "resumed")
            return second["model"], losses_of(trainer)
        check(loop)


@quietly
@needs("transformers", "trl", "peft", "datasets")
class TRL(unittest.TestCase):
    OPTIONS = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": [],
               "use_cpu": True, "bf16": False, "logging_steps": 1, "disable_tqdm": True}

    def train(self, door, folder, name, names, data):
        from datasets import Dataset
        from peft import LoraConfig
        from safetensors.torch import load_file

        names = door.run(name, {
            **names, "model": llama(3), "data": Dataset.from_list(data), "tokenizer": word_tokenizer(),
            "LoraConfig": lambda **more: LoraConfig(target_modules="all-linear", **more)})
        names["trainer"].save_model(f"{folder}/last")
        return names["model"], [losses_of(names["trainer"]), load_file(f"{folder}/last/adapter_model.safetensors")]

    def test_sft(self):
        def loop(door, folder):
            from trl import SFTConfig, SFTTrainer

            names = {"SFTTrainer": SFTTrainer, "arguments": SFTConfig(folder, **self.OPTIONS)}
            return self.train(door, folder, "TRL SFT", names, [{"text": words(i, 12)} for i in range(16)])
        check(loop)
        check(loop, trained="auto")

    def test_dpo(self):
        def loop(door, folder):
            from trl import DPOConfig, DPOTrainer

            names = {"DPOTrainer": DPOTrainer, "arguments": DPOConfig(folder, **self.OPTIONS)}
            return self.train(door, folder, "TRL DPO", names, [
                {"prompt": words(i, 4), "chosen": f" {words(i + 1, 5)}", "rejected": f" {words(i + 2, 6)}"}
                for i in range(16)])
        check(loop)


def sft_on_rank(rank, folder, port):
    """Trains adapters on one of two ranks, with frozen weights that both share, and with a plain model."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    found = []
    for offloaded in (False, True):
        door = Door(offloaded, trained="auto", shared=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments = SFTConfig(folder, **TRL.OPTIONS)  # begins torch.distributed
            names = door.run("TRL SFT", {
                "SFTTrainer": SFTTrainer, "arguments": arguments, "model": llama(3).requires_grad_(False),
                "data": Dataset.from_list([{"text": words(i, 12)} for i in range(16)]), "tokenizer": word_tokenizer(),
                "LoraConfig": lambda **more: LoraConfig(target_modules="all-linear", **more)})
        found.append([losses_of(names["trainer"]), state(names["model"])])
    same(*found)
    wrapped, report = names["trainer"].model_wrapped, door.handles[0].report()
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert 0 < report.shared_bytes == sum(report.units.values()), report
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert name in wrapped.parameters_to_ignore and name in dict(wrapped.module.named_parameters())
    torch.distributed.destroy_process_group()


@unittest.skipUnless(torch.distributed.is_available(), "this torch has no torch.distributed")
@needs("transformers", "trl", "peft", "datasets")
class TRLOnRanks(unittest.TestCase):
    def test_sft_with_shared_weights(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            torch.multiprocessing.spawn(sft_on_rank, (folder, port), nprocs=2)


@quietly
@needs("transformers", "peft")
class PEFT(unittest.TestCase):
    def test_adapters(self):
        from peft import LoraConfig, get_peft_model

        def loop(door, folder):
            def train(model):
                optimizer = ballast.OffloadAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
                for step in range(3):
                    seen.append(model(input_ids=tokens(step), labels=tokens(step)).loss)
                    seen[-1].backward()
                    optimizer.step()
                    optimizer.zero_grad()
                model.save_pretrained(folder)

            seen = []
            names = door.run("PEFT", {"model": llama(3), "train": train, "LoraConfig": LoraConfig,
                                      "get_peft_model": get_peft_model})
            with torch.no_grad():
                seen.append(names["model"](input_ids=tokens(9)).logits)
            return names["model"], seen
        check(loop)
        check(loop, trained="auto")


@quietly
@needs("accelerate", "transformers")
class Accelerate(unittest.TestCase):
    def test_loop_with_accumulation_and_saved_states(self):
        from accelerate import Accelerator

        def loop(door, folder):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            loader = torch.utils.data.DataLoader(rows(16), batch_size=2)
            names = door.run("Accelerate", {"model": llama(3), "accelerator": accelerator, "loader": loader})
            model, optimizer = names["model"], names["optimizer"]

            def epoch():
                seen = []
                for number, batch in enumerate(names["loader"]):
                    with accelerator.accumulate(model):
                        loss = model(**batch).loss
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
                    seen.append(loss.detach())
                    if number == 3:
                        accelerator.save_state(folder)
                return seen

            epoch()
            accelerator.load_state(folder)
            seen = epoch()
            accelerator.free_memory()
            return model, seen
        check(loop)


@quietly
@needs("diffusers", "peft", "accelerate")
class Diffusers(unittest.TestCase):
    def make(self):
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(0)
        return FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])

    def batch(self, step):
        g = torch.Generator().manual_seed(step)
        of = lambda *shape: torch.randn(*shape, generator=g).to(torch.bfloat16)
        return {"hidden_states": of(2, 16, 4), "timestep": torch.rand(2, generator=g), "guidance": None,
                "pooled_projections": of(2, 32), "encoder_hidden_states": of(2, 8, 32),
                "txt_ids": torch.zeros(8, 3), "img_ids": torch.zeros(16, 3), "return_dict": False}

    def test_lora_script(self):
        from accelerate import Accelerator
        from diffusers import FluxPipeline
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig
        from peft.utils import get_peft_model_state_dict
        from safetensors.torch import load_file

        def loop(door, folder):
            transformer = self.make().requires_grad_(False)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            door.run("diffusers", {"transformer": transformer, "weight_dtype": torch.bfloat16,
                                   "accelerator": accelerator})
            transformer.enable_gradient_checkpointing()
            transformer.add_adapter(LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"],
                                               init_lora_weights="gaussian"))
            cast_training_params(transformer, dtype=torch.float32)
            adapters = [p for p in transformer.parameters() if p.requires_grad]
            wrapped, optimizer = accelerator.prepare(transformer, torch.optim.AdamW(adapters, lr=1e-2))
            seen = []
            for step in range(6):
                with accelerator.accumulate(wrapped), torch.autocast("cpu", torch.bfloat16):
                    batch = self.batch(step)
                    seen.append((wrapped(**batch)[0].float() - batch["hidden_states"]).pow(2).mean())
                    accelerator.backward(seen[-1])
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(adapters, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            layers = get_peft_model_state_dict(accelerator.unwrap_model(wrapped))
            FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
            seen.append(load_file(os.path.join(folder, "pytorch_lora_weights.safetensors")))
            return transformer, seen
        check(loop, trained="auto")


@quietly
@needs("lightning", "transformers")
class Lightning(unittest.TestCase):
    def test_fit_and_resume(self):
        import lightning.pytorch as pl

        def module(door):
            found = door.run("Lightning", {})

            class Module(pl.LightningModule):
                handle = None
                configure_model = found["configure_model"]
                configure_optimizers = found["configure_optimizers"]

                def __init__(self):
                    super().__init__()
                    self.model = llama(3)

                def training_step(self, batch, _):
                    loss = self.model(**batch).loss
                    self.log("loss", loss)
                    return loss

                def validation_step(self, batch, _):
                    self.log("held out", self.model(**batch).loss)

            return Module()

        def trainer(steps, folder):
            return pl.Trainer(
                max_steps=steps, accelerator="cpu", default_root_dir=folder, accumulate_grad_batches=2,
                gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False)

        def loop(door, folder):
            loaders = [torch.utils.data.DataLoader(rows(count), batch_size=2) for count in (16, 4)]
            first, half = trainer(3, folder), module(door)
            first.fit(half, *loaders)
            first.save_checkpoint(f"{folder}/half.ckpt")
            second, whole = trainer(6, folder), module(door)
            second.fit(whole, *loaders, ckpt_path=f"{folder}/half.ckpt")
            return whole.model, [state(half.model), dict(first.callback_metrics), dict(second.callback_metrics)]
        check(loop)


if __name__ == "__main__":
    unittest.main()
