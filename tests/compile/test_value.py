"""MlaValue: every build compiles within its limits, and its PTX, run on the CPU, computes what the oracle does."""

import pytest
import torch
from ptx_grid import Memory, program, run
from value_cases import NAN, Case, check, inputs

from k3dsl.nvidia import toolchain
from k3dsl.nvidia import value as facts

pytestmark = pytest.mark.compile


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


def launch(case: Case, given: dict) -> torch.Tensor:
    memory, values = Memory(), facts.arguments(case.key, **given)
    for name in ("latent", "weight", "gate", "lengths", "out"):
        values[name] = memory.place(given[name], writable=name == "out")
    shape = facts.geometry(case.key, rows=case.rows)
    run(case.key, shape, values, memory, shape.smem)
    assert memory.buffers[-1].written.all()
    return given["out"]


CASES = [
    Case(1), Case(2, heads=12, lengths="all"), Case(15, heads=1, q=3), Case(16, q=4), Case(17), Case(33, heads=1),
    Case(64, heads=1, q=4), Case(4, heads=3, lengths="none"), Case(5, heads=1, tile=32), Case(40, heads=1, tile=16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values(case):
    given = inputs(case)
    check(case, given, launch(case, given))


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
