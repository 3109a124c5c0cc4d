"""Context-parallel groups in plain torch, behind the interface of the kernels' boxes and layers.

With it the checks of tests/parallel_runs.py are run where there is no GPU: they pass, and each planted fault is found.
Virtual ranks step together; of real ranks (a gloo group) each does its part and gathers the others'.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from parallel_runs import Backend
from torch import Tensor

from k3dsl import reference as ref
from k3dsl.errors import PeerError
from k3dsl.scenario_parallel import ParallelCase


class Box:
    """The mailboxes' bookkeeping of a rank: nothing is ever left in them."""

    def __init__(self, case: ParallelCase, rank: int, timeout: float) -> None:
        self.case, self.rank, self.timeout = case, rank, timeout
        self.error: PeerError | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def armed(self) -> bool:
        return self.error is None

    def reset(self) -> None:
        self.error = None

    def lost(self, peer: int) -> None:
        if self.error is None:
            self.error = PeerError(f"rank {self.rank} waited {self.timeout:g} s for rank {peer}: region q")
            self.error.rank, self.error.peer, self.error.region = self.rank, peer, "q"


class Layer:
    """A layer of one rank: run() where ranks are processes."""

    def __init__(self, case: ParallelCase, shard: ref.Shard, box: Box) -> None:
        self.case, self.attention, self.box = case, shard.attention, box

    def shard(self, call: dict[str, Any]) -> ref.Shard:
        names = ("cache", "slots", "block_table", "lengths")
        return ref.Shard(call["projected"], self.attention, *(call[n] for n in names))

    def run(self, projected: Tensor, out: Tensor, *, totals: Tensor, q: int = 1, **rest: Tensor) -> None:
        self.box.check()
        case, shard = self.case, self.shard({"projected": projected, **rest})
        ref.insert(shard.projected, shard.attention, shard.cache, shard.slots)
        queries = _gather(ref.query(shard.projected, shard.attention).view(torch.uint8), case.dcp)
        whole = ref.gathered(queries).view(torch.float8_e4m3fn)
        mine = ref.partial_of(whole, shard, self.box.rank, case.dcp, totals, q, case.interleave)
        sent = list(zip(_gather(mine[0], case.dcp), _gather(mine[1], case.dcp), strict=True))
        out.copy_(ref.received(*ref.partial_mailbox(sent, self.box.rank, case.rows), shard, totals, q))


def _gather(tensor: Tensor, count: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(found, tensor.contiguous())
    return found


class Alone:
    """A layer without context parallelism."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def run(self, projected: Tensor, out: Tensor, *, cache: Tensor, q: int = 1, **rest: Tensor) -> None:
        kv_format = "bf16" if cache.dtype == torch.bfloat16 else "fp8"
        ref.decode_layer(projected, self.attention, cache, q=q, kv_format=kv_format, out=out, **rest)


class Oracle(Backend):
    """`fault(outs, layer)`, if given, spoils what a step of virtual ranks gave."""

    device = "cpu"

    def __init__(self, fault: Callable[[Sequence[dict[str, Any]]], None] | None = None) -> None:
        self.fault = fault

    def virtual(self, case: ParallelCase, timeout: float) -> list[Box]:
        return [Box(case, rank, timeout) for rank in range(case.dcp)]

    def box(self, case: ParallelCase, timeout: float) -> Box:
        return Box(case, dist.get_rank(), timeout)

    def layer(self, case: ParallelCase, shard: ref.Shard, box: Box, parity: int, **changes: Any) -> Layer:
        return Layer(case, shard, box)

    def alone(self, case: ParallelCase, shard: ref.Shard, cache: Tensor) -> Alone:
        return Alone(shard.attention)

    def step(self, layers: Sequence[Layer], calls: Sequence[dict[str, Any]], q: int, stopped: Sequence[int]) -> None:
        for layer in layers:
            layer.box.check()
        if stopped:
            for rank, layer in enumerate(layers):
                if rank not in stopped:
                    layer.box.lost(stopped[0])
            return
        case = layers[0].case
        shards = [layer.shard(call) for layer, call in zip(layers, calls, strict=True)]
        outs = ref.parallel_layer(shards, calls[0]["totals"], q, case.interleave, case.kv_format)
        for call, out in zip(calls, outs, strict=True):
            call["out"].copy_(out)
        if self.fault is not None:
            self.fault(calls)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def synchronize(self) -> None:
        pass
