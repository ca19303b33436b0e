#!/usr/bin/env python3
"""One measured process of step_peers.py: training steps in PyTorch or with DeepSpeed.

    step_torch.py JOB

Needs `torch`, and `deepspeed` or `transformers` if the job uses them. JOB is a JSON object that
step_peers.py makes (`Peer` there names the keys). The last line on stdout is a JSON object with
the figures.

The models are those of Ballast's `model` section, written for speed in eager PyTorch: queries, keys
and values in one product, torch's norms, scaled_dot_product_attention with is_causal, cross-entropy
in fp32. With --model transformers the bodies are LlamaModel and GPT2Model instead, with --model FOLDER
the one that its config.json describes. Initial weights have Ballast's distribution; the tokens are
the same.
"""

import contextlib
import gc
import json
import math
import os
import socket
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STDDEV = 0.02  # model.init_stddev
EPSILON = 1e-5  # model.norm_epsilon
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0  # gradient_clipping
WARM_UPS = 2  # as `ballast bench step`
MASK = 0xFFFFFFFF


# Data.

def philox(counter, stream):
    """The low 64 bits of Philox4x32-10 with key 1, as two tensors of 32-bit numbers: low, high."""
    zero = torch.zeros_like(counter)
    x = [counter & MASK, counter >> 32, zero + (stream & MASK), zero + (stream >> 32)]
    k0, k1 = 1, 0
    for _ in range(10):
        # A product may overflow into the sign bit; the masks remove it.
        a = 0xD2511F53 * x[0]
        b = 0xCD9E8D57 * x[2]
        x = [((b >> 32) & MASK) ^ x[1] ^ k0, b & MASK, ((a >> 32) & MASK) ^ x[3] ^ k1, a & MASK]
        k0 = (k0 + 0x9E3779B9) & MASK
        k1 = (k1 + 0xBB67AE85) & MASK
    return x[0], x[1]


def random_ids(count, vocab, stream):
    """`random_ids` of tools/bench/step.cpp."""
    low, high = philox(torch.arange(count, dtype=torch.int64), stream)
    return ((high % vocab) * (2**32 % vocab) + low) % vocab


def micro_batches(job, device):
    """Pairs of inputs and targets, [sequences, length] each."""
    shape = (job["accumulation"], job["micro_batch"], job["sequence"])
    inputs, targets = (random_ids(math.prod(shape), job["vocab"], stream).view(shape).to(device)
                       for stream in (1, 2))
    return list(zip(inputs, targets))


# The models. Modules initialize their weights in the constructor, because ZeRO's Init partitions
# them right after it.

class Linear(nn.Linear):
    def __init__(self, inputs, outputs, bias=False, stddev=STDDEV):
        self.stddev = stddev
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.stddev)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=STDDEV)


def attend(q, k, v):
    """q, k and v: [sequences, length, heads, size]; k and v may have fewer heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                  enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def rotated(x, cosine, sine):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self, job):
        super().__init__()
        hidden = job["hidden"]
        self.size = hidden // job["heads"]
        self.heads = (job["heads"], job["kv_heads"], job["kv_heads"])
        self.norm1 = nn.RMSNorm(hidden, EPSILON)
        self.qkv = Linear(hidden, sum(self.heads) * self.size)
        self.out = Linear(hidden, hidden)
        self.norm2 = nn.RMSNorm(hidden, EPSILON)
        self.gate = Linear(hidden, job["intermediate"])
        self.up = Linear(hidden, job["intermediate"])
        self.down = Linear(job["intermediate"], hidden)

    def forward(self, x, cosine, sine):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split(self.heads, dim=2)
        x = x + self.out(attend(rotated(q, cosine, sine), rotated(k, cosine, sine), v))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Gpt2Layer(nn.Module):
    def __init__(self, job):
        super().__init__()
        hidden = job["hidden"]
        self.size = hidden // job["heads"]
        residual = STDDEV / math.sqrt(2 * job["layers"])
        self.norm1 = nn.LayerNorm(hidden, EPSILON)
        self.qkv = Linear(hidden, 3 * hidden, bias=True)
        self.out = Linear(hidden, hidden, bias=True, stddev=residual)
        self.norm2 = nn.LayerNorm(hidden, EPSILON)
        self.mlp_in = Linear(hidden, job["intermediate"], bias=True)
        self.mlp_out = Linear(job["intermediate"], hidden, bias=True, stddev=residual)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.size))
        x = x + self.out(attend(*qkv.unbind(2)))
        y = self.mlp_in(self.norm2(x))
        return x + self.mlp_out(functional.gelu(y, approximate="tanh"))


class Body(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, job):
        super().__init__()
        gpt2 = job["family"] == "gpt2"
        self.job = job
        self.tokens = Embedding(job["vocab"], job["hidden"])
        self.positions = Embedding(job["sequence"], job["hidden"]) if gpt2 else None
        layer = Gpt2Layer if gpt2 else LlamaLayer
        self.layers = nn.ModuleList(layer(job) for _ in range(job["layers"]))
        self.norm = (nn.LayerNorm if gpt2 else nn.RMSNorm)(job["hidden"], EPSILON)
        if job["compile"]:
            for one in self.layers:
                one.compile()

    def angles(self, x):
        """Cosine and sine, [length, 1, size / 2] each, in the type of the queries."""
        job = self.job
        half = job["hidden"] // job["heads"] // 2
        steps = torch.arange(half, dtype=torch.float32, device=x.device) / half
        turns = torch.outer(torch.arange(x.shape[1], dtype=torch.float32, device=x.device),
                            job["rope_theta"] ** -steps).unsqueeze(1)
        dtype = torch.float32 if job["precision"] == "fp32" else torch.bfloat16
        return turns.cos().to(dtype), turns.sin().to(dtype)

    def forward(self, ids):
        x = self.tokens(ids)
        extra = ()
        if self.positions is None:
            extra = self.angles(x)
        else:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            if self.job["recompute"]:
                # ZeRO releases weights between the passes; only the reentrant form supports that.
                x = checkpoint(layer, x, *extra, use_reentrant=self.job["peer"] == "deepspeed")
            else:
                x = layer(x, *extra)
        return self.norm(x)


def transformers_body(job):
    """The model's body from transformers: the one of a folder, LlamaModel or GPT2Model."""
    import transformers
    if job["model"] != "transformers":
        config = transformers.AutoConfig.from_pretrained(job["model"])
        config = getattr(config, "text_config", config)
        config.use_cache = False
        body = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
        tokens = body.get_input_embeddings()
    elif job["family"] == "gpt2":
        body = transformers.GPT2Model(transformers.GPT2Config(
            vocab_size=job["vocab"], n_embd=job["hidden"], n_layer=job["layers"],
            n_head=job["heads"], n_inner=job["intermediate"], n_positions=job["sequence"],
            layer_norm_epsilon=EPSILON, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None))
        tokens = body.wte
    else:
        body = transformers.LlamaModel(transformers.LlamaConfig(
            vocab_size=job["vocab"], hidden_size=job["hidden"], num_hidden_layers=job["layers"],
            num_attention_heads=job["heads"], num_key_value_heads=job["kv_heads"],
            intermediate_size=job["intermediate"], max_position_embeddings=job["sequence"],
            rms_norm_eps=EPSILON, pad_token_id=None, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": job["rope_theta"]},
            attn_implementation="sdpa", bos_token_id=None, eos_token_id=None))
        tokens = body.embed_tokens
    if job["recompute"]:
        body.gradient_checkpointing_enable({"use_reentrant": False})
    body.train()
    return body, tokens


def head_loss(hidden, weight, targets):
    """Sum of the rows' losses, in fp32."""
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")


class Model(nn.Module):
    """Maps token ids and targets to the mean loss."""

    def __init__(self, job):
        super().__init__()
        self.job = job
        if job["model"] != "plain":
            self.body, tokens = transformers_body(job)
        else:
            self.body = Body(job)
            tokens = self.body.tokens
        self.head = Linear(job["hidden"], job["vocab"])
        if job["tied"]:
            self.head.weight = tokens.weight
        self.head_loss = torch.compile(head_loss) if job["compile"] else head_loss

    def forward(self, ids, targets):
        hidden = self.body(ids)
        hidden = getattr(hidden, "last_hidden_state", hidden).flatten(0, 1)
        targets = targets.flatten()
        chunks = self.job["loss_chunks"]
        if chunks == 1:
            return self.head_loss(hidden, self.head.weight, targets) / len(targets)
        # Holds the logits of one chunk at a time and recomputes them in the backward pass.
        return sum(checkpoint(self.head_loss, part, self.head.weight, theirs, use_reentrant=False)
                   for part, theirs in zip(hidden.chunk(chunks), targets.chunk(chunks))
                   ) / len(targets)


def parameters_of(model):
    """Number of parameters; ZeRO keeps the size of a partitioned one in ds_numel."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


# Ways to train.

class TorchTrainer:
    """AdamW(fused) on fp32 weights. Precision bf16: the model has bf16 copies of them, and
    their gradients are summed in fp32 at once; amp: autocast; fp32: no copies, no autocast."""

    def __init__(self, job, device):
        self.job = job
        self.device = device
        torch.manual_seed(1)
        with torch.device(device):
            self.model = Model(job)
        self.parameters = parameters_of(self.model)
        self.weights = list(self.model.parameters())
        self.masters = self.weights
        if job["precision"] == "bf16":
            self.keep_masters()
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **OPTIMIZER)

    def keep_masters(self):
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.weights]
        self.model.bfloat16()
        for weight, master in zip(self.weights, self.masters):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(
                lambda p, sums=master.grad: self.add_gradient(p, sums))

    def add_gradient(self, weight, sums):
        if self.fresh:
            sums.copy_(weight.grad)
        else:
            sums.add_(weight.grad)
        weight.grad = None

    def autocast(self):
        if self.job["precision"] != "amp":
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def step(self, batches):
        """Runs one step and returns the mean loss."""
        total = 0.0
        for index, (ids, targets) in enumerate(batches):
            self.fresh = index == 0
            with self.autocast():
                loss = self.model(ids, targets) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        if self.job["precision"] == "bf16":
            with torch.no_grad():
                torch._foreach_copy_([p.data for p in self.weights], self.masters)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return float(total)


class DeepSpeedTrainer:
    """ZeRO stage 3 on one rank, optimizer states (and weights) in host memory."""

    def __init__(self, job, device):
        alone(device)
        import deepspeed
        deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")
        config = self.config(job, pinned=device == "cuda")
        torch.manual_seed(1)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model(job)
        self.parameters = parameters_of(model)
        self.engine, *_ = deepspeed.initialize(model=model, config=config,
                                               model_parameters=list(model.parameters()))

    @staticmethod
    def config(job, pinned):
        place = {"device": "cpu", "pin_memory": pinned}
        zero = {"stage": 3, "offload_optimizer": place}
        if job["offload"] == "all":
            zero["offload_param"] = place
        sequences = job["micro_batch"] * job["accumulation"]
        return {
            "train_batch_size": sequences, "train_micro_batch_size_per_gpu": job["micro_batch"],
            "gradient_accumulation_steps": job["accumulation"], "gradient_clipping": CLIP,
            "bf16": {"enabled": job["precision"] != "fp32"}, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": OPTIMIZER}, "steps_per_print": 10**9}

    def step(self, batches):
        total = 0.0
        for ids, targets in batches:
            loss = self.engine(ids, targets)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(batches)
        return float(total)


def alone(device):
    """Sets the environment variables that a launcher sets for a job of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"


# Measuring.

def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def gemm_peak(device, dtype, seconds=0.5):
    """FLOP/s of PyTorch's fastest product of square matrices."""
    best = 0.0
    sizes = (4096, 8192) if device == "cuda" else (768, 1536, 2304)
    for size in sizes:
        # A GPU multiplies constants faster, because they need less power.
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        torch.mm(a, b)
        wait_for(device)
        end = time.perf_counter() + seconds / len(sizes)
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b)
            wait_for(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def measure(job):
    device = job["device"]
    torch.set_num_threads(job["threads"])
    dtype = torch.float32 if job["precision"] == "fp32" else torch.bfloat16
    if device == "cuda":
        if job["device_bytes"]:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job["device_bytes"] / whole))
        torch.backends.cuda.matmul.allow_tf32 = False  # Ballast does not use TF32 either
    peak = gemm_peak(device, dtype)
    trainer = (DeepSpeedTrainer if job["peer"] == "deepspeed" else TorchTrainer)(job, device)
    batches = micro_batches(job, device)
    gc.collect()
    losses = []
    times = []
    for _ in range(WARM_UPS + job["steps"]):
        wait_for(device)
        start = time.perf_counter()
        losses.append(trainer.step(batches))
        wait_for(device)
        times.append(time.perf_counter() - start)
    return {"parameters": trainer.parameters, "seconds": times[WARM_UPS:],
            "first_loss": losses[0], "loss": losses[-1], "gemm_peak_flops_per_second": peak,
            "device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "version": torch.__version__}


def main():
    result = measure(json.loads(sys.argv[1]))
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
