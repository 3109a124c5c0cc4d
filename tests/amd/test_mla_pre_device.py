"""mla_pre's machine code on the emulator, each stage against a computation from the kernel's own hand-off before it."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

pytest.importorskip("flydsl")
pytest.importorskip("tinygrad")

from tools.gfx950 import build, flydsl_backend

os.environ.setdefault("FLYDSL_RUNTIME_CACHE_DIR", str(build.cache_folder() / "flydsl"))
flydsl_backend.install()

import mla_pre_device as device  # noqa: E402

from k3dsl.amd.mla_pre import kernel  # noqa: E402
from k3dsl.amd.mla_pre.key import MlaPreBuild  # noqa: E402
from k3dsl.reference.mla_pre import PreWeights  # noqa: E402

pytestmark = pytest.mark.emulator

weights = functools.cache(PreWeights.random)
compiled = functools.cache(lambda key: kernel.launcher(key)[0])

CASES: list[tuple[dict[str, Any], dict[str, Any], list[int] | None]] = [
    # key, emulator's schedule, slots
    ({"tokens": 1}, {}, None),
    ({"tokens": 2, "nblocks": 3}, {"model": "weak", "seed": 1}, [-1, 63]),
    ({"tokens": 4, "nblocks": 8, "w_uk": "bf16"}, {}, [5, -1, -1, 0]),
    ({"tokens": 8, "nblocks": 8}, {"model": "weak", "seed": 2}, None),
    ({"tokens": 8, "nblocks": 5, "delta": False}, {"quantum": 2000, "seed": 3}, [-1] * 8),
    ({"tokens": 16, "nblocks": 8}, {}, None),
    ({"tokens": 5, "nblocks": 7, "delta": False, "w_uk": "bf16", "qbf16": True}, {"model": "weak", "seed": 4}, None),
]


@pytest.mark.parametrize(("fields", "schedule", "slots"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_every_stage(fields: dict[str, Any], schedule: dict[str, Any], slots: list[int] | None) -> None:
    key = MlaPreBuild(**fields)
    rank = device.Rank(key, weights(), device.inputs(key, 7, slots, wide=1))
    result = device.launch([rank], 3, 5, compiled(key), **schedule)
    device.check(rank)
    assert not result.reports
