"""What the bench of context parallelism checks on one rank: the kernels against one device, and a peer that dies."""

import contextlib
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3dsl import PeerError
from k3dsl import reference as ref
from k3dsl.cli.bench import question
from k3dsl.scenario import relative_error
from k3dsl.scenario_parallel import INTERLEAVES, ParallelCase, deal

work = question("dcp_rank")


def check(me: Any, dcp: int, heads: int, dry: bool, timeout: float) -> list[dict[str, Any]]:
    """This rank against one device (the reference) for short, odd and long requests, padding, ranks without a key."""
    found = []
    for interleave in INTERLEAVES:
        for q in (1, 4):
            totals = (1, 3, 17, 0) if dry else ()
            case = ParallelCase(dcp, interleave, q, heads=heads, totals=totals)
            found.append(_check(me, case, dry, timeout))
    return found


def _check(me: Any, case: ParallelCase, dry: bool, timeout: float) -> dict[str, Any]:
    device = "cpu" if dry else f"cuda:{me.rank}"
    steps = [deal(case, device=device, seed=seed, ranks=(me.rank,)) for seed in range(2)]
    box: Any = None
    if not dry:
        from k3dsl.nvidia import DcpBox

        box = DcpBox(heads=case.heads, interleave=case.interleave, timeout=timeout)
    errors, zeros = [], True
    for parity, step in enumerate(steps):
        shard = step.shards[me.rank]
        out = torch.full((case.rows, case.heads * 128), torch.nan, dtype=torch.bfloat16, device=device)
        if dry:
            queries = work.everyone(_published(shard), case.dcp)
            whole = ref.gathered(queries).view(torch.float8_e4m3fn)
            mine = ref.partial_of(whole, shard, me.rank, case.dcp, step.totals, case.q, case.interleave)
            sent = list(zip(work.everyone(mine[0], case.dcp), work.everyone(mine[1], case.dcp), strict=True))
            out.copy_(ref.received(*ref.partial_mailbox(sent, me.rank, case.rows), shard, step.totals, case.q))
        else:
            _kernel_step(case, shard, step.totals, box, parity, out)
        want = step.block(step.expected(), me.rank)
        live = want.any(dim=1)
        errors.append(relative_error(out[live], want[live]))
        zeros &= bool((out[~live] == 0).all())
    work.quiet(dry)
    armed = box is None or box.armed()
    if box is not None:
        box.check()
    work.quiet(dry)
    return {"case": case.id, "error": max(errors), "zeros": zeros, "armed": armed}


def _published(shard: ref.Shard) -> Tensor:
    ref.insert(shard.projected, shard.attention, shard.cache, shard.slots)
    return ref.query(shard.projected, shard.attention).view(torch.uint8)


def _kernel_step(case: ParallelCase, shard: ref.Shard, totals: Tensor, box: Any, parity: int, out: Tensor) -> None:
    from k3dsl.nvidia import PreparedMla

    scratch = torch.zeros(64, case.heads, 576, dtype=torch.uint8, device=out.device)
    pitch = shard.projected.stride(0)
    layer = PreparedMla(shard.attention, {case.rows: pitch}, scratch, max_context=work.MAX_CONTEXT, queries=(case.q,),
                        dcp=box, parity=parity, page_size=case.page, cache=work.store())  # fmt: skip
    layer.prepare_cache(shard.cache)
    layer.run(shard.projected, out, cache=shard.cache, slots=shard.slots, block_table=shard.block_table,
              lengths=shard.lengths, totals=totals, q=case.q)  # fmt: skip
    torch.cuda.synchronize()


def lose(me: Any, shape: Any, dead: int, bound: float) -> dict[str, Any]:
    """Rank `dead` is killed after two steps; what the others are told in the next, and after how long."""
    if shape.dry:
        if me.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seconds": 0.0, "peer": dead, "region": "q", "text": "dry"}
    from k3dsl.nvidia import DcpBox

    box = DcpBox(heads=shape.heads, interleave=shape.interleave, timeout=bound)
    layers = [work.Layer(shape, me.rank, index, f"cuda:{me.rank}") for index in range(2)]
    ours, _ = work.kernel_ways(layers, box, work.store())
    for way in ours:
        way.run()
    torch.cuda.synchronize()
    dist.barrier()
    if me.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    for way in ours:
        with contextlib.suppress(PeerError):
            way.run()
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    try:
        box.check()
    except PeerError as error:
        return {"seconds": seconds, "peer": error.peer, "region": error.region, "text": str(error)}
    return {"seconds": seconds, "peer": None, "region": None, "text": "no error"}
