"""FlyDSL kernels launched through their ordinary Python API on the emulator backend."""

from __future__ import annotations

import os
from typing import Any

import pytest
import small_floats as small
import torch

pytest.importorskip("flydsl")

from tools.gfx950 import ExecutionError, Memory, build, flydsl_backend

os.environ.setdefault("FLYDSL_RUNTIME_CACHE_DIR", str(build.cache_folder() / "flydsl"))
flydsl_backend.install()

import flydsl.expr as fx  # noqa: E402
import flydsl_kernels as fk  # noqa: E402

SCHEDULES: list[dict[str, Any]] = [{}, {"model": "weak", "seed": 1}, {"model": "weak", "seed": 2, "quantum": 11}]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=["flat", "weak-1", "weak-2"])
p = fk.pointer


@schedules
def test_add(schedule: dict[str, Any]) -> None:
    a, b, c = torch.randn(1000), torch.randn(1000), torch.full((1000,), 7.0)
    with flydsl_backend.emulating(Memory(a, b, c), **schedule) as session:
        fk.add(p(fx.Float32, a), p(fx.Float32, b), p(fx.Float32, c), fx.Int32(900))
    assert torch.equal(c[:900], a[:900] + b[:900])
    assert (c[900:] == 7).all()
    assert session.results[0].waves == 16


def test_a_fault_reaches_python_from_the_launch_itself() -> None:
    a, b, c = (torch.zeros(1000) for _ in range(3))
    with (
        flydsl_backend.emulating(Memory(a=a, b=b)),
        pytest.raises(ExecutionError, match="out of bounds: store of 4 bytes"),
    ):
        fk.add(p(fx.Float32, a), p(fx.Float32, b), p(fx.Float32, c), fx.Int32(1000))


@schedules
def test_product_over_lds(schedule: dict[str, Any]) -> None:
    a, b, c = torch.randn(16, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.zeros(16, 16)
    with flydsl_backend.emulating(Memory(a, b, c), uninitialised=True, **schedule) as session:
        fk.product(p(fx.BFloat16, a), p(fx.BFloat16, b), p(fx.Float32, c))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-5)
    assert not session.results[0].reports
    assert session.results[0].profiles[0].matrix == 2


@schedules
def test_reductions(schedule: dict[str, Any]) -> None:
    x, out = torch.randn(64), torch.zeros(5, 64)
    with flydsl_backend.emulating(Memory(x, out), **schedule):
        fk.reductions(p(fx.Float32, x), p(fx.Float32, out))
    for way in (0, 1, 3):
        torch.testing.assert_close(out[way], x.sum().expand(64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[2, 63], x.sum(), rtol=1e-5, atol=1e-5)
    assert out[4, 63] == x.max()


@schedules
def test_scaled_product_and_narrowing(schedule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(0, 256, (16, 64), dtype=torch.uint8, generator=generator) for _ in range(2))
    sa, sb = (torch.randint(118, 124, (16, 4), dtype=torch.uint8, generator=generator) for _ in range(2))
    d, q, s = torch.zeros(16, 16), torch.zeros(192, dtype=torch.int32), torch.zeros(32)
    u8, f32 = fx.Uint8, fx.Float32
    with flydsl_backend.emulating(Memory(a, b, sa, sb, d, q, s), **schedule):
        fk.scaled(p(u8, a), p(u8, b), p(u8, sa), p(u8, sb), p(f32, d), p(fx.Int32, q), p(f32, s))
    table = torch.tensor(small.values("fp4"))

    def wide(codes: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(1)
        return values * torch.exp2(e.double() - 127).repeat_interleave(32, 1)

    want = wide(a, sa) @ wide(b, sb).T
    assert torch.equal(d.double(), want)  # few significant bits: exact
    lane = torch.arange(64)
    values = torch.stack([d[4 * (lane // 16) + i, lane % 16] for i in range(4)])
    bytes_of = lambda words: words.view(torch.uint8).view(64, 4).numpy()  # noqa: E731
    assert (small.encode("fp8", values.numpy(), False) == bytes_of(q[:64]).T).all()
    fours = small.encode("fp4", values.numpy() / 2, True)
    assert (bytes_of(q[64:128])[:, 0] == (fours[0] | fours[1] << 4)).all()
    assert (bytes_of(q[64:128])[:, 1] == (fours[2] | fours[3] << 4)).all()
    assert torch.equal(q[128:].view(torch.bfloat16).view(64, 2).T, values[:2].bfloat16())
    torch.testing.assert_close(s[:16], d[0::4].sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(s[16:], d[1::4].sum(0), rtol=1e-5, atol=1e-5)


@schedules
def test_local_memory(schedule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 1 << 20, (256,), dtype=torch.int32, generator=generator)
    h, out = torch.randn(256, generator=generator).half(), torch.zeros(576, dtype=torch.int32)
    with flydsl_backend.emulating(Memory(x, h, out), uninitialised=True, **schedule) as session:
        fk.local(p(fx.Int32, x), p(fx.Float16, h), p(fx.Int32, out), fx.Int32(5))
    lane = torch.arange(64)
    assert torch.equal(out[:256].view(64, 4), x.view(64, 4).flip(0))
    assert torch.equal(out[256:320], torch.stack([lane[lane % 4 == k].sum() for k in range(4)])[lane % 4].int())
    assert (out[320:384] == x[8] + 3 * x[9] + 5 * x[10] + 7 * x[11]).all()
    assert torch.equal(out[384:448], sum(x[(lane + i) % 256] for i in range(5)))
    columns = torch.cat([h[64 * g : 64 * g + 64].view(4, 16).T for g in range(4)])
    assert torch.equal(out[448:].view(torch.float16).view(64, 4), columns)
    assert not session.results[0].reports


def gathered(policy: int, seed: int, ranks: int = 4) -> list[torch.Tensor]:
    """An all-gather inside kernels that run together, one on each device."""
    launch = fk.gather_kernel(policy, ranks)
    memory = Memory()
    mine = [torch.arange(64, dtype=torch.int32) + 1000 * r for r in range(ranks)]
    homes = [torch.zeros(ranks * 128, dtype=torch.int32) for _ in range(ranks)]
    outs = [torch.zeros(ranks * 64, dtype=torch.int32) for _ in range(ranks)]
    table = torch.tensor([h.data_ptr() for h in homes])
    memory.add(table, "table")
    for r in range(ranks):
        memory.add(mine[r], f"input of {r}", device=r)
        memory.add(homes[r], f"peer buffer of {r}", device=r, peer=True)
        memory.add(outs[r], f"output of {r}", device=r)
    with flydsl_backend.emulating(memory, collect=True, model="weak", seed=seed, deadlock_after=100_000) as session:
        for r in range(ranks):
            session.device = r
            launch(p(fx.Int32, mine[r]), p(fx.Int64, table), p(fx.Int32, outs[r]), fx.Int32(r), fx.Int32(77))
        session.run()
    return outs


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_devices_gather_inside_their_kernels(seed: int) -> None:
    want = torch.cat([torch.arange(64, dtype=torch.int32) + 1000 * r for r in range(4)])
    for out in gathered(fk.SYSTEM, seed):
        assert torch.equal(out, want)


def test_gathering_at_device_scope_is_found() -> None:
    with pytest.raises(ExecutionError, match="needs system scope"):
        gathered(fk.DEVICE, 1)
