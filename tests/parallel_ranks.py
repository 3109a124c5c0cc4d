"""What the process of a rank does in the tests of context parallelism: called by name, answers with plain data."""

import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from parallel_runs import KERNELS, Backend, Ending, Group, Verdict, unequal_replays

from k3dsl.errors import ConfigError
from k3dsl.scenario_parallel import ParallelCase, deal


def backend_of(name: str) -> Backend:
    """The kernels, or for a trial without a GPU the oracle."""
    if name == "kernels":
        return KERNELS
    from parallel_oracle import Oracle

    return Oracle()


@dataclass
class Compared:
    """What a rank found of a case."""

    verdict: Verdict  # eagerly, and replayed with other lengths
    unequal: int  # replays with other bits than the first
    armed: bool  # its mailboxes after all of it


def compare(me: Any, case: ParallelCase, backend: str = "kernels", replays: int = 0) -> Compared:
    """The case on this rank: eagerly, as a graph, as a graph with other lengths; then `replays` of the last."""
    group = Group(backend_of(backend), case, rank=me.rank)
    group.run()
    eager = group.verdict()
    replay = group.backend.captured(group.run)
    group.poison()
    replay()
    captured = group.verdict()
    group.shorten(torch.Generator().manual_seed(case.q))
    group.poison()
    replay()
    moved = group.verdict()
    unequal = unequal_replays(group, replay, replays) if replays else 0
    for box in group.boxes:
        box.check()
    worst = Verdict(
        reference=max(v.reference for v in (eager, captured, moved)),
        kernels=max(v.kernels for v in (eager, captured, moved)),
        zeros=all(v.zeros for v in (eager, captured, moved)),
        entries=all(v.entries for v in (eager, captured, moved)),
    )
    return Compared(worst, unequal, group.armed())


@dataclass
class Stopped:
    """How the ranks ended when one of them did nothing."""

    ending: Ending | None  # of a rank that waited
    replayed: Ending | None  # the same with the step in a graph, after a reset
    after: Verdict  # of a step after another reset


def stop(me: Any, case: ParallelCase, stopped: int, bound: float, backend: str = "kernels") -> Stopped:
    """Rank `stopped` launches nothing while the others run, eagerly and replayed; then all go on."""
    group = Group(backend_of(backend), case, rank=me.rank, timeout=bound)
    [box] = group.boxes
    group.run()
    replay = group.backend.captured(group.run)
    group.backend.synchronize()
    endings: list[Ending | None] = []
    for work in (group.run, replay):
        waits = me.rank != stopped
        endings.append(Ending.of(group, box, work, group.run) if waits else None)
        box.reset()
    group.poison()
    group.run()
    after = group.verdict()
    replay()
    group.backend.synchronize()
    box.check()
    return Stopped(*endings, after)


def publish_only(me: Any, case: ParallelCase, silent: int, bound: float) -> Ending | None:
    """Rank `silent` publishes its queries and goes no further; how the step ends for the others, and that all go on."""
    group = Group(KERNELS, case, rank=me.rank, timeout=bound)
    [box] = group.boxes
    group.run()
    group.verdict().require()
    ending = None
    if me.rank == silent:
        layer = group.layers[0][0]
        step, _ = layer.bound(**group.calls(0)[0], q=case.q)
        step.query.launch(torch.cuda.current_stream().cuda_stream)
    else:
        layer = group.layers[0][0]
        ending = Ending.of(group, box, lambda: layer.run(**group.calls(0)[0], q=case.q), group.run)
    box.reset()
    group.run()
    group.verdict().require()
    return ending


def die(me: Any, case: ParallelCase, dead: int, bound: float) -> Ending | None:
    """Rank `dead` is killed after a few steps; the others wait for it in the next."""
    group = Group(KERNELS, case, rank=me.rank, timeout=bound)
    for _ in range(4):
        group.run()
    group.backend.synchronize()
    torch.distributed.barrier()
    if me.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    return Ending.of(group, group.boxes[0], group.run, group.run)


def disagree(me: Any, case: ParallelCase, changes: list[dict[str, Any]]) -> str:
    """A layer is prepared with changes[rank]; the text of the ConfigError, or nothing."""
    box = KERNELS.box(case, 5.0)
    shard = deal(case, device="cuda", ranks=(me.rank,)).shards[me.rank]
    try:
        KERNELS.layer(case, shard, box, **changes[me.rank])
    except ConfigError as error:
        return str(error)
    return ""


def disagree_boxes(me: Any, case: ParallelCase, changes: list[dict[str, Any]]) -> str:
    """A box is made with changes[rank]; the text of the ConfigError, or nothing."""
    from k3dsl.nvidia import DcpBox

    arguments = {"heads": case.heads, "interleave": case.interleave, "prepare_timeout": 40.0, **changes[me.rank]}
    try:
        DcpBox(**arguments)
    except ConfigError as error:
        return str(error)
    return ""
