"""Device code of the probe; see `probe`."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental.cuda import TensorMap, TensorMapL2Promotion, TensorMapSwizzle, create_tensor_map_tiled

import probe as facts
from k3dsl.nvidia.kernels.ptx import emit


class Probe:
    """Compile-time facts: CTAs of a cluster."""

    def __init__(self, key: facts.ProbeKey):
        self.launch = facts.geometry(key, count=1)

    @cute.jit
    def __call__(
        self,
        source: Int64,
        count: Int32,
        scale: Float32,
        offset: Int64,
        out: Int64,
        row: Int32,
        tile: Int64,
        ranks: Int64,
        stream: cuda.CUstream,
    ):
        keys = create_tensor_map_tiled(
            source,
            cutlass.BFloat16,
            [facts.TILE_COLUMNS, count],
            [facts.TILE_COLUMNS * 2],
            [facts.TILE_COLUMNS, facts.TILE_ROWS],
            swizzle=TensorMapSwizzle.s128b,
            l2_promotion=TensorMapL2Promotion.l2_128b,
        )
        self.kernel(source, count, keys, scale, offset, out, row, tile, ranks).launch(
            grid=self.launch.grid,
            block=self.launch.block,
            cluster=self.launch.cluster,
            smem=self.launch.smem,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        source: Int64,
        count: Int32,
        keys: GridConstant[TensorMap],
        scale: Float32,
        offset: Int64,
        out: Int64,
        row: Int32,
        tile: Int64,
        ranks: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        base = cutlass.memory.SmemAllocator().allocate(facts.SMEM, 1024).toint()
        box = base + facts.TILE_AT
        barrier = box + facts.TILE_BYTES
        if thread == 0:
            emit("mbarrier.init.shared.b64 [$0], 1;", ins=[("r", barrier)], memory=True)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if thread == 0:
            text = f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {facts.TILE_BYTES};"
            emit(text, ins=[("r", barrier)], memory=True)
            text = (
                "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                " [$0], [$1, {$2,$3}], [$4];"
            )
            ins = [("r", box), ("l", keys.get_ptr().toint()), ("r", Int32(0)), ("r", row), ("r", barrier)]
            emit(text, ins=ins, memory=True)
            rank, size = cute.arch.block_idx_in_cluster(), cute.arch.cluster_size()
            emit(
                "st.global.b32 [$0], $1;", ins=[("l", ranks + Int64(block) * 4), ("r", rank + 100 * size)], memory=True
            )
        text = (
            "{.reg .pred done; again_${:uid}: mbarrier.try_wait.parity.shared.b64 done, [$0], 0;"
            " @!done bra again_${:uid};}"
        )
        emit(text, ins=[("r", barrier)], memory=True)
        if block == 0:
            for i in cutlass.range_constexpr(facts.TILE_BYTES // 4 // facts.THREADS):
                word = emit(
                    "ld.shared.b32 $0, [$1];", "r", [("r", box + (thread + i * facts.THREADS) * 4)], memory=True
                )
                at = tile + Int64(thread + i * facts.THREADS) * 4
                emit("st.global.b32 [$0], $1;", ins=[("l", at), ("r", word)], memory=True)
        i = block * facts.THREADS + thread
        if i < count:
            x = emit("ld.global.f32 $0, [$1];", "f", [("l", source + Int64(i) * 4)], memory=True)
            y = x * scale + Float32(Int32(offset >> 33))
            emit("st.global.f32 [$0], $1;", ins=[("l", out + Int64(i) * 4), ("f", y)], memory=True)


def trace(key: facts.ProbeKey, target: str):
    """The jitted launcher and arguments of the right types, to be traced and compiled."""
    wide, word = Int64(16), Int32(1)
    return Probe(key), (wide, word, Float32(1.0), wide, wide, word, wide, wide, make_fake_stream())
