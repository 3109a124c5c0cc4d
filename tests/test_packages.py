"""Cores of other packages: what they are called with, against the packages' own signatures and validators."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_blackwell import BlackwellBench
from fake_runtime import step

from k3dsl import CompileCache, ConfigError, Deployment, MlaDims, ToolchainError
from k3dsl.nvidia.core import packages
from k3dsl.nvidia.core.tokenspeed import fill

DIMS = MlaDims.kimi_k3(8)
#: The argument list that the design gives, and no more.
TRTLLM = [
    *("backend", "block_tables", "bmm1_scale", "bmm2_scale", "enable_pdl", "kv_cache", "kv_lora_rank", "max_seq_len"),
    *("multi_ctas_kv_counter_buffer", "out", "qk_nope_head_dim", "qk_rope_head_dim", "query", "seq_lens"),
    "workspace_buffer",
]


@pytest.fixture(autouse=True)
def _owned():
    packages._buffers().clear()
    yield
    packages._buffers().clear()


@pytest.fixture
def calls(monkeypatch):
    """Calls of either package's function, recorded."""
    seen = []

    def record(*arguments, **named):
        seen.append((arguments, named))
        return named["out"]

    monkeypatch.setattr(packages, "_function", lambda module, name, package: record)
    monkeypatch.setattr(packages, "facts", lambda device: SimpleNamespace(sm_count=148, target="sm_100a"))
    return seen


def tensors(requests, q=1, heads=12, pages=4):
    return {
        "query": torch.zeros(requests, q, heads, 576, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "cache": torch.zeros(pages, 64, 576, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "block_table": torch.zeros(requests, 2, dtype=torch.int32),
        "lengths": torch.ones(requests, dtype=torch.int32),
        "max_seq": 131072,
        "scales": (0.125, 0.25),
        "out": torch.zeros(requests, q, heads, 512, dtype=torch.bfloat16),
    }


def test_trtllm_is_called_as_the_design_says(calls):
    given = tensors(16)
    assert packages.trtllm_decode(**given) is given["out"]
    [(positional, named)] = calls
    assert positional == ()
    assert sorted(named) == TRTLLM
    workspace, counter = named["workspace_buffer"], named["multi_ctas_kv_counter_buffer"]
    assert (workspace.dtype, workspace.numel(), int(workspace.count_nonzero())) == (torch.int8, 128 << 20, 0)
    assert (counter.numel(), int(counter.count_nonzero())) == (4 * 64 * 12, 0)
    assert (named["kv_cache"].shape, named["kv_cache"].dtype) == ((4, 1, 64, 576), torch.float8_e4m3fn)
    assert (named["bmm1_scale"], named["bmm2_scale"], named["max_seq_len"]) == (0.125, 0.25, 131072)
    assert (named["enable_pdl"], named["backend"]) == (True, "trtllm-gen")
    sizes = [named[n] for n in ("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")]
    assert sizes == [128, 512, 64]


def test_its_memory_is_owned_once_and_zeroed_once(calls):
    packages.trtllm_decode(**tensors(16))
    first = calls[0][1]["workspace_buffer"]
    first[:8] = 7  # a kernel's business from now on
    packages.trtllm_decode(**tensors(64))
    packages.trtllm_decode(**tensors(16, heads=6))
    assert calls[1][1]["workspace_buffer"] is first
    assert int(first[0]) == 7
    assert calls[1][1]["multi_ctas_kv_counter_buffer"] is calls[0][1]["multi_ctas_kv_counter_buffer"]
    assert calls[2][1]["workspace_buffer"] is not first  # of other heads


def test_counter_bytes():
    assert packages.counter_bytes(12, 148) == 4 * 768
    assert packages.counter_bytes(6, 148) == 4 * 384
    assert packages.counter_bytes(1, 148) == 4 * 152
    assert packages.counter_bytes(1, 60) == 4 * 64


def test_an_outgrown_workspace_is_kept_for_graphs_that_use_it():
    small = packages._buffer("tokenspeed", torch.device("cpu"), 100)
    large = packages._buffer("tokenspeed", torch.device("cpu"), 200)
    assert packages._buffer("tokenspeed", torch.device("cpu"), 50) is large
    assert packages._buffers()["tokenspeed", torch.device("cpu")] == [small, large]


def test_tokenspeed_is_called_with_the_least_splits_and_its_workspace(calls):
    given = tensors(2, q=4)
    packages.stock_decode(**given)
    [(positional, named)] = calls
    query, cache, workspace, latent, rope, table, lengths, bound, scale = positional
    assert (query, cache, table, lengths) == tuple(given[n] for n in ("query", "cache", "block_table", "lengths"))
    assert (latent, rope, bound, scale) == (512, 64, 131072, 0.125)
    assert workspace.numel() == max(2 * 48 * 64 * 513 * 4, 148 * 12 * 513 * 4)
    assert named == {
        "output_scale": 0.25,
        "out": given["out"],
        "is_var_seq": True,
        "causal_mask": True,
        "enable_pdl": True,
        "min_split_kv": fill(8, 148),
    }


@pytest.mark.parametrize("name", ["query", "cache", "out"])
@pytest.mark.parametrize("function", [packages.trtllm_decode, packages.stock_decode])
def test_wrong_tensors_are_refused_before_the_call(calls, function, name):
    given = tensors(2)
    given[name] = given[name].float()
    with pytest.raises(ConfigError, match=f"{name} is torch.float32"):
        function(**given)
    assert calls == []


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    with pytest.raises(ToolchainError, match="pip install flashinfer-python"):
        packages._function(*packages.TRTLLM)
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", None)
    with pytest.raises(ToolchainError, match="pip install tokenspeed-mla"):
        packages._function(*packages.TOKENSPEED)


# ---- the real packages


@pytest.fixture
def flashinfer():
    return pytest.importorskip("flashinfer.mla", reason="flashinfer-python is not installed: .[blackwell]")


@pytest.fixture
def tokenspeed_mla():
    return pytest.importorskip("tokenspeed_mla.mla_decode", reason="tokenspeed-mla is not installed: .[nvidia]")


def test_trtllm_binds_to_flashinfers_signature(flashinfer, calls):
    signature = inspect.signature(flashinfer.trtllm_batch_decode_with_kv_cache_mla)
    packages.trtllm_decode(**tensors(16))
    bound = signature.bind(**calls[0][1])
    defaults = {n: p.default for n, p in signature.parameters.items() if n not in bound.arguments}
    # What we leave out must keep meaning nothing: dense, no sinks, no LSE, uniform q, no context parallelism.
    assert inspect.Parameter.empty not in defaults.values()
    known = {
        "sparse_mla_top_k": 0,
        "sinks": None,
        "skip_softmax_threshold_scale_factor": None,
        "is_var_seq": True,
        "uses_shared_paged_kv_idx": True,
        "lse": None,
        "return_lse": False,
        "cute_dsl_impl": "auto",
        "kv_scale_format": "auto",
        "cum_seq_lens_q": None,
        "max_q_len": None,
        "sparse_mla_top_k_lens": None,
        "enable_dcp": False,
        "cp_world": 1,
        "cp_rank": 0,
        "causal_seqlens_kv_global": None,
        "use_fp16_softmax": None,
        "return_lse_base": None,
    }
    assert defaults == known


def test_flashinfers_own_counter_size(flashinfer):
    from flashinfer.utils import get_trtllm_gen_multi_ctas_kv_counter_bytes as theirs

    for heads in (6, 12):
        for sm_count in (132, 148, 152, 160):
            assert packages.counter_bytes(heads, sm_count) == theirs(64, heads, sm_count)


@pytest.mark.parametrize(("requests", "q", "heads"), [(16, 1, 12), (64, 1, 6), (4, 4, 12)])
def test_flashinfers_own_checks_take_our_tensors(flashinfer, calls, requests, q, heads):
    from flashinfer.mla import _core as core

    packages.trtllm_decode(**tensors(requests, q, heads))
    named = calls[0][1]
    reason = core._trtllm_gen_mla_incompatibility_reason(
        num_heads_q=heads, block_size=64, has_var_q=False, lse_requested=False
    )
    assert reason is None
    shape = (named["query"], named["kv_cache"], 512, 64, 0, named["block_tables"], 64)
    cache = core._check_mla_functional_shape(*shape, True, require_aligned_block_table=False)
    assert cache.shape == (4, 1, 64, 576)
    out = core._prepare_trtllm_gen_mla_output(named["out"], (requests, q, heads, 512), torch.device("cpu"))
    assert out.data_ptr() == named["out"].data_ptr()


def test_tokenspeed_binds_to_its_signature(tokenspeed_mla, calls):
    signature = inspect.signature(tokenspeed_mla.tokenspeed_mla_decode)
    packages.stock_decode(**tensors(2))
    positional, named = calls[0]
    bound = signature.bind(*positional, **named)
    defaults = {n: p.default for n, p in signature.parameters.items() if n not in bound.arguments}
    assert defaults == {
        "window_left": -1,
        "return_lse": False,
        "causal_seqs": None,
        "cp_world": 1,
        "cp_rank": 0,
        "cp_interleave_size": 1,
        "local_visible_lens": None,
    }


# ---- a layer


@pytest.fixture
def bench(tmp_path):
    plan = Deployment(DIMS, target="sm_100a", batches=(16, 32), core="trtllm")
    return BlackwellBench(plan, CompileCache(tmp_path))


def test_a_layer_calls_trtllm_between_query_and_value(bench, calls):
    layer, kv = bench.layer(), bench.kv()
    layer.prepare_cache(kv)
    calls.clear()
    bench.fake.launches.clear()
    given = step(DIMS, 16)
    given["lengths"] = torch.ones(20, dtype=torch.int32)  # an engine's own, longer
    layer.run(**given, cache=kv)
    assert [x.symbol for x in bench.fake.launches] == ["fake_mla_query", "fake_mla_value"]
    [(_, named)] = calls
    assert sorted(named) == TRTLLM
    assert named["seq_lens"].shape == (16,)
    assert named["seq_lens"].data_ptr() == given["lengths"].data_ptr()
    assert named["block_tables"].shape == (16, 3)
    assert named["query"].shape == (16, 1, 12, 576)
    assert named["query"].data_ptr() == layer._scratch.data_ptr()
    assert named["out"].data_ptr() == layer._latent.data_ptr()
    assert named["bmm1_scale"] == pytest.approx(192**-0.5 * 0.5 * 0.25)
    assert named["bmm2_scale"] == 0.25


def test_what_flashinfer_raises_names_what_to_install(bench, calls, monkeypatch):
    def fail(**named):
        raise RuntimeError("no cubin")

    monkeypatch.setattr(packages, "_function", lambda *names: fail)
    with pytest.raises(ToolchainError, match=r"no cubin.*flashinfer-cubin.*flashinfer-jit-cache"):
        bench.layer().prepare_cache(bench.kv())


def test_without_flashinfer_preparing_says_so(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    with pytest.raises(ToolchainError, match="pip install flashinfer-python"):
        bench.layer().prepare_cache(bench.kv())
