"""Device code of `faulty`. What happens outside of the kernel happens in `trace`, as it would in the compiler."""

import os
import subprocess
import sys
import time

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

import faulty as facts
from k3dsl.nvidia.kernels.ptx import emit


class Faulty:
    def __init__(self, key: facts.FaultyKey):
        self.fault = key.fault
        self.threads = 1024 if key.fault == "spill" else 128
        self.live = facts.LIVE if key.fault == "spill" else 4

    @cute.jit
    def __call__(self, source: Int64, scale: Float32, out: Int64, stream: cuda.CUstream):
        if cutlass.const_expr(self.fault != "no kernel"):
            self.kernel(source, scale, out).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)
        if cutlass.const_expr(self.fault == "two kernels"):
            self.second(source, scale, out).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: Int64, scale: Float32, out: Int64):
        thread, _, _ = cute.arch.thread_idx()
        at = source + Int64(thread) * 4
        xs = [emit("ld.global.f32 $0, [$1];", "f", [("l", at + i * 4096)], memory=True) for i in range(self.live)]
        cute.arch.barrier()
        for i in cutlass.range_constexpr(self.live):
            y = xs[self.live - 1 - i] * scale
            emit("st.global.f32 [$0], $1;", ins=[("l", out + Int64(thread) * 4 + i * 4096), ("f", y)], memory=True)
        if cutlass.const_expr(self.fault == "ptxas"):
            emit("this.is.no instruction;")

    @cute.kernel
    def second(self, source: Int64, scale: Float32, out: Int64):
        emit("st.global.f32 [$0], $1;", ins=[("l", out + source), ("f", scale)], memory=True)


def trace(key: facts.FaultyKey, target: str):
    assert key.shape == ((1, 2), (3,)), "tuples arrive as tuples"
    if key.fault == "exception":
        raise ValueError("a sentence of the kernel")
    if key.fault == "abort":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if key.fault == "exit":
        os._exit(3)
    if key.fault == "hang":
        time.sleep(600)
    if key.fault == "reported":
        subprocess.run([sys.executable, "-c", "print('ptxas error   : something is wrong')"], check=True)
    if key.fault == "chatter":
        print("x" * 100_000)
        sys.stdout.write("no error here, an errors count of 0\n")
        os.write(1, b"and past Python\n")
    if key.fault == "litter":
        with open("litter.txt", "w") as file:
            file.write(os.getcwd())
    if key.fault == "environment":
        raise ValueError(
            f"devices={os.environ['CUDA_VISIBLE_DEVICES']!r}"
            f" dsl={sorted(n for n in os.environ if n.startswith('CUTE_DSL'))}"
            f" flavour={'.cu13.' in sys.modules['cutlass._mlir._mlir_libs._cutlass_ir'].__file__}"
        )
    return Faulty(key), (Int64(16), Float32(1.0), Int64(16), make_fake_stream())
