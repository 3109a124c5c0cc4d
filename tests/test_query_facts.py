"""Host facts of MlaQuery: what is served, by which build, how it is launched, what the arguments of a call become."""

import pytest
import torch

from k3dsl.errors import ConfigError
from k3dsl.nvidia import query as facts
from k3dsl.nvidia.query import (
    MAX_HEADS,
    TARGETS,
    TILES,
    QueryKey,
    arguments,
    config,
    configs,
    geometry,
    page_shift,
    smem,
)
from k3dsl.nvidia.query import supports as reasons

SMEM_LIMIT = 227 * 1024


def tensors(rows: int = 4, heads: int = 12, fp8: bool = True) -> dict:
    bf16 = {"dtype": torch.bfloat16}
    element = torch.uint8 if fp8 else torch.bfloat16
    given = {
        "projected": torch.zeros(rows, 2112 + heads * 128, **bf16),
        "q_norm": torch.zeros(1536, **bf16),
        "kv_norm": torch.zeros(512, **bf16),
        "q_b": torch.zeros(heads * 192, 1536, **bf16),
        "w_uk": torch.zeros(heads, 256, 512, **bf16)[:, :128],
        "slots": torch.zeros(rows + 3, dtype=torch.int64),
        "cache": torch.zeros(5, 64, 576, dtype=element),
        "query": torch.zeros(rows, heads, 576, dtype=element),
        "eps": 1e-5,
    }
    if fp8:
        given |= {name: torch.ones(1) for name in ("q_scale_inv", "k_scale_inv")}
    return given


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", facts.ELEMENT)
def test_every_tile_is_served(kv_format, target):
    for schedule, tiles in TILES.items():
        for tile in tiles:
            assert reasons(QueryKey(schedule, tile, kv_format), target) == []
            assert smem(schedule, tile).total <= SMEM_LIMIT


def test_every_reason_is_named():
    found = reasons(QueryKey("narrow", 16, "fp8_ds_mla"), "sm_80")
    assert len(found) == 3
    assert "tile=16 must be one of 1, 2, 4, 8 (narrow)" in found[0]
    assert "fp8, bf16" in found[1]
    assert "sm_90a" in found[2]
    assert "narrow, wide" in reasons(QueryKey("broad", 8, "fp8"), "sm_90a")[0]


@pytest.mark.parametrize(
    ("heads", "rows", "schedule", "tile", "grid"),
    [
        (12, 1, "narrow", 1, (8, 12, 1)),
        (12, 2, "narrow", 2, (8, 12, 1)),
        (12, 3, "narrow", 4, (8, 12, 1)),
        (12, 5, "narrow", 8, (8, 12, 1)),
        (12, 8, "narrow", 8, (8, 12, 1)),
        (12, 9, "wide", 16, (8, 12, 1)),
        (12, 17, "wide", 32, (8, 12, 1)),
        (12, 33, "wide", 48, (8, 12, 1)),
        (12, 49, "wide", 64, (8, 12, 1)),
        (12, 64, "wide", 64, (8, 12, 1)),
        (6, 8, "narrow", 8, (8, 6, 1)),
        (6, 16, "wide", 16, (8, 6, 1)),
        (6, 33, "wide", 32, (8, 6, 2)),
        (6, 64, "wide", 32, (8, 6, 2)),
    ],
)
def test_config_and_geometry(heads, rows, schedule, tile, grid):
    key = config(heads, rows, "fp8")
    assert key == QueryKey(schedule, tile, "fp8")
    launch = geometry(key, heads=heads, rows=rows)
    assert launch.grid == grid
    assert launch.block == (256, 1, 1)
    assert launch.cluster == (8, 1, 1)
    assert launch.smem == smem(schedule, tile).total
    assert launch.pdl


@pytest.mark.parametrize("heads", [1, 6, 12, MAX_HEADS])
def test_every_batch_has_a_build_that_covers_it(heads):
    for rows in range(1, facts.MAX_ROWS + 1):
        key = config(heads, rows, "bf16")
        assert reasons(key, "sm_90a") == []
        launch = geometry(key, heads=heads, rows=rows)
        assert key.tile * (launch.grid[2] - 1) < rows <= key.tile * launch.grid[2]
        # The rows of a tile are inserted by one warp each.
        assert key.tile <= facts.WARPS * launch.grid[0] * launch.grid[1]


def test_few_builds_serve_all_batches():
    assert len(configs(12, range(1, 65), "fp8")) == 8
    assert len(configs(6, range(1, 65), "fp8")) == 6
    assert set(configs(6, range(1, 65), "fp8")) < set(configs(12, range(1, 65), "fp8"))


@pytest.mark.parametrize("rows", [0, 65, True, "4"])
def test_rows_out_of_range(rows):
    with pytest.raises(ConfigError, match=f"rows={rows!r} must be an int from 1 to 64"):
        config(12, rows, "fp8")


@pytest.mark.parametrize("heads", [0, MAX_HEADS + 1, 2.0])
def test_heads_out_of_range(heads):
    with pytest.raises(ConfigError, match=f"heads={heads!r} must be an int from 1 to {MAX_HEADS}"):
        geometry(QueryKey("narrow", 1, "fp8"), heads=heads, rows=1)


def test_page_shift():
    assert [page_shift(page) for page in (1, 32, 64, 128)] == [0, 5, 6, 7]
    for page in (0, 48, -64, 64.0):
        with pytest.raises(ConfigError, match=f"page={page!r}.*power of two"):
            page_shift(page)


@pytest.mark.parametrize("fp8", [True, False])
def test_arguments_are_those_of_the_kernel(fp8):
    given = tensors(fp8=fp8)
    values = arguments(QueryKey("narrow", 4, "fp8" if fp8 else "bf16"), **given)
    assert set(values) == {p.name for p in QueryKey.params}
    for param in QueryKey.params:
        if param.kind == "ptr" and param.name in given:
            assert values[param.name] == given[param.name].data_ptr()
    assert fp8 == bool(values["q_scale_inv"]) == bool(values["k_scale_inv"])
    assert values["rows"] == 4
    assert values["row_pitch"] == 3648
    assert values["page_shift"] == 6
    assert (values["uk_head_stride"], values["uk_stride"]) == (131072, 512)
    assert (values["page_stride"], values["token_stride"]) == (64 * 576, 576)
    assert values["eps"] == 1e-5


def test_strides_that_are_served():
    given = tensors(rows=1)
    given["projected"] = torch.zeros(1, 2112, dtype=torch.bfloat16).as_strided((1, 2112), (3, 1))  # one row: no stride
    given["cache"] = torch.zeros(5, 96, 640, dtype=torch.float8_e4m3fn)[:, :64, :576]
    given["query"] = given["query"].view(torch.float8_e4m3fn)
    values = arguments(QueryKey("narrow", 1, "fp8"), **given)
    assert values["row_pitch"] == 0
    assert (values["page_stride"], values["token_stride"]) == (96 * 640, 640)


BAD = [
    ("projected", lambda t: t.float(), "projected is torch.float32, must be bfloat16"),
    ("projected", lambda t: t[:, :2111], "projected has 2111 columns, must have at least 2112"),
    ("projected", lambda t: t[:, 1:], "projected starts at"),
    (
        "projected",
        lambda t: t.new_zeros(4, 2113)[:, :2112],
        "projected has strides (2113, 1), must step by multiples of 16",
    ),
    ("projected", lambda t: t.new_zeros(3648, 4).T, "projected has strides (1, 4), must be contiguous from axis 1 on"),
    ("q_norm", lambda t: t[:512], "q_norm has shape (512,), must be (1536,)"),
    ("q_b", lambda t: t[:192], "q_b has shape (192, 1536), must be (2304, 1536)"),
    ("q_b", lambda t: t.T.contiguous().T, "q_b has strides (1, 2304), must be contiguous"),
    ("w_uk", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "w_uk has strides (65536, 1, 128)"),
    ("slots", lambda t: t.int(), "slots is torch.int32, must be int64"),
    ("slots", lambda t: t[:3], "slots has 3 entries, must have at least 4"),
    ("cache", lambda t: t.bfloat16(), "cache is torch.bfloat16, must be uint8 or float8_e4m3fn"),
    ("cache", lambda t: t[..., :512], "cache has shape (5, 64, 512), must be ('any', 'any', 576)"),
    (
        "cache",
        lambda t: t.new_zeros(5, 64, 577)[..., :576],
        "cache has strides (36928, 577, 1), must step by multiples of 8",
    ),
    ("cache", lambda t: t[:, :48], "page=48"),
    ("query", lambda t: t[:2], "query has shape (2, 12, 576), must be (4, 12, 576)"),
    ("q_scale_inv", lambda t: t.double(), "q_scale_inv is torch.float64, must be float32"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[f"{n}{i}" for i, (n, *_) in enumerate(BAD)])
def test_bad_tensors(name, change, message):
    given = tensors()
    given[name] = change(given[name])
    with pytest.raises(ConfigError) as caught:
        arguments(QueryKey("narrow", 4, "fp8"), **given)
    assert message in str(caught.value)


def test_all_problems_in_one_error():
    given = tensors() | {"q_norm": torch.zeros(3), "slots": torch.zeros(2)}
    with pytest.raises(ConfigError) as caught:
        arguments(QueryKey("narrow", 4, "fp8"), **given)
    assert str(caught.value).count("\n  - ") == 4


@pytest.mark.parametrize("name", ["projected", "query", "cache"])
def test_wrong_number_of_axes(name):
    given = tensors()
    given[name] = given[name].flatten()
    with pytest.raises(ConfigError, match="must have 2, 3 and 3"):
        arguments(QueryKey("narrow", 4, "fp8"), **given)


def test_missing_scales_are_named():
    given = tensors()
    del given["k_scale_inv"]
    with pytest.raises(ConfigError, match="k_scale_inv is None"):
        arguments(QueryKey("narrow", 4, "fp8"), **given)
