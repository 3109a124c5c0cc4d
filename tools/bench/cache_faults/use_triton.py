"""One process that wants one kernel from Triton's cache, really compiled for sm_90. Prints what came of it as JSON.

python use_triton.py FOLDER [--change version|flavour] [--slow SECONDS] [--expect SHA256]
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--change", choices=("version", "flavour"))
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--expect")
given = parser.parse_args()
os.environ["TRITON_CACHE_DIR"] = given.folder

import triton  # noqa: E402 - reads the variable above
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import compiler as backend  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import cache as triton_cache  # noqa: E402

hits: list[bool] = []
knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
if given.change == "version":
    triton_cache.__version__ = "99.0"
elif given.change == "flavour":  # the ptxas of another CUDA
    real = backend.get_ptxas_version
    backend.get_ptxas_version = lambda *arguments: real(*arguments) + " of another CUDA"


@triton.jit
def kernel(x, y, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


if given.slow:
    stage = backend.CUDABackend.make_cubin

    def slow(*arguments, **named):  # type: ignore[no-untyped-def]
        time.sleep(given.slow)
        return stage(*arguments, **named)

    backend.CUDABackend.make_cubin = slow
source = ASTSource(
    fn=kernel, signature={"x": "*fp32", "y": "*fp32", "n": "i32", "block": "constexpr"}, constexprs={"block": 128}
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
sha = hashlib.sha256(compiled.asm["cubin"]).hexdigest()
good = given.expect in (None, sha)
sys.stdout.write(
    json.dumps({"builds": hits.count(False), "good": good, "bad": "hands out a damaged object", "sha": sha}) + "\n"
)
