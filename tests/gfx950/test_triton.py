"""Kernels that Triton compiled for gfx950, against torch; flat and under several weak schedules."""

from __future__ import annotations

from typing import Any

import pytest
import small_floats as small
import torch

from tools.bench import emulator_triton as tk

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"model": "weak", "seed": 1},
    {"model": "weak", "seed": 2, "quantum": 37},
    {"seed": 3, "quantum": 100_000},
]
schedules = pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()) or "flat"
)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@pytest.mark.parametrize(
    ("dtype", "instruction"),
    [(torch.bfloat16, 16), (torch.bfloat16, 32), (torch.float16, 16), (torch.float16, 32), (torch.float32, 16)],
    ids=str,
)
@schedules
def test_matmul(dtype: torch.dtype, instruction: int, schedule: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size, block = (128, 64), (64, 64, 32)
    a, b, c = torch.randn(size).to(dtype), torch.randn(size[1], 128).to(dtype), torch.zeros(128, 128)
    built = tk.build(
        tk.matmul,
        {"a": TYPES[dtype], "b": TYPES[dtype], "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
        dict(zip(("BM", "BN", "BK"), block, strict=True)),
        matrix_instr_nonkdim=instruction,
    )
    result = tk.run(built, (2, 2), [a, b, c, 128, 128, 64], uninitialised=True, **schedule)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-4)
    assert not result.reports
    assert result.profiles[0].matrix > 0


FORMATS = {"e2m1": ("*u8", 2, "fp4"), "e4m3": ("*fp8e4nv", 1, "fp8"), "e5m2": ("*fp8e5", 1, "bf8")}


def scaled(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw bytes, scales, and the values that they stand for (double)."""
    generator = torch.Generator().manual_seed(seed)
    _, pack, table = FORMATS[name]
    raw = torch.randint(0, 256, (64, 256 // pack), dtype=torch.uint8, generator=generator)
    values = torch.tensor(small.values(table))
    if pack == 2:
        wide = torch.stack([values[(raw & 15).long()], values[(raw >> 4).long()]], -1).flatten(1)
    else:
        raw = torch.where(values[raw.long()].isfinite(), raw, 0)
        wide = values[raw.long()]
    scale = torch.randint(120, 134, (64, 8), dtype=torch.uint8, generator=generator)
    return raw, scale, wide * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("instruction", [16, 32])
@pytest.mark.parametrize(
    "formats", [("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e2m1", "e4m3"), ("e4m3", "e4m3"), ("e5m2", "e2m1")], ids="-".join
)
def test_scaled_matmul(formats: tuple[str, str], instruction: int) -> None:
    (a, sa, left), (b, sb, right) = scaled(formats[0], 1), scaled(formats[1], 2)
    (ta, pa, _), (tb, pb, _) = FORMATS[formats[0]], FORMATS[formats[1]]
    built = tk.build(
        tk.matmul_scaled,
        {"a": ta, "sa": "*u8", "b": tb, "sb": "*u8", "c": "*fp32"},
        {"BM": 64, "BN": 64, "BK": 256, "AF": formats[0], "BF": formats[1], "AP": pa, "BP": pb},
        matrix_instr_nonkdim=instruction,
    )
    c = torch.zeros(64, 64)
    tk.run(built, 1, [a, sa, b, sb, c], model="weak", seed=1)
    want = left @ right.T
    assert (c - want).abs().max() < 1e-6 * want.abs().max()


@schedules
def test_softmax(schedule: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(24, 1000), torch.zeros(24, 1000)
    built = tk.build(tk.softmax, {"x": "*fp32", "y": "*fp32", "N": "i32"}, {"BLOCK": 1024})
    tk.run(built, 24, [x, y, 1000], **schedule)
    torch.testing.assert_close(y, x.softmax(1), rtol=1e-5, atol=1e-7)


@schedules
def test_layer_norm(schedule: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, w, b, y = torch.randn(24, 1000), torch.randn(1000), torch.randn(1000), torch.zeros(24, 1000)
    built = tk.build(
        tk.layer_norm,
        {"x": "*fp32", "weight": "*fp32", "bias": "*fp32", "y": "*fp32", "N": "i32", "eps": "fp32"},
        {"BLOCK": 1024},
    )
    tk.run(built, 24, [x, w, b, y, 1000, 1e-5], **schedule)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1000,), w, b), rtol=1e-4, atol=1e-5)


def test_dropout_draws_random_numbers() -> None:
    x, y = torch.ones(5000), torch.zeros(5000)
    built = tk.build(tk.dropout, {"x": "*fp32", "y": "*fp32", "N": "i32", "p": "fp32", "seed": "i32"}, {"BLOCK": 1024})
    tk.run(built, 5, [x, y, 5000, 0.25, 1234])
    kept = y != 0
    assert abs(kept.float().mean() - 0.75) < 0.03
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_barrier_across_the_grid(seed: int) -> None:
    counter, mine, sums = (
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
    )
    built = tk.build(tk.grid_barrier, {"counter": "*i32", "mine": "*i32", "sums": "*i32"}, {"BLOCKS": 64})
    tk.run(built, 64, [counter, mine, sums], model="weak", seed=seed)
    assert (sums == 64 * 65 // 2).all()
