"""Context-parallel groups under test: D ranks on one device (virtual), or one rank a process. Layers, steps, verdicts.

What runs the layers is a Backend: the kernels (KERNELS), or plain torch on the CPU (tests/parallel_oracle.py), with
which these very checks are run where there is no GPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from k3dsl import reference as ref
from k3dsl.cli.demo import LIMITS
from k3dsl.dims import KV_BYTES, MlaDims
from k3dsl.errors import PeerError
from k3dsl.scenario import relative_error
from k3dsl.scenario_parallel import ParallelCase, ParallelStep, deal, new_slots

#: Ranks against one device, both by kernels: as MERGE_ERROR, and P of more than 24 heads is e4m3 twice (8 bits).
KERNEL_ERROR = 8e-3
#: Layers of a group: parities alternate, so an even number.
LAYERS = 2


class Backend(Protocol):
    """What makes boxes and layers and steps them."""

    device: str

    def virtual(self, case: ParallelCase, timeout: float) -> list[Any]: ...
    def box(self, case: ParallelCase, timeout: float) -> Any: ...
    def layer(self, case: ParallelCase, shard: ref.Shard, box: Any, parity: int = 0, **changes: Any) -> Any: ...
    def alone(self, case: ParallelCase, shard: ref.Shard, cache: Tensor) -> Any: ...
    def step(self, layers: Sequence[Any], calls: Sequence[dict[str, Any]], q: int, stopped: Sequence[int]) -> None: ...
    def captured(self, work: Callable[[], None]) -> Callable[[], None]: ...
    def synchronize(self) -> None: ...


class Kernels:
    """The kernels, on the current CUDA device."""

    device = "cuda"

    def virtual(self, case: ParallelCase, timeout: float) -> list[Any]:
        from k3dsl.nvidia import DcpBox

        return DcpBox.virtual(
            case.dcp,
            heads=case.heads,
            interleave=case.interleave,
            kv_format=case.kv_format,
            device="cuda",
            timeout=timeout,
        )

    def box(self, case: ParallelCase, timeout: float) -> Any:
        from k3dsl.nvidia import DcpBox

        return DcpBox(
            heads=case.heads,
            interleave=case.interleave,
            kv_format=case.kv_format,
            timeout=timeout,
            prepare_timeout=40.0,
        )

    def layer(self, case: ParallelCase, shard: ref.Shard, box: Any, parity: int = 0, **changes: Any) -> Any:
        layer = self._prepared(case, shard, dcp=box, parity=parity, **changes)
        layer.prepare_cache(shard.cache)
        return layer

    def alone(self, case: ParallelCase, shard: ref.Shard, cache: Tensor) -> Any:
        layer = self._prepared(case, shard)
        layer.prepare_cache(cache)
        return layer

    def _prepared(self, case: ParallelCase, shard: ref.Shard, **changes: Any) -> Any:
        from harness import objects

        from k3dsl.nvidia import PreparedMla

        arguments: dict[str, Any] = {
            "max_context": 8192,
            "queries": (case.q,),
            "page_size": case.page,
            "cache": objects(),
            **changes,
        }
        pitches = arguments.pop("pitches", {case.rows: MlaDims(heads=case.heads).pitch})
        scratch = torch.full((64, case.heads, KV_BYTES[case.kv_format]), 0xFF, dtype=torch.uint8, device="cuda")
        return PreparedMla(shard.attention, pitches, scratch, **arguments)

    def step(self, layers: Sequence[Any], calls: Sequence[dict[str, Any]], q: int, stopped: Sequence[int]) -> None:
        from k3dsl.nvidia import virtual_step

        virtual_step(layers, calls, q=q, stopped=tuple(stopped))

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of a process group may ask the driver things meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize()


KERNELS = Kernels()


@dataclass
class Verdict:
    """How a step compares, over all layers and ranks at hand."""

    reference: float = 0.0  # largest relative error of a row against the reference on one device
    kernels: float = 0.0  # the same against the layer without context parallelism
    zeros: bool = True  # rows of empty requests are exact zeros
    entries: bool = True  # the caches have changed at this step's slots alone, to the entries that one device writes

    def require(self, kernel_error: float = KERNEL_ERROR) -> None:
        """Asserts that ranks and one device agree."""
        assert self.zeros, "a row of an empty request is not zero"
        assert self.entries, "an entry differs from what one device writes, or another slot has changed"
        assert self.kernels <= kernel_error, f"against the layer of one device: {self.kernels:.2e} > {kernel_error:.0e}"
        limit = LIMITS["fp8"]
        assert self.reference <= limit, f"against the reference: {self.reference:.2e} > {limit:.0e}"


#: Verdicts of this process, in order.
SEEN: list[Verdict] = []


class Group:
    """Layers of a group: of all its ranks (virtual), or of this process's rank (`rank`)."""

    def __init__(
        self,
        backend: Backend,
        case: ParallelCase,
        *,
        rank: int | None = None,
        timeout: float = 10.0,
        layers: int = LAYERS,
    ) -> None:
        self.backend, self.case, self.rank = backend, case, rank
        self.ranks = tuple(range(case.dcp)) if rank is None else (rank,)
        self.boxes = backend.virtual(case, timeout) if rank is None else [backend.box(case, timeout)]
        self.steps = [deal(case, device=backend.device, seed=i, ranks=self.ranks) for i in range(layers)]
        self.before = [{r: s.shards[r].cache.clone() for r in self.ranks} for s in self.steps]
        self.layers = [
            [backend.layer(case, s.shards[r], b, i % 2) for r, b in zip(self.ranks, self.boxes, strict=True)]
            for i, s in enumerate(self.steps)
        ]
        width = case.heads * 128
        self.outs = [
            {
                r: torch.full((case.rows, width), torch.nan, dtype=torch.bfloat16, device=backend.device)
                for r in self.ranks
            }
            for _ in self.steps
        ]

    def calls(self, layer: int, requests: int | None = None) -> list[dict[str, Any]]:
        """The arguments of each rank's run(), with `requests` rows of metadata."""
        step = self.steps[layer]
        return [
            {
                "projected": step.shards[r].projected,
                "out": self.outs[layer][r],
                "cache": step.shards[r].cache,
                "slots": step.shards[r].slots,
                "block_table": step.shards[r].block_table[:requests],
                "lengths": step.shards[r].lengths[:requests],
                "totals": step.totals[:requests],
            }
            for r in self.ranks
        ]

    def run(self, *, stopped: Sequence[int] = (), requests: int | None = None) -> None:
        """One step of every layer."""
        for i, layers in enumerate(self.layers):
            if self.rank is None:
                self.backend.step(layers, self.calls(i, requests), self.case.q, stopped)
            elif self.rank not in stopped:
                layers[0].run(**self.calls(i, requests)[0], q=self.case.q)

    def poison(self) -> None:
        """NaN in every output."""
        for outs in self.outs:
            for out in outs.values():
                out.fill_(torch.nan)

    def verdict(self) -> Verdict:
        """How the step that has run compares. The caches may have been written more than once, with the same."""
        self.backend.synchronize()
        found = Verdict()
        for i, step in enumerate(self.steps):
            self._judge(found, i, step)
        SEEN.append(found)
        return found

    def _judge(self, found: Verdict, i: int, step: ParallelStep) -> None:
        case, whole = self.case, step.whole
        expected = step.expected()
        empty = (step.totals == 0).repeat_interleave(case.q)
        unseen = ~expected.any(dim=1)  # those, and tokens before a request's first key
        for r in self.ranks:
            shard, out = step.shards[r], self.outs[i][r]
            want = step.block(expected, r)
            single = torch.full_like(out, torch.nan)
            twin = whole.cache.clone()
            alone = self.backend.alone(case, shard, twin)
            alone.run(shard.projected, single, cache=twin, slots=whole.slots, block_table=whole.block_table,
                      lengths=whole.lengths, q=case.q)  # fmt: skip
            self.backend.synchronize()
            found.zeros &= not bool(ref.bits(out[empty]).any()) and bool((out[unseen] == 0).all())
            found.reference = max(found.reference, relative_error(out[~unseen], want[~unseen]))
            found.kernels = max(found.kernels, relative_error(out[~unseen], single[~unseen]))
            mine = shard.slots >= 0
            kept = self.before[i][r].flatten(0, 1).clone()
            kept[shard.slots[mine]] = twin.flatten(0, 1)[whole.slots[mine]]
            found.entries &= torch.equal(ref.bits(kept), ref.bits(shard.cache.flatten(0, 1)))

    def shorten(self, generator: torch.Generator) -> None:
        """Other metadata and rows in the same tensors: every request shorter by q or more, so that all it sees is past.

        Any number of times: what an earlier step wrote is never within a later length.
        """
        case = self.case
        for i, step in enumerate(self.steps):
            now = step.totals.cpu()
            room = (now - case.q + 1).clamp(min=1)
            lower = (torch.rand(len(now), generator=generator) * room).to(torch.int32)
            whole = step.whole
            whole.lengths.copy_(lower)
            whole.slots.copy_(new_slots(whole.lengths, whole.block_table, case.q, case.page))
            rows = torch.randn(*whole.projected.shape, generator=generator).to(whole.projected)
            rows[(whole.lengths == 0).repeat_interleave(case.q)] = torch.nan
            whole.projected.copy_(rows)
            for r in self.ranks:
                shard = step.shards[r]
                shard.projected.copy_(ref.projected_block(whole.projected, step.attention, case.dcp, r))
                shard.lengths.copy_(ref.local_len(whole.lengths, case.dcp, r, case.interleave))
                shard.slots.copy_(
                    new_slots(whole.lengths, shard.block_table, case.q, case.page, case.dcp, r, case.interleave)
                )
                self.before[i][r] = shard.cache.clone()

    def armed(self) -> bool:
        """Whether every mailbox here is as before the first step."""
        self.backend.synchronize()
        return all(box.armed() for box in self.boxes)


def unequal_replays(group: Group, replay: Callable[[], None], count: int) -> int:
    """How many of `count` replays gave other bits than the first, outputs poisoned before each."""
    group.poison()
    replay()
    group.backend.synchronize()
    first = [{r: ref.bits(out).clone() for r, out in outs.items()} for outs in group.outs]
    unequal = torch.zeros((), dtype=torch.int64, device=group.backend.device)
    for _ in range(count):
        group.poison()
        replay()
        differs = torch.zeros((), dtype=torch.bool, device=group.backend.device)
        for outs, kept in zip(group.outs, first, strict=True):
            for r, out in outs.items():
                differs |= (ref.bits(out) != kept[r]).any()
        unequal += differs
    group.backend.synchronize()
    return int(unequal)


@dataclass
class Ending:
    """How a rank's wait for a peer ended."""

    seconds: float
    error: PeerError | None
    again: PeerError | None  # what another run() raised

    @classmethod
    def of(cls, group: Group, box: Any, work: Callable[[], None], again: Callable[[], None]) -> "Ending":
        """`work` queued and waited for; then what check() and another run say. `work` itself may notice the error."""
        began = time.monotonic()
        caught(work)
        group.backend.synchronize()
        seconds = time.monotonic() - began
        return cls(seconds, caught(box.check), caught(again))


def caught(call: Callable[[], None]) -> PeerError | None:
    """The PeerError that `call` raises, if it raises one."""
    try:
        call()
    except PeerError as error:
        return error
    return None
