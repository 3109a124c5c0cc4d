"""Host facts of MlaQuery: from the packed projection to absorbed, quantized queries and the cache entries of the step.

For row b and head h, with c_q, c_kv, k_pe = projected[b, 0:1536], [b, 1536:2048], [b, 2048:2112]:

    x    = bf((c_q * rsqrt(mean(c_q^2) + eps)) * g_q)
    u[j] = bf(sum_k W_qb[192 h + j, k] x[k])                     j in 0..191
    a[l] = bf(sum_p u[p] W_UK[h, p, l])                          p in 0..127, l in 0..511
    n    = bf((c_kv * rsqrt(mean(c_kv^2) + eps)) * g_kv)

    query[b, h] = a, u[128:192]           fp8: each bf16 value times q_scale_inv, then e4m3; bf16: as they are
    cache[slot] = n, k_pe                 fp8: times k_scale_inv, then e4m3; bf16: as they are; no write if slot < 0

with float32 sums. One launch of clusters of 8 CTAs: cluster (head, row tile), CTA `part` of it. The device code is in
`kernels/query_*.py`; docs/query.md says who owns what and why there are two schedules.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from k3dsl.errors import ConfigError
from k3dsl.nvidia.launch import Launch, Param

LORA: Final = 1536  # q latent
NOPE: Final = 128
QK: Final = 192  # rows of W_qb a head: nope and rope
LATENT: Final = 512
ENTRY: Final = 576  # latent and rope part, of a query and of a cache entry
PROJECTED: Final = LORA + ENTRY  # columns of the projection that are read
CLUSTER: Final = 8  # the largest portable cluster
THREADS: Final = 256
WARPS: Final = THREADS // 32
#: Most rows of a launch: the query scratch that all layers share has 64.
MAX_ROWS: Final = 64
MAX_HEADS: Final = 128
#: Bytes of one element of the query and of the cache.
ELEMENT: Final = {"fp8": 1, "bf16": 2}
#: Row tiles of each schedule.
TILES: Final = {"narrow": (1, 2, 4, 8), "wide": (16, 32, 48, 64)}
#: Builds that fit 128 registers a thread, so that a CTA can start (and request its weights) beside one of the kernel
#: before. The others need more for W_qb, the norm weights and the rows that are on their way.
TWO_A_SM: Final = (("narrow", 1), ("narrow", 2), ("wide", 16))
TARGETS: Final = ("sm_90a", "sm_100a", "sm_103a")

#: Rows of W_qb and columns of W_UK that a CTA owns.
PART_ROWS: Final = QK // CLUSTER
PART_COLUMNS: Final = LATENT // CLUSTER

# Shared memory. The odd 64 and 16 bytes are there so that no access finds two of its lanes in one bank.
UK_PITCH: Final = PART_COLUMNS * 2 + 16  # bytes of a staged row of W_UK
X_PITCH_NARROW: Final = LORA * 2 + 64  # bytes of a normalized row, all 1536 columns
X_CHUNK: Final = 32 * 16 * 2 + 64  # bytes of 16 normalized rows, 32 columns, as two A fragments of 16 bytes a lane
UNIT: Final = 512  # bytes of one 16 x 8 accumulator tile in fragment order: 32 lanes, 4 floats


@dataclass(frozen=True)
class Smem:
    """Byte offsets into a CTA's dynamic shared memory."""

    uk: int  # the staged slice of W_UK
    x: int  # normalized rows
    sums: int  # narrow: partial sums of the warps; wide: those of the cluster's CTAs, for the rows of W_qb of this one
    u: int  # nope part of u of the head, bf16, in the order of the absorbing MMA's fragments
    scale: int  # narrow: partial sums of squares; wide: one factor a row
    barriers: int
    total: int


@dataclass(frozen=True)
class QueryKey:
    """What reaches codegen. Rows, heads, strides, page size and eps are arguments of the kernel or of its launch."""

    schedule: str  # "narrow" or "wide"
    tile: int  # rows of a cluster
    kv_format: str  # "fp8" or "bf16"

    name: ClassVar[str] = "mla_query"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.query"
    params: ClassVar[tuple[Param, ...]] = (
        Param("projected", "ptr"),  # bf16 [rows, >= 2112], row stride row_pitch, rows 16-byte aligned
        Param("q_norm", "ptr"),  # bf16 [1536]
        Param("kv_norm", "ptr"),  # bf16 [512]
        Param("q_b", "ptr"),  # bf16 [heads * 192, 1536], contiguous, 16-byte aligned
        Param("w_uk", "ptr"),  # bf16 [heads, 128, 512], strides (uk_head_stride, uk_stride, 1), rows 16-byte aligned
        Param("q_scale_inv", "ptr"),  # f32 [1]; not read for bf16
        Param("k_scale_inv", "ptr"),  # f32 [1]; not read for bf16
        Param("slots", "ptr"),  # int64 [rows]
        Param("cache", "ptr"),  # [pages, page, 576]; strides below, entries 8-byte (fp8) or 16-byte (bf16) aligned
        Param("query", "ptr"),  # [rows, heads, 576], contiguous, 16-byte aligned
        Param("rows", "i32"),
        Param("row_pitch", "i32"),  # of projected, elements
        Param("page_shift", "i32"),  # log2 of the tokens of a page
        Param("uk_head_stride", "i64"),  # elements
        Param("uk_stride", "i64"),  # elements
        Param("page_stride", "i64"),  # of cache, elements
        Param("token_stride", "i64"),  # of cache, elements
        Param("eps", "f32"),
    )


def supports(key: QueryKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    if key.schedule not in TILES:
        bad.append(f"schedule={key.schedule!r} must be one of {', '.join(TILES)}")
    elif key.tile not in TILES[key.schedule]:
        bad.append(f"tile={key.tile!r} must be one of {', '.join(map(str, TILES[key.schedule]))} ({key.schedule})")
    if key.kv_format not in ELEMENT:
        bad.append(f"kv_format={key.kv_format!r} must be one of {', '.join(ELEMENT)}")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


def smem(schedule: str, tile: int) -> Smem:
    """The shared memory of a CTA."""
    uk = 0
    x = uk + NOPE * UK_PITCH
    if schedule == "narrow":
        sums = x + tile * X_PITCH_NARROW
        u = sums + WARPS * tile * PART_ROWS * 4
    else:
        sums = x + tile // 16 * (LORA // CLUSTER // 32) * X_CHUNK
        u = sums + CLUSTER * (tile // 16) * (PART_ROWS // 8) * UNIT
    # A fragment word holds two p of one row; below 16 rows, rows 8..15 of the MMA do not exist and have no words.
    scale = u + max(8, tile) * NOPE * 2
    barriers = scale + max(16, tile) * 4
    return Smem(uk, x, sums, u, scale, barriers, barriers + 32)


def config(heads: int, rows: int, kv_format: str) -> QueryKey:
    """The build that serves `rows` rows of `heads` heads.

    Up to 8 rows every CTA of a cluster normalizes all rows itself ("narrow"). From 9 on that is the largest part of the
    kernel's time, so the CTAs split the 1536 columns instead and exchange sums ("wide"). With few heads, two tiles of
    32 rows keep twice as many SMs busy as one of 64.
    """
    _check(heads, rows)
    if rows <= 8:
        return QueryKey("narrow", next(t for t in TILES["narrow"] if t >= rows), kv_format)
    most = 64 if heads > 8 else 32
    return QueryKey("wide", next(t for t in TILES["wide"] if t >= min(rows, most)), kv_format)


def configs(heads: int, rows: range, kv_format: str) -> list[QueryKey]:
    """The builds that serve all these row counts, each once."""
    return list(dict.fromkeys(config(heads, r, kv_format) for r in rows))


def geometry(key: QueryKey, *, heads: int, rows: int) -> Launch:
    """The launch for `rows` rows of `heads` heads: grid (part, head, row tile). Any key serves any such pair."""
    _check(heads, rows)
    return Launch(
        grid=(CLUSTER, heads, -(-rows // key.tile)),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        smem=smem(key.schedule, key.tile).total,
        pdl=True,
    )


def page_shift(page: int) -> int:
    """log2 of the page size. Raises ConfigError unless it is a power of two."""
    if type(page) is not int or page < 1 or page & (page - 1):
        raise ConfigError(f"page={page!r}: the tokens of a cache page must be a power of two")
    return page.bit_length() - 1


def arguments(
    key: QueryKey,
    *,
    projected: Any,
    q_norm: Any,
    kv_norm: Any,
    q_b: Any,
    w_uk: Any,
    slots: Any,
    cache: Any,
    query: Any,
    q_scale_inv: Any = None,
    k_scale_inv: Any = None,
    eps: float,
) -> dict[str, Any]:
    """Torch tensors of one call as values of QueryKey.params. Shapes, dtypes and strides: there.

    projected may be wider than 2112, slots longer than the rows. Caches of one byte an element may be uint8. The scales
    are for fp8 alone. Raises ConfigError with every shape, dtype, stride or alignment that the kernel does not take.
    """
    if projected.ndim != 2 or query.ndim != 3 or cache.ndim != 3:
        raise ConfigError(
            f"MlaQuery: projected, query and cache have {projected.ndim}, {query.ndim} and {cache.ndim} axes, "
            "must have 2, 3 and 3"
        )
    rows, heads = int(projected.shape[0]), int(query.shape[1])
    _check(heads, rows)
    fp8 = key.kv_format == "fp8"
    element = ("uint8", "float8_e4m3fn") if fp8 else ("bfloat16",)
    want: dict[str, tuple[Any, tuple[int | None, ...], tuple[str, ...], int]] = {
        "projected": (projected, (rows, None), ("bfloat16",), 16),
        "q_norm": (q_norm, (LORA,), ("bfloat16",), 16),
        "kv_norm": (kv_norm, (LATENT,), ("bfloat16",), 16),
        "q_b": (q_b, (heads * QK, LORA), ("bfloat16",), 16),
        "w_uk": (w_uk, (heads, NOPE, LATENT), ("bfloat16",), 16),
        "slots": (slots, (None,), ("int64",), 8),
        "cache": (cache, (None, None, ENTRY), element, 8 * ELEMENT[key.kv_format]),
        "query": (query, (rows, heads, ENTRY), element, 16),
    }
    if fp8:
        want |= {n: (t, (1,), ("float32",), 4) for n, t in (("q_scale_inv", q_scale_inv), ("k_scale_inv", k_scale_inv))}
    bad = []
    for name, (tensor, shape, dtypes, align) in want.items():
        if tensor is None:
            bad.append(f"{name} is None, must be a tensor: the cache is fp8")
            continue
        have = tuple(tensor.shape)
        if len(have) != len(shape) or any(w is not None and w != h for w, h in zip(shape, have, strict=True)):
            bad.append(f"{name} has shape {have}, must be {tuple('any' if n is None else n for n in shape)}")
        if str(tensor.dtype) not in [f"torch.{d}" for d in dtypes]:
            bad.append(f"{name} is {tensor.dtype}, must be {' or '.join(dtypes)}")
        if tensor.data_ptr() % align:
            bad.append(f"{name} starts at {tensor.data_ptr():#x}, must be {align}-byte aligned")
        # Strides that the kernel takes: of the first axis of projected, the first two of w_uk and cache. An axis of one
        # has no stride: whatever it says is multiplied by 0.
        free = {"projected": 1, "w_uk": 2, "cache": 2}.get(name, 0)
        strides = [st if n > 1 else 0 for st, n in zip(tensor.stride(), have, strict=True)]
        inner = tensor[(0,) * free] if free and 0 not in have else tensor
        if not inner.is_contiguous():
            bad.append(f"{name} has strides {tuple(tensor.stride())}, must be contiguous from axis {free} on")
        elif any(st < 0 or st * tensor.element_size() % align for st in strides[:free]):
            bad.append(f"{name} has strides {tuple(tensor.stride())}, must step by multiples of {align} bytes")
    if projected.shape[1] < PROJECTED:
        bad.append(f"projected has {projected.shape[1]} columns, must have at least {PROJECTED}")
    if len(slots.shape) == 1 and slots.shape[0] < rows:
        bad.append(f"slots has {slots.shape[0]} entries, must have at least {rows}")
    if bad:
        raise ConfigError.of("MlaQuery", bad)

    def stride(tensor: Any, axis: int) -> int:
        return int(tensor.stride(axis)) if tensor.shape[axis] > 1 else 0

    return {
        **{name: tensor.data_ptr() for name, (tensor, *_) in want.items()},
        **({} if fp8 else {"q_scale_inv": 0, "k_scale_inv": 0}),
        "rows": rows,
        "row_pitch": stride(projected, 0),
        "page_shift": page_shift(int(cache.shape[1])),
        "uk_head_stride": stride(w_uk, 0),
        "uk_stride": stride(w_uk, 1),
        "page_stride": stride(cache, 0),
        "token_stride": stride(cache, 1),
        "eps": eps,
    }


def _check(heads: int, rows: int) -> None:
    if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"rows={rows!r} must be an int from 1 to {MAX_ROWS}")
    if type(heads) is not int or not 1 <= heads <= MAX_HEADS:
        raise ConfigError(f"heads={heads!r} must be an int from 1 to {MAX_HEADS}")
