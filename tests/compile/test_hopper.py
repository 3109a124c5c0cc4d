"""The hopper core and its merge without a GPU: every build within its limits, its machine code made of the instructions
that it is meant to be made of, and its PTX, run on the CPU with warps in random order, right."""

import re
import subprocess
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CORE_CASES, CoreCase, CoreInputs, core_inputs
from hopper_partials import merged
from ptx_grid import Memory
from ptx_warps import Map, launch, program

from k3dsl import reference as ref
from k3dsl.nvidia import toolchain
from k3dsl.nvidia.core import hopper

pytestmark = pytest.mark.compile

TARGET = "sm_90a"
LOG2E = 1.4426950408889634
#: (heads, q): every N there is, one block and several, blocks that begin inside a token.
SHAPES = ((6, 1), (12, 1), (6, 4), (12, 2), (6, 5), (12, 3), (12, 4), (6, 8), (12, 5), (12, 8), (96, 1), (96, 8))
KEYS = [
    hopper.choose(heads=heads, q=q, page=page, kv=kv, p=p)
    for heads, q in SHAPES
    for kv in hopper.KV
    for p in hopper.P_DTYPES[kv]
    for page in (hopper.PAGES if (heads, q) in ((12, 1), (12, 4)) else (64,))
]
MERGES = sorted({hopper.merge_key(k, requests=r) for k in KEYS for r in (1, 4, 16, 64)}, key=str)


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


def built(compiler, key):
    return compiler.build(toolchain.compile_key(key, TARGET))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_core_builds(compiler, key):
    found = built(compiler, key).resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    # Registers are those of four parts of an SM, so warps count in fours.
    assert found["registers"] * -(-key.threads // 128) * 128 <= 65536
    if key.n <= 16:  # what is left of an SM's registers holds a CTA of the merge while the core runs
        assert found["registers"] <= 128


@pytest.mark.parametrize("key", MERGES, ids=str)
def test_merge_builds(compiler, key):
    found = built(compiler, key).resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    assert found["registers"] * (32 * key.warps + 32) <= 65536


# ---- machine code


@pytest.fixture(scope="module")
def disassemble(tmp_path_factory):
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    tool = next(Path(str(f.locate())) for f in files if f.name == "nvdisasm")

    def opcodes(cubin: bytes) -> list[str]:
        path = tmp_path_factory.mktemp("sass") / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
        return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.M)

    return opcodes


@pytest.mark.parametrize("key", [k for k in KEYS if k.page == 64], ids=str)
def test_machine_code(compiler, disassemble, key):
    found = disassemble(built(compiler, key).payload)

    def count(start: str) -> int:
        return sum(op.startswith(start) for op in found)

    assert count("HMMA") == count("LDL") == count("STL") == 0
    assert count("UTMALDG.3D") == (5 if key.kv == "fp8" else 9)
    tiles = hopper.LATENT // hopper.TILE // 2
    if key.kv == "bf16":
        assert count("QGMMA") == 0
        assert count("HGMMA") == 36 + tiles * 4
        return
    products = 6 if key.apart else 18  # of QK: a loop over the boxes, and the tail
    if key.p == "f16":
        assert (count("QGMMA"), count("HGMMA")) == (products, tiles * 4)
    else:  # O in two halves of the columns where there are many
        assert (count("QGMMA"), count("HGMMA")) == (products + tiles * (4 if key.apart else 2), 0)
    assert count("LDSM") == tiles * 2  # V once: nothing else reads a tile but the tensor cores
    # One wait for each product, and one fragment ahead of it: a serialized wgmma would wait after each.
    groups = tiles * (4 if key.apart and key.p == "f16" else 2)
    assert count("WARPGROUP.DEPBAR") <= groups + 6


# ---- values


class Machine:
    """Core and merge of these inputs on the CPU, with poison in the workspace."""

    def __init__(self, given: CoreInputs, *, p: str | None = None, sm_count: int = 4, seed: int = 0) -> None:
        requests, cache = len(given.lengths), given.cache
        self.given, self.sm_count, self.seed = given, sm_count, seed
        heads = given.query.shape[-2]
        self.key = key = hopper.choose(heads=heads, q=given.q, page=cache.shape[1], kv=given.kv_format, p=p)
        self.sizes = hopper.workspace(key, requests=requests, sm_count=sm_count)
        self.memory = memory = Memory()
        size = cache.element_size()
        values = {"table": memory.place(given.block_table), "lengths": memory.place(given.lengths)}
        memory.place(as_bytes(cache))
        cached = memory.buffers[-1]
        memory.place(as_bytes(given.query))
        queries = memory.buffers[-1]
        facts = hopper.kv_maps(
            key, pages=cache.shape[0], page_stride=cache.stride(0) * size, token_stride=cache.stride(1) * size
        )
        values |= {name: Map(cached, strict=True, **fact) for name, fact in facts.items()}
        facts = hopper.query_maps(key, rows=requests * given.q)
        values |= {name: Map(queries, **fact) for name, fact in facts.items()}
        kind = {"f16": torch.float16, "f32": torch.float32}[key.partial]
        self.partial = self.place(values, "partial", (self.sizes.partial // kind.itemsize,), kind)
        self.stats = self.place(values, "stats", (self.sizes.stats // 4,))
        values |= {"requests": requests, "splits": hopper.splits(key, sm_count), "slots": self.sizes.slots}
        values |= {"scale_log2": given.scale * LOG2E, "table_stride": given.block_table.stride(0)}
        values |= {"columns": key.columns, "out_scale": given.out_scale}
        self.values = values
        self.late = [(queries, np.arange(queries.data.size)), (cached, self.new_bytes())]

    def place(
        self, values: dict, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        tensor = torch.full(shape, torch.nan, dtype=dtype)
        values[name] = self.memory.place(tensor, writable=True)
        self.memory.buffers[-1].constant = False
        return tensor

    def new_bytes(self) -> np.ndarray:
        """Offsets of the cache bytes that the kernel before the core writes: the last q tokens of every request."""
        cache, size = self.given.cache, self.given.cache.element_size()
        found = [np.zeros(0, int)]
        for r, length in enumerate(self.given.lengths.tolist()):
            for position in range(max(0, length - self.given.q), length):
                page, row = self.given.block_table[r, position // cache.shape[1]].item(), position % cache.shape[1]
                start = (page * cache.stride(0) + row * cache.stride(1)) * size
                found.append(np.arange(start, start + 576 * size))
        return np.concatenate(found)

    def core(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in float64 after the core, merged on the host."""
        shape = hopper.geometry(self.key, requests=len(self.given.lengths), sm_count=self.sm_count)
        named = {p.name: self.values[p.name] for p in self.key.params}
        launch(self.key, shape, named, self.memory, self.late, self.seed)
        lengths = self.given.lengths.tolist()
        return merged(
            self.key, self.partial, self.stats, lengths, sm_count=self.sm_count, out_scale=self.given.out_scale
        )

    def merge(self, *, key: hopper.MergeKey | None = None, lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the merge, after the core."""
        requests = len(self.given.lengths)
        key = key or hopper.merge_key(self.key, requests=requests)
        shape = (requests, self.given.q, self.key.heads)
        out = self.place(self.values, "out", (*shape, hopper.LATENT), torch.bfloat16)
        lse_out = self.place(self.values, "lse", shape)
        if not lse:
            self.values["lse"] = 0
        grid = hopper.merge_geometry(key, self.key, requests=requests)
        launch(key, grid, {p.name: self.values[p.name] for p in key.params}, self.memory, seed=self.seed)
        return out, lse_out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


#: Relative error by the type of P, and of the LSE. Here products are exact, so QK adds nothing.
ERROR = {"f16": 3e-4, "bf16": 2.5e-3, "e4m3": 3e-2}
LSE = 2e-5


def check(given: CoreInputs, out: torch.Tensor, lse: torch.Tensor, limit: float, lse_limit: float = LSE) -> None:
    want, want_lse = given.call(ref.core64)
    unseen = want_lse == -torch.inf
    assert ((lse == -torch.inf) == unseen).all()
    assert (out[unseen] == 0).all()
    if not unseen.all():
        assert (out.double() - want).norm() <= limit * want.norm()
        assert (lse.double() - want_lse)[~unseen].abs().max() <= lse_limit


by_name = {c.name: c for c in CORE_CASES if c.name}
VALUES = [
    (CoreCase((1, 63, 64, 65, 0, 200)), None),
    (CoreCase((1, 63, 64, 65, 0, 200), kv_format="bf16"), None),
    *((CoreCase((3, 130, 0, 66), q=4), p) for p in hopper.P_DTYPES["fp8"]),
    (CoreCase((3, 130, 0, 66), q=4, kv_format="bf16", page=32), None),
    *((CoreCase((70, 2, 129), q=q, page=page), None) for q, page in ((2, 64), (3, 32), (5, 128), (8, 64))),
    *((CoreCase((190,), heads=6, q=q), None) for q in (1, 4, 5, 8)),
    (CoreCase((90,), heads=96), None),
    (CoreCase((40, 90), heads=96, q=2, kv_format="bf16", page=128), None),
    (replace(by_name["page_gap"], page=32), None),
    (replace(by_name["sliced_table"], page=128, kv_format="bf16"), None),
    (by_name["q_above_length"], None),
    (replace(by_name["q_above_length"], kv_format="bf16"), None),
    (CoreCase((30,) * 40 + (0,) * 20 + (70,) * 4), None),
]


@pytest.mark.parametrize(("case", "p"), VALUES, ids=lambda x: getattr(x, "id", str(x)))
def test_core_values(case, p):
    machine = Machine(core_inputs(case), p=p, seed=len(case.id))
    check(machine.given, *machine.core(), ERROR[machine.key.p])


RINGS = [
    *((CoreCase((420, 1, 64, 0, 130), heads=6, kv_format=kv), None) for kv in hopper.KV),
    # S and O apart: an odd and an even number of tiles, many requests of one tile after the other
    *((CoreCase((450, 7, 64, 0, 130, 20, 64, 9), heads=12, q=4), p) for p in hopper.P_DTYPES["fp8"]),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("case", "p"), RINGS, ids=lambda x: getattr(x, "id", str(x)))
def test_any_interleaving_gives_the_same_bits(case, p, seed):
    """Rings that wrap, several requests a CTA."""
    given = core_inputs(case)
    first, other = (Machine(given, p=p, sm_count=2, seed=s) for s in (100, seed))
    check(given, *first.core(), ERROR[first.key.p])
    other.core()
    assert torch.equal(first.partial.view(torch.int32), other.partial.view(torch.int32))
    assert torch.equal(first.stats.view(torch.int32), other.stats.view(torch.int32))


RISING = [
    (CoreCase((420, 7), heads=6), None),
    (CoreCase((420, 7), heads=12, q=4, kv_format="bf16"), None),
    *((CoreCase((420, 7), heads=12, q=4), p) for p in hopper.P_DTYPES["fp8"]),
]


@pytest.mark.parametrize(("case", "p"), RISING, ids=lambda x: getattr(x, "id", str(x)))
def test_m_rises_from_tile_to_tile(case, p):
    """Logits so far apart that the m of a request's first tile does not hold: those of the other cases are not."""
    given = core_inputs(case)
    given = replace(given, scale=12 * given.scale)
    query, keys = given.query[: case.q].double().flatten(0, 1), given.keys[0][: 6 * hopper.TILE].double()
    keys /= given.out_scale  # as they are stored
    largest = (given.scale * LOG2E * query @ keys.T).unflatten(1, (6, hopper.TILE)).amax(2).cummax(1).values
    assert (largest[:, 1:] > largest[:, :1] + 8).any()  # more than P may have
    first, other = (Machine(given, p=p, sm_count=1, seed=s) for s in (0, 1))
    check(given, *first.core(), ERROR[first.key.p])
    other.core()
    assert torch.equal(first.partial.view(torch.int32), other.partial.view(torch.int32))


@pytest.mark.parametrize("kv", hopper.KV)
def test_low_logits(kv):
    """All of them near -6e4: float32 has steps of 2^-4 at the scores, a hundredth at the logits."""
    machine = Machine(core_inputs(by_name["low_logits"].of(kv)))
    check(machine.given, *machine.core(), 1e-2, 2e-2)


@pytest.mark.parametrize("case", [CoreCase((70, 300)), CoreCase((70, 300), q=4)], ids=lambda c: c.id)
def test_the_largest_values_fit_partials_of_f16(case):
    """448 in every key and equal weights: the sums pass 65504, the largest f16, by far."""
    given = core_inputs(case, poison=False)
    given.cache[:] = 0x7E
    given.query.view(torch.uint8)[:] = 0
    machine = Machine(given)
    out, lse = machine.core()
    assert machine.partial.dtype == torch.float16
    assert (out == 448 * given.out_scale).all()
    check(given, out, lse, 1e-6)


POISONED = [CoreCase((300, 65), heads=6), CoreCase((300, 9), heads=6, q=2), CoreCase((300, 9, 65), heads=12, q=4)]


@pytest.mark.parametrize("case", POISONED, ids=lambda c: c.id)
def test_poison_changes_no_bit(case):
    clean, poisoned = (Machine(core_inputs(case, poison=p)) for p in (False, True))
    for a, b in zip(clean.core(), poisoned.core(), strict=True):
        assert torch.equal(a, b)


MERGE_CASES = [
    (CoreCase((700, 0, 1), heads=2), 16, None),
    (CoreCase((1100,), heads=1), 3, hopper.MergeKey(1, slice=128, groups=2, batch=2)),  # more splits than are in flight
    (CoreCase((700, 0, 2), heads=2, q=3), 16, hopper.MergeKey(6, slice=512, groups=1, batch=8)),
    (CoreCase((300, 1), heads=2, q=4), 16, hopper.MergeKey(8, slice=256, groups=4, batch=17)),
    (CoreCase((70,), heads=49), 4, hopper.MergeKey(25, slice=512, groups=1, batch=8)),  # two blocks, the last one short
]


@pytest.mark.parametrize(("case", "sm_count", "key"), MERGE_CASES, ids=lambda x: getattr(x, "id", str(x)))
def test_merge_values(case, sm_count, key):
    machine = Machine(core_inputs(case), sm_count=sm_count, seed=3)
    want, want_lse = machine.core()
    out, lse = machine.merge(key=key)
    assert (out.double() - want).abs().max() <= 2**-8 * want.abs().max()
    assert (out.double() - want).norm() <= 1.8e-3 * want.norm()  # one rounding to bf16
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert (out[lse == -torch.inf].view(torch.int16) == 0).all()
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    check(machine.given, out, lse, (ERROR[machine.key.p] ** 2 + 1.8e-3**2) ** 0.5)


def test_merge_of_empty_requests():
    machine = Machine(core_inputs(CoreCase((0, 0), heads=1, q=2)))
    machine.core()
    out, lse = machine.merge()
    assert (out.view(torch.int16) == 0).all()
    assert (lse == -torch.inf).all()
    assert machine.partial.isnan().all()  # the core wrote nothing


def test_merge_without_lse():
    machine = Machine(core_inputs(CoreCase((70,), heads=1)))
    machine.core()
    out, lse = machine.merge(lse=False)
    assert torch.isfinite(out).all()
    assert lse.isnan().all()


def test_the_grid_dependency_is_waited_for_where_it_must_be():
    """launch_dependents comes first of all; the merge reads partials only after its wait (the machine checks that)."""
    for key in (hopper.choose(heads=12, q=1, page=64, kv="fp8"), hopper.MergeKey(12)):
        ops = [".".join(op) for _, _, op, _ in program(key).statements]
        first = ops.index("griddepcontrol.launch_dependents")
        assert not any(op.startswith(("ld.global", "bar", "cp.async")) for op in ops[:first])
        assert first < ops.index("griddepcontrol.wait")
