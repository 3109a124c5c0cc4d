"""The tokenspeed core's start: compiled in front of the first request, as its package does, or loaded from our cache.

    k3dsl bench --what blackwell [--quick] [--json FILE]
    python tools/bench/blackwell.py RANK-COMMAND      (what the processes of the bench run)

No GPU takes part and none is needed: times are those of the host, up to a launcher that can be called. `package`: each
process imports tokenspeed_mla and compiles, which keeps its kernels in memory only and has no warm-up for decode;
`package again`: the next start of the same. `cold`: N processes meet an empty cache of ours; `warm`: the next start,
which finds it filled. Every rank is a process of its own, all of them started at once; the time is that of the slowest,
from its start to its end, imports included.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

TARGET: Final = "sm_100a"
#: Ranks that share the machine. They compile at once, so this is also the number of compilers in a package's start.
RANKS: Final = (1, 2, 4)
KINDS: Final = ("package", "package again", "cold", "warm")


def run(*, against: str | None = None, commit: str | None = None, quick: bool = False, **_: Any) -> dict[str, Any]:
    """The document: seconds to the slowest rank's last object, for the package, a cold and a warm cache."""
    from k3dsl.errors import ConfigError, ToolchainError
    from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
    from k3dsl.nvidia.toolchain import installed, lacks

    from . import harness  # here: ranks run this file as a program

    if against not in (None, "package"):
        raise ConfigError(f"against={against!r} must be package")
    lacking = lacks(TokenspeedKey(12))
    if lacking:
        raise ToolchainError(lacking)
    rows, load = [], os.getloadavg()[0]
    for ranks in RANKS[:2] if quick else RANKS:
        with tempfile.TemporaryDirectory(prefix="k3dsl-bench-") as folder:
            times = {kind: _start(ranks, kind, folder) for kind in KINDS}
        rows.append({"ranks": ranks, **times})
    method = f"wall clock of processes started together, one shape (12 heads, 1 row, {TARGET}), imports included"
    facts = {"cores": os.cpu_count(), "load": load, **TokenspeedKey.packages, "nvidia-cutlass-dsl": installed()}
    return {"conditions": {**harness.conditions(commit, method), **facts}, "rows": rows}


def show(document: dict[str, Any], console: Any) -> None:
    """The table."""
    from rich.table import Table

    table = Table(title="Seconds until every rank has the tokenspeed core")
    for name in ("ranks", *KINDS, "compiled"):
        table.add_column(name, justify="right")
    for row in document["rows"]:
        compiled = ", ".join(str(row[kind]["compiled"]) for kind in KINDS)
        table.add_row(str(row["ranks"]), *(f"{row[kind]['seconds']:.2f}" for kind in KINDS), compiled)
    console.print(table)
    console.print(document["conditions"]["method"])


def _start(ranks: int, kind: str, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "K3DSL_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, os.path.abspath(__file__), kind]
    began = time.monotonic()
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(ranks)
    ]
    said = [process.communicate()[0] for process in started]
    seconds = time.monotonic() - began
    if any(process.returncode for process in started):
        raise RuntimeError(f"a rank of {kind} failed with {[p.returncode for p in started]}")
    each = [json.loads(text.splitlines()[-1]) for text in said]
    return {"seconds": round(seconds, 3), "compiled": sum(one["compiled"] for one in each), "ranks": each}


def _rank(kind: str) -> dict[str, Any]:
    """One rank: its own seconds, and whether it compiled."""
    from k3dsl.nvidia.core import tokenspeed
    from k3dsl.nvidia.host_object import host_isa

    key = tokenspeed.key_for(
        TARGET, heads=12, q=1, requests=1, page=64, max_context=131072, sm_count=148, host=host_isa()
    )
    began = time.monotonic()
    compiled = _package(key) if kind.startswith("package") else _ours(key)
    return {"seconds": round(time.monotonic() - began, 3), "compiled": compiled}


def _package(key: Any) -> int:
    """What the package does at a first request: import, compile."""
    import torch
    from tokenspeed_mla import mla_decode

    mla_decode.get_max_active_clusters = lambda size: 148 // size  # the one question to the GPU
    mla_decode._get_compiled_mla_kernel(
        torch_dtype=torch.float8_e4m3fn,
        page_size=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        is_persistent=False,
        is_var_seq=True,
        is_var_split_kv=False,
        compute_capability=(10, 0),
        has_local_visible_lens=False,
        skip_correction_threshold=8.0,
        num_heads=12,
        seq_len_q=1,
        use_pdl=True,
        reducer_d_tiles=key.bands,
        reducer_max_splits=key.capacity,
        partial_fp16=False,
    )
    return 1


def _ours(key: Any) -> int:
    """From the cache, built if need be, to a launcher in this process."""
    from k3dsl import CompileCache
    from k3dsl.nvidia.host_object import IMPORTS
    from k3dsl.nvidia.image import Loaded, Relocatable
    from k3dsl.nvidia.toolchain import build, compile_key

    entry = CompileCache().get_or_build(compile_key(key, TARGET), build)
    Loaded(Relocatable(entry.payload, IMPORTS), dict.fromkeys(IMPORTS, 0))
    return int(entry.source == "built")


if __name__ == "__main__":
    print(json.dumps(_rank(sys.argv[1])))
