"""Sparse MLA's machine code on the emulator, against attention in float64 over the dequantised records."""

import importlib.util

import pytest
import torch
from sparse_cases import SCALE, Case, check, make, run, subset

from k3dsl.amd import SparseMlaKey, flydsl_sparse_mla_fp8ds_fwd, flydsl_sparse_mla_fp8ds_warmup
from k3dsl.amd.codeobject import parse
from k3dsl.amd.sparse_mla.key import RECORD, WAVE_BYTES
from k3dsl.amd.toolchain import Compiler, compile_key
from k3dsl.cache import CompileCache
from k3dsl.errors import CacheMiss, CaptureError
from k3dsl.reference.sparse_mla import sparse_mla64

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="needs FlyDSL: pip install 'k3dsl[amd]'"),
]

BUILDS = list(dict.fromkeys(SparseMlaKey(c.heads, c.has_invalid, c.lse) for c in subset()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> CompileCache:
    """Objects of this file's builds, by one compiler."""
    found = CompileCache(tmp_path_factory.mktemp("cache"))
    with Compiler() as compiler:
        for key in BUILDS:
            found.get_or_build(compile_key(key, "gfx950"), compiler.build)
    return found


@pytest.mark.parametrize("case", subset(), ids=lambda c: c.name)
def test_against_float64(case: Case, cache: CompileCache) -> None:
    made = make(case)
    runtime = run(case, made, cache, uninitialised=True)
    check(case, made)
    # What nobody wrote is read in two places, and not used: the other half of a register pair whose one half a packed
    # product takes twice, and the rope parts of a tile without a key.
    for report in runtime.results[-1].reports:
        if report.kind == "uninitialised register":
            assert "v_pk_mul_f32" in report.instruction
        else:
            assert case.has_invalid
            assert report.kind == "uninitialised LDS"
            assert "ds_read_b128" in report.instruction


def test_records_past_4_gib(cache: CompileCache) -> None:
    case = Case("huge", 16, (1, 64, 129), values="huge")
    made = make(case)
    assert made.indices.max() * RECORD > 1 << 32
    run(case, made, cache)
    check(case, made)


def test_entries_past_the_end_of_the_index_list_are_slot_0(cache: CompileCache) -> None:
    """What docs/sparse_mla.md says of an indptr that points there; no read leaves the array, which is all it has."""
    case = Case("h12", 12, (40, 50), lse=True)
    made = make(case)
    made.kv[0] = made.kv[made.indices[0].long()]  # a record, not NaN
    made.indptr[-1] += 70
    missing = torch.zeros(70, dtype=torch.int32)
    made.want = sparse_mla64(made.q, made.kv, made.indptr, torch.cat([made.indices, missing]), made.scale)
    run(case, made, cache)
    check(case, made)


def test_the_same_bits_with_and_without_lse_and_however_the_records_are_viewed(cache: CompileCache) -> None:
    from tools.gfx950 import Memory
    from tools.gfx950.runtime import EmulatorRuntime

    made = make(Case("views", 12, (65, 200), records=640))
    views = [made.kv, made.kv[:, None], made.kv[:, None, None], made.kv.view(10, 64, RECORD), made.kv.view(torch.int8)]
    runtime = EmulatorRuntime(Memory(made.kv, made.q, made.indptr, made.indices, strict=False))
    results = [
        flydsl_sparse_mla_fp8ds_fwd(
            made.q, view, made.indptr, made.indices, SCALE, return_lse=lse, runtime=runtime, cache=cache
        )
        for lse in (False, True)
        for view in views
    ]
    for out, _ in results:
        assert torch.equal(out, results[0][0])
    assert results[0][1] is None
    lse = results[-1][1]
    assert lse is not None
    torch.testing.assert_close(lse.double(), made.want[1], rtol=0, atol=1e-3)


def test_strided_tensors_and_long_indices(cache: CompileCache) -> None:
    """Rows of q and out apart and not in order of memory; int64 lists that step over every second entry."""
    from tools.gfx950.runtime import EmulatorRuntime

    made = make(Case("strides", 12, (33, 0, 100), lse=False))
    wide = torch.full((12, 3, 600), float("nan"), dtype=torch.bfloat16)
    q = wide.transpose(0, 1)[:, :, 2:578]
    q.copy_(made.q)
    space = torch.full((3, 14, 520), 9.0, dtype=torch.bfloat16)
    out = space[:, 1:13, 4:520]
    twice = made.indices.long().repeat_interleave(2)
    twice[1::2] = -5
    runtime = EmulatorRuntime()
    got, lse = flydsl_sparse_mla_fp8ds_fwd(
        q, made.kv, made.indptr.long(), twice[::2], SCALE, out=out, runtime=runtime, cache=cache
    )
    assert lse is None
    assert got.data_ptr() == out.data_ptr()
    made.out.copy_(out[:, :, :512])
    check(Case("strides", 12, (33, 0, 100), lse=False), made)
    untouched = space.clone()
    untouched[:, 1:13, 4:516] = 9.0
    assert (untouched == 9).all()


def test_two_waves_a_workgroup_agree_with_four(cache: CompileCache) -> None:
    case = Case("waves", 16, (2048, 65, 1))
    made = make(case)
    four = run(case, made, cache).results[-1]
    check(case, made)

    from tools.gfx950.runtime import EmulatorRuntime

    class Crowded(EmulatorRuntime):
        compute_units = 2  # fewer than tokens

    runtime = Crowded()
    out, lse = flydsl_sparse_mla_fp8ds_fwd(
        made.q, made.kv, made.indptr, made.indices, SCALE, return_lse=True, runtime=runtime, cache=cache
    )
    assert (four.waves, runtime.results[-1].waves) == (12, 6)
    assert lse is not None
    made.lse.copy_(lse)
    made.out.copy_(out)
    check(case, made)


def test_no_token_and_no_index(cache: CompileCache) -> None:
    from tools.gfx950.runtime import EmulatorRuntime

    runtime = EmulatorRuntime()
    kv = torch.zeros(1, RECORD, dtype=torch.uint8)
    empty = torch.zeros(0, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(0, 12, 576, dtype=torch.bfloat16)
    out, lse = flydsl_sparse_mla_fp8ds_fwd(q, kv, start, empty, 1.0, return_lse=True, runtime=runtime)
    assert out.shape == (0, 12, 512)
    assert lse is not None
    assert lse.shape == (0, 12)
    assert runtime.results == []
    q = torch.ones(2, 12, 576, dtype=torch.bfloat16)
    bounds = torch.zeros(3, dtype=torch.int32)
    out, lse = flydsl_sparse_mla_fp8ds_fwd(q, kv, bounds, empty, 1.0, return_lse=True, runtime=runtime, cache=cache)
    assert (out == 0).all()
    assert lse is not None
    assert lse.isneginf().all()


def test_objects_spill_nothing_and_two_workgroups_share_a_compute_unit(cache: CompileCache) -> None:
    assert {key.has_invalid for key in BUILDS} == {key.lse for key in BUILDS} == {False, True}
    for key in BUILDS:
        entry = cache.get(compile_key(key, "gfx950"))
        assert entry is not None
        facts = parse(entry.payload)
        assert (facts.private, facts.vgpr_spills, facts.sgpr_spills, facts.lds) == (0, 0, 0, 0)
        assert facts.vgprs <= 512  # a wave has a SIMD of its own
        assert facts.block is None
        assert facts.max_threads == 256
    assert 2 * (2 * WAVE_BYTES) <= 160 * 1024
    assert 4 * WAVE_BYTES <= 160 * 1024


def test_banks_bytes_and_instructions(cache: CompileCache) -> None:
    """What the emulator counts for one token of 2048 keys; docs/sparse_mla.md has the table."""
    case = Case("profile", 16, (2048,), records=5000)
    made = make(case)
    (result,) = run(case, made, cache, profile=True).results
    profile = result.profiles[0]
    assert profile.bank_conflicts == 0
    read = sum(n for (space, _, way), n in profile.bytes.items() if space == "global" and way == "read")
    query = 4 * 16 * 576 * 2  # every wave reads it
    assert read - query - 2048 * RECORD < 2048 * 8 * 1.1  # records once; indices by both halves of a wave
    assert profile.matrix == 2048 // 32 * 68
    assert profile.instructions < 28 * 2048


def test_a_capture_refuses_to_load_and_a_sealed_cache_to_build(cache: CompileCache, tmp_path) -> None:
    from tools.gfx950.runtime import EmulatorRuntime

    made = make(Case("capture", 12, (3,), lse=False))
    runtime = EmulatorRuntime()
    runtime.in_capture = True
    with pytest.raises(CaptureError, match="loading sparse_mla_h12"):
        flydsl_sparse_mla_fp8ds_fwd(made.q, made.kv, made.indptr, made.indices, SCALE, runtime=runtime, cache=cache)
    assert runtime.results == []
    runtime.in_capture = False
    sealed = CompileCache(tmp_path)
    sealed.seal()
    with pytest.raises(CacheMiss):
        flydsl_sparse_mla_fp8ds_fwd(made.q, made.kv, made.indptr, made.indices, SCALE, runtime=runtime, cache=sealed)


def test_warm_up_runs_every_build(cache: CompileCache) -> None:
    from tools.gfx950 import Memory
    from tools.gfx950.runtime import EmulatorRuntime

    runtime = EmulatorRuntime(Memory(torch.zeros(16)))
    made = make(Case("warm", 12, (3,)))
    assert flydsl_sparse_mla_fp8ds_warmup(heads=(12,), runtime=runtime, cache=cache) == 4
    assert len(runtime.results) == 4
    runtime.in_capture = True  # nothing is left to load
    for tensor in (made.q, made.kv, made.indptr, made.indices, made.out, made.lse):
        runtime.memory.add(tensor)
    out, _ = flydsl_sparse_mla_fp8ds_fwd(
        made.q, made.kv, made.indptr, made.indices, SCALE, out=made.out, runtime=runtime, cache=cache
    )
    torch.testing.assert_close(out.double(), made.want[0], rtol=0, atol=2e-2 * float(made.want[0].abs().max()))
