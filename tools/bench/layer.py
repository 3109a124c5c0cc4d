"""A whole decode layer: us per layer in a graph of layers, against the same math in torch ops, and its floor.

    k3dsl warmup --target sm_90a --batches 1,4,16,64 --kv-format fp8     where the compiler is; and for bf16
    k3dsl bench --what layer [--quick] [--against torch] [--json FILE]

Every layer of the graph has weights and a cache of its own, in pages that lie in random order, so that a layer finds
nothing of its own in L2. Lengths are equal within a row of the table. The torch ops get what they like best: they
gather each request's pages, so they need equal lengths too, and they run in a graph as well.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl import CompileCache, Deployment, MlaDims, MlaWeights
from k3dsl.dims import KV_BYTES
from k3dsl.errors import ConfigError
from k3dsl.preparing import detect_target, prepare
from k3dsl.scenario import relative_error

from . import harness

BATCHES: Final = (1, 4, 16, 64)
CONTEXTS: Final = (1024, 8192)
FORMATS: Final = ("fp8", "bf16")
PAGE: Final = 64
#: Of HBM3e and of the tensor cores of an H200 as measured, for the floors: bytes and operations a us.
BYTES_PER_US: Final = 4.3e6
BF16_PER_US: Final = 790e6
FP8_PER_US: Final = 1580e6
#: Ours against torch ops: both round where the kernels do, but sum in other orders.
AGREE: Final = 5e-2


def floor(dims: MlaDims, rows: int, context: int, kv_format: str) -> dict[str, float]:
    """The bytes and operations that a layer cannot avoid, and the least us for each; `us` is the larger.

    Weights once, the cache once, and the activations: projected row, output, query, latent, cache entry.
    """
    h = dims.heads
    weights = 2 * h * (dims.qk * dims.q_lora + 2 * dims.nope * dims.kv_lora)
    entry = KV_BYTES[kv_format]
    element = 1 if kv_format == "fp8" else 2
    activations = 2 * (dims.projected + 2 * h * dims.v) + 2 * element * h * dims.latent + 4 * h * dims.kv_lora + entry
    moved = weights + rows * (activations + context * entry)
    gemm = rows * 2 * h * (dims.qk * dims.q_lora + 2 * dims.nope * dims.kv_lora)
    keys = 2 * h * rows * context
    fast = FP8_PER_US if kv_format == "fp8" else BF16_PER_US
    compute = gemm / BF16_PER_US + keys * (dims.latent / fast + dims.kv_lora / BF16_PER_US)
    return {"bytes": moved, "memory_us": moved / BYTES_PER_US, "compute_us": compute,
            "us": max(moved / BYTES_PER_US, compute)}  # fmt: skip


class Layer:
    """One layer with a cache full of requests of `context` tokens, and one step of it."""

    def __init__(self, dims: MlaDims, rows: int, context: int, kv_format: str, device: str, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        self.dims, self.kv_format = dims, kv_format
        self.weights = MlaWeights.random(dims, seed=seed).to(device)
        width = -(-context // PAGE)
        pages = rows * width + 1
        values = torch.randn(pages, PAGE, dims.latent, generator=generator, device=device, dtype=torch.bfloat16)
        self.cache = values.to(torch.float8_e4m3fn).view(torch.uint8) if kv_format == "fp8" else values
        order = torch.randperm(pages - 1, generator=generator, device=device) + 1
        self.table = order.view(rows, width).to(torch.int32)
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        last = self.table[:, (context - 1) // PAGE].to(torch.int64)
        self.slots = last * PAGE + (context - 1) % PAGE
        self.projected = torch.randn(rows, dims.pitch, generator=generator, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(rows, dims.heads * dims.v, dtype=torch.bfloat16, device=device)


def torch_layer(layer: Layer) -> Tensor:
    """The layer in torch ops, as an engine without fused kernels has it. All requests have the same length."""
    w, dims, rows = layer.weights, layer.dims, layer.projected.shape[0]
    h, fp8 = dims.heads, layer.kv_format == "fp8"
    c_q, c_kv, k_pe, gate = layer.projected[:, : dims.pitch].split(
        [dims.q_lora, dims.kv_lora, dims.rope, h * dims.v], dim=1
    )
    rms = torch.nn.functional.rms_norm
    entry = torch.cat([rms(c_kv, (dims.kv_lora,), w.kv_a_layernorm.weight, w.rms_norm_eps), k_pe], dim=1)
    if fp8:
        entry = (entry * w._k_scale_inv).to(torch.float8_e4m3fn).view(torch.uint8)
    layer.cache.view(-1, dims.latent).index_copy_(0, layer.slots, entry)
    u = torch.nn.functional.linear(rms(c_q, (dims.q_lora,), w.q_a_layernorm.weight, w.rms_norm_eps), w.q_b_proj.weight)
    u = u.view(rows, h, dims.qk)
    absorbed = torch.bmm(u[..., : dims.nope].transpose(0, 1), w.W_UK_T).transpose(0, 1)
    query = torch.cat([absorbed, u[..., dims.nope :]], dim=2)
    keys = layer.cache[layer.table.long()].flatten(1, 2)
    scale = w.scale
    if fp8:
        query = (query * w._q_scale_inv).to(torch.float8_e4m3fn).to(torch.bfloat16)
        keys = keys.view(torch.float8_e4m3fn).to(torch.bfloat16)
        scale *= w._q_scale_float * w._k_scale_float
    scores = torch.bmm(query, keys.transpose(1, 2)).float() * scale
    unseen = torch.arange(keys.shape[1], device=keys.device)[None, None] >= layer.lengths[:, None, None]
    p = torch.softmax(scores.masked_fill_(unseen, -torch.inf), dim=2).to(torch.bfloat16)
    latent = torch.bmm(p, keys[..., : dims.kv_lora])
    if fp8:
        latent = latent * w._k_scale_float
    up = torch.bmm(latent.transpose(0, 1), w.W_UV).transpose(0, 1).reshape(rows, h * dims.v)
    return torch.mul(up, torch.sigmoid(gate), out=layer.out)


def run(
    *, against: str | None = None, commit: str | None = None, quick: bool = False, tp: int = 8, **_: Any
) -> dict[str, Any]:
    """The document: conditions, and a row for each format, number of rows and context."""
    if against not in (None, "torch"):
        raise ConfigError(f"against={against!r} must be torch")
    harness.require_gpu()
    dims, target = MlaDims.kimi_k3(tp), detect_target()
    cache = CompileCache()
    rows = []
    for kv_format in FORMATS[:1] if quick else FORMATS:
        plan = Deployment(dims, target=str(target), kv_format=kv_format, batches=BATCHES)
        for batch in BATCHES:
            for context in CONTEXTS:
                rows.append(_measure(plan, batch, context, cache, 5 if quick else 9))
    method = (
        "graph of layers with weights and caches of their own (320 MB or more), median of 9 replays over the layers, "
        "launches included; page 64, q=1"
    )
    return {"conditions": harness.conditions(commit, method), "tp": tp, "rows": rows}


def _measure(plan: Deployment, rows: int, context: int, cache: CompileCache, repeats: int) -> dict[str, Any]:
    bound = floor(plan.dims, rows, context, plan.kv_format)
    count = harness.rotation(int(bound["bytes"]))
    layers = [Layer(plan.dims, rows, context, plan.kv_format, "cuda", seed) for seed in range(count)]
    calls = []
    for layer in layers:
        prepared = prepare(plan, layer.weights, cache=cache, device="cuda")
        prepared.prepare_cache(layer.cache)
        calls.append(_call(prepared, layer))
    calls[0]()
    mine = layers[0].out.clone()
    error = relative_error(mine, torch_layer(layers[0]))
    ours = harness.graph_us(calls, repeats)
    theirs = harness.graph_us([_torch_call(layer) for layer in layers], repeats)
    torch.cuda.empty_cache()
    return {
        "kv_format": plan.kv_format,
        "rows": rows,
        "context": context,
        "us": ours,
        "torch_us": theirs,
        "speedup": theirs / ours,
        "floor_us": bound["us"],
        "memory_floor_us": bound["memory_us"],
        "compute_floor_us": bound["compute_us"],
        "gb_per_s": bound["bytes"] / ours / 1e3,
        "layers": count,
        "error_against_torch": error,
        "agrees": error <= AGREE,
    }


def _call(prepared: Any, layer: Layer) -> harness.Call:
    def call() -> None:
        prepared.run(
            layer.projected,
            layer.out,
            cache=layer.cache,
            slots=layer.slots,
            block_table=layer.table,
            lengths=layer.lengths,
        )

    return call


def _torch_call(layer: Layer) -> harness.Call:
    return lambda: torch_layer(layer)


def show(document: dict[str, Any], console: Any) -> None:
    """A table for people."""
    from k3dsl.cli.console import table

    gpu = document["conditions"]["gpu"].get("name", "this device")
    columns = ("rows", "context", "us", "floor us", "of floor", "GB/s", "torch ops us", "speedup", "error")
    made = table(f"A layer at tp={document['tp']} on {gpu}, us", "cache", *columns, right=columns)
    for row in document["rows"]:
        made.add_row(
            row["kv_format"],
            str(row["rows"]),
            str(row["context"]),
            f"{row['us']:.2f}",
            f"{row['floor_us']:.2f}",
            f"{row['us'] / row['floor_us']:.2f}x",
            f"{row['gb_per_s']:.0f}",
            f"{row['torch_us']:.1f}",
            f"{row['speedup']:.1f}x",
            f"{row['error_against_torch']:.1e}" + ("" if row["agrees"] else " (!)"),
        )
    console.print(made)


def plot(document: dict[str, Any], path: Path) -> None:
    """Time over rows, one panel a (format, context): ours, torch ops, the floor."""
    plt = harness.pyplot()
    panels = list(dict.fromkeys((row["kv_format"], row["context"]) for row in document["rows"]))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False)
    for axis, (kv_format, context) in zip(axes[0], panels, strict=True):
        rows = [r for r in document["rows"] if (r["kv_format"], r["context"]) == (kv_format, context)]
        for name, label in (("torch_us", "torch ops"), ("us", "k3dsl"), ("floor_us", "floor")):
            axis.plot([r["rows"] for r in rows], [r[name] for r in rows], marker="o", label=label)
        axis.set(title=f"{kv_format}, context {context}", xlabel="rows", ylabel="us", xscale="log", yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
