"""FlyDSL code of the probe."""

# mypy: ignore-errors
# ruff: noqa: B008

import os
import time

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm

THREADS = 64
LIVE = 90  # values at once, more than the 64 registers that eight waves a SIMD leave


@fx.struct
class TooMuch:
    words: fx.Array[fx.Int32, 41 * 1024, 16]


def trace(key, target):
    fault = key.fault
    if fault == "raises":
        raise RuntimeError("as asked")
    if fault == "exits":
        os._exit(3)
    if fault == "hangs":
        time.sleep(60)
    if fault == "prints":
        print("one line on stdout")

    @flyc.kernel(name=f"flyprobe_{fault}", known_block_size=[THREADS, 1, 1])
    def kernel(count: fx.Int32, source: fx.Pointer, scale: fx.Float32, offset: fx.Int64, out: fx.Pointer):
        i = fx.block_idx.x * THREADS + fx.thread_idx.x
        if fx.const_expr(fault == "hidden"):
            i = i + fx.Int32(fx.grid_dim.x)
        if fx.const_expr(fault == "lds"):
            shared = fx.SharedAllocator().allocate(TooMuch).peek()
            shared.words[fx.thread_idx.x] = i
            fx.barrier()
            i = shared.words[(fx.thread_idx.x + count) % (41 * 1024)]
        if fx.const_expr(fault == "spills"):
            live = [source[i + 64 * k] for k in range(LIVE)]
            fx.barrier()
            total = fx.Float32(0.0)
            for k in fx.range_constexpr(LIVE):
                total = total + live[k] * live[(k * 37 + 11) % LIVE]
            out[i] = total
        if fx.const_expr(fault == "tanh"):
            out[i] = fx.math.tanh(source[i])
        if fx.const_expr(fault == "assembly"):
            llvm.inline_asm(None, [], "v_no_such_thing v0, v0", "", has_side_effects=True)
        if fx.const_expr(fault not in ("spills", "tanh")):  # noqa: SIM102 - one of the trace, one of the kernel
            if i < count:
                out[i] = source[i] * scale + fx.Float32(fx.Int32(offset >> fx.Int64(33)))

    @flyc.jit
    def launch(
        count: fx.Int32,
        source: fx.Pointer,
        scale: fx.Float32,
        offset: fx.Int64,
        out: fx.Pointer,
        stream: fx.Stream = fx.Stream(None),
    ):
        kernel(count, source, scale, offset, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    pointer = flyc.from_c_void_p(fx.Float32, None, assumed_align=16)
    arguments = (fx.Int32(1), pointer, fx.Float32(1.0), fx.Int64(1), pointer)
    return (launch, arguments, {"waves_per_eu": 8}) if fault == "spills" else (launch, arguments)
