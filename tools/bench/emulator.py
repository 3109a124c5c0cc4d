"""How fast the gfx950 emulator executes: CPU seconds of whole launches, with what they wrote checked.

    python -m tools.bench.emulator [--against CHECKOUT] [--repeats 5] [--json FILE]

Layer norm and a matrix product by Triton, and a step of `mla_pre`, flat and under the weak memory model, seed 1. The
least of some repeats, one thread. `--against` measures another checkout in turn. Needs the `amd` extra.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from k3dsl.amd import toolchain
from k3dsl.amd.mla_pre.key import PEER_HEAD, MlaPreBuild
from k3dsl.reference.mla_pre import PreWeights
from tools.bench import emulator_triton, harness
from tools.bench.mla_pre import Step
from tools.gfx950 import CodeObject, Emulator, Memory, Result

MODELS: Final[dict[str, dict[str, Any]]] = {"flat": {}, "weak": {"model": "weak", "seed": 1}}
#: Launches with these options of the emulator; checks what the last launch wrote, and spoils it.
Work = tuple[Callable[..., Result], Callable[[], None]]


def layer_norm(rows: int = 2048, width: int = 4096) -> Work:
    """fp32, a program a row, 4 waves."""
    torch.manual_seed(0)
    x, weight, bias, y = torch.randn(rows, width), torch.randn(width), torch.randn(width), torch.empty(rows, width)
    types = dict.fromkeys(("x", "weight", "bias", "y"), "*fp32") | {"N": "i32", "eps": "fp32"}
    built = emulator_triton.build(emulator_triton.layer_norm, types, {"BLOCK": width})
    want = torch.nn.functional.layer_norm(x, (width,), weight, bias)

    def run(**options: Any) -> Result:
        return emulator_triton.run(built, rows, [x, weight, bias, y, width, 1e-5], **options)

    def check() -> None:
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        y.fill_(float("nan"))

    return run, check


def matmul(size: int = 2048, inner: int = 512) -> Work:
    """bf16, tiles of 128 x 128 x 64, 8 waves, MFMA 32x32x16."""
    torch.manual_seed(0)
    a, b, c = torch.randn(size, inner).bfloat16(), torch.randn(inner, size).bfloat16(), torch.empty(size, size)
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    tile = {"BM": 128, "BN": 128, "BK": 64}
    built = emulator_triton.build(emulator_triton.matmul, types, tile, warps=8, matrix_instr_nonkdim=32)
    want = a.float() @ b.float()

    def run(**options: Any) -> Result:
        grid = (size // 128, size // 128)
        return emulator_triton.run(built, grid, [a, b, c, size, size, inner], warps=8, **options)

    def check() -> None:
        torch.testing.assert_close(c, want, rtol=1e-4, atol=1e-3)
        c.fill_(float("nan"))

    return run, check


def mla_pre(tokens: int = 8) -> Work:
    """One rank, 8 blocks, 256 workgroups of 512 threads that wait for each other."""
    key = MlaPreBuild(tokens=tokens, nblocks=8)
    code = CodeObject(toolchain.build(toolchain.compile_key(key, "gfx950")).payload)
    weights = PreWeights.random(1)

    step, memory = Step(key, weights, 0), Memory()
    launch = step.launch(code, memory, memory.add(torch.tensor([step.peer.data_ptr() + PEER_HEAD]), "peers"))

    def run(**options: Any) -> Result:
        return Emulator(memory, **options).run([launch])

    def check() -> None:
        if step.own["health"].any() or not step.own["q_out"].any():
            raise RuntimeError("a wait was given up, or no query was written")
        step.own["epoch"] += 1
        step.own["q_out"].zero_()

    return run, check


KERNELS: Final[dict[str, Callable[[], Work]]] = {
    "layer norm 2048 x 4096": layer_norm,
    "matmul 2048 x 2048 x 512": matmul,
    "mla_pre, 8 rows": mla_pre,
}


def measure(repeats: int) -> dict[str, dict[str, Any]]:
    """Kernel -> wave instructions, MFMA, and the least CPU seconds of a launch in each model."""
    found = {}
    for name, make in KERNELS.items():
        run, check = make()
        row: dict[str, Any] = {}
        for model, options in MODELS.items():
            seconds = []
            for _ in range(repeats):
                started = time.process_time()
                result = run(**options)
                seconds.append(time.process_time() - started)
                check()
            if model == "flat":
                row |= {"instructions": result.instructions, "mfma": result.profiles[0].matrix}
            row[model] = round(min(seconds), 3)
        found[name] = row
    return found


def elsewhere(checkout: Path, repeats: int) -> dict[str, Any]:
    """Commit, and `measure` with the emulator and the kernels of another checkout, by this file."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "rows.json"
        # Where this runs comes first on the path of imports, and then what the checkout may lack.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='__main__')"
        command = [sys.executable, "-c", code, "--repeats", str(repeats), "--json", str(written)]
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(written.read_text())
        return {"commit": found["conditions"]["commit"], "rows": found["rows"]}


def least(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The smaller seconds of two measurements of the same work."""
    return {name: row | {m: min(row[m], other[name][m]) for m in MODELS} for name, row in one.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout with another emulator")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    versions = {name: metadata.version(name) for name in ("flydsl", "triton")}
    launches = arguments.repeats * (2 if arguments.against else 1)
    method = f"least process time of {launches} launches"
    found: dict[str, Any] = {"conditions": harness.conditions(method=method) | versions}
    found["rows"] = measure(arguments.repeats)
    if arguments.against:
        checkout = arguments.against.resolve()
        found["against"] = elsewhere(checkout, arguments.repeats)
        found["rows"] = least(found["rows"], measure(arguments.repeats))
        found["against"]["rows"] = least(found["against"]["rows"], elsewhere(checkout, arguments.repeats)["rows"])
    print("| kernel | wave instructions | MFMA | flat | weak | M instructions/s, flat |\n|---|---|---|---|---|---|")
    other = found.get("against", {"rows": {}})
    for note, rows in (("", found["rows"]), (f", {other.get('commit')}", other["rows"])):
        for name, r in rows.items():
            rate = r["instructions"] / r["flat"] / 1e6
            print(f"| {name}{note} | {r['instructions']:,} | {r['mfma']:,} | {r['flat']} | {r['weak']} | {rate:.1f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
