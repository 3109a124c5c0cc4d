"""The hopper attention core with its merge: us by batch and context, beside the goals and the best published kernels.

    k3dsl bench --what core [--quick] [--against zeros | --against merges] [--json FILE]
    python tools/bench/core.py --build            builds the kernels into the user's cache; needs no GPU

--against zeros measures the long rows on normal data and on zeros, which take so little power that the clock stays up;
--against merges measures other shapes of the merge.

Calls of one graph read disjoint windows of a random permutation of the pages of a pool of several GB, so nothing of a
call is in L2 when it begins; core and merge follow each other by programmatic launches; us is the median of replays
over the calls. GB/s are the bytes of the cache over that time. Data are normal; what the kernels compute with it is
tested elsewhere.
"""

import sys
import time
from typing import Any, Final, NamedTuple

PAGE: Final = 64
LOG2E: Final = 1.4426950408889634
#: Pages of the pool: 2.4 GB of FP8, 4.8 GB of BF16.
POOL: Final = 65536
#: Seconds of rest in front of each measurement: a long call takes the card to its power limit, and the clock stays low
#: for a while after it.
PAUSE: Final = 0.2
#: One request of 128k among short ones.
MIXED: Final = (131072, *(1024 + 48 * i for i in range(63)))


METHOD: Final = (
    "graph of calls on disjoint windows of a random permutation of 65536 pages, median of replays over the calls"
)


class Shape(NamedTuple):
    """A row of the table. goal and peer in us; peer: the fastest public kernel for that cache format, as measured once
    on an H200 by the same method (docs/hopper.md)."""

    kv: str
    heads: int
    q: int
    lengths: tuple[int, ...]
    goal: float | None = None
    peer: float | None = None


def _row(
    kv: str, heads: int, q: int, b: int, context: int, goal: float | None = None, peer: float | None = None
) -> Shape:
    return Shape(kv, heads, q, (context,) * b, goal, peer)


SHAPES: Final = (
    _row("fp8", 12, 1, 1, 1024, 4.8, 9.9), _row("fp8", 12, 1, 1, 8192, 5.5, 15.0),
    _row("fp8", 12, 1, 4, 8192, 10.3, 18.6), _row("fp8", 12, 1, 16, 8192, 25.0, 38.2),
    _row("fp8", 12, 1, 64, 8192, 76.0, 112.8), _row("fp8", 12, 1, 16, 131072, 277.0, 393.3),
    _row("fp8", 12, 1, 64, 32768, 277.0, 405.2), _row("fp8", 12, 1, 1, 131072, 25.0, 43.3),
    _row("fp8", 12, 1, 16, 1024, None, 13.9), _row("fp8", 12, 1, 64, 1024, None, 27.7),
    _row("fp8", 12, 4, 1, 1024, 6.0, 11.3), _row("fp8", 12, 4, 1, 8192, 7.5, 17.1),
    _row("fp8", 12, 4, 4, 8192, 12.0, 21.1), _row("fp8", 12, 4, 16, 8192, 28.0, 42.0),
    _row("fp8", 12, 4, 64, 8192, 82.0, 118.4), _row("fp8", 12, 4, 16, 131072, 295.0, 397.7),
    _row("fp8", 12, 4, 1, 131072, 28.0, 46.6),
    _row("fp8", 96, 1, 64, 16384, 210.0, 423.7), _row("fp8", 96, 1, 16, 4096, 24.0, 40.4),
    _row("bf16", 12, 1, 1, 8192, 10.0, 17.5), _row("bf16", 12, 1, 16, 8192, 44.0, 46.6),
    _row("bf16", 12, 1, 64, 8192, 143.0, 146.8), _row("bf16", 12, 1, 64, 32768, 535.0, 546.4),
    _row("bf16", 12, 4, 16, 8192, None, 50.3), _row("bf16", 12, 4, 64, 8192, None, 153.6),
    Shape("fp8", 12, 1, MIXED),
)  # fmt: skip
#: Rows that reach the power limit.
LONG: Final = tuple(s for s in SHAPES if s.kv == "fp8" and s.q * s.heads >= 48 and sum(s.lengths) >= 64 * 8192)
#: (row, shapes of the merge: slice, groups, batch) to compare; the first is what `merge_key` gives.
MERGES: Final = (
    (_row("fp8", 12, 1, 1, 8192), ((128, 8, 17), (128, 4, 17), (128, 8, 8))),
    (_row("fp8", 12, 4, 1, 8192), ((128, 4, 17), (128, 8, 17), (256, 4, 17), (256, 2, 17))),
    (_row("fp8", 12, 4, 1, 131072), ((128, 4, 17), (128, 8, 17), (256, 4, 17))),
    (_row("fp8", 12, 4, 4, 8192), ((256, 2, 17), (256, 4, 17), (128, 4, 17))),
    (_row("fp8", 12, 1, 64, 8192), ((512, 1, 8), (512, 1, 16), (512, 2, 8))),
    (_row("fp8", 12, 4, 64, 8192), ((512, 1, 8), (512, 1, 16), (512, 2, 8))),
    (Shape("fp8", 12, 1, MIXED), ((512, 1, 8), (512, 1, 16), (512, 2, 8), (512, 4, 8), (256, 1, 16), (256, 2, 8))),
)
QUICK: Final = tuple(s for s in SHAPES if len(set(s.lengths)) == 1 and sum(s.lengths) <= 131072)
#: Types of P that are measured where there is a choice: the default, and the other.
PS: Final = (None, "e4m3")


def variants(shape: Shape) -> tuple[str | None, ...]:
    """Types of P to measure at this shape; None: the default."""
    return PS if shape.kv == "fp8" else (None,)


def keys() -> list[Any]:
    """Every kernel that this bench launches."""
    from k3dsl.nvidia.core import hopper

    found = []
    for shape in SHAPES:
        for p in variants(shape):
            core = hopper.choose(heads=shape.heads, q=shape.q, page=PAGE, kv=shape.kv, p=p)
            found += [core, hopper.merge_key(core, requests=len(shape.lengths))]
    for shape, merges in MERGES:
        core = hopper.choose(heads=shape.heads, q=shape.q, page=PAGE, kv=shape.kv)
        found += [merge_of(core, merge) for merge in merges]
    return list(dict.fromkeys(found))


def merge_of(core: Any, shape: tuple[int, int, int]) -> Any:
    """The merge of this shape (slice, groups, batch) for a core's partials."""
    from k3dsl.nvidia.core import hopper

    return hopper.MergeKey(core.block, *shape, partial=core.partial)


class Bench:
    """The pool of one format, and the functions of the kernels."""

    def __init__(self, kv: str) -> None:
        import torch

        from k3dsl.cache import CompileCache

        self.kv, self.element = kv, 1 if kv == "fp8" else 2
        self.objects = CompileCache()
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        generator = torch.Generator(device="cuda").manual_seed(0)
        # As latents behind an RMS norm. What the bits are decides how much power moving them takes, and the card is at
        # its limit in long calls.
        dtype = torch.float8_e4m3fn if kv == "fp8" else torch.bfloat16
        self.pool = torch.empty(POOL, PAGE, 576, dtype=dtype, device="cuda")
        for some in self.pool.split(4096):
            some.copy_(torch.randn(some.shape, generator=generator, device="cuda"))
        self.pages = torch.randperm(POOL, generator=generator, device="cuda").int()

    def function(self, key: Any) -> Any:
        from k3dsl.nvidia.driver import Module, driver
        from k3dsl.nvidia.toolchain import build, compile_key

        entry = self.objects.get_or_build(compile_key(key, "sm_90a"), build)
        return Module.load(driver(), entry.payload).function(0)

    def measure(
        self, shape: Shape, p: str | None, repeats: int, merge_shape: tuple[int, int, int] | None = None
    ) -> dict[str, Any]:
        import torch

        from k3dsl.nvidia.core import hopper
        from k3dsl.nvidia.driver import LaunchPlan, driver
        from k3dsl.nvidia.tensor_map import TensorMap

        from . import harness

        requests, width = len(shape.lengths), -(-max(shape.lengths) // PAGE)
        counts = [-(-length // PAGE) for length in shape.lengths]
        key = hopper.choose(heads=shape.heads, q=shape.q, page=PAGE, kv=shape.kv, p=p)
        merge = merge_of(key, merge_shape) if merge_shape else hopper.merge_key(key, requests=requests)
        sizes = hopper.workspace(key, requests=requests, sm_count=self.sm_count)
        lengths = torch.tensor(shape.lengths, dtype=torch.int32, device="cuda")
        query = torch.randn(requests * shape.q, shape.heads, 576, device="cuda").bfloat16()
        if shape.kv == "fp8":
            query = query.to(torch.float8_e4m3fn)
        partial = torch.empty(sizes.partial, dtype=torch.uint8, device="cuda")
        stats = torch.empty(sizes.stats, dtype=torch.uint8, device="cuda")
        out = torch.empty(requests * key.columns, 512, dtype=torch.bfloat16, device="cuda")
        row = 576 * self.element
        maps = {
            name: TensorMap(driver(), address=self.pool.data_ptr(), **fact)
            for name, fact in hopper.kv_maps(key, pages=POOL, page_stride=PAGE * row, token_stride=row).items()
        }
        maps |= {
            name: TensorMap(driver(), address=query.data_ptr(), **fact)
            for name, fact in hopper.query_maps(key, rows=requests * shape.q).items()
        }
        shared = {
            "lengths": lengths.data_ptr(), "partial": partial.data_ptr(), "stats": stats.data_ptr(),
            "requests": requests, "splits": hopper.splits(key, self.sm_count), "slots": sizes.slots,
        }  # fmt: skip
        total = sum(counts)
        windows = max(1, min(POOL // total, harness.rotation(total * PAGE * row, 64)))
        core_function, merge_function = self.function(key), self.function(merge)
        pairs, tables = [], []
        for w in range(windows):
            table = torch.zeros(requests, width, dtype=torch.int32, device="cuda")
            at = w * total
            for r, count in enumerate(counts):
                table[r, :count] = self.pages[at : at + count]
                at += count
            tables.append(table)
            core_plan = LaunchPlan(
                core_function, hopper.geometry(key, requests=requests, sm_count=self.sm_count), key.params,
                table=table.data_ptr(), table_stride=width, scale_log2=192**-0.5 * LOG2E * 0.1, **maps, **shared,
            )  # fmt: skip
            merge_plan = LaunchPlan(
                merge_function, hopper.merge_geometry(merge, key, requests=requests), merge.params,
                out=out.data_ptr(), lse=0, columns=key.columns, out_scale=1.0, **shared,
            )  # fmt: skip
            pairs.append((core_plan, merge_plan))

        def stream() -> int:
            return torch.cuda.current_stream().cuda_stream

        rounds = max(1, 32 // windows) if windows > 1 else 1
        both = [lambda c=c, m=m: (c.launch(stream()), m.launch(stream())) for c, m in pairs]
        alone = [lambda c=c: c.launch(stream()) for c, _ in pairs]
        time.sleep(PAUSE)
        us = harness.graph_us(both, repeats, rounds)
        time.sleep(PAUSE)
        core_us = harness.graph_us(alone, repeats, rounds)
        read = sum(shape.lengths) * row
        return {
            "kv": shape.kv, "heads": shape.heads, "q": shape.q, "requests": requests,
            "context": shape.lengths[0] if len(set(shape.lengths)) == 1 else "mixed", "p": key.p,
            "us": us, "core_us": core_us, "gb_s": read / us / 1e3, "goal_us": shape.goal, "peer_us": shape.peer,
            "calls": windows * rounds,
        }  # fmt: skip


def run(against: str | None = None, commit: str | None = None, quick: bool = False) -> dict[str, Any]:
    """All rows, or those of a comparison; see the module."""
    import torch

    from k3dsl.errors import ConfigError

    from . import harness

    if against not in (None, "zeros", "merges"):
        raise ConfigError(f"against={against!r} must be zeros or merges")
    harness.require_gpu()
    rows = []
    if against is not None:
        bench = Bench("fp8")
        compared = on_zeros(bench) if against == "zeros" else other_merges(bench)
        return {"conditions": harness.conditions(commit, METHOD), "rows": compared}
    for kv in ("fp8", "bf16"):
        bench = Bench(kv)
        for shape in QUICK if quick else SHAPES:
            if shape.kv == kv:
                rows += [bench.measure(shape, p, 5 if quick else 9) for p in variants(shape)]
        del bench
        torch.cuda.empty_cache()
    return {"conditions": harness.conditions(commit, METHOD), "rows": rows}


def on_zeros(bench: Bench) -> list[dict[str, Any]]:
    """The long rows with normal keys and, after those, with zeros."""
    rows = []
    for data in ("normal", "zeros"):
        if data == "zeros":
            bench.pool.zero_()
        rows += [{**bench.measure(shape, p, 9), "data": data} for shape in LONG for p in variants(shape)]
    return rows


def other_merges(bench: Bench) -> list[dict[str, Any]]:
    """Rows with the merge in several shapes."""
    return [{**bench.measure(shape, None, 9, merge), "merge": merge} for shape, merges in MERGES for merge in merges]


def show(document: dict[str, Any], console: Any) -> None:
    """A table for people."""
    from k3dsl.cli.console import table

    gpu = document["conditions"]["gpu"].get("name", "this device")
    columns = ("heads", "q", "B x context", "P", "us", "core us", "GB/s", "goal us", "peer us", "of peer")
    what = next((name for name in ("data", "merge") if document["rows"] and name in document["rows"][0]), None)
    made = table(f"Attention core and merge on {gpu}, us", "cache", *columns, *([what] if what else []), right=columns)
    for row in document["rows"]:
        peer, goal = row["peer_us"], row["goal_us"]
        made.add_row(
            row["kv"], str(row["heads"]), str(row["q"]), f"{row['requests']} x {row['context']}", row["p"],
            f"{row['us']:.2f}", f"{row['core_us']:.2f}", f"{row['gb_s']:.0f}", "-" if goal is None else f"{goal:.1f}",
            "-" if peer is None else f"{peer:.1f}", "-" if peer is None else f"{peer / row['us']:.2f}x",
            *([str(row[what])] if what else []),
        )  # fmt: skip
    console.print(made)


def main() -> int:
    """Without the CLI: builds."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", required=True, help="build the kernels into the user's cache")
    parser.add_argument("--target", default="sm_90a")
    options = parser.parse_args()

    from k3dsl.cache import CompileCache
    from k3dsl.nvidia import toolchain

    cache = CompileCache()
    with toolchain.Compiler() as compiler:
        for key in keys():
            cache.get_or_build(toolchain.compile_key(key, options.target), compiler.build)
    print(f"{len(keys())} kernels ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
