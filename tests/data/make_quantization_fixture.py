"""Writes quantization/codes.bin: matrices, their codes, scales and decoded values as bitsandbytes 0.50.2 has
them on the CPU.

NF4 codes, both tables and all decoded values are bitsandbytes' own. Codes of its dynamic map are those of the rule
that it documents for all devices but the CPU, whose kernel replaces the least value of the map by -1: here, the
nearest value of (x / absmax), of two equally near ones the lower. The mean of scales is rounded once from double.

    pip install torch==2.15.0 bitsandbytes==0.50.2
    python3 make_quantization_fixture.py
"""

import pathlib

import bitsandbytes.functional as F
import torch


def dynamic_codes(x, block):
    table = F.create_dynamic_map()
    middles = (table[:-1] + table[1:]) / 2
    codes, scales = [], []
    for part in x.split(block):
        scale = part.abs().max()
        inverse = 1.0 / scale.clamp(min=1e-38)
        scaled = torch.clamp(part * inverse, -1, 1)
        codes.append(torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8))
        scales.append(scale)
    return torch.cat(codes), torch.stack(scales)


def decode_dynamic(codes, scales, block, dtype):
    state = F.QuantState(absmax=scales, code=F.create_dynamic_map(), blocksize=block, dtype=dtype)
    return F.dequantize_blockwise(codes, state)


def decode_nf4(codes, scales, shape, dtype):
    state = F.QuantState(absmax=scales, shape=shape, dtype=dtype, blocksize=64, code=F.get_4bit_type("nf4", device="cpu"),
                         quant_type="nf4")
    return F.dequantize_4bit(codes, state)


def raw(tensor):
    tensor = tensor.contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes()


def matrix():
    """Values of all magnitudes in bf16, with blocks of zeros and blocks whose largest value is negative."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(17, 16, 64, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (17, 16, 1), generator=generator).float())
    x = x.reshape(17, 1024)
    x[3, 64:192] = 0
    x[4, :256] = 0
    x[5, 64] = -1e9
    return x.bfloat16().float()


def main():
    x = matrix()
    flat = x.reshape(-1)
    nf4, state = F.quantize_4bit(x, quant_type="nf4", blocksize=64)
    scales = state.absmax
    mean = scales.double().mean().float()
    nested_codes, nested = dynamic_codes(scales - mean, 256)
    restored = decode_dynamic(nested_codes, nested, 256, torch.float32) + mean
    int8, int8_scales = dynamic_codes(flat, 256)
    parts = [
        F.create_dynamic_map(), F.get_4bit_type("nf4", device="cpu"), x.bfloat16(),
        nf4, scales, decode_nf4(nf4, scales, x.shape, torch.bfloat16),
        nested_codes, nested, mean.reshape(1), decode_nf4(nf4, restored, x.shape, torch.bfloat16),
        int8, int8_scales, decode_dynamic(int8, int8_scales, 256, torch.bfloat16),
    ]
    folder = pathlib.Path(__file__).parent / "quantization"
    folder.mkdir(exist_ok=True)
    content = b"".join(raw(part) for part in parts)
    (folder / "codes.bin").write_bytes(content)
    print(len(content), "bytes")


if __name__ == "__main__":
    main()
