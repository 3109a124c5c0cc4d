"""The frozen key of mla_pre and the layout that follows from it."""

from __future__ import annotations

import itertools

import pytest

from k3dsl.amd.mla_pre.key import LDS_LIMIT, MlaPreBuild, peer_bytes, peer_pairs, q_heads, scratch_bytes
from k3dsl.amd.mla_pre.layout import PAIRS_FIRST, lds, regions, rows
from k3dsl.errors import ConfigError


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(ConfigError, match="4 problems") as caught:
        MlaPreBuild(tokens=33, ranks=3, qbf16=True, w_uk="fp8")
    assert all(part in str(caught.value) for part in ("tokens=33", "ranks=3", "qbf16", "'fp8'"))


@pytest.mark.parametrize("field", [{"tokens": True}, {"tokens": 4.0}, {"delta": 1}, {"eps": 0}, {"w_uk": None}])
def test_types_are_exact(field: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))}="):
        MlaPreBuild(**{"tokens": 4, **field})


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": 0},
        {"tokens": 17},
        {"nblocks": 0},
        {"nblocks": 9},
        {"ranks": 8, "q_heads": 95},
        {"ranks": 2, "q_heads": 49},
        {"q_heads": 16},
        {"eps": 0.0},
        {"wait_ticks": 0},
        {"fault_rank": 1},
        {"fault_slot": 256},
    ],
)
def test_limits(bad: dict) -> None:
    with pytest.raises(ConfigError, match=f"{list(bad)[-1]}="):
        MlaPreBuild(**{"tokens": 4, **bad})


def test_heads_are_padded_to_sixteen_when_gathered() -> None:
    assert [q_heads(MlaPreBuild(tokens=1, ranks=r)) for r in (1, 2, 4, 8)] == [12, 32, 48, 96]


def test_peer_buffer() -> None:
    assert peer_pairs(8, 8) == 110_592
    assert peer_bytes(MlaPreBuild(tokens=8, ranks=8)) == 256 + 1_769_472
    assert peer_bytes(MlaPreBuild(tokens=8)) == 0


@pytest.mark.parametrize("tokens", range(1, 17))
@pytest.mark.parametrize("nblocks", range(1, 9))
def test_rows_stay_put_and_regions_do_not_touch(tokens: int, nblocks: int) -> None:
    key = MlaPreBuild(tokens=tokens, nblocks=nblocks, ranks=8)
    spans = [(r.offset, r.offset + r.bytes) for r in rows()]
    assert max(end for _, end in spans) == PAIRS_FIRST  # in every build: no row lies where another build polls
    spans += [(r.offset, r.offset + r.pairs * 8) for r in regions(key).values() if r.space == "device"]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(start % 16 == 0 for start, _ in spans)
    assert spans[-1][1] <= scratch_bytes(key)
    for uk in ("mxfp4", "bf16"):
        assert lds(MlaPreBuild(tokens=tokens, nblocks=nblocks, w_uk=uk, timeline=True)).total <= LDS_LIMIT


def test_region_ids_differ() -> None:
    ids = [r.id for r in regions(MlaPreBuild(tokens=1, ranks=2)).values()]
    assert len(set(ids)) == len(ids)
    assert all(0 < i < 2**31 for i in ids)
