"""The host checks of a mla_pre launch: every rule by itself, all of them in one error, and what must be let through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_pre_cases import aligned, launch_arguments, meta_weights

from k3dsl.amd.checks import launch_problems, require_launch
from k3dsl.amd.mla_pre.key import MlaPreBuild, peer_bytes, peer_pairs, q_heads, scratch_bytes
from k3dsl.amd.mla_pre.launch import mla_pre
from k3dsl.errors import ConfigError

KEY = MlaPreBuild(tokens=4, nblocks=3)
WEIGHTS = meta_weights()


def good(key: MlaPreBuild = KEY, **changes: Any) -> dict[str, Any]:
    return launch_arguments(key, WEIGHTS) | changes


def bf16(*shape: int) -> torch.Tensor:
    return aligned(*shape, dtype=torch.bfloat16)


def bytes_(*shape: int) -> torch.Tensor:
    return aligned(*shape, dtype=torch.uint8)


BUILDS = [
    KEY,
    MlaPreBuild(tokens=1, nblocks=1, delta=False),
    MlaPreBuild(tokens=16, nblocks=8),
    MlaPreBuild(tokens=2, qbf16=True, w_uk="bf16"),
    MlaPreBuild(tokens=8, ranks=8, nblocks=8),
    MlaPreBuild(tokens=8, ranks=2, timeline=True),
]


@pytest.mark.parametrize("key", BUILDS, ids=lambda key: key.symbol)
def test_right_arguments_pass(key: MlaPreBuild) -> None:
    assert launch_problems(key, **good(key)) == []
    require_launch(key, **good(key))


def test_what_strides_may_be() -> None:
    """Interleaved caches, wide residual stacks, a stock w_k and one that is its own."""
    cache = bytes_(4, 5, 16, 640)[:, 2, :, :576]
    blocks = bf16(9, 4, 7168).transpose(0, 1)
    for w_k in (bytes_(512, 12, 64).transpose(0, 1), bytes_(12, 512, 64), bytes_(12, 512, 68)[..., 4:]):
        assert launch_problems(KEY, **good(kv_cache=cache, blocks=blocks, w_k=w_k)) == []
    scale = bytes_(4, 12, 512).permute(1, 2, 0)
    assert launch_problems(KEY, **good(w_k_scale=scale)) == []
    one_block = bytes_(1, 16, 576)
    assert launch_problems(KEY, **good(kv_cache=one_block.view(torch.float8_e4m3fn))) == []


# What is changed, and what the one sentence must say.
WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("prefix", lambda: bf16(4, 7168).float(), "prefix is float32, must be bfloat16"),
    ("prefix", lambda: bf16(5, 7168), r"prefix has shape \[5, 7168\], must be \[4, 7168\]"),
    ("prefix", lambda: bf16(4, 7296)[:, :7168], r"prefix has strides \[7296, 1\], must be contiguous"),
    ("delta", lambda: None, r"delta is NoneType, must be a tensor of bfloat16 \[4, 7168\]"),
    ("delta", lambda: bf16(4, 7296)[:, :7168], "delta has strides"),
    (
        "blocks",
        lambda: bf16(4, 2, 7168),
        r"blocks has shape \[4, 2, 7168\], must be a tensor of bfloat16 \[4, 3 or more",
    ),
    ("blocks", lambda: bf16(4, 7168, 3).transpose(1, 2), "blocks has strides .*, the last must be 1"),
    (
        "blocks",
        lambda: bf16(4, 21508)[:, :21504].unflatten(1, (3, 7168)),
        r"blocks has a stride\(0\) of 21508 elements, must be a multiple of 8",
    ),
    ("blocks", lambda: bf16(3 * 4 * 7168 + 4)[4:].view(4, 3, 7168), "blocks starts at .*, must be 16-byte aligned"),
    ("ares_qk", lambda: bf16(7167), r"ares_qk has shape \[7167\], must be \[7168\]"),
    ("in_nw", lambda: None, r"in_nw is NoneType, must be a tensor of bfloat16 \[7168\]"),
    ("w_qkv", lambda: torch.empty(2112, 7296, dtype=torch.bfloat16)[:, :7168], "w_qkv has strides .*contiguous"),
    (
        "w_g",
        lambda: torch.empty(768, 7168, dtype=torch.bfloat16),
        r"w_g has shape \[768, 7168\], must be \[1536, 7168\]",
    ),
    ("q_nw", lambda: bf16(1536).half(), "q_nw is float16, must be bfloat16"),
    ("w_qb", lambda: torch.empty(1536, 2304, dtype=torch.bfloat16).T, "w_qb has strides .*contiguous"),
    ("w_k", lambda: bytes_(12, 512, 128)[..., ::2], "w_k has strides .*axis 2 must have 1"),
    (
        "w_k",
        lambda: bytes_(12, 512, 66)[..., :64],
        r"w_k has a stride\(1\) of 66 bytes, must be a positive multiple of 4",
    ),
    ("w_k", lambda: bytes_(12 * 512 * 64 + 2)[2:].view(12, 512, 64), "w_k starts at .*, must be 4-byte aligned"),
    ("w_k", lambda: bf16(12, 512, 64), "w_k is bfloat16, must be uint8"),
    ("w_k_scale", lambda: bytes_(12, 512, 1).expand(12, 512, 4), r"w_k_scale has a stride\(2\) of 0 bytes"),
    ("w_k_scale", lambda: bytes_(12 * 512 * 4 + 2)[2:].view(12, 512, 4), "w_k_scale starts at .*, must be 4-byte"),
    ("w_k_scale", lambda: None, "w_k_scale is NoneType"),
    ("kv_cache", lambda: bf16(4, 16, 576), "kv_cache is bfloat16, must be a one-byte tensor"),
    ("kv_cache", lambda: bytes_(4, 16, 656), r"kv_cache has shape \[4, 16, 656\]"),
    ("kv_cache", lambda: bytes_(4, 16, 1152)[..., ::2], "kv_cache has strides .*, the last must be 1"),
    (
        "kv_cache",
        lambda: bytes_(4, 16, 578)[..., :576],
        "kv_cache has a slot stride of 578 bytes, must be a multiple of 4",
    ),
    ("kv_cache", lambda: bytes_(16, 576).expand(4, 16, 576), "kv_cache has a block stride of 0 bytes"),
    ("slots", lambda: torch.zeros(4, dtype=torch.int32), "slots is int32, must be int64"),
    ("slots", lambda: torch.zeros(8, dtype=torch.int64), r"slots has shape \[8\], must be \[4\]"),
    ("slots", lambda: torch.zeros(8, dtype=torch.int64)[::2], r"slots has strides \[2\], must be contiguous"),
    ("gate_out", lambda: bf16(4, 2048)[:, :1536], "gate_out has strides .*contiguous"),
    ("q_out", lambda: bytes_(4, 16, 576), r"q_out has shape \[4, 16, 576\], must be \[4, 12, 576\]"),
    ("q_out", lambda: bf16(4, 12, 576), "q_out is bfloat16, must be uint8 or int8 or float8_e4m3fn"),
    ("q_out", lambda: bytes_(4, 16, 576)[:, :12], "q_out has strides .*contiguous"),
    ("scratch", lambda: bytes_(1000), f"scratch has 1000 bytes, must have {scratch_bytes(KEY)} or more"),
    ("scratch", lambda: bf16(scratch_bytes(KEY)), "scratch is bfloat16 .*, must be a contiguous tensor of uint8, "),
    ("epoch", lambda: torch.ones(1, dtype=torch.int64), "epoch is int64, must be int32"),
    ("health", lambda: torch.zeros(256, dtype=torch.int32), r"health has shape \[256\], must be \[2056\]"),
    ("peers", lambda: torch.zeros(1, dtype=torch.int32), "peers is int32, must be int64"),
    ("tl", lambda: torch.zeros(256, 16, dtype=torch.int64), "tl is given, must be None"),
    ("rank", lambda: 1, "rank=1 must be an int from 0 to 0"),
    ("layer", lambda: 256, "layer=256 must be an int from 0 to 255: it is a tag slot"),
    ("layer", lambda: True, "layer=True must be an int"),
    ("alarm", lambda: 6, "alarm=6 must be the address of an int32 word, or 0 for none"),
]


@pytest.mark.parametrize(("what", "value", "says"), WRONG, ids=[f"{w}-{i}" for i, (w, _, _) in enumerate(WRONG)])
def test_each_rule_is_one_sentence(what: str, value: Callable[[], Any], says: str) -> None:
    found = launch_problems(KEY, **good(**{what: value()}))
    assert len(found) == 1, found
    with pytest.raises(ConfigError, match=says):
        require_launch(KEY, **good(**{what: value()}))


def test_a_launch_needs_a_runtime() -> None:
    with pytest.raises(ConfigError, match="runtime=5 must be None for HIP, or what has the methods"):
        mla_pre(KEY, **good(), runtime=5)  # type: ignore[arg-type]


def test_every_problem_is_in_one_error() -> None:
    bad = good(prefix=bf16(4, 7167), w_k=None, slots=torch.zeros(3), layer=-1, gate_out=None, scratch=None)
    with pytest.raises(ConfigError) as error:
        require_launch(KEY, **bad)
    for what in ("prefix", "w_k", "slots", "layer", "gate_out", "scratch"):
        assert f"- {what}" in str(error.value)


def test_other_builds_have_other_rules() -> None:
    peers = MlaPreBuild(tokens=8, ranks=8)
    assert launch_problems(peers, **good(peers, peers=None)) == ["peers is NoneType, must be a tensor of int64 [8]"]
    assert launch_problems(peers, **good(peers, alarm=0)) == ["alarm=0 must be the address of an int32 word"]
    assert launch_problems(peers, **good(peers, rank=7)) == []
    plain = MlaPreBuild(tokens=4, delta=False)
    assert launch_problems(plain, **good(plain, delta=bf16(4, 7168))) == [
        "delta is given, must be None for a build with delta=False"
    ]
    wide = MlaPreBuild(tokens=4, qbf16=True, w_uk="bf16")
    assert any("q_out is uint8" in line for line in launch_problems(wide, **good(wide, q_out=bytes_(4, 12, 576))))
    assert any(
        "w_k_scale is given" in line for line in launch_problems(wide, **good(wide, w_k_scale=bytes_(12, 512, 4)))
    )
    timed = MlaPreBuild(tokens=4, timeline=True)
    assert any("tl is NoneType" in line for line in launch_problems(timed, **good(timed, tl=None)))


def test_outputs_must_not_overlap_what_is_read() -> None:
    shared = bf16(4, 7168)
    found = launch_problems(KEY, **good(prefix=shared, delta=shared))
    assert found == ["prefix and delta overlap in memory"]
    both = bytes_(4 * 12 * 576 + 4 * 1536 * 2)
    q_out = both[: 4 * 12 * 576].view(4, 12, 576)
    gate = both[4 * 12 * 576 - 64 : -64].view(torch.bfloat16).view(4, 1536)
    assert launch_problems(KEY, **good(q_out=q_out, gate_out=gate)) == ["gate_out and q_out overlap in memory"]


def test_tensors_of_another_device_are_named() -> None:
    found = launch_problems(KEY, **good(w_g=torch.empty(1536, 7168, dtype=torch.bfloat16, device="meta")))
    assert found == ["w_g is on meta, must be on cpu as prefix is"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 17}, "tokens=17 must be 1..16"),
        ({"tokens": 0}, "tokens=0 must be 1..16"),
        ({"nblocks": 9}, "nblocks=9 must be 1..8"),
        ({"ranks": 3}, "ranks=3 must be one of 1, 2, 4, 8"),
        ({"ranks": 8, "qbf16": True}, "qbf16=True is served at ranks=1 only"),
        ({"q_heads": 16}, "q_heads=16 must be 12 at ranks=1"),
        ({"ranks": 8, "q_heads": 95}, "q_heads=95 must be 96..192"),
        ({"w_uk": "fp8"}, "w_uk='fp8' must be one of mxfp4, bf16"),
        ({"eps": 0.0}, r"eps=0.0 must be between 0 and 1"),
        ({"tokens": True}, "tokens=True must be of type int"),
        ({"wait_ticks": 0}, "wait_ticks=0 must be"),
    ],
)
def test_builds_validate_themselves(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MlaPreBuild(**({"tokens": 4} | changes))


def test_every_bad_field_is_in_one_error() -> None:
    with pytest.raises(ConfigError, match="3 problems") as error:
        MlaPreBuild(tokens=99, nblocks=0, w_uk="x")
    for what in ("tokens=99", "nblocks=0", "w_uk='x'"):
        assert what in str(error.value)


def test_sizes() -> None:
    assert q_heads(MlaPreBuild(tokens=1)) == 12
    assert [q_heads(MlaPreBuild(tokens=1, ranks=r)) for r in (2, 4, 8)] == [32, 48, 96]
    assert q_heads(MlaPreBuild(tokens=1, ranks=8, q_heads=128)) == 128
    assert peer_pairs(8, 8) == 110_592
    assert peer_bytes(MlaPreBuild(tokens=8, ranks=8)) == 256 + 2 * 884_736
    assert peer_bytes(MlaPreBuild(tokens=8)) == 0
    pairs = 56 * 8 * 9 * 2 + 8 * 10 + 56 * 8 + 56 + 8 * 1056 + 8 + 8 * 768  # of S = 8, nblocks = 8
    assert scratch_bytes(MlaPreBuild(tokens=8, nblocks=8)) == 16 * (14336 + 3072) + 8 * pairs


@pytest.mark.parametrize(
    "code",
    [
        "from k3dsl.amd import mla_pre, MlaPreBuild",
        "from k3dsl.amd import MlaPreBuild, mla_pre",
        "import k3dsl.amd; mla_pre, MlaPreBuild = k3dsl.amd.mla_pre, k3dsl.amd.MlaPreBuild",
        "import k3dsl.amd.mla_pre.key as key; from k3dsl.amd import mla_pre; MlaPreBuild = key.MlaPreBuild",
    ],
)
def test_the_function_and_its_package_are_one_name(code: str) -> None:
    """In whatever order they are imported, in a process of its own."""
    import subprocess
    import sys

    check = "print(callable(mla_pre), MlaPreBuild.__name__, 'torch' in sys.modules)"
    command = [sys.executable, "-c", f"import sys; {code}; {check}"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "MlaPreBuild", "False"]


def test_calling_the_package_is_calling_the_function() -> None:
    import inspect

    from k3dsl.amd import mla_pre
    from k3dsl.amd.mla_pre.launch import mla_pre as function

    assert inspect.signature(mla_pre) == inspect.signature(function)
    with pytest.raises(TypeError, match="missing 24 required keyword-only arguments"):
        mla_pre(KEY)
    with pytest.raises(ConfigError, match="layer=300"):
        mla_pre(KEY, **good(layer=300))
    with pytest.raises(ConfigError, match="mla_pre runs on a GPU, or on the runtime that it is given"):
        mla_pre(KEY, **good())
