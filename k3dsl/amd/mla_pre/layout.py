"""Where mla_pre's hand-offs lie, who writes them, and in which scope: facts for the kernel, the checker and the tests.

A hand-off is a pair of dwords (value, tag), stored by one instruction; a reader polls until the tag is that of its
launch. Two arrays are plain rows instead, announced by a pair. The rows lie first and at the same place in every build:
builds of different shapes share one scratch buffer, and no row may lie where another build looks for tags.
"""

from typing import Final, NamedTuple
from zlib import crc32

from k3dsl.amd.mla_pre.key import (
    HEADS,
    HIDDEN,
    MAX_TOKENS,
    NOPE,
    POINTS,
    Q_LORA,
    QKV_A,
    MlaPreBuild,
    peer_pairs,
)

COLUMNS: Final = 128  # of a column slice
SLICES: Final = HIDDEN // COLUMNS  # 56, one workgroup each
GEMV_FIRST: Final = SLICES  # workgroups 56..255 start with projections
ROWS: Final = 16  # weight rows of a projection task; also the most tokens of a matrix instruction
A_TASKS: Final = QKV_A // ROWS  # 132
G_TASKS: Final = HEADS * 128 // ROWS  # 96
QB_FIRST: Final = 64
QB_SUB: Final = 12  # tasks of a head: 8 nope, 4 rope
QB_TASKS: Final = HEADS * QB_SUB  # 144
UK_FIRST: Final = 208
UK_GROUPS: Final = 32  # groups of 16 latent rows
ROUND: Final = 8 * 128 * 2  # bytes of a row that the eight waves take together, a chunk of 128 columns each
ROUNDS: Final = HIDDEN * 2 // ROUND  # 7
#: Most tokens whose whole rows are in LDS together; of more, four rounds of all rows, then three.
X_WHOLE: Final = 10

#: In the order in which every workgroup walks them.
STAGES: Final = ("slice", "gate", "mix", "gemv", "norm", "q_b", "w_uk", "unpack")


class Region(NamedTuple):
    """An array of pairs. `exchange`: its own writers poll it, after they put."""

    name: str
    space: str  # "device": past the L2s of a device; "system": past the device
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    exchange: bool
    offset: int  # bytes into the scratch; for "qg" past the peer buffer's flags
    pairs: int

    @property
    def id(self) -> int:
        """What a health record calls it."""
        return crc32(self.name.encode()) & 0x7FFFFFFF

    @property
    def bytes(self) -> int:
        """Room that it takes."""
        return -(-self.pairs // 2) * 16


class Rows(NamedTuple):
    """Plain bf16 rows, device scope, valid once `flag` is there."""

    name: str
    writer: str
    reader: str
    flag: str
    offset: int
    pitch: int  # bytes

    @property
    def bytes(self) -> int:
        """Room that they take, the same in every build."""
        return self.pitch * MAX_TOKENS


class Event(NamedTuple):
    """One hand-off operation met while the kernel was traced."""

    stage: str
    region: str
    space: str
    kind: str  # put, poll, publish; store, load (plain rows)


X_ROWS: Final = Rows("x", "mix", "gemv", "xrdy", 0, HIDDEN * 2)
QC_ROWS: Final = Rows("qc", "norm", "q_b", "qcr", X_ROWS.bytes, Q_LORA * 2)
PAIRS_FIRST: Final = QC_ROWS.offset + QC_ROWS.bytes


def rows() -> tuple[Rows, ...]:
    """The plain rows."""
    return X_ROWS, QC_ROWS


def regions(key: MlaPreBuild) -> dict[str, Region]:
    """The pair arrays of `key` by name, in the order in which they lie."""
    s, ns = key.tokens, key.sources
    wanted: list[tuple[str, tuple[str, ...], tuple[str, ...], int]] = [
        ("part", ("slice",), ("gate",), SLICES * s * ns * 2),
        ("wgt", ("gate",), ("mix",), s * (ns + 1)),
        ("msq", ("mix",), ("mix",), SLICES * s),
        ("xrdy", ("mix",), ("gemv",), SLICES),
        ("qa", ("gemv",), ("norm",), s * QKV_A // 2),
        ("qcr", ("norm",), ("q_b",), s),
        ("qn", ("q_b",), ("w_uk",), s * HEADS * NOPE // 2),
    ]
    found, offset = {}, PAIRS_FIRST
    for name, writers, readers, pairs in wanted:
        found[name] = Region(name, "device", writers, readers, set(writers) == set(readers), offset, pairs)
        offset += found[name].bytes
    if key.ranks > 1:
        pairs = peer_pairs(key.tokens, key.ranks)
        found["qg"] = Region("qg", "system", ("q_b", "w_uk"), ("unpack",), False, 0, pairs)
    return found


def scratch_end(key: MlaPreBuild) -> int:
    """Bytes from the start of the scratch to the end of its last region."""
    last = [r for r in regions(key).values() if r.space == "device"][-1]
    return last.offset + last.bytes


def x_parts(tokens: int) -> tuple[tuple[int, int], ...]:
    """(first round, rounds) of the parts in which the rows of x are multiplied."""
    return ((0, ROUNDS),) if tokens <= X_WHOLE else ((0, 4), (4, 3))


def x_pitch(rounds: int) -> int:
    """Bytes between rows of x in LDS; the pad spreads the rows of a column over the banks."""
    return rounds * ROUND + 16


class Lds(NamedTuple):
    """Byte offsets into a workgroup's LDS."""

    red: int  # reductions between waves, 8 KiB and a little
    head: int  # 16 words that live through the kernel
    stamps: int  # the timeline's record
    body: int  # one stage's rows at a time
    total: int


QC_PITCH: Final = Q_LORA * 2 + 16
RED_BYTES: Final = 8 * 64 * 4 * 4
UK_TILE: Final = 4096  # a wave's 128 x 16 tile of a bf16 W_UK
UK_PITCH: Final = 80  # bytes of a lane's 16 words of the nope query, padded


def lds(key: MlaPreBuild) -> Lds:
    """The LDS of a workgroup; stages use the body one after the other."""
    head = RED_BYTES
    stamps = head + 64
    body = stamps + (POINTS * 8 if key.timeline else 0)
    vals = key.tokens * key.sources * COLUMNS * 4
    x = key.tokens * max(x_pitch(n) for _, n in x_parts(key.tokens))
    qc = key.tokens * QC_PITCH
    uk = 64 * UK_PITCH + (8 * UK_TILE if key.w_uk == "bf16" else 0)
    return Lds(0, head, stamps, body, body + max(vals, x, qc, uk))
