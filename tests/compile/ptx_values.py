"""Values of registers: bits in uint64, and what they mean as numbers of PTX types."""

import numpy as np
import torch

U64 = np.uint64


def f32(bits):
    return (bits & U64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)


def bits32(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32).astype(U64)


def bf16_bits(values):
    rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16).astype(U64)


def bf16_values(bits):
    return ((bits & U64(0xFFFF)) << U64(16)).astype(np.uint32).view(np.float32)


def e4m3_bits(values):
    x = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448, 448).to(torch.float8_e4m3fn)
    bits = x.view(torch.uint8).numpy().astype(U64)
    return np.where(np.isnan(values), U64(0x7F), bits)


def signed(bits, width):
    return bits.astype(np.int64) if width == 64 else (bits.astype(np.int64) << (64 - width)) >> (64 - width)


def wrap(values, width):
    bits = np.asarray(values).astype(U64) if np.asarray(values).dtype != np.int64 else np.asarray(values).view(U64)
    return bits if width == 64 else bits & U64((1 << width) - 1)
