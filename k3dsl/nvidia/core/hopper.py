"""Host facts of the `hopper` attention core and of its merge: keys, shapes, work split, launches.

The core attends q tokens of each request to a paged latent cache and leaves partials; the merge weighs them
into the output. A query column is one (token, head): column c of a request is head c % heads of token c // heads, which
sees the keys below length - (q - 1) + token. The device code is kernels/hopper.py and kernels/merge.py; docs/hopper.md
says who owns what.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from k3dsl.errors import ConfigError
from k3dsl.nvidia.launch import Launch, Param

ENTRY: Final = 576  # elements of a cache entry: all of them are the key, the first LATENT the value
LATENT: Final = 512
TILE: Final = 64  # keys of a tile, the M of a wgmma
PAGES: Final = (32, 64, 128)
KV: Final = ("fp8", "bf16")
#: Types of P by cache; the first is the default.
P_DTYPES: Final = {"fp8": ("f16", "e4m3"), "bf16": ("bf16",)}
#: m of a column that has seen no key, for core and merge: below every score, and differences of it are finite.
UNSEEN: Final = -1.0e30
#: Types of the partials and their bytes.
PARTIALS: Final = {"f16": 2, "f32": 4}
TARGETS: Final = ("sm_90a",)
MAX_Q: Final = 8
MAX_HEADS: Final = 128
MAX_REQUESTS: Final = 64  # two lengths a lane
#: Columns of a CTA. Its accumulator takes 2 registers a column and thread; at 48 the loop still fits the time in which
#: a tile arrives from memory (docs/hopper.md).
MAX_COLUMNS: Final = 48
#: CTAs a request's partials may come from, at most: the merge's weights are in shared memory.
MAX_SPLITS: Final = 160
#: Tiles a request may have before a CTA takes two: below it, one more split costs less than one more tile.
SINGLE_TILES: Final = 32
#: N from which on more warpgroups or other shares do the work on a tile: of blocks of more than 24 columns.
WIDE_COLUMNS: Final = 32
#: Tiles of P that shared memory holds.
PARTS_OF_P: Final = 4
SMEM: Final = 232448  # bytes of shared memory that a CTA may have on sm_90


@dataclass(frozen=True)
class HopperKey:
    """What reaches codegen: heads, query tokens a request, page size, cache format ("fp8", "bf16"), type of P."""

    heads: int
    q: int
    page: int = 64
    kv: str = "fp8"
    p: str = "f16"

    name: ClassVar[str] = "mla_hopper"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.hopper"

    @property
    def params(self) -> tuple[Param, ...]:
        """The kernel's parameters. A map with _tail covers the 64 bytes that a row has beyond its 128-byte boxes."""
        maps = ("kv", "kv_tail", "query", "query_tail") if self.kv == "fp8" else ("kv", "query")
        return (
            *(Param(name, "tmap") for name in maps),
            Param("lengths", "ptr"),  # int32 [requests]; 0 or less: nothing to attend to
            Param("table", "ptr"),  # int32 [requests, >= ceil(length / page)], row stride table_stride
            Param("partial", "ptr"),  # workspace(...).partial bytes, 16-byte aligned
            Param("stats", "ptr"),  # float32, workspace(...).stats bytes, 16-byte aligned
            Param("table_stride", "i32"),  # entries
            Param("requests", "i32"),
            Param("splits", "i32"),  # CTAs a column block has: grid y
            Param("slots", "i32"),  # splits + requests
            Param("scale_log2", "f32"),  # softmax scale x scales of query and key x log2(e), positive
        )

    @property
    def columns(self) -> int:
        """Query columns of a request."""
        return self.heads * self.q

    @property
    def blocks(self) -> int:
        """Column blocks: CTAs that share the keys of a request between them."""
        return -(-self.columns // MAX_COLUMNS)

    @property
    def block(self) -> int:
        """Columns of a block; the last one may have fewer."""
        return -(-self.columns // self.blocks)

    @property
    def wide(self) -> bool:
        """Whether there are so many columns that warpgroups share a tile's work otherwise: see `halves`, `apart`."""
        return -(-self.block // 8) * 8 >= WIDE_COLUMNS

    @property
    def halves(self) -> int:
        """Parts that the columns of a tile's scores are in, one for a warpgroup (BF16, many columns)."""
        return 2 if self.kv == "bf16" and self.wide else 1

    @property
    def n(self) -> int:
        """N of PV's wgmmas; that of QK's is n // halves."""
        if self.apart:  # always the largest: how registers are shared out was found for this N, at 32 it does not hold
            return MAX_COLUMNS
        return -(-self.block // (8 * self.halves)) * 8 * self.halves

    @property
    def element(self) -> int:
        """Bytes of a cache or query element."""
        return 1 if self.kv == "fp8" else 2

    @property
    def partial(self) -> str:
        """Type of the partials: for FP8 f16 of O / l, below 480; for BF16, whose values have any size, f32 of O."""
        return "f16" if self.kv == "fp8" else "f32"

    @property
    def partial_bytes(self) -> int:
        """Bytes of an element of a partial."""
        return PARTIALS[self.partial]

    @property
    def apart(self) -> bool:
        """Whether S and P have warpgroups of their own, two, beside the two that accumulate O (FP8, many columns).

        Else the same two do both in turn.
        """
        return self.kv == "fp8" and self.wide

    @property
    def step(self) -> int:
        """Tiles whose scores are worked out at a time, where the same warpgroups do all: FP8 one each, BF16 one.

        A BF16 tile is so large that only two fit: a step of two would leave none in flight.
        """
        return 2 if self.kv == "fp8" and not self.apart else 1

    @property
    def alone(self) -> bool:
        """Whether a warpgroup works out all scores of a tile for itself, and so need not wait for the other.

        A BF16 tile takes so long to arrive that both can do all tiles where there are few columns. If S and O are
        apart, each does every second tile.
        """
        return self.step * self.halves == 1

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return 4 if self.apart else 2

    @property
    def readers(self) -> int:
        """Consumer warpgroups that read a tile."""
        return 3 if self.apart else 2

    @property
    def threads(self) -> int:
        """Threads of a CTA. Two warps load; registers are handed over by whole warpgroups only."""
        return 640 if self.apart else 320


@dataclass(frozen=True)
class Smem:
    """Shared memory of a core CTA, byte offsets: stages of one tile, query buffers, P of four tiles, exchange."""

    stages: int
    queries: int
    tile_bytes: int
    query_bytes: int
    p_bytes: int
    query: int
    p: int
    peaks: int
    sums: int
    factors: int
    m: int
    inverse: int
    split: int
    bytes: int
    #: Barriers follow at `bytes`, 8 bytes each: stages full, stages empty, queries full, queries empty, and if S and O
    #: are apart P full, P empty, l full and l empty.
    total: int


def smem(key: HopperKey) -> Smem:
    """The layout with the most stages that fits, then the most query buffers (two at most)."""
    tile_bytes = TILE * ENTRY * key.element
    query_bytes = -(-key.n * ENTRY * key.element // 1024) * 1024  # boxes start at whole swizzle atoms
    p_bytes = -(-key.n * TILE * (1 if key.p == "e4m3" else 2) // 1024) * 1024
    exchange = 8 * key.n * 4  # a row a warp, or a row of two that have half of the columns each
    factors_bytes = PARTS_OF_P * (key.n * 4 + 8) if key.apart else key.n * 4  # a factor a column; a flag
    for stages in (5, 4, 3, 2):
        for queries in (2, 1):
            query = stages * tile_bytes
            p = query + queries * query_bytes
            peaks = p + PARTS_OF_P * p_bytes
            sums = peaks + exchange
            factors = sums + exchange
            m = factors + factors_bytes
            inverse = m + (key.n * 4 if key.apart else 0)  # m of each column, from tile to tile
            split = inverse + (key.n * 4 if key.apart else 0)  # 1 / l of each column
            size = split + 2 * MAX_REQUESTS * 4
            total = size + 8 * 2 * (stages + queries + (PARTS_OF_P + 1 if key.apart else 0))
            if total <= SMEM:
                return Smem(
                    stages,
                    queries,
                    tile_bytes,
                    query_bytes,
                    p_bytes,
                    query,
                    p,
                    peaks,
                    sums,
                    factors,
                    m,
                    inverse,
                    split,
                    bytes=size,
                    total=total,
                )
    raise ConfigError(f"{key}: no two stages fit {SMEM} bytes of shared memory")


def choose(*, heads: int, q: int, page: int, kv: str, p: str | None = None) -> HopperKey:
    """The key that serves this layer. `p` overrides the type of P: one of P_DTYPES[kv]."""
    return HopperKey(heads, q, page, kv, p or P_DTYPES.get(kv, ("f16",))[0])


def supports(key: HopperKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    if type(key.heads) is not int or not 1 <= key.heads <= MAX_HEADS:
        bad.append(f"heads={key.heads!r} must be an int from 1 to {MAX_HEADS}")
    if type(key.q) is not int or not 1 <= key.q <= MAX_Q:
        bad.append(f"q={key.q!r} must be an int from 1 to {MAX_Q}")
    if key.page not in PAGES:
        bad.append(f"page={key.page!r} must be one of {', '.join(map(str, PAGES))}")
    if key.kv not in KV:
        bad.append(f"kv={key.kv!r} must be one of {', '.join(KV)}")
    elif key.p not in P_DTYPES[key.kv]:
        bad.append(f"p={key.p!r} must be one of {', '.join(P_DTYPES[key.kv])} for a cache of kv={key.kv!r}")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


# ---- the work split


def splits(key: HopperKey, sm_count: int) -> int:
    """CTAs of a column block: one CTA an SM in all."""
    if type(sm_count) is not int or sm_count < 1:
        raise ConfigError(f"sm_count={sm_count!r} must be a positive int")
    return min(MAX_SPLITS, max(1, sm_count // key.blocks))


@dataclass(frozen=True)
class Cut:
    """How the tiles of all requests, one after the other, fall to CTAs: CTA c has [c * share, (c + 1) * share).

    first[r], last[r]: the CTAs that hold request r (first > last: it has no tile). The partial of request r by CTA c is
    in slot c + r: along the staircase of (c, r) no slot comes twice.
    """

    share: int
    tiles: int
    first: tuple[int, ...]
    last: tuple[int, ...]

    def runs(self, cta: int, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """(request, first tile, tiles) of a CTA, in order. For tests: the device finds them by ballots."""
        found, start = [], 0
        low, high = cta * self.share, min((cta + 1) * self.share, self.tiles)
        for r, length in enumerate(lengths):
            end = start + tiles_of(length)
            a, b = max(low, start), min(high, end)
            if a < b:
                found.append((r, a - start, b - a))
            start = end
        return found


def tiles_of(length: int) -> int:
    """Tiles of a request; none for a length of 0 or less."""
    return -(-max(length, 0) // TILE)


def cut(lengths: Sequence[int], splits: int) -> Cut:
    """The split that the kernels compute from `lengths` [requests]: the specification of kernels/cut.py."""
    tiles = [tiles_of(x) for x in lengths]
    total = sum(tiles)
    least = 2 if total > SINGLE_TILES * len(lengths) else 1
    share = max(-(-total // splits), least)
    first, last, start = [], [], 0
    for t in tiles:
        first.append(start // share)
        last.append((start + t - 1) // share if t else first[-1] - 1)
        start += t
    return Cut(share, total, tuple(first), tuple(last))


@dataclass(frozen=True)
class Workspace:
    """Bytes that a launch writes and its merge reads. Nothing needs to be cleared."""

    slots: int
    partial: int  # [blocks][slots][block][512], of the key's type
    stats: int  # float32 [blocks * block][slots][2]: (m, l) with l = sum of 2^(score - m)


def workspace(key: HopperKey, *, requests: int, sm_count: int) -> Workspace:
    """The workspace of a launch over `requests` requests."""
    slots = splits(key, sm_count) + requests
    columns = key.blocks * key.block
    return Workspace(slots, columns * slots * LATENT * key.partial_bytes, columns * slots * 8)


def geometry(key: HopperKey, *, requests: int, sm_count: int) -> Launch:
    """The core's launch: grid (column blocks, splits). CTAs that read the same tiles are neighbours, for the L2."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"requests={requests!r} must be from 1 to {MAX_REQUESTS}")
    return Launch(
        grid=(key.blocks, splits(key, sm_count), 1), block=(key.threads, 1, 1), smem=smem(key).total, pdl=True
    )


# ---- tensor maps


def kv_maps(key: HopperKey, *, pages: int, page_stride: int, token_stride: int) -> dict[str, dict[str, Any]]:
    """Arguments of `driver.TensorMap` (without the address) for a cache of `pages` pages; strides in bytes.

    Page numbers outside [0, pages) read zeros.
    """
    rows = min(key.page, TILE)
    dims, strides = (ENTRY, key.page, pages), (token_stride, page_stride)
    return _maps(key, "kv", dims, strides, lambda width: (width, rows, 1))


def query_maps(key: HopperKey, *, rows: int) -> dict[str, dict[str, Any]]:
    """Arguments of `driver.TensorMap` for a contiguous query [rows, heads, 576], rows = requests * q."""
    dims, strides = (ENTRY, rows * key.heads), (ENTRY * key.element,)
    return _maps(key, "query", dims, strides, lambda width: (width, key.n))


def _maps(key: HopperKey, name: str, dims: Any, strides: Any, box: Any) -> dict[str, dict[str, Any]]:
    common = {"dims": dims, "strides_bytes": strides, "l2_promotion": 128}
    if key.kv == "bf16":
        return {name: {"dtype": "bf16", "box": box(64), "swizzle": 128, **common}}
    return {
        name: {"dtype": "e4m3", "box": box(128), "swizzle": 128, **common},
        f"{name}_tail": {"dtype": "e4m3", "box": box(64), "swizzle": 64, **common},
    }


# ---- the merge


@dataclass(frozen=True)
class MergeKey:
    """What reaches codegen: columns of a block, latents of a CTA, groups of warps that share the splits, how many
    partials a thread has in flight, and their type."""

    block: int
    slice: int = 512
    groups: int = 1
    batch: int = 8
    partial: str = "f16"

    name: ClassVar[str] = "mla_merge"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.merge"
    params: ClassVar[tuple[Param, ...]] = (
        Param("partial", "ptr"),
        Param("stats", "ptr"),
        Param("lengths", "ptr"),  # int32 [requests]
        Param("out", "ptr"),  # bf16 [requests, columns, 512], contiguous, 4-byte aligned
        Param("lse", "ptr"),  # float32 [requests, columns], base 2, without out_scale; 0: not wanted
        Param("requests", "i32"),
        Param("splits", "i32"),
        Param("slots", "i32"),
        Param("columns", "i32"),  # of a request
        Param("out_scale", "f32"),
    )

    @property
    def warps(self) -> int:
        """Warps with data; one more works out the weights."""
        return self.groups * self.slice // 128

    @property
    def smem(self) -> int:
        """Bytes of shared memory: a weight a split, a slice of sums a group, the total."""
        return 4 * MAX_SPLITS + 4 * self.groups * self.slice + 16


def merge_key(key: HopperKey, *, requests: int) -> MergeKey:
    """The merge that serves `requests` requests of `key`.

    Few (request, column) pairs need every CTA they can get: four latent slices of each, the splits shared by eight
    warps (17 partials each in flight: 132 splits at once). With more pairs fewer CTAs each, as a launch of too many
    takes longer than they save (H200, sweep in docs/hopper.md).
    """
    pairs = requests * key.columns
    if pairs <= 24:
        shape = {"slice": 128, "groups": 8, "batch": 17}
    elif pairs <= 64:
        shape = {"slice": 128, "groups": 4, "batch": 17}
    elif pairs <= 256 and requests < 8:  # so a request has many splits
        shape = {"slice": 256, "groups": 2, "batch": 17}
    elif pairs <= 256:
        shape = {"slice": 256, "groups": 1, "batch": 8}
    else:
        shape = {"slice": 512, "groups": 1, "batch": 8}
    return MergeKey(key.block, partial=key.partial, **shape)


def merge_supports(key: MergeKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    if type(key.block) is not int or not 1 <= key.block <= MAX_COLUMNS:
        bad.append(f"block={key.block!r} must be an int from 1 to {MAX_COLUMNS}")
    if key.slice not in (128, 256, 512):
        bad.append(f"slice={key.slice!r} must be one of 128, 256, 512")
    elif not 1 <= key.groups <= 31 or key.warps > 31:
        bad.append(f"groups={key.groups!r} must be from 1 to {31 * 128 // key.slice}")
    if not 1 <= key.batch <= 32:
        bad.append(f"batch={key.batch!r} must be from 1 to 32")
    if key.partial not in PARTIALS:
        bad.append(f"partial={key.partial!r} must be one of {', '.join(PARTIALS)}")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


def merge_geometry(merge: MergeKey, key: HopperKey, *, requests: int) -> Launch:
    """The merge's launch: grid (columns, latent slices, requests)."""
    if not 1 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"requests={requests!r} must be from 1 to {MAX_REQUESTS}")
    grid = (key.columns, LATENT // merge.slice, requests)
    return Launch(grid=grid, block=(32 * merge.warps + 32, 1, 1), smem=merge.smem, pdl=True)
