"""Host facts of decode context parallelism: D ranks hold H heads each, and each a D-th of every context.

    MlaQuery + publish   a rank's queries go to every rank's mailbox q; the launch ends when those of all ranks are here
    core                 all D * H heads over the local shard, with the LSE
    DcpValue             partial outputs go to the rank of their head; there they are merged, up-projected and gated

Mailboxes are armed (ARMED, ARMED_PARTIAL): a word that is not the armed one has arrived. Who waits reads the words
themselves, and arms them again once they are used. docs/dcp.md has the protocol, and who owns what.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

from k3dsl.errors import ConfigError, PeerError
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values
from k3dsl.nvidia.launch import Launch, Param

#: Ranks that share a context.
RANKS: Final = (2, 4, 8, 16)
#: Heads of all ranks, at most: what the cores take.
MAX_HEADS: Final = 128
#: Positions that one rank has in a row, at most: more than any context has.
MAX_INTERLEAVE: Final = 1 << 20
CAP: Final = 64  # rows of a mailbox
CLUSTER: Final = 8
THREADS: Final = 256
#: What an armed mailbox holds in every 32-bit word: no e4m3 or bf16 query, no LSE that was made finite ...
ARMED: Final = -1
#: ... and no pair of bf16 without -0.
ARMED_PARTIAL: Final = -(2**31)
#: LSE of a shard with no key, in place of -inf: finite, so that no difference of two is a NaN.
EMPTY: Final = -3.0e38
HUGE: Final = 3.0e38
#: 16-byte reads that a thread has in flight.
IN_FLIGHT: Final = 8
#: 16-byte pieces that a pushing thread should have at least, and CTAs of DcpValue that an SM holds.
PIECES: Final = 4
CTAS_A_SM: Final = 2
#: Most CTAs that push: more do not make the links faster.
MAX_PUSHERS: Final = 96
REGIONS: Final = ("q", "lse", "partial")
#: Bytes from one row of merged latents in shared memory to the next: 64 more than a row, so that no two lanes meet.
LATENT_PITCH: Final = values.LATENT * 2 + 64


@dataclass(frozen=True)
class DcpQueryKey:
    """What reaches codegen: that of QueryKey, the number of ranks, and whether one store reaches all of them."""

    schedule: str
    tile: int
    kv_format: str
    ranks: int
    multicast: bool = False

    name: ClassVar[str] = "mla_query_dcp"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.query_dcp"
    params: ClassVar[tuple[Param, ...]] = (
        *queries.QueryKey.params,
        Param("box", "ptr"),  # this rank's q: [2, 64, ranks * heads, 576] elements
        Param("peers", "ptr"),  # int64 [ranks], every rank's q; with multicast the multicast address of q itself
        Param("poison", "ptr"),  # uint64 [1]: 0, or the first wait that was given up
        Param("alarm", "ptr"),  # uint64 [1] in host memory: the same
        Param("limit", "i64"),  # nanoseconds that a wait may last; 0: publish and do not wait
        Param("parity", "i32"),
        Param("rank", "i32"),
    )

    @property
    def query(self) -> queries.QueryKey:
        """The same without publishing."""
        return queries.QueryKey(self.schedule, self.tile, self.kv_format)


@dataclass(frozen=True)
class DcpValueKey:
    """What reaches codegen: heads of a rank, ranks, rows of a merging cluster."""

    heads: int
    ranks: int
    tile: int = 16

    name: ClassVar[str] = "mla_value_dcp"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.value_dcp"
    params: ClassVar[tuple[Param, ...]] = (
        Param("latent", "ptr"),  # bf16 [rows, ranks * heads, 512]: of the local shard
        Param("latent_lse", "ptr"),  # f32 [rows, ranks * heads], base 2
        Param("peers", "ptr"),  # int64 [ranks]: every rank's partial
        Param("lse_peers", "ptr"),  # int64 [ranks]: every rank's lse
        Param("box", "ptr"),  # this rank's q, which is armed again
        Param("partial", "ptr"),  # this rank's: bf16 [2, ranks, 64, heads, 512]
        Param("lse", "ptr"),  # this rank's: f32 [2, ranks, 64, heads]
        Param("weight", "ptr"),  # bf16 [heads, 512, 128], latent axis contiguous
        Param("gate", "ptr"),  # bf16 [rows, heads * 128], row stride gate_pitch
        Param("lengths", "ptr"),  # int32 [rows / q]: of the local shard
        Param("totals", "ptr"),  # int32 [rows / q]: of the whole context
        Param("out", "ptr"),  # bf16 [rows, heads * 128]
        Param("poison", "ptr"),
        Param("alarm", "ptr"),
        Param("limit", "i64"),
        Param("rows", "i32"),
        Param("q", "i32"),
        Param("head_stride", "i32"),  # of weight, elements
        Param("v_stride", "i32"),  # of weight, elements
        Param("gate_pitch", "i32"),  # elements
        Param("entry", "i32"),  # bytes of a head's query: 576 * element
        Param("parity", "i32"),
        Param("rank", "i32"),
        Param("pushers", "i32"),  # CTAs in front that push; the others merge
    )

    @property
    def smem(self) -> int:
        """Dynamic shared memory of a CTA, bytes."""
        return self.layout.total

    @property
    def layout(self) -> "Smem":
        """Where things are in it."""
        sums = self.tile * LATENT_PITCH
        lse = sums + values.smem_bytes(self.tile)
        barrier = lse + -(-self.tile * self.ranks * 4 // 16) * 16
        return Smem(0, sums, lse, barrier, barrier + 16)


class Smem(NamedTuple):
    """Byte offsets: merged latents of the tile, partial sums of the up-projection, LSE [row][rank], a barrier."""

    latent: int
    sums: int
    lse: int
    barrier: int
    total: int


def rank_problems(ranks: Any, heads: Any) -> list[str]:
    """Why `ranks` ranks of `heads` heads cannot share a context; empty if they can."""
    if type(ranks) is not int or ranks not in RANKS:
        return [f"ranks={ranks!r} must be one of {', '.join(map(str, RANKS))}"]
    if type(heads) is not int or not 1 <= heads <= MAX_HEADS // ranks:
        return [f"heads={heads!r} must be an int from 1 to {MAX_HEADS // ranks} on each of {ranks} ranks"]
    return []


def interleave_problems(interleave: Any) -> list[str]:
    """Why that many consecutive positions cannot lie on one rank; empty if they can. Kernels count in 32 bits."""
    if type(interleave) is not int or not 1 <= interleave <= MAX_INTERLEAVE:
        return [f"interleave={interleave!r} must be an int from 1 to {MAX_INTERLEAVE}"]
    return []


def local_bound(max_context: int, ranks: int) -> int:
    """Tokens of a context that one rank may hold, for planning: a multiple of 64."""
    return max_context if ranks == 1 else -(-max_context // (ranks * 64)) * 64


def query_config(heads: int, rows: int, kv_format: str, ranks: int, multicast: bool = False) -> DcpQueryKey:
    """The build that serves `rows` rows of `heads` heads of a rank."""
    key = queries.config(heads, rows, kv_format)
    return DcpQueryKey(key.schedule, key.tile, key.kv_format, ranks, multicast)


def query_supports(key: DcpQueryKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    return queries.supports(key.query, target) + rank_problems(key.ranks, 1)


def value_supports(key: DcpValueKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    return values.supports(values.ValueKey(key.heads, key.tile), target) + rank_problems(key.ranks, key.heads)


def query_geometry(key: DcpQueryKey, *, heads: int, rows: int) -> Launch:
    """That of MlaQuery. A CTA waits for what CTAs of other ranks publish, so all must be on the device together."""
    return queries.geometry(key.query, heads=heads, rows=rows)


class ValueGrid(NamedTuple):
    """CTAs of DcpValue: `pushers` that push and never wait, then `mergers`. Both are whole clusters.

    Blocks start in order, so the pushers are there first and every wait is for something that is on its way, however
    many CTAs the device holds.
    """

    pushers: int
    mergers: int


def value_grid(key: DcpValueKey, *, rows: int, sm_count: int) -> ValueGrid:
    """How many CTAs push and merge `rows` rows. Together at most what the device holds at once, if it can be."""
    if not 1 <= rows <= CAP:
        raise ConfigError(f"rows={rows!r} must be from 1 to {CAP}")
    mergers = CLUSTER * key.heads * -(-rows // key.tile)
    pieces = rows * key.ranks * key.heads * (values.LATENT // 8)
    wanted = -(-pieces // (THREADS * PIECES))
    room = min(CTAS_A_SM * sm_count - mergers, MAX_PUSHERS)
    clusters = max(1, min(-(-wanted // CLUSTER), room // CLUSTER))
    return ValueGrid(clusters * CLUSTER, mergers)


def value_geometry(key: DcpValueKey, ctas: int) -> Launch:
    """A launch of `ctas` CTAs of DcpValue: pushers, mergers, or both."""
    return Launch(
        grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), smem=key.smem, pdl=True
    )  # fmt: skip


# ---- what a wait that was given up leaves


def record(region: str, peer: int, row: int, rank: int, parity: int) -> int:
    """The 64-bit record that kernels write, see `peer_error`."""
    return (REGIONS.index(region) + 1) | peer << 8 | row << 16 | rank << 24 | parity << 32


def peer_error(word: int, seconds: float) -> PeerError:
    """The error that a record stands for."""
    region = REGIONS[(word & 0xFF) - 1]
    peer, row, rank, parity = (word >> shift & 0xFF for shift in (8, 16, 24, 32))
    return PeerError(
        f"rank {rank} waited {seconds:g} s for rank {peer}: region {region}, row {row}, parity {parity}. The step's "
        "results are not valid, and the box stays unusable until every rank has called reset()",
        rank=rank, peer=peer, region=region, row=row, parity=parity, seconds=seconds,
    )  # fmt: skip
