"""One rank of the bench of context parallelism: layers of its own, the two ways to run them, and their times.

`ours` is `PreparedMla(dcp=box).run()`. `nccl` is the same layer put together from the same kernels and collectives, the
way engines do it: query kernel, all-gather of the queries, the same core over the rank's shard, all-gather of the LSE,
the partials weighted in torch, reduce-scatter, value kernel; all of it captured in a graph as well.

With `dry` everything but the kernels is done, on the CPU and over gloo: the reference stands for the kernels.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from k3dsl import MlaDims, MlaWeights
from k3dsl import reference as ref
from k3dsl.cli.bench import question
from k3dsl.scenario import relative_error
from k3dsl.scenario_parallel import new_slots

harness = question("harness")
PAGE: Final = 64
LN2: Final = math.log(2.0)
#: Calls of one graph, at least: the ranks' start is then a small part of what is timed.
CALLS: Final = 24
#: Cycles that a device idles before a timed graph, so that all of it is queued when it begins (about 1 ms).
IDLE: Final = 2_000_000
MAX_CONTEXT: Final = 131072
TARGET: Final = "sm_90a"
#: (rows, q) of the checks against one device.
CHECKED: Final = ((8, 1), (32, 4))


@dataclass(frozen=True)
class Shape:
    """What is measured: B rows of q tokens a request, `context` tokens a request on all ranks together."""

    rows: int
    q: int
    context: int
    dcp: int
    heads: int = 12
    interleave: int = 1
    dry: bool = False
    repeats: int = 7

    @property
    def requests(self) -> int:
        """R."""
        return self.rows // self.q

    @property
    def local(self) -> int:
        """Tokens of a request on the first rank, which has the most."""
        return int(ref.local_len(torch.tensor(self.context), self.dcp, 0, self.interleave))

    @property
    def bytes(self) -> int:
        """What a layer reads of its rank: weights and keys."""
        dims = MlaDims(heads=self.heads)
        return 2 * dims.heads * (dims.qk * dims.q_lora + 256 * dims.kv_lora) + self.requests * self.local * dims.latent

    @property
    def layers(self) -> int:
        """How many layers the graph rotates over, so that one finds nothing in L2: even, as parities alternate."""
        return 2 if self.dry else (harness.rotation(self.bytes) + 1) // 2 * 2


def kernel_keys(shapes: Sequence[Shape]) -> list[Any]:
    """The kernels that checks and measurements of these shapes load, each once."""
    from k3dsl.nvidia.layer import shape_keys

    first = shapes[0]
    facts = {"target": TARGET, "heads": first.heads, "kv_format": "fp8", "page": PAGE, "core": "hopper"}
    found = []
    for rows, q in dict.fromkeys([*CHECKED, *((s.rows, s.q) for s in shapes)]):
        found += shape_keys(**facts, rows=rows, q=q, max_context=MAX_CONTEXT, dcp=first.dcp).all()
        alone = shape_keys(**facts, rows=rows, q=q, max_context=MAX_CONTEXT)
        found += [alone.query, alone.value]  # of the layer with collectives
    return list(dict.fromkeys(found))


class Layer:
    """A layer's weights, cache and step on rank `rank`. What the ranks share is drawn from the same seed."""

    def __init__(self, shape: Shape, rank: int, index: int, device: str) -> None:
        self.shape, self.rank, self.device = shape, rank, device
        dims = MlaDims(heads=shape.heads)
        self.weights = _weights(shape.heads, index * 64 + rank, device)
        generator = torch.Generator(device=device).manual_seed(index)
        width = -(-shape.context // (PAGE * shape.dcp))
        pages = shape.requests * width + 1
        pool = torch.randn(1 << 20, generator=generator, device=device)
        self.cache = _filled(pool.to(torch.float8_e4m3fn).view(torch.uint8), (pages, PAGE, dims.latent))
        order = torch.randperm(pages - 1, generator=generator, device=device) + 1
        self.table = order.view(shape.requests, width).to(torch.int32)
        self.totals = torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device)
        self.lengths = ref.local_len(self.totals, shape.dcp, rank, shape.interleave).to(torch.int32)
        self.slots = new_slots(self.totals, self.table, shape.q, PAGE, shape.dcp, rank, shape.interleave)
        common = torch.randn(shape.rows, dims.projected, generator=generator, device=device)
        own = torch.Generator(device=device).manual_seed(1000 + index * 64 + rank)
        gate = torch.randn(shape.rows, dims.heads * dims.v, generator=own, device=device)
        self.projected = torch.cat([common, gate], dim=1).to(torch.bfloat16)
        self.out, self.nccl_out = (
            torch.full((shape.rows, dims.heads * dims.v), torch.nan, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )

    def call(self, out: Tensor) -> dict[str, Any]:
        """The arguments of run()."""
        return {
            "projected": self.projected,
            "out": out,
            "cache": self.cache,
            "slots": self.slots,
            "block_table": self.table,
            "lengths": self.lengths,
            "totals": self.totals,
        }

    @property
    def shard(self) -> ref.Shard:
        """For the reference."""
        return ref.Shard(self.projected, self.weights, self.cache, self.slots, self.table, self.lengths)


_held: dict[tuple[int, int, str], MlaWeights] = {}


def _weights(heads: int, seed: int, device: str) -> MlaWeights:
    """Weights by seed, made once a process: shapes share them."""
    if (heads, seed, device) not in _held:
        dims = MlaDims(heads=heads)
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * std + mean).to(torch.bfloat16)

        _held[heads, seed, device] = MlaWeights.from_kv_b(
            dims,
            q_b=normal(heads * dims.qk, dims.q_lora, std=dims.q_lora**-0.5),
            kv_b=normal(heads * (dims.nope + dims.v), dims.kv_lora, std=dims.kv_lora**-0.5),
            q_a_norm=torch.ones(dims.q_lora, dtype=torch.bfloat16, device=device),
            kv_a_norm=torch.ones(dims.kv_lora, dtype=torch.bfloat16, device=device),
        )
    return _held[heads, seed, device]


def _filled(pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bytes of `shape`, the pool over and over: a cache of gigabytes is not drawn anew for each layer."""
    size = math.prod(shape)
    flat = torch.empty(-(-size // len(pool)) * len(pool), dtype=torch.uint8, device=pool.device)
    flat.view(-1, len(pool)).copy_(pool.expand(len(flat) // len(pool), -1))
    return flat[:size].view(shape)


# ---- the two ways


class Nccl:
    """A layer with collectives. `query`, `core`, `value`: the kernels, or what stands for them."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        *,
        query: Callable[[], Tensor],  # uint8 [B, H, 576]
        gathered: Tensor,  # uint8 [B, D * H, 576]: what the core reads
        core: Callable[[], None],
        partial: Tensor,  # bf16 [B, D * H, 512]: what the core writes
        lse: Tensor,  # float32 [B, D * H]
        latent: Tensor,  # bf16 [B, H, 512]: what the value kernel reads
        value: Callable[[], None],
    ) -> None:
        self.query, self.core, self.value = query, core, value
        self._rank, self._shape = rank, (shape.rows, shape.dcp, shape.heads)
        self._gathered, self._partial, self._lse, self._latent = gathered, partial, lse, latent
        device = partial.device
        b, d, h = self._shape
        self._queries = torch.empty(d * b, h, 576, dtype=torch.uint8, device=device)  # rank, row
        self._every_lse = torch.empty(d * b, d * h, dtype=torch.float32, device=device)
        self._send = torch.empty(d * b, h, 512, dtype=torch.bfloat16, device=device)

    def publish(self) -> None:
        """Queries of all ranks, where the core reads them."""
        b, d, h = self._shape
        dist.all_gather_into_tensor(self._queries, self.query())
        self._gathered.view(b, d, h, 576).copy_(self._queries.view(d, b, h, 576).transpose(0, 1))

    def merge(self) -> None:
        """Partials to the rank of their head, weighted by their LSE among all ranks; up-projection and gate."""
        b, d, h = self._shape
        dist.all_gather_into_tensor(self._every_lse, self._lse)
        weight = torch.softmax(self._every_lse.view(d, b, d, h, 1) * LN2, dim=0)[self._rank].transpose(0, 1)
        torch.mul(self._partial.view(b, d, h, 512).transpose(0, 1), weight, out=self._send.view(d, b, h, 512))
        dist.reduce_scatter_tensor(self._latent, self._send)
        self.value()

    def run(self) -> None:
        """The layer."""
        self.publish()
        self.core()
        self.merge()


@dataclass
class Way:
    """A layer's launches: all of it, and its three parts for the breakdown."""

    run: Callable[[], None]
    publish: Callable[[], None]
    core: Callable[[], None]
    merge: Callable[[], None]


def dry_ways(layers: Sequence[Layer]) -> tuple[list[Way], list[Way]]:
    """(ours, nccl) with the reference in place of the kernels."""
    ours, theirs = [], []
    for layer in layers:
        shape, rank, shard = layer.shape, layer.rank, layer.shard
        every = shape.dcp * shape.heads
        gathered = torch.zeros(shape.rows, every, 576, dtype=torch.uint8)
        partial = torch.zeros(shape.rows, every, 512, dtype=torch.bfloat16)
        lse = torch.zeros(shape.rows, every)
        latent = torch.zeros(shape.rows, shape.heads, 512, dtype=torch.bfloat16)

        def query(shard: ref.Shard = shard) -> Tensor:
            ref.insert(shard.projected, shard.attention, shard.cache, shard.slots)
            return ref.query(shard.projected, shard.attention).view(torch.uint8)

        def core(
            shape: Shape = shape, shard: ref.Shard = shard, q: Tensor = gathered, o: Tensor = partial, w: Tensor = lse,
            rank: int = rank, totals: Tensor = layer.totals,
        ) -> None:  # fmt: skip
            whole = q.view(torch.float8_e4m3fn)
            found = ref.partial_of(whole, shard, rank, shape.dcp, totals, shape.q, shape.interleave)
            o.copy_(found[0])
            w.copy_(found[1])

        def value(layer: Layer = layer, latent: Tensor = latent) -> None:
            gate = ref.gate_of(layer.projected, layer.weights)
            layer.nccl_out.copy_(ref.value(latent, layer.weights.W_UV, gate, layer.totals, layer.shape.q))

        made = Nccl(shape, rank, query=query, gathered=gathered, core=core, partial=partial, lse=lse, latent=latent,
                    value=value)  # fmt: skip
        theirs.append(Way(made.run, made.publish, made.core, made.merge))

        def run(layer: Layer = layer, query: Any = query) -> None:
            d, shape = layer.shape.dcp, layer.shape
            whole = ref.gathered(everyone(query(), d)).view(torch.float8_e4m3fn)
            mine = ref.partial_of(whole, layer.shard, layer.rank, d, layer.totals, shape.q, shape.interleave)
            sent = list(zip(everyone(mine[0], d), everyone(mine[1], d), strict=True))
            box = ref.partial_mailbox(sent, layer.rank, shape.rows)
            layer.out.copy_(ref.received(*box, layer.shard, layer.totals, shape.q))

        ours.append(Way(run, made.publish, core, made.merge))
    return ours, theirs


def everyone(tensor: Tensor, count: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(found, tensor.contiguous())
    return found


def kernel_ways(layers: Sequence[Layer], box: Any, objects: Any) -> tuple[list[Way], list[Way]]:
    """(ours, nccl) with the kernels. The box's mailbox of queries serves the collectives as well: arm it afterwards."""
    from k3dsl.nvidia import PreparedMla
    from k3dsl.nvidia.runtime import runtime_of
    from k3dsl.nvidia.stages import MlaQuery, MlaValue

    runtime = runtime_of(torch.device(layers[0].device))
    ours, theirs = [], []
    for index, layer in enumerate(layers):
        shape, parity = layer.shape, index % 2
        pitch = layer.projected.stride(0)
        scratch = runtime.query_scratch(shape.heads, 1)
        prepared = PreparedMla(
            layer.weights, {shape.rows: pitch}, scratch, max_context=MAX_CONTEXT, queries=(shape.q,), dcp=box,
            parity=parity, page_size=PAGE, cache=objects,
        )  # fmt: skip
        prepared.prepare_cache(layer.cache)
        call = layer.call(layer.out)
        prepared.run(**call, q=shape.q)
        step = prepared._steps[shape.rows, shape.q]

        def load(key: Any) -> Any:
            return runtime.function(key, objects)

        latent = torch.empty(shape.rows, shape.heads, 512, dtype=torch.bfloat16, device=layer.device)
        query = MlaQuery(load, layer.weights, cache=layer.cache, scratch=scratch, projected=layer.projected,
                         slots=layer.slots, kv_format="fp8")  # fmt: skip
        value = MlaValue(load, layer.weights, latent=latent, projected=layer.projected, lengths=layer.totals,
                         out=layer.nccl_out, q=shape.q)  # fmt: skip

        def queried(query: Any = query, scratch: Tensor = scratch, rows: int = shape.rows) -> Tensor:
            query.launch(runtime.stream())
            return scratch[:rows]

        def core(step: Any = step) -> None:
            step.core.launch(runtime.stream())

        made = Nccl(
            shape,
            layer.rank,
            query=queried,
            gathered=box.q[parity, : shape.rows],
            core=core,
            partial=box.rows[: shape.rows, 0],
            lse=box.rows_lse[: shape.rows, 0],
            latent=latent,
            value=lambda value=value: value.launch(runtime.stream()),
        )
        theirs.append(Way(made.run, made.publish, made.core, made.merge))
        mailbox = box.q[parity, : shape.rows]

        def publish(step: Any = step, mailbox: Tensor = mailbox) -> None:
            step.query.launch(runtime.stream())
            mailbox.fill_(0xFF)

        ours.append(
            Way(
                lambda prepared=prepared, call=call, q=shape.q: prepared.run(**call, q=q),
                publish,
                core,
                lambda step=step: step.value.launch(runtime.stream()),
            )
        )
    return ours, theirs


# ---- times


def group_us(calls: Sequence[Callable[[], None]], shape: Shape) -> float:
    """us of a call: the median of replays of a graph of all calls, every rank starting together."""
    rounds = max(1, CALLS // len(calls))
    quiet(shape.dry)
    if shape.dry:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) * 1e6 / len(calls)
    for call in calls:
        call()
    quiet(shape.dry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    together = torch.zeros(1, device="cuda")
    times = []
    for _ in range(shape.repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(IDLE)
        dist.all_reduce(together)  # ends on all ranks at once
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[2:]) / (len(calls) * rounds)


def quiet(dry: bool = False) -> None:
    """Until nothing is under way on any rank."""
    if not dry:
        torch.cuda.synchronize()
    dist.barrier()
    if not dry:
        torch.cuda.synchronize()


def measure(me: Any, shape: Shape, timeout: float) -> dict[str, Any]:
    """Both ways of a shape on this rank: us of a layer and of its parts, and how far their results differ."""
    box = None
    if not shape.dry:
        from k3dsl.nvidia import DcpBox

        box = DcpBox(heads=shape.heads, interleave=shape.interleave, timeout=timeout)
    device = "cpu" if shape.dry else f"cuda:{me.rank}"
    layers = [Layer(shape, me.rank, index, device) for index in range(shape.layers)]
    ours, theirs = dry_ways(layers) if shape.dry else kernel_ways(layers, box, store())
    times: dict[str, float] = {"us": group_us([way.run for way in ours], shape)}
    results = [layer.out.clone() for layer in layers]  # parts that are timed alone leave others
    quiet(shape.dry)
    armed = True if box is None else box.armed()
    if box is not None:
        box.check()
    times["merge_us"] = group_us([way.merge for way in ours], shape)
    if box is not None:  # what arms the mailbox again in the loop of publishes alone
        fills = [lambda m=box.q[i % 2, : shape.rows]: m.fill_(0xFF) for i in range(len(layers))]
        times["publish_us"] = group_us([way.publish for way in ours], shape) - group_us(fills, shape)
        box.check()
    try:
        times["nccl_us"] = group_us([way.run for way in theirs], shape)
        apart = [relative_error(out, layer.nccl_out) for out, layer in zip(results, layers, strict=True)]
        times |= _nccl_parts(theirs, shape)
    except RuntimeError as error:  # ours is measured all the same; the box is not used again
        return {**times, "armed": armed, "nccl_error": f"{type(error).__name__}: {error}"}
    if box is not None:
        quiet()
        box.reset()
    del layers, ours, theirs
    if not shape.dry:
        torch.cuda.empty_cache()
    return {**times, "error_against_nccl": max(apart), "armed": armed}


def _nccl_parts(ways: Sequence[Way], shape: Shape) -> dict[str, float]:
    return {
        "core_us": group_us([way.core for way in ways], shape),
        "nccl_publish_us": group_us([way.publish for way in ways], shape),
        "nccl_merge_us": group_us([way.merge for way in ways], shape),
    }


def store() -> Any:
    from k3dsl import CompileCache

    return CompileCache()
