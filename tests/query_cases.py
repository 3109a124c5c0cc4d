"""Cases of the MlaQuery kernel, for its PTX on the CPU and for the GPU: inputs, and what outputs must be.

Poison: outputs and cache are filled before, canaries lie behind the query, projected ends with the last column that may
be read, its columns from 2112 on are NaN, and the cache has gaps between pages that must keep their bytes.
"""

from dataclasses import dataclass, replace

import torch
from cases import bf16_steps, fp8_steps
from torch import Tensor

from k3dsl import reference as ref
from k3dsl.dims import MlaDims
from k3dsl.nvidia import query as facts
from k3dsl.weights import MlaWeights

FILL = 0xA5
CANARY = 256  # bytes behind the query
#: Share of values that may differ from the oracle's, by one step. Sums in another order round a few u in a thousand to
#: the other neighbour; of 128 such terms one in a few is, which is a tenth of a bf16 step of the absorbed query.
APART = {"fp8": 0.01, "bf16": 0.1}


@dataclass(frozen=True)
class QueryCase:
    rows: int
    heads: int = 12
    kv_format: str = "fp8"
    page: int = 64
    gap: int = 0  # cache elements between the end of a page and the next page
    token_gap: int = 0  # cache elements between entries
    pitch: int | None = None  # default: the model's
    q_scale: float = 1.0
    k_scale: float = 1.0
    eps: float = 1e-5
    slots: str = "mixed"  # "mixed": every third row is not inserted; "all", "none"; "first": slot 0 among them
    copied_uk: bool = False  # W_UK in an allocation of its own, other strides
    key: facts.QueryKey | None = None  # default: what config() says
    name: str = ""

    @property
    def build(self) -> facts.QueryKey:
        return self.key or facts.config(self.heads, self.rows, self.kv_format)

    @property
    def id(self) -> str:
        build = f"{self.build.schedule}{self.build.tile}"
        return "-".join(x for x in (self.kv_format, f"h{self.heads}", f"b{self.rows}", build, self.name) if x)


@dataclass
class QueryInputs:
    """What a launch gets. `query_bytes` and `cache_bytes` are the storages of `query` and `cache`."""

    case: QueryCase
    weights: MlaWeights
    projected: Tensor
    slots: Tensor
    cache: Tensor
    query: Tensor
    query_bytes: Tensor
    cache_bytes: Tensor

    def tensors(self) -> dict:
        """The arguments of facts.arguments."""
        w = self.weights
        scales = {"q_scale_inv": w._q_scale_inv, "k_scale_inv": w._k_scale_inv}
        return {
            "projected": self.projected,
            "q_norm": w.q_a_layernorm.weight,
            "kv_norm": w.kv_a_layernorm.weight,
            "q_b": w.q_b_proj.weight,
            "w_uk": w.W_UK_T,
            "slots": self.slots,
            "cache": self.cache,
            "query": self.query,
            "eps": w.rms_norm_eps,
            **(scales if self.case.kv_format == "fp8" else {}),
        }

    def refill(self) -> None:
        self.query_bytes.fill_(FILL)
        self.cache_bytes.fill_(FILL)


def inputs(
    case: QueryCase, device: str = "cpu", seed: int = 0, bad_rows: dict[int, float] | None = None
) -> QueryInputs:
    """bad_rows: rows of projected that are this value (NaN, inf) in one q and one kv column."""
    generator = torch.Generator().manual_seed(seed)
    dims = MlaDims(heads=case.heads, eps=case.eps)
    weights = MlaWeights.random(dims, seed=seed, q_scale=case.q_scale, k_scale=case.k_scale)
    if case.copied_uk:
        wider = (torch.randn(case.heads, 130, 520, generator=generator) * 0.05).bfloat16()
        weights = replace(weights, W_UK_T=wider[:, 1:129, 8:])
    weights = weights.to(device)
    pitch = case.pitch or dims.pitch
    # The last row ends at column 2112, so that a read beyond it leaves the allocation.
    flat = torch.full(((case.rows - 1) * pitch + facts.PROJECTED,), torch.nan)
    projected = flat.as_strided((case.rows, facts.PROJECTED), (pitch, 1))
    projected[:] = torch.randn(case.rows, facts.PROJECTED, generator=generator)
    for row, value in (bad_rows or {}).items():
        projected[row, 100] = projected[row, 1536 + 7] = value
    projected = flat.bfloat16().to(device).as_strided((case.rows, facts.PROJECTED), (pitch, 1))

    size = facts.ELEMENT[case.kv_format]
    token = facts.ENTRY + case.token_gap
    pages = -(-case.rows // case.page) + 2
    page_stride = case.page * token + case.gap
    cache_bytes = torch.full((pages * page_stride * size,), FILL, dtype=torch.uint8, device=device)
    elements = cache_bytes if size == 1 else cache_bytes.view(torch.bfloat16)
    cache = elements.as_strided((pages, case.page, facts.ENTRY), (page_stride, token, 1))
    query_size = case.rows * case.heads * facts.ENTRY * size
    query_bytes = torch.full((query_size + CANARY,), FILL, dtype=torch.uint8, device=device)
    query = query_bytes[:query_size].view(cache.dtype).view(case.rows, case.heads, facts.ENTRY)

    slots = torch.randperm(pages * case.page, generator=generator)[: case.rows]
    if case.slots == "first":
        slots[slots == 0] = slots[0].clone()
        slots[0] = 0
    if case.slots == "none":
        slots[:] = -1
    if case.slots == "mixed":
        slots[1::3] = -1
    return QueryInputs(case, weights, projected, slots.to(device), cache, query, query_bytes, cache_bytes)


def expected_cache(given: QueryInputs) -> Tensor:
    """The bytes of the whole cache after the call."""
    after = given.cache_bytes.clone().fill_(FILL)
    elements = after if given.cache.element_size() == 1 else after.view(torch.bfloat16)
    view = elements.as_strided(given.cache.shape, given.cache.stride())
    ref.insert(given.projected, given.weights, view, given.slots, given.case.kv_format)
    return after


def check(given: QueryInputs, bad_rows: tuple[int, ...] = ()) -> None:
    """Outputs against the oracle: the same rounding points, another order of sums."""
    case = given.case
    fp8 = case.kv_format == "fp8"
    live = [b for b in range(case.rows) if b not in bad_rows]
    want = ref.query(given.projected, given.weights, case.kv_format)
    query = given.query
    steps = fp8_steps(query, want.view(torch.uint8)) if fp8 else bf16_steps(query, want)
    # One step; more only near zero, where one other rounding of one u is many steps of a sum that cancels.
    values = [(q.view(torch.float8_e4m3fn) if fp8 else q)[live].float() for q in (query, want)]
    near = (values[0] - values[1]).abs() <= values[1].abs().mean() * 2**-6
    worst = steps[live].masked_fill(near, 0).max()
    assert worst <= 1, f"a query value is off by {worst} steps"
    apart = (steps[live] > 0).float().mean().item()
    assert apart <= APART[case.kv_format], f"{apart:.4f} of the query values differ"
    if fp8:
        assert (given.query_bytes[:-CANARY] != 0xFF).all()
    assert (given.query_bytes[-CANARY:] == FILL).all(), "written behind the query"
    for b in bad_rows:
        got = query[b].view(torch.float8_e4m3fn) if fp8 else query[b]
        assert got.float().isnan().all()
        assert not fp8 or (query[b] == 0x7F).all()

    # Against float64 without rounding points: not further away than the oracle, whose rounding points are the same.
    exact = ref.query64(given.projected[live], given.weights, case.kv_format)
    exact = exact.clamp(-448, 448) if fp8 else exact
    off, allowed = (
        ((q.view(torch.float8_e4m3fn) if fp8 else q).double() - exact).abs() for q in (query[live], want[live])
    )
    assert off.mean() <= 1.02 * allowed.mean()
    assert off.max() <= 1.5 * allowed.max()

    bytes_want = expected_cache(given)
    untouched = bytes_want == FILL  # also where an entry's byte happens to be FILL
    if fp8:
        assert fp8_steps(given.cache_bytes, bytes_want).max() <= 1
    else:
        assert bf16_steps(given.cache_bytes.view(torch.bfloat16), bytes_want.view(torch.bfloat16)).max() <= 1
    apart = (given.cache_bytes != bytes_want)[~untouched].float().mean().item() if (~untouched).any() else 0.0
    assert apart <= APART[case.kv_format], f"{apart:.4f} of the cache bytes differ"
    inserted = torch.zeros_like(given.cache_bytes, dtype=torch.bool)
    size = given.cache.element_size()
    for slot in given.slots[given.slots >= 0].tolist():
        start = (slot // case.page * given.cache.stride(0) + slot % case.page * given.cache.stride(1)) * size
        inserted[start : start + facts.ENTRY * size] = True
    assert (given.cache_bytes[~inserted] == FILL).all(), "cache bytes that belong to no slot changed"
    # k_pe is copied, not computed.
    rows = (given.slots >= 0).nonzero().flatten()
    slots = given.slots[rows]
    rope = given.cache[slots // case.page, slots % case.page, 512:]
    k_pe = given.projected[rows, 2048:2112]
    if fp8:
        assert torch.equal(rope, ref.f8(k_pe.float() * given.weights._k_scale_inv).view(torch.uint8))
    else:
        assert torch.equal(rope.contiguous().view(torch.int16), k_pe.contiguous().view(torch.int16))


def every_build(kv_format: str) -> list[facts.QueryKey]:
    return [facts.QueryKey(s, t, kv_format) for s, tiles in facts.TILES.items() for t in tiles]
