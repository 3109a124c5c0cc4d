"""Host facts of the `tokenspeed` core: tokenspeed_mla's FP8 decode for sm_100a and sm_103a.

The device code is the package's own; what is here is what its host code needs to know of a shape: the tile, how query
rows are laid out, into how many parts the keys of a request are split, and the workspace of their partials. The rule is
that of tokenspeed_mla 2.0.4, restated, with the least number of splits that fills the device; tests hold it against the
package's own functions. docs/blackwell.md says how the object is built, loaded and launched.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from k3dsl.errors import ConfigError

LATENT: Final = 512
ROPE: Final = 64
ENTRY: Final = LATENT + ROPE
KEYS: Final = 128  # keys of a tile
PAGES: Final = (32, 64)
TARGETS: Final = ("sm_100a", "sm_103a")
MAX_Q: Final = 8
MAX_HEADS: Final = 128
MAX_SPLITS: Final = 256
MAX_RANKS: Final = 32
#: Where the query rows of a request fit 64, sm_100 has a tile for them that one CTA computes; 128 rows take a pair.
SMALL_TILE: Final = {"sm_100a": 64}
TILE: Final = 128
#: SMs that devices of both targets report, by the CPU of the machines that they are sold in: B200 and B300 148, GB200
#: and GB300, which come with an ARM CPU, 152. The number of splits, and with it the reducer, depends on it.
SM_COUNTS: Final = {"x86-64": (148,), "aarch64": (152,)}
#: Byte offsets into the workspace are 32-bit.
MAX_WORKSPACE: Final = 2**31 - 1
#: Growth of the running maximum, in powers of two, up to which the core rescales nothing: P stays below 2^8 < 448.
SKIP_CORRECTION: Final = 8.0


@dataclass(frozen=True)
class TokenspeedKey:
    """What reaches codegen.

    heads, q    query heads and tokens of a request, compiled in
    page        tokens of a cache page
    capacity    splits that the reducer holds in registers, a power of two from 4; 0: one split and no reducer
    bands       halves of the 512 latents that reducers share a row by, 1 or 2
    lse         whether the base-2 LSE is written
    pack        whether query rows are laid out one after the other instead of folded by whole tokens
    ranks, rank, interleave    whose shard of a context this is, compiled in where tokens see different numbers of its
                keys (q > 1): token t sees those below position total - q + t + 1 of the whole context. At q = 1 every
                key of a shard is seen, and the object serves any rank: 1, 0, 1
    host        ISA of the launcher, one of `SM_COUNTS`
    """

    heads: int
    q: int = 1
    page: int = 64
    capacity: int = 0
    bands: int = 1
    lse: bool = False
    pack: bool = False
    ranks: int = 1
    rank: int = 0
    interleave: int = 1
    host: str = "x86-64"

    name: ClassVar[str] = "mla_tokenspeed"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.tokenspeed"
    #: Host code and cubin in one object (k3dsl.nvidia.host_object), not a cubin whose parameters are ours.
    payload: ClassVar[str] = "host"
    #: Packages whose code the object is made of, besides the compiler, in the version that this file restates. It is
    #: in the key whatever is installed, so that a node that only loads objects may have another or none.
    packages: ClassVar[dict[str, str]] = {"tokenspeed-mla": "2.0.4"}
    options: ClassVar[str] = "--opt-level 2"  # what the package itself compiles with
    params: ClassVar[tuple[Any, ...]] = ()


def supports(key: TokenspeedKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    if type(key.heads) is not int or not 1 <= key.heads <= MAX_HEADS:
        bad.append(f"heads={key.heads!r} must be an int from 1 to {MAX_HEADS}")
    if type(key.q) is not int or not 1 <= key.q <= MAX_Q:
        bad.append(f"q={key.q!r} must be an int from 1 to {MAX_Q}")
    if key.page not in PAGES:
        bad.append(f"page={key.page!r} must be one of {', '.join(map(str, PAGES))}")
    capacities = (0, *(1 << n for n in range(2, 9)))
    if key.capacity not in capacities:
        bad.append(f"capacity={key.capacity!r} must be one of {', '.join(map(str, capacities))}")
    if key.bands not in (1, 2):
        bad.append(f"bands={key.bands!r} must be 1 or 2")
    if not 1 <= key.ranks <= MAX_RANKS:
        bad.append(f"ranks={key.ranks!r} must be an int from 1 to {MAX_RANKS}")
    elif not 0 <= key.rank < key.ranks:
        bad.append(f"rank={key.rank!r} must be an int from 0 to {key.ranks - 1}")
    if key.interleave < 1:
        bad.append(f"interleave={key.interleave!r} must be a positive int")
    if key.ranks == 1 and key.interleave != 1:
        bad.append(f"interleave={key.interleave!r} must be 1 where ranks is")
    if key.host not in SM_COUNTS:
        bad.append(f"host={key.host!r} must be one of {', '.join(SM_COUNTS)}")
    if key.ranks > 1 and not (key.q > 1 and key.lse):
        bad.append(f"ranks={key.ranks!r} must be 1 with q={key.q} and lse={key.lse}: shards need q > 1 and an LSE")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


def tile(target: str, heads: int, q: int) -> int:
    """Query rows of a tile: 64 where sm_100 serves all rows of a request by one such tile, else 128."""
    small = SMALL_TILE.get(target, 0)
    return small if small and heads * q <= small else TILE


def fold(heads: int, q: int, rows: int) -> int:
    """Tokens that share a tile of `rows` rows: the largest divisor of q whose heads fit."""
    return next(f for f in range(q, 0, -1) if q % f == 0 and (f == 1 or heads * f <= rows))


def fill(rows: int, sm_count: int) -> int:
    """The least number of splits: two CTAs' worth of every row's keys on each SM, from 1 to 256."""
    return min(MAX_SPLITS, max(1, sm_count // (2 * rows)))


@dataclass(frozen=True)
class Work:
    """How one shape is cut, and what that takes.

    tile      query rows of a tile
    rows      query rows that partials are kept for, per tile group: heads times folded tokens, or the tile if packed
    groups    tile groups of a request
    splits    parts that the keys of a request are split into, none empty at the planned bound
    workspace bytes of float32 partials: 512 latents and an LSE for every row and split; 0 with one split
    """

    tile: int
    rows: int
    groups: int
    splits: int
    workspace: int


def work(
    target: str, *, heads: int, q: int, requests: int, max_context: int, sm_count: int, pack: bool = False
) -> Work:
    """The cut of `requests` requests of q tokens, up to `max_context` keys each, on a device of `sm_count` SMs.

    max_context only decides the number of splits: requests may be longer. Raises ConfigError for numbers below 1 and
    for partials that would need more than 2 GiB.
    """
    named = {"heads": heads, "q": q, "requests": requests, "max_context": max_context, "sm_count": sm_count}
    bad = [f"{name}={value!r} must be a positive int" for name, value in named.items()
           if type(value) is not int or value < 1]  # fmt: skip
    if bad:
        raise ConfigError.of("the split of tokenspeed", bad)
    size = tile(target, heads, q)
    if pack and size == TILE:
        rows, groups = size, -(-heads * q // size)
    else:
        together = fold(heads, q, size)
        rows, groups = heads * together, q // together
    blocks = -(-max_context // KEYS)
    wanted = max(_automatic(size, groups, requests, blocks, sm_count), fill(requests * q, sm_count))
    splits = -(-blocks // -(-blocks // wanted))  # none that is empty at the end
    size_bytes = 0 if splits == 1 else requests * rows * groups * splits * (LATENT + 1) * 4
    if size_bytes > MAX_WORKSPACE:
        raise ConfigError(
            f"requests={requests}, q={q}, heads={heads}: {splits} splits need {size_bytes} bytes of partials, at most "
            f"{MAX_WORKSPACE} can be addressed"
        )
    return Work(size, rows, groups, splits, size_bytes)


def _automatic(size: int, groups: int, requests: int, blocks: int, sm_count: int) -> int:
    """The package's own choice. A small tile is one CTA, and its splits are evened out over waves."""
    if size == TILE:
        return min(32, max(1, sm_count // requests // (2 * groups)))
    at_once = min(blocks, max(1, sm_count // requests // groups))
    waves = -(-blocks // at_once)
    return min(-(-blocks // waves), 64)


def bands(rows: int, splits: int, sm_count: int) -> int:
    """2 where halving the latents of `rows` reducer rows gives fewer waves per half, else 1."""
    if splits == 1 or rows >= sm_count:
        return 1
    return 2 if -(-2 * rows // sm_count) < 2 * -(-rows // sm_count) else 1


def key_for(
    target: str,
    *,
    heads: int,
    q: int,
    requests: int,
    page: int,
    max_context: int,
    sm_count: int,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
    host: str = "x86-64",
) -> TokenspeedKey:
    """The object of a shape on a device of `sm_count` SMs.

    ranks: those that share a context; then `heads` are those of all of them, `max_context` bounds a shard, and
    tokens are packed: heads * q rows of a request fill tiles better than whole tokens do.
    """
    pack = ranks > 1 and q > 1
    cut = work(target, heads=heads, q=q, requests=requests, max_context=max_context, sm_count=sm_count, pack=pack)
    many = cut.splits > 1
    return TokenspeedKey(
        heads,
        q,
        page,
        capacity=max(4, 1 << (cut.splits - 1).bit_length()) if many else 0,
        bands=bands(requests * q * heads, cut.splits, sm_count),
        lse=ranks > 1,
        pack=pack and cut.tile == TILE,
        host=host,
        **({"ranks": ranks, "rank": rank, "interleave": interleave} if pack else {}),
    )


def keys_for(
    target: str,
    *,
    host: str,
    sm_counts: tuple[int, ...] = (),
    ranks: int = 1,
    rank: int | None = None,
    **shape: Any,
) -> tuple[TokenspeedKey, ...]:
    """Every object of a shape: for devices of each SM count (by default those of `host`), for `rank` or every rank.

    shape: the other arguments of `key_for`. Raises ConfigError for a host that there is not.
    """
    if host not in SM_COUNTS:
        raise ConfigError(f"host={host!r} must be one of {', '.join(SM_COUNTS)}: the core has host code")
    members = range(ranks) if rank is None else (rank,)
    keys = (
        key_for(target, sm_count=count, ranks=ranks, rank=member, host=host, **shape)
        for member in members
        for count in sm_counts or SM_COUNTS[host]
    )
    return tuple(dict.fromkeys(keys))


def table_entries(page: int) -> int:
    """Rows of the block table must have a multiple of this many entries: the core reads them by tiles of 128 keys."""
    return KEYS // page


def signature(key: TokenspeedKey) -> tuple[str, ...]:
    """Types of the launcher's arguments: what stages_packages.TokenspeedCore packs, and the compiler must have made."""
    query = "ptr 4xi32 3xi32"
    cache = "ptr 3xi32 2xi32"
    flat = "ptr 1xi32"
    return (
        *(query, query, cache, cache, "ptr 2xi32 1xi64", "ptr 4xi32 3xi64"),
        *(("ptr 3xi32 2xi64",) if key.lse else ()),
        *((flat,) if key.capacity else ()),
        *("i32", flat, flat, "f32", "f32", "ptr"),
    )
