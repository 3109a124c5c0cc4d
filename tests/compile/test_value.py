"""MlaValue: every build compiles within its limits, and its PTX, run on the CPU, computes what the oracle does."""

from dataclasses import dataclass

import pytest
import torch
from ptx_grid import Memory, program, run

from k3dsl import reference
from k3dsl.nvidia import toolchain
from k3dsl.nvidia import value as facts

pytestmark = pytest.mark.compile

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


@pytest.mark.parametrize("target", facts.TARGETS)
@pytest.mark.parametrize("tile", facts.TILES)
@pytest.mark.parametrize("heads", [1, 6, 12, 96, 128])
def test_builds(compiler, heads, tile, target):
    built = compiler.build(toolchain.compile_key(facts.ValueKey(heads, tile), target))
    found = built.resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    assert found["registers"] <= 80  # three CTAs an SM


def test_weights_are_requested_before_the_dependency_wait():
    ops = [".".join(op) for _, _, op, _ in program(facts.ValueKey(12)).statements]
    wait = ops.index("griddepcontrol.wait")
    weights = [i for i, op in enumerate(ops) if op.startswith("ld.global.L1::no_allocate")]
    others = [i for i, op in enumerate(ops) if op.startswith("ld.global") and i not in weights]
    assert len(weights) == 4
    assert max(weights) < wait < min(others)
    # ptxas moves read-only loads below the wait.
    assert not any(".nc" in op for op in ops)
    assert max(others) < ops.index("griddepcontrol.launch_dependents")


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int = 2
    q: int = 1
    lengths: str = "mixed"  # some 0; "all": none; "none": all 0
    tile: int = 0  # 0: as rows ask

    @property
    def key(self) -> facts.ValueKey:
        return facts.ValueKey(self.heads, self.tile or facts.tile_for(self.rows))


def inputs(case: Case, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    rows, heads, requests = case.rows, case.heads, case.rows // case.q
    lengths = torch.randint(1, 9000, (requests + 2,), generator=g, dtype=torch.int32)
    if case.lengths == "mixed":
        lengths[torch.rand(requests + 2, generator=g) < 0.4] = 0
    elif case.lengths == "none":
        lengths.zero_()
    gate = normal(rows, 2112 + heads * 128)[:, 2112:]
    gate[-1, :8] = torch.tensor([INF, -INF, 100.0, -100.0, 0.0, -0.0, -87.5, -88.5])
    latent = normal(rows, heads, 512)
    empty = (lengths[:requests] == 0).repeat_interleave(case.q)
    gate[empty], latent[empty] = NAN, NAN
    return {
        "latent": latent,
        "weight": (normal(heads, 256, 512) * 0.05)[:, 128:].transpose(1, 2),
        "gate": gate,
        "lengths": lengths,
        "out": torch.full((rows, heads * 128), NAN, dtype=torch.bfloat16),
        "q": case.q,
    }


def launch(case: Case, given: dict) -> torch.Tensor:
    memory, values = Memory(), facts.arguments(case.key, **given)
    for name in ("latent", "weight", "gate", "lengths", "out"):
        values[name] = memory.place(given[name], writable=name == "out")
    shape = facts.geometry(case.key, rows=case.rows)
    run(case.key, shape, values, memory, shape.smem)
    assert memory.buffers[-1].written.all()
    return given["out"]


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of bf16 values in steps; -0 and 0 are one."""
    x, y = (t.view(torch.int16).int() for t in (a, b))
    x, y = (torch.where(t < 0, -32768 - t, t) for t in (x, y))
    return (x - y).abs()


CASES = [
    Case(1), Case(2, heads=12, lengths="all"), Case(15, heads=1, q=3), Case(16, q=4), Case(17), Case(33, heads=1),
    Case(64, heads=1, q=4), Case(4, heads=3, lengths="none"), Case(5, heads=1, tile=32), Case(40, heads=1, tile=16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    given = inputs(case)
    want = reference.value(given["latent"], given["weight"], given["gate"], given["lengths"], case.q)
    got = launch(case, given)
    off = ulps(got, want)
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01
    empty = (given["lengths"][: case.rows // case.q] <= 0).repeat_interleave(case.q)
    assert (got[empty].view(torch.int16) == 0).all()  # +0, not -0
    assert not got[~empty].isnan().any()


def test_rows_do_not_depend_on_each_other():
    whole = inputs(Case(16, lengths="all"))
    out = launch(Case(16), whole).clone()
    alone = {**whole, "latent": whole["latent"][3:4], "gate": whole["gate"][3:4], "lengths": whole["lengths"][3:]}
    alone["out"] = torch.empty(1, 256, dtype=torch.bfloat16)
    assert torch.equal(launch(Case(1), alone)[0], out[3])
    whole["latent"][7] = NAN
    whole["out"].fill_(0)
    poisoned = launch(Case(16), whole)
    assert poisoned[7].isnan().all()
    rest = torch.arange(16) != 7
    assert torch.equal(poisoned[rest], out[rest])


def test_weight_strides_are_run_time():
    given = inputs(Case(3))
    want = launch(Case(3), given).clone()
    wide = torch.full((2, 128, 640), NAN, dtype=torch.bfloat16)
    wide[..., :512] = given["weight"].transpose(1, 2)
    given["weight"] = wide[..., :512].transpose(1, 2)
    given["out"].zero_()
    assert torch.equal(launch(Case(3), given), want)
