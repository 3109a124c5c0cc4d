"""MlaPreBuild: the frozen facts that reach the code of one mla_pre kernel, and the sizes that follow from them.

One launch takes a speculative-verify step of S rows from the AttnRes seam to the input of the attention core, for one
layer on one rank: AttnRes and input norm, the qkv_a and gate projections, both norms, the KV entry, q_b, W_UK, the
query, and with more than one rank the gather of all heads. No torch, no FlyDSL here.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Final

from k3dsl.errors import ConfigError

HIDDEN: Final = 7168
Q_LORA: Final = 1536
KV_LORA: Final = 512
ROPE: Final = 64
NOPE: Final = 128
V_HEAD: Final = 128
HEADS: Final = 12  # of one rank
QKV_A: Final = Q_LORA + KV_LORA + ROPE  # rows of w_qkv
GATE: Final = HEADS * V_HEAD  # rows of w_g
ENTRY: Final = KV_LORA + ROPE  # elements of a query row and of a cache entry
QUERY_WORDS: Final = ENTRY // 4  # dwords of an fp8 query row

GRID: Final = 256  # workgroups: one a compute unit, all resident
THREADS: Final = 512
LDS_LIMIT: Final = 160 * 1024
#: Thread (token, 4 columns) of the mixing stage: 32 threads a token.
MAX_TOKENS: Final = THREADS // 32
RANKS: Final = (1, 2, 4, 8)
MAX_BLOCKS: Final = 8
W_UK: Final = ("mxfp4", "bf16")
#: Bytes before a rank's peer buffer proper: one alarm word a rank, on rank 0.
PEER_HEAD: Final = 256
HEALTH_WORDS: Final = 8 * (GRID + 1)
TAG_SLOTS: Final = 256
POINTS: Final = 16  # timeline stamps a workgroup, int64
SECOND: Final = 100_000_000  # ticks of s_memrealtime

#: Parameters of the kernel in order: a 64-bit address or a 32-bit integer each.
PARAMS: Final = (
    ("prefix", "ptr"),  # bf16 [S, 7168]; with delta updated in place
    ("delta", "ptr"),  # bf16 [S, 7168], or 0
    ("blocks", "ptr"),  # bf16 [S, >= nblocks, 7168]
    ("blocks_token_stride", "i32"),  # elements
    ("blocks_block_stride", "i32"),  # elements
    ("ares_nw", "ptr"),  # bf16 [7168]
    ("ares_qk", "ptr"),  # bf16 [7168]
    ("in_nw", "ptr"),  # bf16 [7168]
    ("w_qkv", "ptr"),  # bf16 [2112, 7168]
    ("w_g", "ptr"),  # bf16 [1536, 7168]
    ("q_nw", "ptr"),  # bf16 [1536]
    ("kv_nw", "ptr"),  # bf16 [512]
    ("w_qb", "ptr"),  # bf16 [2304, 1536]
    ("w_k", "ptr"),  # mxfp4: u8 [12, 512, 64]; bf16: [12, 128, 512]
    ("w_k_stride0", "i32"),  # bytes
    ("w_k_stride1", "i32"),  # bytes
    ("w_k_scale", "ptr"),  # u8 [12, 512, 4], or 0
    ("w_k_scale_stride0", "i32"),
    ("w_k_scale_stride1", "i32"),
    ("w_k_scale_stride2", "i32"),
    ("kv_cache", "ptr"),  # one byte an element, entries of 576 bytes
    ("kv_block_stride", "i32"),  # bytes
    ("kv_slot_stride", "i32"),  # bytes
    ("block_size", "i32"),
    ("slots", "ptr"),  # int64 [S]
    ("gate_out", "ptr"),  # bf16 [S, 1536]
    ("q_out", "ptr"),  # fp8 or bf16 [S, q_heads, 576]
    ("scratch", "ptr"),
    ("peers", "ptr"),  # int64 [ranks], or 0
    ("rank", "i32"),
    ("layer", "i32"),  # tag slot
    ("epoch", "ptr"),  # int32 [1]
    ("health", "ptr"),  # int32 [HEALTH_WORDS]
    ("alarm", "ptr"),  # one int32, or 0
    ("tl", "ptr"),  # int64 [256, POINTS], or 0
)


@dataclass(frozen=True)
class MlaPreBuild:
    """What reaches codegen, and nothing else. Raises ConfigError with every bad value.

    `wait_ticks` bounds each wait (s_memrealtime, 100 MHz). The fault fields are a test hook: workgroup 0 of rank
    `fault_rank` sleeps `fault_ticks` before it starts, when epoch and layer are `fault_epoch` and `fault_slot`.
    """

    tokens: int  # S, rows of the step
    ranks: int = 1
    nblocks: int = 1
    delta: bool = True
    q_heads: int = 0  # heads of q_out; 0 stands for the smallest that serves
    qbf16: bool = False
    w_uk: str = "mxfp4"
    eps: float = 1e-5  # of AttnRes
    out_eps: float = 1e-5  # of the input norm
    q_eps: float = 1e-5
    kv_eps: float = 1e-5
    timeline: bool = False
    wait_ticks: int = 10 * SECOND
    fault_rank: int = -1
    fault_epoch: int = 0
    fault_slot: int = 0
    fault_ticks: int = 0

    name: ClassVar[str] = "mla_pre"
    device_module: ClassVar[str] = "k3dsl.amd.mla_pre.kernel"
    params: ClassVar[tuple[tuple[str, str], ...]] = PARAMS

    def __post_init__(self) -> None:
        bad = [
            f"{f.name}={getattr(self, f.name)!r} must be of type {getattr(f.type, '__name__', f.type)}"
            for f in fields(self)
            if type(getattr(self, f.name)) is not f.type
        ]
        if bad:
            raise ConfigError.of("MlaPreBuild", bad)
        if self.q_heads == 0 and self.ranks in RANKS:
            object.__setattr__(self, "q_heads", padded_heads(self.ranks))
        bad = _problems(self)
        if bad:
            raise ConfigError.of("MlaPreBuild", bad)

    @property
    def sources(self) -> int:
        """Sources of AttnRes: the blocks and the prefix (ns)."""
        return self.nblocks + 1

    @property
    def symbol(self) -> str:
        """Name of the kernel in its object."""
        parts = [f"mla_pre_s{self.tokens}_r{self.ranks}_nb{self.nblocks}_d{int(self.delta)}_h{self.q_heads}", self.w_uk]
        return "_".join([*parts, *(["qbf16"] if self.qbf16 else []), *(["tl"] if self.timeline else [])])


def _problems(key: MlaPreBuild) -> list[str]:
    bad = []
    if not 1 <= key.tokens <= MAX_TOKENS:
        bad.append(f"tokens={key.tokens} must be 1..{MAX_TOKENS}: the mixing stage has 32 threads a token, 512 in all")
    if key.ranks not in RANKS:
        bad.append(f"ranks={key.ranks} must be one of {', '.join(map(str, RANKS))}")
    elif key.ranks == 1 and key.q_heads != HEADS:
        bad.append(f"q_heads={key.q_heads} must be {HEADS} at ranks=1")
    elif not HEADS * key.ranks <= key.q_heads <= 2 * HEADS * key.ranks:
        bad.append(f"q_heads={key.q_heads} must be {HEADS * key.ranks}..{2 * HEADS * key.ranks} at ranks={key.ranks}")
    if not 1 <= key.nblocks <= MAX_BLOCKS:
        bad.append(f"nblocks={key.nblocks} must be 1..{MAX_BLOCKS}")
    if key.qbf16 and key.ranks != 1:
        bad.append(f"qbf16=True is served at ranks=1 only, not at ranks={key.ranks}")
    if key.w_uk not in W_UK:
        bad.append(f"w_uk={key.w_uk!r} must be one of {', '.join(W_UK)}")
    for name in ("eps", "out_eps", "q_eps", "kv_eps"):
        if not 0.0 < getattr(key, name) < 1.0:
            bad.append(f"{name}={getattr(key, name)!r} must be between 0 and 1")
    if not 0 < key.wait_ticks <= 3600 * SECOND:
        bad.append(f"wait_ticks={key.wait_ticks} must be 1..{3600 * SECOND} (an hour)")
    if not -1 <= key.fault_rank < key.ranks:
        bad.append(f"fault_rank={key.fault_rank} must be -1 (none) or a rank below {key.ranks}")
    if not 0 <= key.fault_slot < TAG_SLOTS:
        bad.append(f"fault_slot={key.fault_slot} must be 0..{TAG_SLOTS - 1}")
    if key.fault_epoch < 0 or not 0 <= key.fault_ticks <= 3600 * SECOND:
        bad.append(f"fault_epoch={key.fault_epoch}, fault_ticks={key.fault_ticks} must be >= 0, an hour at most")
    return bad


def padded_heads(ranks: int) -> int:
    """Heads of q_out: 12 on one rank; gathered heads are rounded up to a multiple of 16, as attention kernels want."""
    return HEADS if ranks == 1 else -(-HEADS * ranks // 16) * 16


def q_heads(key: MlaPreBuild) -> int:
    """Heads of `q_out` [S, q_heads, 576]."""
    return key.q_heads


def peer_pairs(s: int, ranks: int) -> int:
    """Pairs of one copy of the gathered query: a dword of four fp8 values each."""
    return ranks * s * HEADS * QUERY_WORDS


def peer_bytes(key: MlaPreBuild) -> int:
    """Bytes of a rank's peer buffer: the flags, then two copies, used in turn by epoch; 0 on one rank."""
    return 0 if key.ranks == 1 else PEER_HEAD + 2 * 8 * peer_pairs(key.tokens, key.ranks)


def scratch_bytes(key: MlaPreBuild) -> int:
    """Bytes of scratch for `key`. A buffer for several builds takes the largest; zero it once, then never again."""
    from k3dsl.amd.mla_pre.layout import scratch_end

    return scratch_end(key)
