"""ballast.offload() with transformers, PEFT, bitsandbytes, quantised tensors and DistributedDataParallel. Needs torch."""

import copy
import importlib.util
import os
import tempfile
import unittest

try:
    import torch
    import torch.distributed
    import torch.multiprocessing
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

import torch.nn.functional as F
from torch import nn

import ballast
import fake_device
from offload_models import (WIDTH, DiT, LoRA, compare, data, dit, llama, same, sgd, state, tokens, train,
                            train_on_text)
from support import join_ranks


def needs(package):
    return unittest.skipIf(importlib.util.find_spec(package) is None, f"{package} is not installed")


@needs("transformers")
class Transformers(unittest.TestCase):
    def test_models_of_text(self):
        from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

        def gpt2():
            torch.manual_seed(0)
            return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=4, n_head=4, vocab_size=128, n_positions=64,
                                              bos_token_id=0, eos_token_id=1))

        def experts():
            torch.manual_seed(0)
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(
                vocab_size=128, hidden_size=WIDTH, intermediate_size=64, moe_intermediate_size=32,
                num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
                num_experts_per_tok=2, output_router_logits=True))

        def checkpointed(reentrant):
            def make():
                model = llama(4)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.train()
                model.config.use_cache = False
                if reentrant:
                    model.enable_input_require_grads()
                return model
            return make

        def loop(model, _):
            torch.manual_seed(5)  # dropout
            return train_on_text(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))

        for make in (gpt2, experts, checkpointed(False), checkpointed(True)):
            compare(make, loop, 2)

    def test_saved_and_read_again(self):
        def loop(model, _):
            train_on_text(model, sgd(model), range(2))
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                with torch.no_grad():
                    return type(copy.deepcopy(model)).from_pretrained(folder)(input_ids=tokens(3)).logits
        compare(lambda: llama(3), loop, 2, strict=False)

    def test_generation(self):
        def loop(model, _):
            return model.generate(tokens(0, 4), max_new_tokens=4, do_sample=False)
        compare(lambda: llama(3).eval(), loop, 1, strict=False)


@needs("peft")
@needs("transformers")
class Adapters(unittest.TestCase):
    def test_added_switched_merged_and_unloaded(self):
        from peft import LoraConfig, get_peft_model

        def loop(model, handle):
            model(input_ids=tokens(0))
            torch.manual_seed(1)
            wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
            seen = train_on_text(wrapped, sgd(wrapped), range(2))
            wrapped.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
            wrapped.set_adapter("b")
            seen += train_on_text(wrapped, sgd(wrapped), range(3, 5))
            wrapped.set_adapter("default")
            wrapped.eval()
            with torch.no_grad():
                seen.append(wrapped(input_ids=tokens(9)).logits)
                with handle.on_host() if handle else torch.no_grad():
                    wrapped.merge_adapter()
                seen.append(wrapped(input_ids=tokens(9)).logits)
                with handle.on_host() if handle else torch.no_grad():
                    wrapped.unmerge_adapter()
                with wrapped.disable_adapter():
                    seen.append(wrapped(input_ids=tokens(9)).logits)
            wrapped.train()
            seen += train_on_text(wrapped, sgd(wrapped), range(5, 7))
            merged = copy.deepcopy(wrapped).merge_and_unload()
            seen.append({name: p.detach().clone() for name, p in merged.named_parameters()})
            return seen
        for trained in ("stream", "keep"):
            compare(lambda: llama(3).requires_grad_(trained == "stream"), loop, 3, trained=trained)


class Int8(torch.Tensor):
    """A weight of int8 codes with scales, as those of torchao."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Int8(inner["codes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return Int8(args[0].codes, args[0].scale)
        args = [a.codes.float() * a.scale if isinstance(a, Int8) else a for a in args]
        return func(*args, **(kwargs or {}))


def int8_of(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Codes(nn.Module):
    """A frozen linear layer with codes in buffers."""

    def __init__(self, linear):
        super().__init__()
        codes, scale = int8_of(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return F.linear(x, self.codes.float() * self.scale)


class Float8(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def with_codes(linear):
    return Codes(linear)


def with_float8(linear):
    linear.__class__ = Float8
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return linear


def with_subclass(linear):
    linear.weight = nn.Parameter(Int8(*int8_of(linear.weight.detach())), requires_grad=False)
    return linear


SHARED = {}


def with_nf4(linear):
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict({"weight": linear.weight.detach()})
    layer = layer.to("cpu")
    state = layer.weight.quant_state
    state.code = SHARED.setdefault("code", state.code)  # as versions of bitsandbytes share it
    return layer


class Quantised(unittest.TestCase):
    """LoRA over quantised frozen weights, which move as bytes."""

    def check_kind(self, quantise, *parts):
        def make():
            torch.manual_seed(0)
            model = DiT(4).requires_grad_(False)
            for block in model.blocks:
                for name in "qkv":
                    setattr(block.attn, name, LoRA(quantise(getattr(block.attn, name))))
            return model
        _, handle = compare(make, lambda model, _: train(model, 3), 2, trained="keep", strict=False)
        moving = {member.name for unit in handle.passes.units for member in unit.members}
        staying = set(handle.report().staying)
        for part in parts:
            self.assertIn(f"blocks.1.attn.q.base.{part}", moving)
        self.assertFalse(any(name.endswith("q.base.weight") for name in staying), staying)
        return handle

    def test_codes_in_buffers(self):
        self.check_kind(with_codes, "codes")

    def test_float8(self):
        self.check_kind(with_float8, "weight")

    def test_subclasses(self):
        self.check_kind(with_subclass, "weight.codes", "weight.scale")

    @needs("bitsandbytes")
    def test_nf4(self):
        handle = self.check_kind(with_nf4, "weight", "weight.absmax", "weight.code")
        members = [id(member.tensor) for unit in handle.passes.units for member in unit.members]
        self.assertEqual(len(members), len(set(members)))

    def test_trained_subclasses_are_refused(self):
        model = DiT(2)
        model.blocks[0].attn.q.weight = nn.Parameter(
            Int8(*int8_of(torch.randn(WIDTH, WIDTH))).requires_grad_(True), requires_grad=True)
        with self.assertRaisesRegex(ballast.UsageError, r"^blocks\.0\.attn\.q\.weight: is a trained "):
            fake_device.offload(model, 1 << 20)


def train_rank(rank: int, folder: str) -> None:
    join_ranks(rank, 2, folder)
    states, refused = [], ""
    for offloaded in (False, True):
        model = dit(True, False, layers=4)()
        if offloaded:
            fake_device.offload(model, fake_device.budget_of(model, 2), trained="keep", delay=0.002, seed=rank)
        train(nn.parallel.DistributedDataParallel(model), 3, sgd(model), number=lambda step: 2 * step + rank)
        states.append(state(model))
    same(*states)
    model = dit(layers=2)()
    fake_device.offload(model, fake_device.budget_of(model, 2))
    try:
        nn.parallel.DistributedDataParallel(model)
    except ballast.UsageError as error:
        refused = str(error)
    assert "DistributedDataParallel cannot average" in refused, refused
    torch.distributed.destroy_process_group()


class Ranks(unittest.TestCase):
    def test_adapters_on_two_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train_rank, (folder,), nprocs=2)


if __name__ == "__main__":
    unittest.main()
