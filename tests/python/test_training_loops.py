"""The optimizers in training loops of other libraries, each compared with torch's optimizer,
without and with overlap: the losses are torch's, and overlap changes no bit. Needs torch."""

import contextlib
import functools
import importlib.util
import io
import os
import pathlib
import tempfile
import unittest
import warnings

try:
    import torch
    import torch.distributed
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW
from small_gpt import bits, loss_of, make_model, tokens, train

STEPS = 4
KINDS = ("torch", "synchronous", "overlap")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


def optimizer_of(kind: str, model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "torch":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)
    return OffloadAdamW(parameters, lr=lr, weight_decay=0.1, model=model, overlap=kind == "overlap")


def finish(optimizer: torch.optim.Optimizer) -> None:
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


@functools.cache
def quietly() -> None:
    """Silences trainers, which print tables and warn about features that a tiny run on a CPU
    lacks."""
    warnings.simplefilter("ignore")
    if importlib.util.find_spec("transformers"):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()


class Loops(unittest.TestCase):
    def assert_alike(self, run) -> None:
        """`run(kind)` returns losses and a trained model."""
        quietly()
        results = {}
        for kind in KINDS:
            torch.manual_seed(0)
            with contextlib.redirect_stdout(io.StringIO()):
                losses, model = run(kind)
            results[kind] = losses, bits(model)
            self.assertTrue(losses)
        self.assertTrue(results["synchronous"] == results["overlap"], "overlap changes the results")
        self.assertEqual(len(results["torch"][0]), len(results["overlap"][0]))
        for mine, its in zip(results["overlap"][0], results["torch"][0]):
            self.assertAlmostEqual(mine, its, delta=2e-6 * max(1.0, abs(its)))


# transformers and libraries built on it


def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>",
                                   eos_token="</s>", unk_token="<unk>")


def sentence(seed: int, words: int = 8) -> str:
    numbers = torch.randint(60, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(number)}" for number in numbers)


def options(folder: str, **more):
    return {"output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "use_cpu": True, "bf16": False, "logging_steps": 1,
            "report_to": [], "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.5,
            "lr_scheduler_type": "linear", "seed": 3, **more}


def losses_of(trainer) -> list[float]:
    return [row[key] for row in trainer.state.log_history for key in ("loss", "grad_norm") if key in row]


@needs("transformers", "accelerate")
class Transformers(Loops):
    def trainer(self, kind: str, folder: str, **more):
        from transformers import Trainer, TrainingArguments

        model = tiny_llama()
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 64, (32, 9))]
        return Trainer(model=model, args=TrainingArguments(**options(folder, **more)), train_dataset=rows,
                       optimizers=(optimizer_of(kind, model), None))

    def test_trainer(self) -> None:
        def run(kind: str):
            with tempfile.TemporaryDirectory() as folder:
                trainer = self.trainer(kind, folder)
                trainer.train()
                finish(trainer.optimizer)
                return losses_of(trainer), trainer.model

        self.assert_alike(run)

    def test_trainer_resumes_with_the_same_bits(self) -> None:
        quietly()
        for kind in ("synchronous", "overlap"):
            with self.subTest(kind), tempfile.TemporaryDirectory() as folder:
                saving = {"save_strategy": "steps", "save_steps": 2}
                with contextlib.redirect_stdout(io.StringIO()):
                    torch.manual_seed(0)
                    whole = self.trainer(kind, folder, **saving)
                    whole.train()
                    finish(whole.optimizer)
                    torch.manual_seed(0)
                    resumed = self.trainer(kind, folder, **saving)
                    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
                    finish(resumed.optimizer)
                self.assertTrue(bits(whole.model) == bits(resumed.model))

    @needs("trl", "datasets")
    def test_sft(self) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"text": sentence(i)} for i in range(16)])

        def run(kind: str):
            with tempfile.TemporaryDirectory() as folder:
                model = tiny_llama()
                trainer = SFTTrainer(model=model, args=SFTConfig(**options(folder, max_length=16)),
                                     train_dataset=data, processing_class=tiny_tokenizer(),
                                     optimizers=(optimizer_of(kind, model), None))
                trainer.train()
                finish(trainer.optimizer)
                return losses_of(trainer), trainer.model

        self.assert_alike(run)

    @needs("trl", "datasets")
    def test_dpo(self) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        data = Dataset.from_list([{"prompt": sentence(i), "chosen": " " + sentence(i + 100),
                                   "rejected": " " + sentence(i + 200)} for i in range(16)])

        def run(kind: str):
            with tempfile.TemporaryDirectory() as folder:
                model = tiny_llama()
                trainer = DPOTrainer(model=model, ref_model=tiny_llama(), args=DPOConfig(**options(folder)),
                                     train_dataset=data, processing_class=tiny_tokenizer(),
                                     optimizers=(optimizer_of(kind, model), None))
                trainer.train()
                finish(trainer.optimizer)
                return losses_of(trainer), trainer.model

        self.assert_alike(run)

    @needs("peft", "trl", "datasets")
    def test_sft_of_adapters_with_an_optimizer_that_the_trainer_makes(self) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"text": sentence(i)} for i in range(16)])

        def run(kind: str):
            made = ((torch.optim.AdamW, {"lr": 1e-2}) if kind == "torch" else
                    (OffloadAdamW, {"lr": 1e-2}))
            with tempfile.TemporaryDirectory() as folder:
                trainer = SFTTrainer(model=tiny_llama(), args=SFTConfig(**options(folder, max_length=16)),
                                     train_dataset=data, processing_class=tiny_tokenizer(),
                                     peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
                                     optimizer_cls_and_kwargs=made)
                trainer.train()
                return losses_of(trainer), trainer.model

        self.assert_alike(run)


@needs("transformers", "peft")
class Adapters(Loops):
    def test_switching_keeps_the_moments_of_each(self) -> None:
        from peft import LoraConfig, get_peft_model

        def run(kind: str):
            config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            model = get_peft_model(tiny_llama(), config, adapter_name="a")
            model.add_adapter("b", config)
            adapters = [p for name, p in model.named_parameters() if "lora_" in name]
            if kind == "torch":
                optimizer = torch.optim.AdamW(adapters, lr=1e-2)
            else:
                optimizer = OffloadAdamW(adapters, lr=1e-2, model=model, overlap=kind == "overlap")
            losses = []
            for step in range(9):
                model.set_adapter("ab"[step // 2 % 2])
                ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(step))
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            finish(optimizer)
            return losses, model

        self.assert_alike(run)


@needs("accelerate")
class Accelerate(Loops):
    def test_accumulation_clipping_and_scheduler(self) -> None:
        from accelerate import Accelerator

        def run(kind: str):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            plain = make_model()
            made = optimizer_of(kind, plain)
            schedule = torch.optim.lr_scheduler.LinearLR(made, 0.1, total_iters=4)
            loader = torch.utils.data.DataLoader([tokens(i) for i in range(2 * STEPS)], batch_size=None)
            model, optimizer, loader, schedule = accelerator.prepare(plain, made, loader, schedule)
            losses = []
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            finish(made)
            accelerator.free_memory()
            return losses, plain

        self.assert_alike(run)


# PyTorch itself


class Compiled(Loops):
    def test_before_and_after_the_optimizer_is_made(self) -> None:
        for first in (False, True):
            def run(kind: str):
                torch._dynamo.reset()
                model = make_model()
                compiled = torch.compile(model, backend="eager")
                if first:  # like an evaluation before training
                    loss_of(compiled, tokens(99))
                optimizer = optimizer_of(kind, model)
                losses = train(compiled, optimizer, range(STEPS), clip=0.5)
                finish(optimizer)
                return losses, model

            with self.subTest(first=first):
                self.assert_alike(run)


def join_alone(folder: str, rank: int = 0, world: int = 1) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank,
                                         world_size=world)


@unittest.skipUnless(torch.distributed.is_available(), "this torch has no torch.distributed")
class Checkpoints(Loops):
    """torch.distributed.checkpoint."""

    def run_with_checkpoints(self, kind: str):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model = make_model()
        optimizer = optimizer_of(kind, model)
        with tempfile.TemporaryDirectory() as folder:
            join_alone(folder)
            try:
                losses = train(model, optimizer, range(STEPS))
                weights, states = get_state_dict(model, optimizer)
                future = dcp.async_save({"model": weights, "optimizer": states},
                                        checkpoint_id=os.path.join(folder, "saved"))
                losses += train(model, optimizer, range(STEPS, 2 * STEPS))  # trains while it is
                                                                            # written
                future.result()
                again = make_model()
                for parameter in again.parameters():
                    torch.nn.init.zeros_(parameter)
                other = optimizer_of(kind, again, lr=7.0)
                weights, states = get_state_dict(again, other)
                dcp.load({"model": weights, "optimizer": states},
                         checkpoint_id=os.path.join(folder, "saved"))
                set_state_dict(again, other, model_state_dict=weights, optim_state_dict=states)
                losses += train(again, other, range(STEPS, 2 * STEPS))
            finally:
                torch.distributed.destroy_process_group()
        finish(optimizer)
        finish(other)
        return losses, model, again

    def test_asynchronous_checkpoints(self) -> None:
        def run(kind: str):
            losses, model, again = self.run_with_checkpoints(kind)
            self.assertEqual(losses[STEPS:2 * STEPS], losses[2 * STEPS:], f"{kind}: the resumed losses differ")
            self.assertTrue(bits(model) == bits(again), f"{kind}: the resumed weights differ")
            return losses, model

        self.assert_alike(run)

    def test_reading_the_state_changes_nothing(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        def run(kind: str):
            model = make_model()
            optimizer = optimizer_of(kind, model)
            losses = []
            for step in range(STEPS):
                losses += train(model, optimizer, range(step, step + 1))
                state = get_optimizer_state_dict(model, optimizer)["state"]
                losses += [float(entry["step"]) for entry in state.values()]
                losses += [entry["exp_avg_sq"].sum().item() for entry in state.values()]
            finish(optimizer)
            return losses, model

        self.assert_alike(run)


def ddp_rank(rank: int, folder: str) -> None:
    """One rank trains with each kind of optimizer, on its own tokens."""
    torch.set_num_threads(1)
    join_alone(folder, rank, 2)
    results = {}
    for kind in KINDS:
        plain = make_model()
        model = torch.nn.parallel.DistributedDataParallel(plain)
        optimizer = optimizer_of(kind, model)
        losses = []
        for step in range(2 * STEPS):
            model.require_backward_grad_sync = step % 2 == 1
            loss = loss_of(model, tokens(2 * step + rank))
            loss.backward()
            losses.append(loss.item())
            if step % 2 == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        saved = {name: value.clone() for name, value in model.module.state_dict().items()}
        finish(optimizer)
        same = all(torch.equal(saved[name], value) for name, value in model.module.state_dict().items())
        results[kind] = {"losses": losses, "bits": bits(plain), "saved": same}
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@unittest.skipUnless(torch.distributed.is_available(), "this torch has no torch.distributed")
class Ranks(Loops):
    def test_ddp(self) -> None:
        import torch.multiprocessing

        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(ddp_rank, (folder,), nprocs=2)
            ranks = [torch.load(pathlib.Path(folder, f"{rank}.pt")) for rank in range(2)]
        for rank in ranks:
            self.assertTrue(rank["overlap"]["saved"], "module.state_dict() was read in mid step")
            self.assertTrue(rank["synchronous"] == rank["overlap"], "overlap changes the results")
            for mine, its in zip(rank["overlap"]["losses"], rank["torch"]["losses"]):
                self.assertAlmostEqual(mine, its, delta=2e-6 * its)
        self.assertTrue(ranks[0]["overlap"]["bits"] == ranks[1]["overlap"]["bits"], "the ranks differ")


if __name__ == "__main__":
    unittest.main()
