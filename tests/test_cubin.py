"""Cubins are read as ptxas writes them; whatever is no cubin, or not one of ours, is one clear error."""

import json

import pytest
from fake_cuda import make_cubin
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl.errors import CompileError
from k3dsl.nvidia.cubin import parse
from k3dsl.nvidia.driver import Param

PARAMS = (
    Param("rows", "i32"),
    Param("latent", "ptr"),
    Param("keys", "tmap"),
    Param("eps", "f32"),
    Param("seed", "i64"),
)


def test_facts():
    found = parse(make_cubin(PARAMS, symbol="some_kernel", block=(128, 2, 1), registers=77, static_smem=512))
    assert found.symbol == "some_kernel"
    assert found.arch == "sm_90a"
    assert found.tool == "13.4"
    assert found.block == (128, 2, 1)
    assert found.registers == 77
    assert found.static_smem == 512
    assert found.frame == found.stack == 0
    assert found.params == ((0, 4), (8, 8), (64, 128), (192, 4), (200, 8))


def test_what_need_not_be_there():
    found = parse(make_cubin(()))
    assert found.block is None
    assert found.params == ()
    assert found.static_smem == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_target_keeps_its_suffix(arch):
    assert parse(make_cubin(PARAMS, arch=arch)).arch == arch


def test_local_memory_of_a_spill():
    found = parse(make_cubin(PARAMS, frame=48))
    assert (found.frame, found.stack) == (48, 48)


def test_resources_are_json():
    found = parse(make_cubin(PARAMS, block=(64, 1, 1)))
    back = json.loads(json.dumps(found.resources()))
    assert back == found.resources()
    assert back["block"] == [64, 1, 1]
    assert back["params"][2] == [64, 128]
    assert parse(make_cubin(())).resources()["block"] is None


@pytest.mark.parametrize("kernels", [2, 3])
def test_one_kernel_only(kernels):
    with pytest.raises(CompileError, match=f"it holds {kernels}: k, k_1"):
        parse(make_cubin(PARAMS, symbol="k", kernels=kernels))


def test_header_and_note_must_agree():
    data = make_cubin(PARAMS, arch="sm_90a").replace(b"-arch sm_90a", b"-arch sm_80a")
    with pytest.raises(CompileError, match="note says sm_80a, its header sm_90"):
        parse(data)


@pytest.mark.parametrize("data", [b"", b"not an object at all", b"\x7fELF", b"\x7fELF\x02\x01\x01" + bytes(57)])
def test_not_a_cubin(data):
    with pytest.raises(CompileError, match=rf"not a readable cubin \({len(data)} bytes\)"):
        parse(data)


def test_an_object_of_another_machine():
    data = bytearray(make_cubin(PARAMS))
    data[0x12:0x14] = (62).to_bytes(2, "little")
    with pytest.raises(CompileError, match="EM_X86_64, not EM_CUDA"):
        parse(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_harmless(data):
    """Any byte changed, anything cut off: CompileError or facts, never another exception."""
    whole = make_cubin(PARAMS, block=(32, 1, 1))
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        if at < len(damaged):
            damaged[at] = data.draw(st.integers(0, 255))
    try:
        outcome = parse(bytes(damaged)).symbol
    except CompileError as error:
        outcome = str(error)
    assert outcome
