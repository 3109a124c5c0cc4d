"""`k3dsl demo`: the main job end to end. Prepare a stack of layers, capture, decode, compare every step."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from k3dsl.cache.key import short
from k3dsl.cli.console import FINDING, Json, emit, err, out, table
from k3dsl.deployment import REFERENCE, Deployment
from k3dsl.dims import MlaDims
from k3dsl.errors import ToolchainError

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache
    from k3dsl.scenario import Stack

#: Largest relative error of a row. fp8: queries that fall to the other side of an fp8 step, and on Blackwell
#: probabilities of e4m3 (1.7e-2 by itself). bf16: three roundings to bf16.
LIMITS: Final = {"fp8": 3e-2, "bf16": 1e-2, "fp8_ds_mla": 1e-2}
_TIMED: Final = 50


def demo(
    target: Annotated[
        str | None, typer.Option(help="sm_90a, gfx950, reference, ...", show_default="that of the GPU, else reference")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=2**16, help="Decode steps.")] = 8,
    layers: Annotated[int, typer.Option(min=1, max=24, help="Layers of the stack.")] = 2,
    kv_format: Annotated[str, typer.Option("--kv-format", help="fp8, bf16; on reference also fp8_ds_mla.")] = "fp8",
    q: Annotated[int, typer.Option("--q", min=1, max=8, help="Tokens of a request in a step.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks: 8 (12 heads) or 16 (6 heads).")] = 8,
    page_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a cache page.")] = 64,
    replays: Annotated[int, typer.Option(min=0, help="Replays of the last step that must be bit-equal.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Of weights, caches and rows.")] = 0,
    json: Json = False,
) -> None:
    """Prepares a stack of layers, captures it, decodes N steps and compares every step with the reference.

    Requests of 1, 63, 64, 65 and up to thousands of tokens and an empty padded row; slots, lengths and block tables
    advance as in an engine. With no GPU the same flow runs on the reference, compared with float64; gfx950 kernels run
    on their emulator where there is a checkout with the amd extra.

    Example: k3dsl demo --steps 16 --kv-format bf16 --q 4 --replays 300
    """
    from k3dsl.preparing import detect_target

    target = target or detect_target() or REFERENCE
    chosen = (target, steps, layers, kv_format, q, tp, page_size, replays, seed)
    if target == "gfx950":
        from k3dsl.cli.demo_amd import AmdDemo

        result: Demo = AmdDemo(*chosen).run()
    else:
        result = Demo(*chosen).run()
    if json:
        emit(result.document())
    else:
        result.show()
    if not result.ok:
        raise typer.Exit(FINDING)


@dataclass
class Demo:
    """One run of the demo and what it found."""

    target: str
    steps: int
    layers: int
    kv_format: str
    q: int
    tp: int
    page_size: int
    replays: int
    seed: int
    errors: list[float] = field(default_factory=list)  # per step
    times: list[float] = field(default_factory=list)  # host us per step, without a graph
    entry_error: float = 0.0
    strays: int = 0
    unequal: int = 0  # replays that gave other bits
    us_per_step: float | None = None
    compiled: int = 0
    hits: int = 0
    kernels: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)  # first and last step

    @property
    def limit(self) -> float:
        return LIMITS[self.kv_format]

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a graph, compared with the reference; the others are compared with float64."""
        return self.target != REFERENCE

    @property
    def max_rel_error(self) -> float:
        return max(self.errors)

    @property
    def ok(self) -> bool:
        """Every step within the limit, no stray write, every replay bit-equal."""
        return max(self.max_rel_error, self.entry_error) <= self.limit and not self.strays and not self.unequal

    def run(self) -> "Demo":
        import torch

        from k3dsl.preparing import detect_target, prepare
        from k3dsl.scenario import LENGTHS, Stack

        on_gpu = self.target != REFERENCE
        dims = MlaDims.kimi_k3(self.tp)
        rows = len(LENGTHS) * self.q
        plan = Deployment(
            dims,
            target=self.target,
            kv_format=self.kv_format,
            page_size=self.page_size,
            batches=(rows,),
            queries=(self.q,),
        )
        if on_gpu and detect_target() != self.target:
            raise ToolchainError(
                f"target={self.target!r} needs a GPU of that architecture, here is {detect_target() or 'none'}; "
                "`k3dsl demo --target reference` runs anywhere"
            )
        cache = self._warm(plan) if on_gpu else None
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        stack = Stack(
            dims,
            layers=self.layers,
            q=self.q,
            page=self.page_size,
            kv_format=self.kv_format,
            steps=self.steps,
            device=device,
            seed=self.seed,
        )
        self.lengths.append(stack.lengths.tolist())
        prepared = [prepare(plan, layer.weights, cache=cache, device=device) for layer in stack.layers]
        for layer, one in zip(stack.layers, prepared, strict=True):
            one.prepare_cache(layer.cache)
        self._decode(stack, prepared, on_gpu)
        self.lengths.append(stack.lengths.tolist())
        return self

    def _warm(self, plan: Deployment) -> "CompileCache":
        """The user's cache with every key of the plan in it."""
        from k3dsl.cache import CompileCache
        from k3dsl.cli.warmup import run

        cache = CompileCache()
        keys = plan.keys()
        there = {key for key in keys if key in cache}
        report = run([plan], cache, jobs=2)
        self.compiled, self.hits = report.built, report.hit
        if report.failures:
            raise ToolchainError("\n".join(error for _, error in report.failures))
        for key in keys:
            entry = cache.get(key)
            resources = entry.resources if entry is not None else {}
            self.kernels.append(
                {
                    "kernel": key.kernel,
                    "params": dict(key.params),
                    "digest": key.digest,
                    "from": "hit" if key in there else "compiled",
                    "registers": resources.get("registers"),
                    "build_seconds": resources.get("build_seconds"),
                }
            )
        return cache

    def _decode(self, stack: "Stack", prepared: list[Any], on_gpu: bool) -> None:
        from k3dsl.scenario import captured

        graph = None
        for step in range(self.steps):
            if step:
                stack.advance()
            began = time.perf_counter()
            if graph is not None:
                graph.replay()
            else:  # the first step has one row of metadata too few, which run() pads with an empty request
                stack.run(prepared, len(stack.requests) - 1 if step == 0 else None)
                if on_gpu:
                    graph = captured(lambda: stack.run(prepared))
            self.times.append((time.perf_counter() - began) * 1e6)
            self._compare(stack, exact=not on_gpu)
        if not on_gpu:
            self.us_per_step = sorted(self.times)[len(self.times) // 2]
        if self.replays:
            self._replay(stack, graph.replay if graph is not None else lambda: stack.run(prepared))
        if graph is not None:
            self.us_per_step = _time(graph)

    def _compare(self, stack: "Stack", exact: bool) -> None:
        from k3dsl.scenario import relative_error

        pairs = zip(stack.layers, stack.expected(exact), strict=True)
        self.errors.append(max(relative_error(layer.out, expected) for layer, expected in pairs))
        self.entry_error = max(self.entry_error, stack.entry_error())
        self.strays += stack.strays()
        stack.adopt()

    def _replay(self, stack: "Stack", again: Any) -> None:
        from k3dsl.reference import bits

        first = [[bits(t).clone() for t in (layer.out, layer.cache)] for layer in stack.layers]
        for _ in range(self.replays):
            for layer in stack.layers:
                layer.out.fill_(float("nan"))
            again()
            self.unequal += any(
                not bool((bits(t) == kept).all())
                for layer, pair in zip(stack.layers, first, strict=True)
                for t, kept in zip((layer.out, layer.cache), pair, strict=True)
            )

    def document(self) -> dict[str, Any]:
        """For --json."""
        facts = (
            *("target", "steps", "max_rel_error", "compiled", "hits", "us_per_step", "layers", "kv_format", "q", "tp"),
            *("page_size", "limit", "entry_error", "strays", "replays", "errors", "kernels"),
        )
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in facts},
            "target": str(self.target),
            "replays_equal": self.unequal == 0,
            "captured": self.captured and self.steps > 1,
            "lengths": {"first": self.lengths[0], "last": self.lengths[-1]},
        }

    def show(self) -> None:
        """For people."""
        console = out()
        console.print(
            f"Kimi-K3 tp={self.tp}: {self.layers} layers, {self.kv_format} cache, page {self.page_size}, "
            f"q={self.q}, target {self.target}"
        )
        console.print(f"lengths {self.lengths[0]} in the first step, {self.lengths[-1]} in the last")
        if self.kernels:
            kernels = table("Kernels", "kernel", "params", "key", "", "registers", right=("registers",))
            for k in self.kernels:
                params = " ".join(f"{name}={value}" for name, value in sorted(k["params"].items()))
                kernels.add_row(k["kernel"], params, short(k["digest"]), k["from"], str(k["registers"]))
            console.print(kernels)
        steps = table("Steps", "step", "relative error", right=("step", "relative error"))
        for i, error in enumerate(self.errors):
            steps.add_row(str(i), f"{error:.2e}")
        console.print(steps)
        against = "the reference" if self.captured else "float64"
        console.print(f"largest error {self.max_rel_error:.2e} against {against}, limit {self.limit:.0e}")
        console.print(f"entries written: error {self.entry_error:.2e}; bytes changed elsewhere: {self.strays}")
        if self.replays:
            console.print(f"{self.replays - self.unequal} of {self.replays} replays bit-equal")
        console.print(f"{self.compiled} kernels compiled, {self.hits} found in the cache")
        if self.us_per_step is not None:
            how = "by graph replay" if self.captured else "on the host"
            console.print(f"{self.us_per_step:.1f} us per step of {self.layers} layers, {how}")
        if self.ok:
            console.print("ok", style="green")
        else:
            err().print("[red]the demo found a difference[/red]")


def _time(graph: Any) -> float:
    """us of a replay: the median of batches between events."""
    import torch

    found = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_TIMED):
            graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1e3 / _TIMED)
    return sorted(found)[2]
