"""Host facts of the hopper core: keys, shapes, the work split, launches and tensor maps."""

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl.errors import ConfigError
from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.core.hopper import HopperKey, MergeKey

TARGET = "sm_90a"
H200 = 132


def every_key():
    for heads in (6, 12, 96):
        for q in range(1, 9):
            for kv in hopper.KV:
                for p in hopper.P_DTYPES[kv]:
                    for page in hopper.PAGES:
                        yield hopper.choose(heads=heads, q=q, page=page, kv=kv, p=p)


# ---- columns


@pytest.mark.parametrize(
    ("heads", "q", "blocks", "block", "n"),
    [
        (12, 1, 1, 12, 16), (12, 2, 1, 24, 24), (12, 3, 1, 36, 48), (12, 4, 1, 48, 48), (12, 5, 2, 30, 48),
        (12, 8, 2, 48, 48), (6, 1, 1, 6, 8), (6, 8, 1, 48, 48), (96, 1, 2, 48, 48), (96, 8, 16, 48, 48),
        (1, 1, 1, 1, 8),
    ],
)  # fmt: skip
def test_columns(heads, q, blocks, block, n):
    key = hopper.choose(heads=heads, q=q, page=64, kv="fp8")
    assert (key.columns, key.blocks, key.block, key.n) == (heads * q, blocks, block, n)
    assert (key.apart, key.groups, key.halves) == ((True, 4, 1) if n >= 32 else (False, 2, 1))
    wide = hopper.choose(heads=heads, q=q, page=64, kv="bf16")
    assert (wide.apart, wide.groups, wide.halves) == (False, 2, 2 if n >= 32 else 1)


@given(heads=st.integers(1, 128), q=st.integers(1, 8))
def test_blocks_cover_the_columns(heads, q):
    key = hopper.choose(heads=heads, q=q, page=64, kv="fp8")
    assert (key.blocks - 1) * key.block < key.columns <= key.blocks * key.block
    assert key.block <= key.n <= hopper.MAX_COLUMNS
    assert key.n % 8 == 0


def test_p_by_default_and_by_choice():
    assert hopper.choose(heads=12, q=1, page=64, kv="fp8").p == "f16"
    assert hopper.choose(heads=12, q=2, page=64, kv="fp8").p == "f16"
    assert hopper.choose(heads=12, q=4, page=64, kv="fp8").p == "f16"
    assert hopper.choose(heads=12, q=4, page=64, kv="bf16").p == "bf16"
    assert hopper.choose(heads=12, q=4, page=64, kv="fp8", p="e4m3").p == "e4m3"


# ---- what is served


def test_all_of_kimi_k3_is_served():
    keys = list(every_key())
    assert len(keys) == 3 * 8 * 3 * 3
    for key in keys:
        assert hopper.supports(key, TARGET) == []
        assert hopper.smem(key).total <= hopper.SMEM
        for requests in (1, 3, 16, 64):
            assert hopper.merge_supports(hopper.merge_key(key, requests=requests), TARGET) == []


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"heads": 0}, ["heads=0", "1 to 128"]),
        ({"heads": 129}, ["heads=129"]),
        ({"heads": True}, ["heads=True"]),
        ({"q": 9}, ["q=9", "1 to 8"]),
        ({"page": 16}, ["page=16", "32, 64, 128"]),
        ({"kv": "fp8_ds_mla"}, ["kv='fp8_ds_mla'", "fp8, bf16"]),
        ({"p": "bf16"}, ["p='bf16'", "f16, e4m3", "kv='fp8'"]),
        ({"kv": "bf16"}, ["p='f16'", "kv='bf16'"]),
    ],
)
def test_what_is_not_served_is_named(changed, names):
    (reason,) = hopper.supports(replace(HopperKey(12, 1), **changed), TARGET)
    assert all(name in reason for name in names)


def test_every_reason_is_given():
    assert len(hopper.supports(HopperKey(0, 0, 0, "x"), "sm_100a")) == 5
    assert len(hopper.merge_supports(MergeKey(0, slice=64, batch=0), "sm_100a")) == 4
    assert len(hopper.merge_supports(MergeKey(12, slice=512, groups=8), TARGET)) == 1  # 33 warps


def test_keys_are_flat():
    """What a CompileKey holds: scalars alone."""
    for key in (hopper.choose(heads=12, q=4, page=64, kv="fp8"), MergeKey(12)):
        assert all(type(v) in (int, str) for v in asdict(key).values())


# ---- shared memory


def test_smem_areas_follow_each_other():
    for key in every_key():
        lay = hopper.smem(key)
        exchange = 8 * key.n * 4
        starts = [
            0, lay.query, lay.p, lay.peaks, lay.sums, lay.factors, lay.m, lay.inverse, lay.split, lay.bytes, lay.total,
        ]  # fmt: skip
        sizes = [
            lay.stages * lay.tile_bytes, lay.queries * lay.query_bytes, 4 * lay.p_bytes, exchange, exchange,
            4 * (4 * key.n + 8) if key.apart else 4 * key.n, *(4 * key.n if key.apart else 0 for _ in range(2)),
            2 * hopper.MAX_REQUESTS * 4, 16 * (lay.stages + lay.queries + (5 if key.apart else 0)),
        ]  # fmt: skip
        assert all(b - a == size for (a, b), size in zip(pairwise(starts), sizes, strict=True))
        # Boxes start at whole swizzle atoms of 8 rows, barriers at multiples of 8.
        assert lay.query % 1024 == lay.query_bytes % 1024 == lay.p % 1024 == lay.p_bytes % 1024 == lay.bytes % 8 == 0
        assert lay.tile_bytes == 64 * 576 * key.element
        assert lay.query_bytes >= key.n * 576 * key.element
        assert lay.stages >= 2 * key.step  # a step in work, another on its way


# ---- the split


lengths_ = st.lists(st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 200_000)), min_size=1, max_size=64)


@settings(max_examples=300, deadline=None)
@given(lengths=lengths_, splits=st.integers(1, hopper.MAX_SPLITS))
def test_split_gives_every_tile_to_one_cta(lengths, splits):
    cut = hopper.cut(lengths, splits)
    tiles = [hopper.tiles_of(x) for x in lengths]
    assert cut.tiles == sum(tiles)
    given_out = [[] for _ in lengths]
    slots = set()
    for cta in range(splits):
        runs = cut.runs(cta, lengths)
        assert sum(n for _, _, n in runs) <= cut.share
        for r, first, n in runs:
            given_out[r] += range(first, first + n)
            assert cut.first[r] <= cta <= cut.last[r]
            slots.add((cta + r, r))
    assert [len(x) for x in given_out] == tiles
    assert all(x == list(range(n)) for x, n in zip(given_out, tiles, strict=True))
    # No slot twice, and all that the merge reads was written.
    read = {(c + r, r) for r in range(len(lengths)) for c in range(cut.first[r], cut.last[r] + 1)}
    assert read == slots
    assert len({slot for slot, _ in slots}) == len(slots)
    assert all(slot < splits + len(lengths) for slot, _ in slots)


@given(lengths=lengths_, splits=st.integers(1, hopper.MAX_SPLITS))
@settings(max_examples=200, deadline=None)
def test_split_is_even(lengths, splits):
    cut = hopper.cut(lengths, splits)
    assert cut.share <= max(-(-cut.tiles // splits), 2)


def test_split_of_known_batches():
    assert hopper.cut([1024], H200).share == 1  # 16 CTAs of one tile
    assert hopper.cut([8192], H200).share == 2  # 64 CTAs of two
    assert hopper.cut([131072], H200).share == 16
    assert hopper.cut([8192] * 64, H200).share == 63
    assert hopper.cut([64] * 64, H200).share == 1
    assert hopper.cut([0, 0], H200) == hopper.Cut(1, 0, (0, 0), (-1, -1))


def test_negative_lengths_are_empty():
    assert hopper.tiles_of(-5) == 0
    assert hopper.cut([-5, 64], 4).runs(0, [-5, 64]) == [(1, 0, 1)]


# ---- launches


def test_splits_leave_one_cta_an_sm():
    for key in every_key():
        count = hopper.splits(key, H200)
        assert 1 <= count <= hopper.MAX_SPLITS
        assert count * key.blocks <= H200
        assert (count + 1) * key.blocks > H200
    assert hopper.splits(hopper.choose(heads=12, q=1, page=64, kv="fp8"), 1000) == hopper.MAX_SPLITS


def test_geometry():
    key = hopper.choose(heads=96, q=1, page=64, kv="fp8")
    launch = hopper.geometry(key, requests=3, sm_count=H200)
    assert (launch.grid, launch.block, launch.cluster) == ((2, 66, 1), (640, 1, 1), (1, 1, 1))
    assert launch.smem == hopper.smem(key).total
    assert launch.pdl
    merge = hopper.merge_geometry(MergeKey(48, slice=128, groups=8), key, requests=3)
    assert (merge.grid, merge.block, merge.pdl) == ((96, 4, 3), (288, 1, 1), True)
    assert merge.smem == 4 * 160 + 4 * 8 * 128 + 16


@pytest.mark.parametrize("requests", [0, 65])
def test_requests_that_a_warp_does_not_hold_are_refused(requests):
    key = hopper.choose(heads=12, q=1, page=64, kv="fp8")
    with pytest.raises(ConfigError, match=f"requests={requests} must be from 1 to 64"):
        hopper.geometry(key, requests=requests, sm_count=H200)
    with pytest.raises(ConfigError, match=f"requests={requests}"):
        hopper.merge_geometry(MergeKey(12), key, requests=requests)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_sm_count(count):
    with pytest.raises(ConfigError, match="sm_count"):
        hopper.splits(hopper.choose(heads=12, q=1, page=64, kv="fp8"), count)


def test_workspace():
    key = hopper.choose(heads=12, q=1, page=64, kv="fp8")
    assert hopper.workspace(key, requests=4, sm_count=H200) == hopper.Workspace(136, 136 * 12 * 1024, 136 * 12 * 8)
    key = hopper.choose(heads=96, q=1, page=64, kv="fp8")
    assert hopper.workspace(key, requests=4, sm_count=H200) == hopper.Workspace(70, 70 * 96 * 1024, 70 * 96 * 8)
    key = hopper.choose(heads=12, q=1, page=64, kv="bf16")
    assert hopper.workspace(key, requests=4, sm_count=H200) == hopper.Workspace(136, 136 * 12 * 2048, 136 * 12 * 8)


def test_merge_has_more_ctas_where_there_is_little_to_merge():
    small = hopper.merge_key(hopper.choose(heads=12, q=1, page=64, kv="fp8"), requests=1)
    large = hopper.merge_key(hopper.choose(heads=12, q=1, page=64, kv="fp8"), requests=64)
    assert (small.slice, large.slice) == (128, 512)
    assert small.groups * small.batch >= H200  # all splits of a request in flight at once
    assert small.block == large.block == 12


# ---- tensor maps


@pytest.mark.parametrize(("page", "rows"), [(32, 32), (64, 64), (128, 64)])
def test_kv_maps(page, rows):
    key = hopper.choose(heads=12, q=1, page=page, kv="fp8")
    maps = hopper.kv_maps(key, pages=1000, page_stride=page * 640 + 4096, token_stride=640)
    assert list(maps) == ["kv", "kv_tail"]
    for name, width in (("kv", 128), ("kv_tail", 64)):
        assert maps[name] == {
            "dtype": "e4m3", "dims": (576, page, 1000), "strides_bytes": (640, page * 640 + 4096),
            "box": (width, rows, 1), "swizzle": width, "l2_promotion": 128,
        }  # fmt: skip
    key = hopper.choose(heads=12, q=1, page=page, kv="bf16")
    (main,) = hopper.kv_maps(key, pages=7, page_stride=page * 1152, token_stride=1152).values()
    assert (main["dtype"], main["box"], main["swizzle"]) == ("bf16", (64, rows, 1), 128)


def test_query_maps():
    key = hopper.choose(heads=12, q=4, page=64, kv="fp8")
    maps = hopper.query_maps(key, rows=8)
    assert maps["query"]["dims"] == (576, 96)
    assert maps["query"]["strides_bytes"] == (576,)
    assert (maps["query"]["box"], maps["query_tail"]["box"]) == ((128, 48), (64, 48))
    (main,) = hopper.query_maps(hopper.choose(heads=6, q=1, page=64, kv="bf16"), rows=1).values()
    assert (main["dims"], main["strides_bytes"], main["box"]) == ((576, 6), (1152,), (64, 8))


def test_parameters_name_the_maps():
    for key in (hopper.choose(heads=12, q=1, page=64, kv=kv) for kv in hopper.KV):
        maps = {p.name for p in key.params if p.kind == "tmap"}
        assert maps == {*hopper.kv_maps(key, pages=1, page_stride=2**17, token_stride=1152),
                        *hopper.query_maps(key, rows=1)}  # fmt: skip
