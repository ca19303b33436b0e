"""ballast.offload() on the emulated device: two types of device, late copies, and memory that nobody
else may touch. Losses, gradients and weights have the bits of the plain model on the same device."""

import contextlib
import unittest
from unittest import mock

import torch
from torch import nn

import ballast
from ballast import _accelerator, offloading
from second_device import device_test

DEVICE = "second"
# Seconds of each kernel and of each copy: neither is late, either is, both are.
DELAYS = ((0.0, 0.0), (0.0003, 0.0), (0.0, 0.002), (0.0002, 0.001))
LATE = DELAYS[3:]


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, **more))


def gpt2(**more):
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=1, **more))


def lora(**more):
    from peft import LoraConfig, get_peft_model
    return get_peft_model(llama(**more), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1,
                                                    target_modules=["q_proj", "v_proj", "down_proj"]))


class Mixed(nn.Module):
    """A shared block, a tied weight, weights used by other code, a buffer that its block changes."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.register_buffer("mean", torch.zeros(1 << 18))

        def forward(self, x):
            with torch.no_grad():
                self.mean[:32].lerp_(x.mean((0, 1)), 0.1)
            return x + self.outer(torch.tanh(self.inner(x + self.mean[:32])))

    def __init__(self, **_):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(self.Block(32) for _ in range(4))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        x = nn.functional.linear(self.embed(input_ids), self.blocks[2].outer.weight.t()[:32, :32])
        for i in (0, 1, 1, 2, 3, 1):
            x = self.blocks[i](x)
        weight = self.blocks[3].inner.weight
        scores = self.head(x + x @ weight.t() @ weight)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def tokens(step, count=12):
    return torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def train(model, steps=3, optimizer=adamw, accumulation=1, sampling=True):
    """Returns losses, gradients of every step and a result without gradients."""
    rule, seen = optimizer(model), []
    for step in range(steps):
        for part in range(accumulation):
            ids = tokens(10 * step + part)
            loss = model(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            seen.append(loss.detach().cpu())
        seen += [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
        rule.step()
        rule.zero_grad()
        if sampling and step == 1:
            model.eval()
            with torch.no_grad():
                seen.append(model(input_ids=ids, labels=ids)["loss"].cpu())
            model.train()
    return seen


def weights(model):
    return {name: t.detach().cpu() for name, t in [*model.named_parameters(), *model.named_buffers()]}


@contextlib.contextmanager
def pinned_homes(second):
    """Homes that the device copies without staging, as those of a CUDA program."""
    def pin(memory):
        second.register_pinned(memory.bytes.data_ptr(), memory.nbytes)
        memory.pinned, memory._unpin = True, lambda: None

    plain = _accelerator.Accelerator.__init__

    def make(self, device):
        plain(self, device)
        self.pinning = True

    with mock.patch.object(_accelerator.HostMemory, "pin", pin), \
            mock.patch.object(_accelerator.Accelerator, "__init__", make):
        yield


class Offload(device_test()):
    def largest(self, model):
        from ballast._blocks import bytes_under, find
        return max(bytes_under(block.module) for block in find(model, None)) + 32768

    def same(self, make, loop=train, room=2.5, pinned=(True,), delays=LATE, before=None,
             **options):
        """Runs `loop` with the plain model on the device and with the offloaded one."""
        def prepared():
            torch.manual_seed(0)
            model = make()
            if before:
                before(model)
            return model

        plain = prepared().to(DEVICE)
        torch.manual_seed(1)
        expected, state = loop(plain), weights(plain)
        for direct in pinned:
            for kernel, copy in delays:
                with self.subTest(pinned=direct, kernel=kernel, copy=copy), \
                        pinned_homes(self.second) if direct else contextlib.nullcontext():
                    ours = prepared()
                    handle = offloading.offload(ours, DEVICE, device_bytes=int(room * self.largest(ours)),
                                                **{"trained": "stream", "prefetch": 1, **options})
                    self.second.set_delays(kernel, copy)
                    torch.manual_seed(1)
                    found = loop(ours)
                    self.compare(expected, found)
                    handle.synchronize()
                    self.assertLessEqual(handle.report().peak_bytes, handle.report().pool_bytes)
                    handle.remove()
                    for (name, one), (other, two) in zip(state.items(), weights(ours).items(), strict=True):
                        self.assertEqual(name, other)
                        self.assertTrue(torch.equal(one, two), name)
                    self.second.set_delays(0.0, 0.0)

    def compare(self, expected, found):
        self.assertEqual(len(expected), len(found))
        for i, (one, two) in enumerate(zip(expected, found, strict=True)):
            self.assertEqual(one.shape, two.shape)
            self.assertTrue(torch.equal(one, two), f"value {i}: {one.flatten()[:3]}, {two.flatten()[:3]}")


class Training(Offload):
    def test_llama(self):
        self.same(llama, pinned=(True, False), delays=DELAYS)

    def test_gpt2_with_dropout(self):
        self.same(gpt2, pinned=(True, False))

    def test_lora(self):
        self.same(lora, delays=DELAYS[2:])
        self.same(lora, trained="auto")

    def test_shared_blocks_and_uses_elsewhere(self):
        self.same(Mixed, delays=DELAYS)

    def test_bf16_and_accumulation(self):
        self.same(lambda: llama().bfloat16(), lambda model: train(model, accumulation=3))

    def test_recomputation(self):
        for reentrant in (False, True):
            def checkpointed(model, reentrant=reentrant):
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            self.same(llama, before=checkpointed)

    def test_room_for_one_block(self):
        self.same(llama, room=1, prefetch=0)

    def test_several_blocks_ahead(self):
        self.same(gpt2, room=3.5, prefetch=3)

    def test_autocast(self):
        def loop(model):
            with torch.autocast(DEVICE, torch.bfloat16):
                return train(model, sampling=False)
        with self.assertWarnsRegex(UserWarning, "under autocast"):
            self.same(llama, loop)


class Optimizers(Offload):
    """The plain model is on the CPU here, whose bits are those of the device."""

    def trained_blocks(self):
        torch.manual_seed(0)
        model = llama(attn_implementation="eager").requires_grad_(False)
        model.model.layers.requires_grad_(True)
        return model

    def test_states_in_host_memory(self):
        for overlap in (False, True):
            def loop(model, overlap=overlap):
                optimizer = ballast.OffloadAdamW([p for p in model.parameters() if p.requires_grad],
                                                 lr=1e-2, overlap=overlap)
                seen = []
                for step in range(4):
                    ids = tokens(step).to(next(model.parameters()).device if plain is model else DEVICE)
                    loss = model(input_ids=ids, labels=ids)["loss"]
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(loss.detach().cpu())
                optimizer.synchronize()
                return seen

            plain = self.trained_blocks()
            expected = loop(plain)
            for kernel, copy in DELAYS[2:]:
                with self.subTest(overlap=overlap, kernel=kernel, copy=copy):
                    ours = self.trained_blocks()
                    handle = offloading.offload(ours, DEVICE, device_bytes=3 * self.largest(ours),
                                                trained="stream")
                    self.second.set_delays(kernel, copy)
                    self.compare(expected, loop(ours))
                    handle.remove()
                    self.compare(list(weights(plain).values()), list(weights(ours).values()))


class Memory(Offload):
    def measure(self, model, ids):
        """Returns the memory before a pass, and its peak in the forward and the backward pass."""
        model(input_ids=ids, labels=ids)["loss"].backward()
        model.zero_grad()
        self.second.synchronize()
        self.second.reset_peak_memory_stats()
        before = self.second.memory_allocated()
        loss = model(input_ids=ids, labels=ids)["loss"]
        forward = self.second.max_memory_allocated()
        loss.backward()
        return before, forward, self.second.max_memory_allocated()

    def test_the_peak_is_that_of_the_pool_and_of_what_stays(self):
        """Activations take as much as without, and gradients are on the device for a block or two."""
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=8,
                             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                             attn_implementation="eager")
        ids, model = tokens(0), LlamaForCausalLM(config)
        plan = ballast.plan_module(model, {"input_ids": ids, "labels": ids}, device_bytes=1 << 30,
                                   trained="stream", prefetch=1)
        total = sum(p.nbytes for p in model.parameters())
        rest = self.second.memory_allocated()
        before, forward, plain = self.measure(model.to(DEVICE), ids)
        activations = forward - before
        self.assertGreaterEqual(plain - rest, 2 * total)
        del model
        self.second.synchronize()
        ours = LlamaForCausalLM(config)
        handle = offloading.offload(ours, DEVICE, trained="stream", prefetch=1)
        report = handle.report()
        self.assertLess(report.pool_bytes, total / 2)
        before, forward, peak = self.measure(ours, ids)
        fixed = rest + report.pool_bytes + report.staying_bytes
        self.assertLessEqual(before, fixed + 65536)
        self.assertLessEqual(forward, fixed + activations + 65536)
        gradients = report.staying_bytes + 2 * max(report.units.values())
        self.assertLessEqual(peak, fixed + activations + gradients + 65536)
        self.assertLess(peak, plain)
        self.assertEqual(plan.pool_bytes, report.pool_bytes)
        self.assertAlmostEqual(plan.device["activations"], activations, delta=activations / 10)
        predicted = sum(plan.device.values())
        self.assertLessEqual(peak - rest, predicted)
        # Gradients of two blocks at most, which may have left in time.
        self.assertLess(predicted, peak - rest + 2.1 * max(report.units.values()) + activations / 10)
        handle.remove()

    def test_nothing_is_left_after_remove(self):
        import gc
        gc.collect()
        before = self.second.memory_allocated()
        model = gpt2()
        handle = offloading.offload(model, DEVICE, trained="stream")
        train(model, 1)
        handle.remove()
        self.assertEqual({p.device.type for p in model.parameters()}, {"cpu"})
        del handle
        model.zero_grad()
        gc.collect()
        self.second.synchronize()
        self.assertEqual(self.second.memory_allocated(), before)

    def test_between_passes_parameters_are_in_host_memory(self):
        model = llama()
        handle = offloading.offload(model, DEVICE, trained="stream")
        train(model, 1)
        kinds = {name.split(".")[1]: p.device.type for name, p in model.named_parameters()}
        self.assertEqual(kinds, {"embed_tokens": DEVICE, "layers": "cpu", "norm": DEVICE})
        norm = torch.nn.utils.get_total_norm([p for p in model.parameters()])
        self.assertTrue(torch.isfinite(norm).item())
        handle.remove()


if __name__ == "__main__":
    unittest.main()
