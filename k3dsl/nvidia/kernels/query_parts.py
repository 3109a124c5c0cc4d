"""What both schedules of MlaQuery share: staging W_UK, the cache insert, the absorbing MMA and the stores of the query.

Fragments (mma_bf16) of W_qb and x come from 16-byte loads: lane 4g + c takes the 8 consecutive k = 8c..8c+7 of a chunk
of 32 and feeds words 0, 1 to one k16 step and words 2, 3 to the next. The MMA takes them for k = 2c, 2c+1, 2c+8, 2c+9;
both operands are permuted alike, so the dot product is the same.

u, the nope part, lies in shared memory in fragment order: word [m][p / 8][lane 4g + c][h] holds p = 8 (p/8) + 2c, + 1
of row 16 m + 8 h + g. A tile of 8 rows or less has no h.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from k3dsl.nvidia import query as facts
from k3dsl.nvidia.kernels import primitives as P  # noqa: N812


class Args(NamedTuple):
    """The kernel's arguments; pointers are addresses. See facts.QueryKey.params."""

    projected: Any
    q_norm: Any
    kv_norm: Any
    q_b: Any
    w_uk: Any
    q_scale_inv: Any
    k_scale_inv: Any
    slots: Any
    cache: Any
    query: Any
    rows: Any
    row_pitch: Any
    page_shift: Any
    uk_head_stride: Any
    uk_stride: Any
    page_stride: Any
    token_stride: Any
    eps: Any


class Where(NamedTuple):
    """A thread's place: lane = 4 g + c of `warp` in CTA `part` of the cluster (head, tile that starts at row0)."""

    thread: Any
    warp: Any
    lane: Any
    g: Any
    c: Any
    part: Any
    head: Any
    heads: Any
    row0: Any

    @classmethod
    def here(cls, tile: int) -> "Where":
        thread, _, _ = cute.arch.thread_idx()
        part, head, row_tile = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = thread & 31
        return cls(thread, warp, lane, lane >> 2, lane & 3, part, head, heads, row_tile * tile)


def stage_uk(args: Args, at: Where, shared) -> None:
    """Start the copy of this CTA's 64 columns of W_UK[head]: 128 rows, UK_PITCH apart."""
    slice_ = args.w_uk + (Int64(at.head) * args.uk_head_stride + Int64(at.part * facts.PART_COLUMNS)) * 2
    chunk = at.thread & 7
    for i in range(facts.NOPE * 8 // facts.THREADS):
        p = (at.thread >> 3) + i * (facts.THREADS // 8)
        P.cp_async_weight(shared + p * facts.UK_PITCH + chunk * 16, slice_ + Int64(p) * args.uk_stride * 2 + chunk * 16)
    cute.arch.cp_async_commit_group()


def normalize(raw, weight, factor, packed: bool):
    """bf((c * factor) * weight) of 8 bf16: two float32 products in that order, one rounding."""
    out = []
    for c, w in zip(raw, weight, strict=True):
        y = P.mul2(P.mul2(P.unpack_bf16(c), [factor, factor], packed), P.unpack_bf16(w), packed)
        out.append(P.pack_bf16(y[0], y[1]))
    return out


def sum_squares(vectors, packed: bool):
    """The sum of the squares of 8 bf16 a vector, as two chains of FMAs that are added at the end."""
    acc = [Float32(0.0), Float32(0.0)]
    for vector in vectors:
        for word in vector:
            x = P.unpack_bf16(word)
            acc = P.fma2(x, x, acc, packed)
    return acc[0] + acc[1]


def q_factor(sum_, eps):
    """rsqrt(mean + eps) of the q latent, with an IEEE division."""
    return P.rsqrt(P.div(sum_, Float32(facts.LORA)) + eps)


class Insert:
    """The cache entry of one row, by one warp: lane takes latents 8 lane.. and 256 + 8 lane.., lanes 0..7 also k_pe.

    The rows of a tile go to warp 7 of the CTAs of its heads in turn, then to warp 6: with one row that is the warp with
    the least else to do. Built before the grid dependency wait; `load` after it; `store` when there is time.
    """

    def __init__(self, args: Args, at: Where, kv_format: str, tile: int, packed: bool):
        self.args, self.at, self.kv_format, self.packed = args, at, kv_format, packed
        ctas = at.heads * facts.CLUSTER
        mine = at.head * facts.CLUSTER + at.part + ctas * (facts.WARPS - 1 - at.warp)
        self.row = at.row0 + mine
        self.live = (mine < tile) & (self.row < args.rows)
        self.weight = [P.ldg_if(args.kv_norm + (at.lane + 32 * i) * 16, self.live) for i in range(2)]
        self.slot_at = args.slots + Int64(self.row) * 8
        self.source = args.projected + (Int64(self.row) * Int64(args.row_pitch) + facts.LORA) * 2 + at.lane * 16

    def load(self) -> None:
        self.latent = [P.ldg_if(self.source + i * 512, self.live) for i in range(2)]
        self.rope = P.ldg_if(self.source + facts.LATENT * 2, self.live & (self.at.lane < 8))
        self.slot = P.ldg_pair_if(self.slot_at, self.live, -1)
        self.scale = P.ldg_f32(self.args.k_scale_inv) if self.kv_format == "fp8" else None

    def store(self) -> None:
        """Under `if insert.wanted():`, which is uniform over the warp."""
        args, at = self.args, self.at
        total = P.warp_sum(sum_squares(self.latent, self.packed))
        factor = P.rsqrt(P.fma(total, Float32(1 / facts.LATENT), args.eps))
        slot = (Int64(self.slot[1]) << 32) | (Int64(self.slot[0]) & 0xFFFFFFFF)
        page = slot >> Int64(args.page_shift)
        token = slot & ((Int64(1) << Int64(args.page_shift)) - 1)
        size = facts.ELEMENT[self.kv_format]
        entry = args.cache + (page * args.page_stride + token * args.token_stride) * size + at.lane * (8 * size)
        for i in range(2):
            words = normalize(self.latent[i], self.weight[i], factor, self.packed)
            self._put(entry + i * (32 * 8 * size), words, True)
        self._put(entry + facts.LATENT * size, self.rope, at.lane < 8)

    def wanted(self):
        return self.slot[1] >= 0

    def _put(self, address, words, live) -> None:
        if self.kv_format == "bf16":
            P.stg128_if(address, words, live)
        else:
            x = [y for word in words for y in P.mul2(P.unpack_bf16(word), [self.scale, self.scale], self.packed)]
            P.stg64_if(address, P.pack_e4m3x4(*x[0:4]), P.pack_e4m3x4(*x[4:8]), live)


def load_uk(at: Where, shared):
    """B fragments of this warp's 8 columns of the staged W_UK: two words for each of the 8 k16 steps over p."""
    column = shared + at.lane * facts.UK_PITCH + at.warp * 16
    words = []
    for i in range(facts.NOPE // 32):
        words += P.ldmatrix_x4_trans(column + i * (32 * facts.UK_PITCH))
    return words


def put_query(args: Args, at: Where, kv_format: str, row, column, word, scale, live) -> None:
    """A pair of bf16 to columns `column`, + 1 of query[row, head], quantized for fp8."""
    size = facts.ELEMENT[kv_format]
    address = args.query + ((Int64(row) * Int64(at.heads) + Int64(at.head)) * facts.ENTRY + Int64(column)) * size
    if kv_format == "bf16":
        P.stg32_if(address, word, live)
    else:
        lo, hi = P.unpack_bf16(word)
        P.stg16_if(address, P.pack_e4m3(P.mul(lo, scale), P.mul(hi, scale)), live)


def absorb(args: Args, at: Where, kv_format: str, tile: int, u, uk, scale) -> None:
    """a = u W_UK for the rows of the tile and this warp's 8 columns, then the latent part of the query.

    Four accumulators, added pairwise at the end: eight dependent MMAs would be the longer wait.
    """
    column = at.part * facts.PART_COLUMNS + at.warp * 8 + 2 * at.c
    steps = facts.NOPE // 16
    for m in range(max(1, tile // 16)):
        acc = [[Float32(0.0)] * 4 for _ in range(4)]
        for s in range(steps):
            if tile <= 8:
                # Rows beyond the tile repeat the last one and are dropped; rows 8..15 are zeros.
                lane = cutlass.select_(at.g < tile, at.g, tile - 1) * 4 + at.c if tile < 8 else at.lane
                word = u + 2 * s * 128 + lane * 4
                a = [P.lds32(word), Int32(0), P.lds32(word + 128), Int32(0)]
            else:
                pair = u + (m * 2 * steps + 2 * s) * 256 + at.lane * 8
                a = [*P.lds64(pair), *P.lds64(pair + 256)]
            acc[s % 4] = P.mma_bf16(acc[s % 4], a, uk[2 * s : 2 * s + 2])
        total = [(acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]) for i in range(4)]
        for h in range(1 if tile <= 8 else 2):
            local = 16 * m + 8 * h + at.g
            row = at.row0 + local
            live = (local < tile) & (row < args.rows)
            word = P.pack_bf16(total[2 * h], total[2 * h + 1])
            put_query(args, at, kv_format, row, column, word, scale, live)
