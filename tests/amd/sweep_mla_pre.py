"""Every case of mla_pre through the prepared object on the emulator: hours of one core, so not part of the test run.

pytest -m emulator tests/amd/sweep_mla_pre.py [-k "one and weak"] [-n 4]
"""

from __future__ import annotations

from itertools import product
from typing import Any

import mla_pre_group as group_of
import pytest
from test_mla_pre_emulated import run_case, stall_case

from k3dsl.amd.layer import builds
from k3dsl.amd.mla_pre import contract
from k3dsl.amd.mla_pre.launch import build

pytestmark = pytest.mark.emulator

SCHEDULES: list[dict[str, Any]] = [{}, {"model": "weak", "seed": 11}, {"model": "weak", "seed": 12, "quantum": 50_000}]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=["flat", "weak", "turns"])


@schedules
@pytest.mark.parametrize("w_uk", ["mxfp4", "bf16"])
@pytest.mark.parametrize(("rows", "nblocks"), list(product((1, 2, 4, 8, 16), range(1, 9))))
def test_one_rank(rows: int, nblocks: int, w_uk: str, schedule: dict[str, Any]) -> None:
    kind = ("own", "mixed", "none")[nblocks % 3]
    run_case(1, rows, nblocks, delta=nblocks % 2 == (w_uk == "bf16"), kind=kind, w_uk=w_uk, **schedule)


@schedules
@pytest.mark.parametrize(("ranks", "rows"), list(product((2, 4, 8), (1, 2, 4, 8, 16))))
def test_several_ranks(ranks: int, rows: int, schedule: dict[str, Any]) -> None:
    run_case(ranks, rows, 1 + (ranks + rows) % 8, kind="mixed" if rows > 2 else "own", **schedule)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_stalled_rank(ranks: int, seed: int) -> None:
    stall_case(ranks, model="weak" if seed % 2 else "flat", seed=seed, quantum=(50, 1000, 20_000)[seed % 3])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("w_uk", ["mxfp4", "bf16"])
def test_every_build_is_resident(ranks: int, w_uk: str) -> None:
    for key in builds((1, 2, 4, 8, 16), ranks=ranks, w_uk=w_uk, deltas=(True, False)):
        contract.require(key.symbol, contract.residency_problems(build(key, cache=group_of.kernels()).resources))
