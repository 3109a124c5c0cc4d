"""MlaValue on the device: latent rows times W_UV, then the output gate.

out[b, 128h + v] = bf(f32(bf(sum_l latent[b, h, l] W_UV[h, l, v])) * sigmoid(gate[b, 128h + v])), and exact zeros for
the rows of an empty request.

A CTA owns COLUMNS output columns of one head for `tile` rows. Its WARPS warps split the 512 latents, because at decode
sizes the time that counts runs from the arrival of the latents to the store: with 64 latents a warp that is two 16-byte
loads a row, a chain of four MMAs and one exchange through shared memory. What does not depend on the kernel before (the
W_UV fragments and every address) is done ahead of the grid dependency wait.

Fragments come straight from global memory. Lane (g, c) = (lane // 4, lane % 4) loads the 8 consecutive latents 8c..8c+7
of each 32 for its rows g and g + 8 of A and for its column g of B, and feeds them to two k16 steps in the order in
which they lie. The MMA takes them for latents 2c, 2c+1, 2c+8, 2c+9 of a step; as both operands are permuted alike, the
dot product is the same.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.cutlass_dsl import dsl_user_op

from k3dsl.nvidia import value as facts
from k3dsl.nvidia.kernels.primitives import ldg_if, lds_f32x2, mma_bf16, pack_bf16, stg32_if, unpack_bf16
from k3dsl.nvidia.kernels.ptx import emit


@dsl_user_op
def load_weight(address, *, loc=None, ip=None):
    """16 bytes of W_UV. Not by the read-only path, though nothing writes them: ptxas sinks read-only loads below a grid
    dependency wait, and these must be on their way before it."""
    return emit(
        "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
        "rrrr",
        [("l", address)],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_word(address, live, *, loc=None, ip=None):
    """4 bytes if `live`, else 0 without touching memory."""
    return emit(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
        "r",
        [("l", address), ("r", Int32(live))],
        memory=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _store_pair(shared, a, b, *, loc=None, ip=None):
    emit("st.shared.v2.f32 [$0], {$1, $2};", ins=[("r", shared), ("f", a), ("f", b)], memory=True, loc=loc, ip=ip)


@dsl_user_op
def _sigmoid(x, *, loc=None, ip=None):
    """1 / (1 + exp(-x)) in float32: fast exp, then a reciprocal refined by one Newton step.

    exp(-x) = inf (x below -88.7) makes the Newton term NaN where the reciprocal is already the right 0: that one is
    selected. A reciprocal without flush to zero keeps the subnormal results of -88.7 < x < -87.3. NaN stays NaN.
    """
    return emit(
        "{ .reg .f32 t, d, r, e, n; .reg .pred p;"
        " mul.f32 t, $1, 0fBFB8AA3B;"  # -log2(e)
        " ex2.approx.ftz.f32 t, t; add.f32 d, t, 0f3F800000; rcp.approx.f32 r, d;"
        " neg.f32 n, d; fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 e, r, e, r;"
        " setp.eq.f32 p, d, 0f7F800000; selp.f32 $0, r, e, p; }",
        "f",
        [("f", x)],
        volatile=True,
        loc=loc,
        ip=ip,
    )


class MlaValue:
    """Compile-time facts: heads (strides of latent and out) and the row tile."""

    def __init__(self, key: facts.ValueKey):
        self.key = key
        self.heads = key.heads
        self.tile = key.tile

    @cute.jit
    def __call__(
        self,
        latent: Int64,  # bf16 [rows, heads, 512]
        weight: Int64,  # bf16 [heads, 512, 128], latent axis contiguous
        gate: Int64,  # bf16 [rows, heads * 128], row pitch gate_pitch
        lengths: Int64,  # int32 [rows / q]
        out: Int64,  # bf16 [rows, heads * 128]
        rows: Int32,
        q: Int32,
        head_stride: Int32,  # of weight, elements
        v_stride: Int32,  # of weight, elements
        gate_pitch: Int32,  # elements
        stream: cuda.CUstream,
    ):
        launch = facts.geometry(self.key, rows=self.tile)
        self.kernel(latent, weight, gate, lengths, out, rows, q, head_stride, v_stride, gate_pitch).launch(
            grid=launch.grid, block=launch.block, smem=launch.smem, stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        latent: Int64,
        weight: Int64,
        gate: Int64,
        lengths: Int64,
        out: Int64,
        rows: Int32,
        q: Int32,
        head_stride: Int32,
        v_stride: Int32,
        gate_pitch: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, head, row_tile = cute.arch.block_idx()
        warp = thread // 32
        lane = thread % 32
        g = lane // 4
        c = lane % 4
        m_tiles = self.tile // 16
        chunks = facts.LATENT // facts.WARPS // 32
        column0 = block * facts.COLUMNS
        row0 = row_tile * self.tile
        k0 = warp * (32 * chunks) + 8 * c

        # W_UV fragments first: they are older than every kernel of the step.
        b = self.weights(weight, head, head_stride, v_stride, column0 + g, k0)

        # The pair of outputs that this thread finishes, and all addresses.
        mine = (thread // 64) * 8 + (thread % 64) // 8
        column = column0 + (thread % 8) * 2
        row = row0 + mine
        live = (thread < self.tile * 8) & (row < rows)
        at = Int64(row) * (self.heads * facts.V) + Int64(head * facts.V + column)
        gate_at = gate + (Int64(row) * Int64(gate_pitch) + Int64(head * facts.V + column)) * 2
        length_at = lengths + Int64(row // q) * 4
        row_at = []
        row_live = []
        for m in cutlass.range_constexpr(m_tiles * 2):
            r = row0 + 8 * m + g
            row_at.append(latent + (Int64(r) * (self.heads * facts.LATENT) + Int64(head * facts.LATENT + k0)) * 2)
            row_live.append(r < rows)

        cute.arch.griddepcontrol_wait()
        a = [[ldg_if(row_at[m] + 64 * i, row_live[m]) for i in range(chunks)] for m in range(2 * m_tiles)]
        logits = load_word(gate_at, live)
        length = load_word(length_at, live)
        cute.arch.griddepcontrol_launch_dependents()

        shared = cutlass.memory.SmemAllocator().allocate(facts.smem_bytes(self.tile), 16).toint()
        self.finish(self.products(a, b), logits, length, shared, thread, warp, lane, out + at * 2, live)

    def weights(self, weight, head, head_stride, v_stride, column, k0):
        """[n tile][chunk]: this lane's 16 bytes of W_UV, column `column` + 8 n, latents k0 + 32 chunk..."""
        base = weight + (Int64(head) * Int64(head_stride) + Int64(k0)) * 2
        b = []
        for n in range(facts.COLUMNS // 8):
            at = base + Int64(column + 8 * n) * Int64(v_stride) * 2
            b.append([load_weight(at + 64 * i) for i in range(facts.LATENT // facts.WARPS // 32)])
        return b

    def products(self, a, b):
        """[m tile][n tile]: the tile's outputs summed over the latents of this warp.

        a: [row g + 8 i][chunk], b: `weights`.
        """
        acc = [[[Float32(0.0)] * 4 for _ in b] for _ in range(self.tile // 16)]
        for i in range(len(b[0])):
            for s in range(2):
                for m, row in enumerate(acc):
                    upper, lower = a[2 * m][i], a[2 * m + 1][i]
                    fragment = [upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]]
                    for n in range(len(b)):
                        row[n] = mma_bf16(row[n], fragment, b[n][i][2 * s : 2 * s + 2])
        return acc

    def finish(self, acc, logits, length, shared, thread, warp, lane, out, live):
        """The warps' sums meet in `shared`; a thread gates a pair of outputs (its `logits`) and stores it at `out`.

        Zeros if length <= 0. The whole block calls this together.
        """
        # Partial sums lie in fragment order, [warp][m][n][half][lane] pairs; a [lane] block is PAIRS long, so that the
        # pairs of one row, half of them in another n tile, are read without a bank conflict.
        m_tiles, n_tiles = len(acc), len(acc[0])
        block_bytes = facts.PAIRS * 8
        warp_bytes = m_tiles * n_tiles * 2 * block_bytes
        write = shared + warp * warp_bytes + lane * 8
        for m in range(m_tiles):
            for n in range(n_tiles):
                for h in range(2):
                    where = write + ((m * n_tiles + n) * 2 + h) * block_bytes
                    _store_pair(where, acc[m][n][2 * h], acc[m][n][2 * h + 1])
        x0, x1 = unpack_bf16(logits)
        gate0, gate1 = _sigmoid(x0), _sigmoid(x1)
        cute.arch.barrier()

        # thread = 64 * (2m + h) + 8 * g + 4 * n + c. Threads beyond the tile repeat others' work and store nothing:
        # so this stays one basic block (in a branch, ptxas would sink the whole sigmoid behind the barrier).
        n = (thread % 8) // 4
        m2h = (thread // 64) % (2 * m_tiles)
        region = ((m2h // 2) * n_tiles + n) * 2 + m2h % 2
        read = shared + region * block_bytes + (((thread % 64) // 8) * 4 + thread % 4) * 8
        sum0, sum1 = lds_f32x2(read)
        for w in range(1, facts.WARPS):
            p0, p1 = lds_f32x2(read + w * warp_bytes)
            sum0 = sum0 + p0
            sum1 = sum1 + p1
        y0, y1 = unpack_bf16(pack_bf16(sum0, sum1))
        word = pack_bf16(y0 * gate0, y1 * gate1)
        # Selected, not multiplied: latents and gates of an empty request may be NaN.
        word = cutlass.select_(length > 0, word, Int32(0))
        stg32_if(out, word, live)


def trace(key: facts.ValueKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    return MlaValue(key), (*[Int64(16)] * 5, *[Int32(1)] * 5, make_fake_stream())
