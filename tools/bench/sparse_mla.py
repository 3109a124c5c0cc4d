"""Sparse MLA on gfx950, counted: what the emulator executes for a token of 2048 keys, beside the same kernel in Triton.

    python -m tools.bench.sparse_mla [--json FILE]

Nothing here is a time: no AMD GPU takes part. Counted are wave instructions, bytes, passes over LDS banks and the
cycles that a compute unit's MFMA units and LDS take at least. Needs the `amd` extra.
"""

import argparse
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from k3dsl.amd import PreparedSparseMla, SparseMlaKey, fp8_ds_mla_pack
from k3dsl.amd.toolchain import compile_key
from k3dsl.cache import CompileCache
from k3dsl.reference.sparse_mla import sparse_mla64
from tools.gfx950 import CodeObject, Emulator, Memory
from tools.gfx950.codeobject import Kernel
from tools.gfx950.profile import Profile
from tools.gfx950.runtime import EmulatorRuntime

KEYS: Final = 2048
RECORD: Final = 656
SCALE: Final = 192**-0.5
#: Cycles of a SIMD for a bf16 MFMA 16x16x32 at the chip's peak: 2.5 PFLOP/s over 256 compute units of 4 SIMDs, 2.4 GHz.
MFMA_CYCLES: Final = {"v_mfma_f32_16x16x32_bf16": 16, "v_mfma_f32_16x16x16_bf16": 16, "v_mfma_f32_32x32x16_bf16": 32}
#: Bytes that a compute unit's LDS moves in a cycle.
LDS_BYTES: Final = 128
#: Bytes of HBM for a compute unit in a cycle: 8 TB/s over 256 at 2.4 GHz.
HBM_BYTES: Final = 8e12 / 256 / 2.4e9
#: Triton: heads as rows or columns, keys of a block, waves, stages.
TRITON: Final = tuple(
    (way, block, warps, stages)
    for way in ("rows", "columns")
    for block in (32, 64)
    for warps in (4, 8)
    for stages in (1, 2)
)


def case(heads: int) -> tuple[torch.Tensor, ...]:
    """q, records, indptr, indices: one token."""
    rng = torch.Generator().manual_seed(1)
    records = fp8_ds_mla_pack(
        torch.randn(8192, 512, generator=rng).bfloat16(), torch.randn(8192, 64, generator=rng).bfloat16()
    )
    q = torch.randn(1, heads, 576, generator=rng).bfloat16()
    indices = torch.randint(0, 8192, (KEYS,), generator=rng, dtype=torch.int32)
    return q, records, torch.tensor([0, KEYS], dtype=torch.int32), indices


def ours(heads: int, waves: int, cache: CompileCache) -> tuple[Profile, dict[str, Any], float]:
    """Profile, resources and error of our kernel."""
    q, records, indptr, indices = case(heads)
    out = torch.zeros(1, heads, 512, dtype=torch.bfloat16)

    class Device(EmulatorRuntime):
        compute_units = 256 if waves == 4 else 0  # which decides the waves of a workgroup

    runtime = Device(Memory(q, records, indptr, indices, out), profile=True)
    layer = PreparedSparseMla(heads, SCALE, cache=cache, runtime=runtime)
    layer.prepare_cache(records)
    layer.run(q, indptr, indices, out)
    entry = cache.get(compile_key(SparseMlaKey(heads), "gfx950"))
    assert entry is not None
    return runtime.results[0].profiles[0], dict(entry.manifest.resources), error(out, q, records, indptr, indices)


def triton_kernel(heads: int, way: str, block: int, warps: int, stages: int) -> tuple[Profile, dict[str, Any], float]:
    """The same of the Triton kernel."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tools.bench import sparse_mla_triton

    kernel = getattr(sparse_mla_triton, way)
    q, records, indptr, indices = case(heads)
    out = torch.zeros(1, heads, 512, dtype=torch.bfloat16)
    signature = {
        **{"q": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "ropes": "*bf16", "indices": "*i32"},
        **{
            "indptr": "*i32",
            "out": "*bf16",
            "q_t": "i32",
            "q_h": "i32",
            "out_t": "i32",
            "out_h": "i32",
            "scale": "fp32",
        },
    }
    constants = {"H": heads, "BLOCK": block}
    # as a launch would find out: pointers and strides are multiples of 16, which lets loads be wide
    aligned = {(k,): [["tt.divisibility", 16]] for k in range(len(signature) - 1)}
    source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages, "matrix_instr_nonkdim": 16, "waves_per_eu": 1}
    built = triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=options)
    code = CodeObject(built.asm["hsaco"])
    scale = SCALE * 1.4426950408889634
    strides = [q.stride(0), q.stride(1), out.stride(0), out.stride(1)]
    args: list[Any] = [q, records, records, records, indices, indptr, out, *strides, scale]
    wanted = sum(not a.hidden for a in code.kernel().arguments)
    args += [None] * (wanted - len(args))  # scratch pointers that it does not use
    emulator = Emulator(Memory(q, records, indptr, indices, out), profile=True)
    result = emulator.launch(code, None, 1, 64 * warps, args, dynamic_lds=built.metadata.shared)
    resources = facts(code.kernel(), built.metadata.shared)
    return result.profiles[0], resources, error(out, q, records, indptr, indices)


def facts(kernel: Kernel, dynamic: int) -> dict[str, Any]:
    """Resources by the names of a manifest."""
    return {
        "vgprs": kernel.vector_registers,
        "lds": kernel.lds_bytes + dynamic,
        "private": kernel.private_bytes,
        "vgpr_spills": int(kernel.metadata.get(".vgpr_spill_count", 0)),
    }


def error(out: torch.Tensor, *given: torch.Tensor) -> float:
    """Largest error over the largest output of attention in float64."""
    want, _ = sparse_mla64(*given, SCALE)
    return float((out.double() - want).abs().max() / want.abs().max())


def row(name: str, profile: Profile, resources: dict[str, Any], wrong: float, lds: int) -> dict[str, Any]:
    """What the table says of one kernel, a key."""
    moved: dict[str, int] = {}
    for (space, _, way), n in profile.bytes.items():
        moved[f"{space} {way}"] = moved.get(f"{space} {way}", 0) + n
    matrix = sum(MFMA_CYCLES.get(name, 0) * n for name, n in profile.mix.items())
    unknown = [name for name in profile.mix if "mfma" in name and name not in MFMA_CYCLES]
    local = (moved.get("lds read", 0) + moved.get("lds write", 0)) / LDS_BYTES
    if any("lds_dword" in name for name in profile.mix):
        local += KEYS * RECORD / LDS_BYTES  # LDS-DMA writes, which are counted as global reads only
    return {
        "kernel": name,
        "instructions": round(profile.instructions / KEYS, 1),
        "bytes": round(moved.get("global read", 0) / KEYS / RECORD, 3),
        "mfma": round(profile.matrix / KEYS, 2),
        "mfma_cycles": None if unknown else round(matrix / 4 / KEYS, 1),
        "lds_cycles": round(local / KEYS, 1),
        "conflicts": round(profile.bank_conflicts / KEYS, 2),
        "vector": round(sum(n for name, n in profile.mix.items() if name[:2] == "v_" and "mfma" not in name) / KEYS, 1),
        "barriers": round(profile.mix.get("s_barrier", 0) / KEYS, 2),
        "vgprs": resources["vgprs"],
        "lds": lds,
        "spills": resources["vgpr_spills"] + resources["private"],
        "error": float(f"{wrong:.1e}"),
        "mix": dict(profile.mix.most_common(12)),
    }


def measure(heads: int = 16) -> dict[str, Any]:
    """All rows."""
    from k3dsl.amd.sparse_mla.key import WAVE_BYTES

    rows = []
    cache = CompileCache()
    for waves in (2, 4):
        profile, resources, wrong = ours(heads, waves, cache)
        rows.append(row(f"k3dsl, {waves} waves", profile, resources, wrong, waves * WAVE_BYTES))
    tried = []
    for way, block, warps, stages in TRITON:
        name = f"Triton {way}, {block} keys, {warps} waves, {stages} stages"
        try:
            profile, resources, wrong = triton_kernel(heads, way, block, warps, stages)
        except Exception as problem:  # does not compile, spills, takes more LDS than there is: a row that says so
            tried.append({"kernel": name, "failed": f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"})
            continue
        tried.append(row(name, profile, resources, wrong, resources["lds"]))
    versions = {name: metadata.version(name) for name in ("flydsl", "triton")}
    conditions = {"where": "the gfx950 emulator, flat memory; no GPU", **versions}
    floor = {"hbm_cycles": round(RECORD / HBM_BYTES, 1), "keys": KEYS, "heads": heads}
    return {"conditions": conditions, "floor": floor, "rows": rows + tried}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--heads", type=int, default=16)
    arguments = parser.parse_args()
    found = measure(arguments.heads)
    columns = (
        "instructions",
        "vector",
        "bytes",
        "mfma",
        "mfma_cycles",
        "lds_cycles",
        "conflicts",
        "barriers",
        "vgprs",
        "lds",
        "spills",
        "error",
    )
    print(
        f"a key of {KEYS}; at 8 TB/s its record takes {found['floor']['hbm_cycles']} cycles of a compute unit's share"
    )
    print("| kernel | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for r in found["rows"]:
        cells = [r["failed"]] if "failed" in r else [str(r[c]) for c in columns]
        print(f"| {r['kernel']} | " + " | ".join(cells) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
