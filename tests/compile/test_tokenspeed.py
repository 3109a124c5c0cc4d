"""The tokenspeed core: the package's own kernels as objects of our cache, loaded and launched on a fake driver."""

import ctypes
import inspect
import math
import os
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_blackwell import BlackwellBench, BlackwellDriver
from fake_runtime import STREAM, step

from k3dsl import CaptureError, CompileCache, CompileError, ConfigError, Deployment, LaunchError, MlaDims
from k3dsl.nvidia import host_object
from k3dsl.nvidia.core import tokenspeed
from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
from k3dsl.nvidia.cubin import parse_all
from k3dsl.nvidia.driver import LaunchAttribute, LaunchConfig
from k3dsl.nvidia.host_object import HostObject
from k3dsl.nvidia.stages_packages import TokenspeedCore
from k3dsl.nvidia.toolchain import Compiler, build, compile_key

pytestmark = pytest.mark.compile
pytest.importorskip("tokenspeed_mla", reason="tokenspeed-mla is not installed: pip install 'k3dsl[nvidia]'")

DIMS = MlaDims.kimi_k3(8)
BOUND = 131072
SCALE, OUT_SCALE = 192**-0.5, 0.25
HOST = host_object.host_isa()
made = partial(TokenspeedKey, host=HOST)
#: One object a target serves the whole split table: capacity is a bound.
SMALL = ("sm_100a", made(12, capacity=128, bands=2))
LARGE = ("sm_103a", made(12, capacity=128, bands=2))
GATHERED = ("sm_100a", made(96, capacity=64, bands=1, lse=True))
SHARD = ("sm_100a", made(96, 4, capacity=32, lse=True, pack=True, ranks=8, rank=3, interleave=16))
SINGLE = ("sm_103a", made(12, 4, 32, capacity=0, lse=True))


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Objects that these tests share: each is compiled once."""
    return CompileCache(tmp_path_factory.mktemp("tokenspeed"))


@pytest.fixture(scope="session")
def built():
    """Builds with one compiler process for all: starting one takes as long as a build."""
    with Compiler() as compiler:
        yield compiler.build


@pytest.fixture
def payload(store, built):
    def get(target, key):
        return store.get_or_build(compile_key(key, target), built).payload

    return get


class Shape:
    """A core on a fake GPU, with tensors of one shape."""

    def __init__(self, data, target, key, requests, sm_count, max_context=BOUND, pages=9, gap=0):
        self.driver = BlackwellDriver(target, sm_count)
        self.key, self.requests, rows = key, requests, requests * key.q
        self.work = tokenspeed.work(
            target,
            heads=key.heads,
            q=key.q,
            requests=requests,
            max_context=max_context,
            sm_count=sm_count,
            pack=key.pack,
        )
        self.cache = torch.zeros(pages, key.page + gap, 576, dtype=torch.uint8)[:, : key.page]
        self.scratch = torch.zeros(rows, key.heads, 576, dtype=torch.uint8)
        self.latent = torch.zeros(rows, key.heads, 512, dtype=torch.bfloat16)
        self.partial = torch.zeros(max(self.work.workspace, 64), dtype=torch.uint8)
        self.lse = torch.zeros(rows, key.heads)
        self.table = torch.zeros(requests, 8, dtype=torch.int32)
        self.lengths = torch.zeros(requests, dtype=torch.int32)
        self.loaded = HostObject(self.driver, data, 0)
        self.core = self.stage()
        self.totals = torch.zeros(requests, dtype=torch.int32)
        self.core.bind(self.table.data_ptr(), self.lengths.data_ptr(), 8, self.totals.data_ptr())

    def stage(self, **changes):
        arguments = {
            "key": self.key,
            "work": self.work,
            "rows": self.requests * self.key.q,
            "cache": self.cache,
            "scratch": self.scratch,
            "partial": self.partial,
            "latent": self.latent,
            "scale": SCALE,
            "out_scale": OUT_SCALE,
            "lse": self.lse.data_ptr() if self.key.lse else 0,
        }
        return TokenspeedCore(self.loaded, **{**arguments, **changes})


def words(launch):
    """Every aligned 8-byte and 4-byte word of a launch's arguments."""
    data = b"".join(launch.arguments)
    eights = [int.from_bytes(a[i : i + 8], "little") for a in launch.arguments for i in range(0, len(a) - 7, 4)]
    fours = [int.from_bytes(a[i : i + 4], "little") for a in launch.arguments for i in range(0, len(a) - 3, 4)]
    assert data
    return eights, fours


TABLE = [
    *[(SMALL, rows, 148, splits) for rows, splits in ((1, 74), (2, 64), (4, 37), (8, 18))],
    *[(LARGE, rows, 152, splits) for rows, splits in ((1, 74), (2, 38), (4, 19), (8, 9))],
]
LOCAL = [(1, 64), (2, 32), (4, 16), (8, 9), (16, 4), (32, 2)]


@pytest.mark.parametrize(("made", "rows", "sm_count", "splits"), TABLE)
def test_grid_cluster_memory_and_pdl_of_the_split_table(payload, made, rows, sm_count, splits):
    target, key = made
    shape = Shape(payload(target, key), target, key, rows, sm_count)
    assert shape.work.splits == splits
    shape.core.launch(STREAM)
    core, reducer = shape.driver.launches
    ctas = 1 if shape.work.tile == 64 else 2
    assert (core.grid, core.block, core.cluster) == ((ctas, rows, splits), (384, 1, 1), (ctas, 1, 1))
    assert core.smem == {64: 195584, 128: 232448}[shape.work.tile]
    assert (reducer.block, reducer.cluster, reducer.smem > 0) == ((128, 1, 1), (1, 1, 1), True)
    assert reducer.grid[0] * reducer.grid[1] * reducer.grid[2] == rows * 12 * key.bands
    assert core.pdl
    assert reducer.pdl
    assert {core.stream, reducer.stream} == {STREAM}
    assert "split_kv_kernel" in core.symbol
    assert "reduction_kernel" in reducer.symbol
    assert shape.driver.cuda.errors == []


@pytest.mark.parametrize(("rows", "splits"), LOCAL)
def test_gathered_heads_have_a_local_bound_and_an_lse(payload, rows, splits):
    target, key = GATHERED
    shape = Shape(payload(target, key), target, key, rows, 148, max_context=16384)
    assert shape.work.splits == splits
    shape.core.launch(STREAM)
    core, reducer = shape.driver.launches
    assert (core.grid, core.cluster) == ((2, rows, splits), (2, 1, 1))
    assert shape.lse.data_ptr() in words(reducer)[0]


def test_a_shard_with_more_tokens_packs_rows_and_takes_the_whole_lengths_too(payload):
    target, key = SHARD
    shape = Shape(payload(target, key), target, key, 2, 148, max_context=16384)
    assert (shape.work.rows, shape.work.groups, shape.work.splits) == (128, 3, 12)
    shape.core.launch(STREAM)
    core, reducer = shape.driver.launches
    assert (core.grid, core.cluster, core.pdl) == ((2, 3 * 2, 12), (2, 1, 1), True)
    eights, _ = words(core)
    assert {shape.lengths.data_ptr(), shape.totals.data_ptr()} <= set(eights)
    eights, _ = words(reducer)
    assert shape.lse.data_ptr() in eights
    assert reducer.grid[0] * reducer.grid[1] * reducer.grid[2] == 2 * 4 * 96 * key.bands


def test_without_ranks_the_bounds_of_tokens_are_the_lengths(payload):
    shape = Shape(payload(*GATHERED), *GATHERED, 2, 148, max_context=16384)
    assert (shape.core._bounds.data, shape.core._lengths.data) == (shape.lengths.data_ptr(),) * 2


@pytest.mark.parametrize("made", [SMALL, LARGE])
def test_argument_words_are_the_addresses_extents_and_scalars(payload, made):
    target, key = made
    shape = Shape(payload(target, key), target, key, 4, 148, gap=16)
    shape.core.launch(STREAM)
    core, reducer = shape.driver.launches
    eights, fours = words(core)
    for tensor in (shape.table, shape.lengths, shape.partial):
        assert tensor.data_ptr() in eights
    lse_part = shape.partial.data_ptr() + 4 * 12 * shape.work.splits * 512 * 4
    assert lse_part in eights  # the partials' LSEs follow their latents
    floats = {struct.unpack("<f", a)[0] for a in core.arguments if len(a) == 4}
    for scale in (SCALE * math.log2(math.e), OUT_SCALE):  # the launcher makes the softmax scale one of base 2
        assert any(one == pytest.approx(scale, rel=1e-6) for one in floats)
    assert {4, shape.work.splits} <= set(fours)
    eights, fours = words(reducer)
    assert {shape.latent.data_ptr(), shape.partial.data_ptr(), lse_part, shape.lengths.data_ptr()} <= set(eights)
    assert {shape.work.splits} <= set(fours)


def test_tensor_maps_hold_the_addresses_and_strides(payload):
    """Five maps: latent and rope of the query, latent and rope of the cache, its transpose."""
    target, key = SMALL
    shape = Shape(payload(target, key), target, key, 4, 148, gap=16)
    shape.core.launch(STREAM)
    maps = [a for a in shape.driver.launches[0].arguments if len(a) == 128]
    assert len(maps) == 5
    query, entries = shape.scratch.data_ptr(), shape.cache.data_ptr()
    bases = sorted(int.from_bytes(m[:8], "little") for m in maps)
    assert bases == sorted([query, query + 512, entries, entries + 512, entries])
    for one in maps:
        base = int.from_bytes(one[:8], "little")
        strides = [16 * int.from_bytes(one[i : i + 4], "little") for i in range(12, 32, 4)]
        wanted = (12 * 576, 576) if base in (query, query + 512) else (80 * 576, 576)
        assert set(wanted) <= set(strides), (hex(base), strides)


def test_bind_moves_the_metadata_and_nothing_else(payload):
    target, key = SMALL
    shape = Shape(payload(target, key), target, key, 2, 148)
    shape.core.launch(STREAM)
    table, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    shape.core.bind(table.data_ptr(), lengths.data_ptr(), 16)
    shape.core.launch(STREAM + 1)
    before, _, after, _ = shape.driver.launches
    assert (before.grid, before.smem, after.stream) == (after.grid, after.smem, STREAM + 1)
    changed = [i for i, (a, b) in enumerate(zip(before.arguments, after.arguments, strict=True)) if a != b]
    assert len(changed) == 3  # table, lengths, causal bounds
    joined = b"".join(after.arguments[i] for i in changed)
    assert table.data_ptr().to_bytes(8, "little") in joined
    assert joined.count(lengths.data_ptr().to_bytes(8, "little")) == 2


def test_spills_of_the_packages_reducer_are_recorded_and_not_refused(payload, store):
    payload(*GATHERED)
    resources = store.get(compile_key(GATHERED[1], "sm_100a")).resources
    reducer, core = resources["kernels"]
    assert core["frame"] == 0
    assert resources["spill_stores"] >= reducer["frame"] > 0


def test_two_objects_and_two_loads_of_one_have_code_of_their_own(payload):
    small, large = payload(*SMALL), payload(*LARGE)
    first, second = HostObject(BlackwellDriver(), small, 0), HostObject(BlackwellDriver(), small, 0)
    other = HostObject(BlackwellDriver("sm_103a"), large, 0)
    entries = {ctypes.cast(x.entry, ctypes.c_void_p).value for x in (first, second, other)}
    assert len(entries) == 3


def test_one_split_is_one_launch_without_workspace(payload):
    target, key = SINGLE
    shape = Shape(payload(target, key), target, key, 16, 8, max_context=128)
    assert (shape.work.splits, shape.work.workspace) == (1, 0)
    shape.core.launch(STREAM)
    [core] = shape.driver.launches
    assert (core.grid, core.pdl) == ((2, 16, 1), True)
    assert shape.latent.data_ptr() in words(core)[0]
    assert shape.lse.data_ptr() in words(core)[0]


def test_errors_of_the_driver_come_through(payload):
    target, key = SMALL
    shape = Shape(payload(target, key), target, key, 2, 148)
    shape.driver.fail("cuLaunchKernelEx", 700)
    with pytest.raises(LaunchError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        shape.core.launch(STREAM)
    shape.core.launch(STREAM)  # and it is usable again
    assert len(shape.driver.launches) == 2
    shape.driver.fail("cuFuncSetAttribute", 1)
    with pytest.raises(LaunchError, match="cuFuncSetAttribute"):
        HostObject(shape.driver, payload(target, key), 0)
    with pytest.raises(LaunchError, match="209"):
        HostObject(BlackwellDriver("sm_103a"), payload(target, key), 0)


def test_a_thread_without_a_context_gets_one(payload):
    import threading

    target, key = SMALL
    shape = Shape(payload(target, key), target, key, 2, 148)
    thread = threading.Thread(target=shape.core.launch, args=(STREAM,))
    thread.start()
    thread.join()
    assert len(shape.driver.launches) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial": torch.zeros(64, dtype=torch.uint8)}, "partial has 64 bytes"),
        ({"lse": 4096}, "lse=0x1000 must be 0"),
        ({"key": replace(SMALL[1], capacity=16)}, "64 splits must be at most 16"),
        ({"cache": torch.zeros(4, 32, 576, dtype=torch.uint8)}, r"must be bytes \[pages, 64, 576\]"),
    ],
)
def test_what_does_not_fit_the_object_is_refused(payload, changes, message):
    shape = Shape(payload(*SMALL), *SMALL, 2, 148)
    with pytest.raises(ConfigError, match=message):
        shape.stage(**changes)
    assert shape.driver.launches == []


def test_the_object_needs_no_library_and_says_what_it_is(payload, store):
    data = payload(*SMALL)
    assert host_object.problems(data, "sm_100a") == []
    [problem, *_] = host_object.problems(data, "sm_103a")
    assert "is for sm_100a, not sm_103a" in problem
    kernels = host_object.facts(data)
    assert [k.block for k in kernels] == [(128, 1, 1), (384, 1, 1)]
    assert all(k.frame == k.stack == 0 for k in kernels)  # no spills
    assert parse_all(host_object.cubin_of(data)) == kernels
    entry = store.get(compile_key(SMALL[1], "sm_100a"))
    assert entry.manifest.payload == "kernel.o"
    assert entry.resources["spill_stores"] == 0


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", bytes(4096)])
def test_what_is_no_object_is_refused(damage):
    assert host_object.problems(damage, "sm_100a")
    with pytest.raises(CompileError):
        HostObject(BlackwellDriver(), damage, 0)


def test_loading_imports_neither_compiler_nor_package(payload, tmp_path):
    file = tmp_path / "kernel.o"
    file.write_bytes(payload(*SMALL))
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]);"
        "from fake_blackwell import BlackwellDriver; from k3dsl.nvidia.host_object import HostObject;"
        "loaded = HostObject(BlackwellDriver(), open(sys.argv[1], 'rb').read(), 0);"
        "bad = {'cutlass', 'tokenspeed_mla', 'tvm_ffi'} & set(sys.modules); assert not bad, bad;"
        "maps = open('/proc/self/maps').read(); assert 'cudart' not in maps and 'cute_dsl' not in maps;"
        "print(len(loaded.kernels))"
    )
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    out = subprocess.check_output([sys.executable, "-c", code, str(file), folder], text=True)
    assert out.strip() == "2"


def test_launch_structures_of_both_apis_have_one_layout():
    """cudaLaunchConfig_t has a size_t where CUlaunchConfig has an unsigned: the same bytes up to 4 GiB."""

    class Runtime(ctypes.Structure):
        _fields_ = [
            ("grid", ctypes.c_uint32 * 3),
            ("block", ctypes.c_uint32 * 3),
            ("smem", ctypes.c_size_t),
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.c_void_p),
            ("count", ctypes.c_uint32),
        ]

    names = ("grid", "block", "smem", "stream", "attributes", "count")
    assert [getattr(Runtime, n).offset for n in names] == [getattr(LaunchConfig, n).offset for n in names]
    assert ctypes.sizeof(Runtime) == ctypes.sizeof(LaunchConfig)
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset) == (72, 8)


# ---- whole layers


@pytest.fixture
def bench(store, built):
    """Layers of one shape each side of q = 1; their objects are those of SMALL and of a verify step."""
    plan = Deployment(DIMS, target="sm_100a", batches=(1, 4), queries=(1, 4), core="tokenspeed")
    for rows, q in plan.shapes():
        key = tokenspeed.key_for(
            "sm_100a", heads=12, q=q, requests=rows // q, page=64, max_context=BOUND, sm_count=148, host=HOST
        )
        store.get_or_build(compile_key(key, "sm_100a"), built)
    return BlackwellBench(plan, store)


def test_a_layer_is_query_core_reducer_value(bench):
    layer, kv = bench.layer(), bench.kv()
    layer.prepare_cache(kv)
    for rows, q in layer.shapes:
        bench.fake.launches.clear()
        layer.run(**step(DIMS, rows, q, width=4), cache=kv, q=q)
        names = [x.symbol for x in bench.fake.launches]
        assert names[0] == "fake_mla_query"
        assert names[-1] == "fake_mla_value"
        assert ["split_kv" in names[1], "reduction" in names[2], len(names)] == [True, True, 4]
        assert all(x.pdl for x in bench.fake.launches)
        assert {x.stream for x in bench.fake.launches} == {STREAM}
    assert bench.fake.cuda.errors == []


def test_a_layer_captures_without_loading_and_refuses_odd_tables(bench):
    layer, kv = bench.layer(), bench.kv()
    layer.prepare_cache(kv)
    with bench.fake.capture(STREAM):
        layer.run(**step(DIMS, 4, 4, width=2), cache=kv, q=4)
        with pytest.raises(CaptureError):
            layer.prepare_cache(bench.kv())
    assert bench.fake.violations == []
    count = len(bench.fake.launches)
    with pytest.raises(ConfigError, match="3 entries a row, must be a multiple of 2"):
        layer.run(**step(DIMS, 4, 1, width=3), cache=kv)
    assert len(bench.fake.launches) == count


def test_padded_requests_and_the_core_alone(bench):
    layer, kv = bench.layer(), bench.kv()
    layer.prepare_cache(kv)
    tensors = step(DIMS, 4, 1, width=4)
    short = {**tensors, "lengths": tensors["lengths"][:2], "block_table": tensors["block_table"][:2]}
    layer.run(**short, cache=kv)
    bench.fake.launches.clear()
    out = layer.stock_core(kv, tensors["block_table"], tensors["lengths"], 4)
    assert out.shape == (4, 12, 512)
    assert len(bench.fake.launches) == 2


# ---- the package that all of this restates


def test_the_split_rule_is_the_packages_own():
    from tokenspeed_mla import mla_decode as package
    from tokenspeed_mla import mla_helpers as helpers

    count = 0
    for target, capability in (("sm_100a", (10, 0)), ("sm_103a", (10, 3))):
        for heads in (6, 12, 96):
            for q in range(1, 9):
                qk, _ = helpers.select_mla_decode_tilers(heads, q, is_fp8=True, compute_capability=capability)
                assert qk == (tokenspeed.tile(target, heads, q), 128)
                together = helpers.get_mla_decode_fold_sq_factor(heads, q, qk[0])
                assert together == tokenspeed.fold(heads, q, qk[0])
                for pack in (False, True):
                    packed = pack and qk[0] == 128
                    rows = 128 if packed else heads * together
                    groups = helpers.compute_q_tile_layout(heads, q, 128)[1] if packed else q // together
                    for requests in (1, 2, 3, 5, 8, 16, 64):
                        for sm_count in (132, 148, 152, 160):
                            for bound in (1, 128, 129, 4096, 16384, 131072, 1 << 20):
                                least = tokenspeed.fill(requests * q, sm_count)
                                theirs = package._get_split_kv_and_workspace_size(
                                    requests, groups, rows, 512, sm_count, bound, torch.float8_e4m3fn, qk, least
                                )
                                cut = tokenspeed.work(
                                    target, heads=heads, q=q, requests=requests, max_context=bound,
                                    sm_count=sm_count, pack=pack,
                                )  # fmt: skip
                                assert (cut.splits, cut.workspace) == theirs
                                count += 1
                                assert tokenspeed.bands(
                                    requests * q * heads, cut.splits, sm_count
                                ) == package._get_reducer_d_tiles(requests, q, heads, sm_count, cut.splits)
                                key = tokenspeed.key_for(
                                    target, heads=heads, q=q, requests=requests, page=64, max_context=bound,
                                    sm_count=sm_count, ranks=8 if pack else 1,
                                )  # fmt: skip
                                if cut.splits > 1:
                                    assert key.capacity == package._get_reducer_max_splits(cut.splits)
    assert count > 10_000


@pytest.mark.parametrize(("ranks", "interleave"), [(8, 1), (8, 16), (16, 64), (4, 1)])
def test_the_packages_bound_of_a_shard_is_the_length_of_the_shard(monkeypatch, ranks, interleave):
    """What token t of q sees is what a context of total - q + t + 1 keys has on the rank."""
    from tokenspeed_mla import mla_decode_fp8 as package

    bound = package.BlackwellMultiHeadLatentAttentionForwardFP8._get_dcp_local_bound.__wrapped__
    monkeypatch.setattr(package, "cute", SimpleNamespace(elem_less=lambda a, b: a < b))
    monkeypatch.setattr(package, "cutlass", SimpleNamespace(const_expr=bool, min=min))
    monkeypatch.setattr(package, "Int32", int)
    for total in (1, 5, interleave, ranks * interleave, ranks * interleave * 9 + interleave + 3, 131072):
        owned = [bound(SimpleNamespace(cp_world=ranks, cp_rank=r, cp_interleave_size=interleave), total)
                 for r in range(ranks)]  # fmt: skip
        owners = [(p // interleave) % ranks for p in range(total)]
        assert owned == [owners.count(r) for r in range(ranks)]


def test_the_compile_function_takes_what_we_pass_and_no_more():
    """A parameter that a new version adds is one whose meaning somebody must look up."""
    from tokenspeed_mla import mla_decode as package

    assert list(inspect.signature(package._get_compiled_mla_kernel.__wrapped__).parameters) == [
        *("torch_dtype", "page_size", "kv_lora_rank", "qk_rope_head_dim", "is_persistent", "is_var_seq"),
        *("is_var_split_kv", "compute_capability", "has_local_visible_lens", "skip_correction_threshold"),
        *("is_workspace_size_zero", "fold_sq_factor", "causal_mask", "num_heads", "seq_len_q", "window_left"),
        *("cp_world", "cp_rank", "cp_interleave_size", "use_pdl", "return_lse", "reducer_d_tiles"),
        *("reducer_max_splits", "pack_q", "partial_fp16"),
    ]


def test_the_object_does_not_depend_on_the_number_of_sms_that_the_package_would_ask_for(store, built):
    """Only persistent grids use it; kernels/tokenspeed.py answers 1."""
    from tokenspeed_mla import mla_helpers

    source = inspect.getsource(mla_helpers.MLAStaticTileScheduler.get_grid_shape)
    before, _, after = source.partition("if params.is_persistent:")
    assert "max_active_clusters *" not in before
    assert "max_active_clusters" not in after.partition("else:")[2]
    # a second build in another process gives the same bytes
    key = compile_key(SMALL[1], "sm_100a")
    assert build(key).payload == store.get_or_build(key, built).payload
