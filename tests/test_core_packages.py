"""The calls of other packages' cores: every argument, the memory that they get, and a clear error without them."""

import sys
from types import ModuleType

import pytest
import torch

from k3dsl import CaptureError, ConfigError, ToolchainError
from k3dsl.nvidia import stock_decode, trtllm_decode
from k3dsl.nvidia.core import packages, tokenspeed
from k3dsl.reference import f8


@pytest.fixture(autouse=True)
def _fresh(fake_driver):
    packages._buffers.cache_clear()
    yield
    packages._buffers.cache_clear()


def inputs(requests=3, q=1, heads=12):
    return {
        "query": f8(torch.randn(requests, q, heads, 576)),
        "cache": torch.zeros(5, 64, 576, dtype=torch.uint8),
        "block_table": torch.zeros(requests, 2, dtype=torch.int32),
        "lengths": torch.ones(requests, dtype=torch.int32),
        "max_seq": 8192,
        "scales": (0.0721, 0.5),
        "out": torch.empty(requests, q, heads, 512, dtype=torch.bfloat16),
    }


def install(monkeypatch, module, name):
    calls = []

    def function(*positional, **named):
        calls.append((positional, named))
        return named["out"]

    parts = module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
    setattr(sys.modules[module], name, function)
    return calls


def test_trtllm_call(monkeypatch):
    calls = install(monkeypatch, "flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla")
    given = inputs()
    assert trtllm_decode(**given) is given["out"]
    trtllm_decode(**given)
    (positional, named), (_, again) = calls
    assert positional == ()
    assert named["query"] is given["query"]
    assert named["kv_cache"].shape == (5, 1, 64, 576)
    assert named["kv_cache"].dtype == torch.float8_e4m3fn
    workspace, counter = named["workspace_buffer"], named["multi_ctas_kv_counter_buffer"]
    assert (workspace.numel(), workspace.dtype, bool(workspace.any())) == (128 << 20, torch.int8, False)
    assert counter.numel() == 4 * 64 * 12
    assert again["workspace_buffer"] is workspace
    assert {k: v for k, v in named.items() if not isinstance(v, torch.Tensor)} == {
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_seq_len": 8192,
        "bmm1_scale": 0.0721,
        "bmm2_scale": 0.5,
        "enable_pdl": True,
        "backend": "trtllm-gen",
    }
    assert named["block_tables"] is given["block_table"]
    assert named["seq_lens"] is given["lengths"]


def test_tokenspeed_call(monkeypatch):
    calls = install(monkeypatch, "tokenspeed_mla", "tokenspeed_mla_decode")
    given = inputs(requests=2, q=4)
    stock_decode(**given)
    [(positional, named)] = calls
    query, cache, workspace, latent, rope, table, lengths, max_seq, scale = positional
    assert query is given["query"]
    assert cache is given["cache"]
    assert (latent, rope, max_seq, scale) == (512, 64, 8192, 0.0721)
    assert table is given["block_table"]
    assert lengths is given["lengths"]
    assert workspace.dtype == torch.int8
    assert (
        workspace.numel()
        >= tokenspeed.work("sm_90a", heads=12, q=4, requests=2, max_context=8192, sm_count=132).workspace
    )
    assert named == {
        "output_scale": 0.5,
        "out": given["out"],
        "is_var_seq": True,
        "causal_mask": True,
        "enable_pdl": True,
        "min_split_kv": 132 // 16,
    }


@pytest.mark.parametrize(("call", "package"), [(stock_decode, "tokenspeed-mla"), (trtllm_decode, "flashinfer-python")])
def test_a_missing_package_is_named(call, package, monkeypatch):
    for name in ("tokenspeed_mla", "flashinfer.mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ToolchainError, match=f"pip install {package}"):
        call(**inputs())


def test_bad_tensors_are_named(monkeypatch):
    install(monkeypatch, "tokenspeed_mla", "tokenspeed_mla_decode")
    given = inputs()
    with pytest.raises(ConfigError, match=r"query is torch.bfloat16 .* must be float8_e4m3fn"):
        stock_decode(**{**given, "query": given["query"].to(torch.bfloat16)})
    with pytest.raises(ConfigError, match=r"must be bfloat16 \[3, 1, 12, 512\]"):
        stock_decode(**{**given, "out": given["out"].float()})


def test_a_workspace_does_not_grow_inside_a_capture(monkeypatch):
    install(monkeypatch, "tokenspeed_mla", "tokenspeed_mla_decode")

    def refuse(what):
        raise CaptureError(what)

    stock_decode(**inputs())
    monkeypatch.setattr(packages, "guard", refuse)
    stock_decode(**inputs())
    with pytest.raises(CaptureError, match="growing the workspace of tokenspeed"):
        stock_decode(**{**inputs(requests=20, q=8), "max_seq": 1 << 20})
