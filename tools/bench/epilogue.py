"""The fused epilogues: bytes over time against the copy rate, an empty kernel, torch ops and one Triton kernel.

    k3dsl bench --what epilogue [--quick] [--json FILE]
    python tools/bench/epilogue.py --build            builds the kernels into the user's cache; needs no GPU

Every number is the replay of a graph of calls over buffers that no two neighbouring calls share, divided by the calls:
launch gaps are inside. Bytes are what a call must move: each input once, each output once. The copy is torch's, of the
same bytes, measured the same way. The empty kernel waits, triggers and ends, by programmatic launches like ours.
"""

import ctypes
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

TOKENS: Final = (1, 16, 64, 512, 4096, 16384)
HEADS: Final = (12, 64)
KINDS: Final = (
    ("decode", "plain"), ("decode", "fp8"), ("decode", "fp8_ds_mla"),
    ("prefill", "plain"), ("prefill", "fp8"), ("prefill", "fp8_ds_mla"),
    ("context", "plain"), ("context", "fp8"),
)  # fmt: skip
#: Decode is called with at most a capture size of tokens.
DECODE_MOST: Final = 512
DECODE_SIZES: Final = (1, 16, 64)
#: Buffers are rotated over at least this many bytes (several times an H200's 50 MB of L2), but not over more sets.
ROTATED: Final = 400 << 20
MOST_SETS: Final = 64
PAGE: Final = 64
GOAL_COPY: Final = 0.90
GOAL_EMPTY: Final = 1.3
GOAL_TORCH: Final = 3.0


def keys(heads: tuple[int, ...] = HEADS) -> list[Any]:
    """Every kernel that this bench launches."""
    from k3dsl.nvidia.epilogue import epilogue_keys

    formats = ("bf16", "fp8", "fp8_ds_mla")
    return [k for h in heads for k in epilogue_keys(h, kv_formats=formats) if not k.pe_fp8]


# ---- inputs -----------------------------------------------------------------------------------------------------


def tensors(op: str, kind: str, tokens: int, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs of a call, as slices of GEMM results where an engine has them so."""
    import torch

    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    quantized = e4m3 if kind == "fp8" else bf16

    def normal(*shape: int) -> Any:
        return torch.randn(shape, dtype=bf16, device="cuda")

    latent = normal(tokens, 576)
    a: dict[str, Any] = {"k_pe": latent[:, 512:]}
    outs: dict[str, Any] = {}
    if op == "decode":
        a["ql_nope"] = normal(heads, tokens, 512).transpose(0, 1)
        a["q_pe"] = normal(tokens, heads, 192)[..., 128:]
        outs["out"] = torch.empty(tokens, heads, 576, dtype=quantized, device="cuda")
    else:
        both = normal(tokens, heads, 256)
        a["k_nope"] = both[..., :128]
        outs["k_out"] = torch.empty(tokens, heads, 192, dtype=quantized, device="cuda")
        if kind == "fp8":
            a["v"] = both[..., 128:]
            outs["v_out"] = torch.empty(tokens, heads, 128, dtype=e4m3, device="cuda")
        if op == "prefill":
            a["q"] = normal(tokens, heads, 192)
            if kind == "fp8":
                outs["q_out"] = torch.empty(tokens, heads, 192, dtype=e4m3, device="cuda")
    if op != "context":
        a["kv_c"] = normal(tokens, 512)
        pages = -(-tokens // PAGE) + 1
        width, dtype = {"plain": (576, bf16), "fp8": (576, e4m3), "fp8_ds_mla": (656, torch.uint8)}[kind]
        a["cache"] = torch.zeros(pages, PAGE, width, dtype=torch.uint8 if dtype != bf16 else bf16, device="cuda")
        a["cache"] = a["cache"].view(dtype)
        a["slots"] = torch.randperm(pages * PAGE, device="cuda")[:tokens]
        if kind == "fp8":
            a |= {n: torch.ones(1, device="cuda") for n in ("q_scale", "k_scale", "v_scale", "cache_scale")}
    return a, outs


def ours(op: str, kind: str, a: dict[str, Any], outs: dict[str, Any]) -> Callable[[], Any]:
    """The call by k3dsl, into the given outputs."""
    from k3dsl import nvidia as ops

    if op == "context":
        if kind == "plain":
            return lambda: ops.context_pack(a["k_nope"], a["k_pe"], out=outs["k_out"])
        both = (outs["k_out"], outs["v_out"])
        return lambda: ops.context_pack_fp8(a["k_nope"], a["v"], a["k_pe"], out=both)
    tail = (a["cache"], a["slots"])
    if op == "decode":
        scales = {f"{n}_inv": a[n] for n in ("q_scale", "cache_scale")} if kind == "fp8" else {}
        return lambda: ops.fused_mla_decode_q_concat_kv_cache_insert(
            a["ql_nope"], a["q_pe"], a["kv_c"], a["k_pe"], *tail, ds_mla=kind == "fp8_ds_mla", out=outs["out"], **scales
        )
    head = (a["q"], a["k_nope"], a["k_pe"], a["kv_c"])
    if kind == "fp8":
        every = (outs["q_out"], outs["k_out"], outs["v_out"])
        scales = tuple(a[n] for n in ("q_scale", "k_scale", "v_scale", "cache_scale"))
        return lambda: ops.fused_mla_qkv_quant_kv_cache_fp8_insert(*head, a["v"], *tail, *scales, out=every)
    name = "fused_mla_key_concat_" + ("ds_mla_insert" if kind == "fp8_ds_mla" else "kv_cache_insert")
    function = getattr(ops, name)
    return lambda: function(*head, *tail, out=outs["k_out"])


def moved(op: str, kind: str, a: dict[str, Any], outs: dict[str, Any]) -> int:
    """Bytes that the call must read and write. A 16-bit prefill does not touch q."""
    skip = {"cache", "slots"} | ({"q"} if op == "prefill" and kind != "fp8" else set())
    read = sum(t.numel() * t.element_size() for n, t in a.items() if n not in skip and not n.endswith("scale"))
    written = sum(t.numel() * t.element_size() for t in outs.values())
    entry = a["cache"].shape[2] * a["cache"].element_size() * a["k_pe"].shape[0] if "cache" in a else 0
    return int(read + written + entry)


# ---- time -------------------------------------------------------------------------------------------------------


def graph_us(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Microseconds of a call: median over the replays of one graph of all of them."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_us(total: int, repeats: int) -> float:
    """A torch copy that reads total / 2 bytes and writes as many, over rotated buffers."""
    import torch

    half = max(total // 2 // 16 * 16, 16)
    sets = min(MOST_SETS, max(4, -(-ROTATED // total)))
    pairs = [tuple(torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2)) for _ in range(sets)]
    return graph_us([lambda a=a, b=b: b.copy_(a) for a, b in pairs], repeats)


def empty_call() -> Callable[[], Any]:
    """A launch of a kernel of one CTA that does nothing, by programmatic launch. Compiled by NVRTC on this machine."""
    import torch

    from k3dsl.nvidia.driver import LaunchPlan, Module, driver
    from k3dsl.nvidia.launch import Launch

    major, minor = torch.cuda.get_device_capability()
    text = (
        'extern "C" __global__ void __launch_bounds__(256) nothing() {'
        ' asm volatile("griddepcontrol.wait;" ::: "memory"); asm volatile("griddepcontrol.launch_dependents;"); }'
    )
    module = Module.load(driver(), _nvrtc(text, f"sm_{major}{minor}a"))
    plan = LaunchPlan(module.function(torch.cuda.current_device()), Launch((1, 1, 1), (256, 1, 1)), ())
    return lambda: plan.launch(torch.cuda.current_stream().cuda_stream)


def _nvrtc(text: str, arch: str) -> bytes:
    """A cubin of CUDA C++ text, by the NVRTC that torch brings."""
    found = _load_nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    option = (ctypes.c_char_p * 1)(f"--gpu-architecture={arch}".encode())
    steps = [
        found.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"nothing.cu", 0, None, None),
        found.nvrtcCompileProgram(program, 1, option),
        found.nvrtcGetCUBINSize(program, ctypes.byref(size)),
    ]
    image = ctypes.create_string_buffer(size.value)
    steps.append(found.nvrtcGetCUBIN(program, image))
    if any(steps):
        raise RuntimeError(f"NVRTC failed: {steps}")
    return image.raw


def _load_nvrtc() -> Any:
    """The library: where the loader finds it, or in the packages beside torch."""
    import torch

    packages = Path(torch.__file__).parents[1] / "nvidia"
    beside = sorted(str(p) for p in packages.glob("**/libnvrtc.so.*") if "alt" not in p.name)
    for name in (*beside, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("no libnvrtc beside torch or on the loader's path")


# ---- the question -----------------------------------------------------------------------------------------------


def run(*, against: str | None = None, commit: str | None = None, quick: bool = False, **_: Any) -> dict[str, Any]:
    """The document: conditions, the empty kernel, a row a shape. `against`: torch, triton or both (None)."""
    import torch

    from k3dsl.errors import ConfigError, ToolchainError

    if against not in (None, "torch", "triton"):
        raise ConfigError(f"against={against!r} must be torch or triton")
    if not torch.cuda.is_available():
        raise ToolchainError("nothing to measure: torch sees no GPU here")
    rivals = _rivals()
    kernel = rivals.triton_kernel() if against in (None, "triton") else None
    repeats = 5 if quick else 9
    heads = (12,) if quick else HEADS
    empty, problem = None, None
    try:
        call = empty_call()
        empty = graph_us([call] * 200, repeats)
    except Exception as error:  # a driver or an NVRTC that does not do it: the other columns stand
        problem = f"{type(error).__name__}: {error}"
    rows = []
    for op, kind in KINDS:
        for h in heads:
            for tokens in TOKENS if not quick else (1, 64, 4096):
                if op == "decode" and tokens > DECODE_MOST:
                    continue
                rows.append(_measure(op, kind, tokens, h, rivals, kernel, against, empty, repeats))
    return {
        "conditions": {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "method": "graph of calls over rotated buffers, median of replays, launches included",
        },
        "empty_us": empty,
        "empty_problem": problem,
        "rows": rows,
    }


def _rivals() -> Any:
    """The module beside this one, however this one was loaded."""
    from importlib import import_module

    return import_module(f"{__package__}.epilogue_rivals" if __package__ else "epilogue_rivals")


def _measure(
    op: str, kind: str, tokens: int, heads: int, rivals: Any, kernel: Any, against: str | None, empty: float | None,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    import torch

    total = moved(op, kind, *tensors(op, kind, tokens, heads))
    count = min(MOST_SETS, max(4, -(-ROTATED // total)))
    sets = [tensors(op, kind, tokens, heads) for _ in range(count)]
    row: dict[str, Any] = {"op": op, "format": kind, "tokens": tokens, "heads": heads, "bytes": total, "sets": count}
    row["us"] = graph_us([ours(op, kind, *s) for s in sets], repeats)
    row["copy_us"] = copy_us(total, repeats)
    row["gb_s"] = total / row["us"] / 1e3
    row["of_copy"] = row["copy_us"] / row["us"]
    row["of_empty"] = row["us"] / empty if empty else None
    row["torch_us"] = row["triton_us"] = None
    if against in (None, "torch"):
        row["torch_us"] = graph_us([rivals.torch_ops(op, kind, a) for a, _ in sets], repeats)
    if kernel is not None:
        try:
            row["triton_us"] = graph_us([rivals.triton_one(kernel, op, kind, *s) for s in sets], repeats)
        except Exception as error:  # what Triton refuses is a finding of its own
            row["triton_problem"] = f"{type(error).__name__}: {error}"[:300]
    row["torch_ratio"] = row["torch_us"] / row["us"] if row["torch_us"] else None
    row["triton_ratio"] = row["triton_us"] / row["us"] if row["triton_us"] else None
    row["missed"] = missed(row)
    del sets
    torch.cuda.empty_cache()
    return row


def missed(row: dict[str, Any]) -> list[str]:
    """The goals that a row does not reach."""
    found = []
    if row["tokens"] >= 4096 and row["of_copy"] < GOAL_COPY:
        found.append(f"{row['of_copy']:.0%} of the copy rate, the goal is {GOAL_COPY:.0%}")
    decode = row["op"] == "decode" and row["tokens"] in DECODE_SIZES
    if decode and row["of_empty"] is not None and row["of_empty"] > GOAL_EMPTY:
        found.append(f"{row['of_empty']:.2f} of an empty kernel, the goal is {GOAL_EMPTY}")
    if row["torch_ratio"] is not None and row["torch_ratio"] < (GOAL_TORCH if decode else 1.0):
        found.append(
            f"{row['torch_ratio']:.2f} times as fast as torch ops, the goal is {GOAL_TORCH if decode else 1.0}"
        )
    return found


def show(document: dict[str, Any], console: Any) -> None:
    """A table for people."""
    from rich.table import Table

    where = document["conditions"]
    empty = document["empty_us"]
    title = f"Fused epilogues on {where['device']}, empty kernel " + (f"{empty:.2f} us" if empty else "not measured")
    table = Table(title=title)
    for name in ("op", "format", "T", "H", "us", "GB/s", "of copy", "of empty", "torch", "triton", "missed"):
        table.add_column(name, justify="left" if name in ("op", "format", "missed") else "right")

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    for row in document["rows"]:
        table.add_row(
            row["op"], row["format"], str(row["tokens"]), str(row["heads"]), f"{row['us']:.2f}", f"{row['gb_s']:.0f}",
            f"{row['of_copy']:.0%}", ratio(row["of_empty"]), ratio(row["torch_ratio"]), ratio(row["triton_ratio"]),
            "; ".join(row["missed"]),
        )  # fmt: skip
    console.print(table)


def main() -> int:
    """Without the CLI: measures and prints JSON, or builds."""
    import argparse
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build the kernels into the user's cache and stop")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", choices=("torch", "triton"))
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.build:
        from k3dsl.cache import CompileCache
        from k3dsl.nvidia import toolchain

        cache = CompileCache()
        with toolchain.Compiler() as compiler:
            for key in keys():
                cache.get_or_build(toolchain.compile_key(key, options.target), compiler.build)
        print(f"{len(keys())} kernels ready")
        return 0
    print(json.dumps(run(against=options.against, commit=options.commit, quick=options.quick), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
