"""Host facts of MlaValue: what is served, how it is launched, what the arguments of a call become."""

import pytest
import torch

from k3dsl.errors import ConfigError
from k3dsl.nvidia.value import MAX_HEADS, TARGETS, ValueKey, arguments, geometry, smem_bytes, supports, tile_for


def tensors(rows: int = 8, heads: int = 12, q: int = 2) -> dict:
    pitch = 2112 + heads * 128
    kv_b = torch.randn(heads, 256, 512).bfloat16()
    return {
        "latent": torch.zeros(rows, heads, 512, dtype=torch.bfloat16),
        "weight": kv_b[:, 128:].transpose(1, 2),
        "gate": torch.zeros(rows, pitch, dtype=torch.bfloat16)[:, 2112:],
        "lengths": torch.ones(rows // q, dtype=torch.int32),
        "out": torch.zeros(rows, heads * 128, dtype=torch.bfloat16),
        "q": q,
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heads", [1, 6, 12, 96, MAX_HEADS])
def test_served(heads, target):
    assert supports(ValueKey(heads, 16), target) == []
    assert supports(ValueKey(heads, 32), target) == []


def test_every_reason_is_named():
    reasons = supports(ValueKey(0, 8), "sm_80")
    assert len(reasons) == 3
    assert "heads=0" in reasons[0]
    assert "128" in reasons[0]
    assert "tile=8" in reasons[1]
    assert "sm_90a" in reasons[2]
    assert supports(ValueKey(True, 16), "sm_90a") == ["heads=True must be an int from 1 to 128"]


@pytest.mark.parametrize(
    ("rows", "tile", "grid_z"),
    [(1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 32, 1), (32, 32, 1), (33, 32, 2), (64, 32, 2)],
)
def test_geometry(rows, tile, grid_z):
    assert tile_for(rows) == tile
    launch = geometry(ValueKey(12, tile), rows=rows)
    assert launch.grid == (8, 12, grid_z)
    assert launch.block == (256, 1, 1)
    assert launch.smem == smem_bytes(tile) <= 48 * 1024  # no opt-in attribute needed
    assert launch.pdl


def test_geometry_refuses_no_rows():
    with pytest.raises(ConfigError, match="rows=0"):
        geometry(ValueKey(12), rows=0)


def test_arguments_are_those_of_the_kernel():
    t = tensors()
    values = arguments(ValueKey(12), **t)
    assert list(values) == [p.name for p in ValueKey.params]
    assert values["rows"] == 8
    assert values["q"] == 2
    assert values["head_stride"] == 256 * 512
    assert values["v_stride"] == 512
    assert values["gate_pitch"] == 2112 + 12 * 128
    assert values["weight"] == t["weight"].data_ptr()


def test_strides_of_axes_of_one_do_not_matter():
    t = tensors(rows=1, heads=1, q=1)
    t["weight"] = t["weight"].as_strided((1, 512, 128), (7, 1, 512), t["weight"].storage_offset())
    t["gate"] = t["gate"].as_strided((1, 128), (5, 1), t["gate"].storage_offset())
    values = arguments(ValueKey(1), **t)
    assert values["head_stride"] == 0
    assert values["gate_pitch"] == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"latent": lambda t: t["latent"].half()}, "latent is torch.float16, must be torch.bfloat16"),
        ({"latent": lambda t: t["latent"][:, :6]}, "must be \\(8, 12, 512\\)"),
        ({"weight": lambda t: t["weight"].contiguous()}, "the latent axis must have 1"),
        ({"weight": lambda t: t["weight"][:, :256]}, "weight has shape"),
        ({"gate": lambda t: torch.zeros(8, 1537, dtype=torch.bfloat16)[:, :1536]}, "the row stride even"),
        ({"gate": lambda t: torch.zeros(8, 1537, dtype=torch.bfloat16)[:, 1:]}, "4-byte aligned"),
        ({"lengths": lambda t: t["lengths"].long()}, "lengths is torch.int64"),
        ({"lengths": lambda t: t["lengths"][:3]}, "at least 4 entries"),
        ({"out": lambda t: torch.zeros(8, 3072, dtype=torch.bfloat16)[:, ::2]}, "out has strides"),
        ({"q": lambda t: 3}, "q=3 must be a positive int that divides the 8 rows"),
        ({"q": lambda t: 0}, "q=0"),
    ],
)
def test_bad_arguments_are_named(change, says):
    t = tensors()
    t.update({name: make(t) for name, make in change.items()})
    with pytest.raises(ConfigError, match=says):
        arguments(ValueKey(12), **t)


def test_all_problems_come_in_one_error():
    t = tensors()
    t["latent"] = t["latent"].float()
    t["out"] = t["out"].float()
    with pytest.raises(ConfigError) as caught:
        arguments(ValueKey(12), **t)
    assert "latent" in str(caught.value)
    assert "out" in str(caught.value)
