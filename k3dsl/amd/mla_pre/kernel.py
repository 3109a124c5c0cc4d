"""The kernel that walks the stages, and its launcher.

Every workgroup walks the same order, and each stage polls only what earlier ones put; with all 256 workgroups resident
that is why nothing can wait in a circle. See docs/mla_pre.md.
"""

# mypy: ignore-errors

from types import SimpleNamespace
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from k3dsl.amd import primitives as p
from k3dsl.amd.mla_pre.gate import gate_stage
from k3dsl.amd.mla_pre.gemv import LATE_FIRST, gemv_stage
from k3dsl.amd.mla_pre.handoff import CLAIM, Step
from k3dsl.amd.mla_pre.key import GRID, PARAMS, POINTS, THREADS, MlaPreBuild
from k3dsl.amd.mla_pre.layout import A_TASKS, G_TASKS, GEMV_FIRST, QB_FIRST, QB_TASKS, SLICES, UK_FIRST, Event
from k3dsl.amd.mla_pre.mix import mix_stage
from k3dsl.amd.mla_pre.norm import norm_stage
from k3dsl.amd.mla_pre.q_b import q_b_stage
from k3dsl.amd.mla_pre.slice import slice_stage
from k3dsl.amd.mla_pre.unpack import unpack_stage
from k3dsl.amd.mla_pre.w_uk import w_uk_stage


def walk(s: Step) -> None:
    """The program of a workgroup."""
    key, block = s.key, s.block
    _start(s)
    with p.when(block < SLICES):
        _stage(s, "slice", 1, slice_stage)
        with p.when(block < key.tokens):
            _stage(s, "gate", 2, gate_stage)
        _stage(s, "mix", 3, mix_stage)
    with p.when(block >= LATE_FIRST):
        late = A_TASKS + G_TASKS - SLICES
        task = p.choose(block < SLICES, block + late, block - GEMV_FIRST)
        _stage(s, "gemv", 4, lambda s: gemv_stage(s, task))
    with p.when(block < key.tokens):
        _stage(s, "norm", 6, norm_stage)
    with p.when((block >= QB_FIRST) & (block < QB_FIRST + QB_TASKS)):
        _stage(s, "q_b", 7, q_b_stage)
    with p.when(block >= UK_FIRST):
        _stage(s, "w_uk", 8, w_uk_stage)
    if key.ranks > 1:
        _stage(s, "unpack", 9, unpack_stage)
    if key.timeline:
        p.barrier()
        with p.when(s.thread < POINTS):
            stamp = s.memory.load(s.thread * 8 + s.lds.stamps, 2)
            p.store(p.resource(s.args.tl), (s.block * POINTS + s.thread) * 8, stamp)


def _stage(s: Step, name: str, point: int, body: Any) -> None:
    s.stage = name
    body(s)
    _stamp(s, point)


def _stamp(s: Step, point: int) -> None:
    """Timeline: thread 0's clock into LDS, where no later wait for the memory has to wait for it."""
    if s.key.timeline:
        with p.when(s.thread == 0):
            s.memory.store_long(s.lds.stamps + 8 * point, p.clock())


def _start(s: Step) -> None:
    """Clears what must start at zero, and runs the fault hook."""
    if s.key.timeline:
        with p.when(s.thread < POINTS):
            s.memory.store(s.thread * 8 + s.lds.stamps, [fx.Int32(0), fx.Int32(0)])
    with p.when(s.thread == 0):
        s.memory.store(fx.Int32(s.lds.head + 4 * CLAIM), [fx.Int32(0)])
    p.barrier()
    _stamp(s, 0)
    key = s.key
    if key.fault_rank >= 0:
        s.read_epoch()
        hit = (s.block == 0) & (s.args.rank == key.fault_rank)
        hit = hit & (s.epoch == key.fault_epoch) & (s.args.layer == key.fault_slot)
        with p.when(hit):
            began = p.clock()

            def asleep(held: list[Any]) -> Any:
                return (fx.Int64(held[0]) - began) < key.fault_ticks

            def sleep(held: list[Any]) -> list[Any]:
                p.sleep(127)
                return [p.clock()]

            p.repeat([began], asleep, sleep)


def launcher(key: MlaPreBuild) -> tuple[Any, list[Event]]:
    """A FlyDSL launcher for `key`, and the list that holds the hand-off events once it has been traced."""
    events: list[Event] = []

    @flyc.kernel(name=key.symbol, known_block_size=[THREADS, 1, 1])
    def kernel(
        prefix: fx.Pointer,
        delta: fx.Pointer,
        blocks: fx.Pointer,
        blocks_token_stride: fx.Int32,
        blocks_block_stride: fx.Int32,
        ares_nw: fx.Pointer,
        ares_qk: fx.Pointer,
        in_nw: fx.Pointer,
        w_qkv: fx.Pointer,
        w_g: fx.Pointer,
        q_nw: fx.Pointer,
        kv_nw: fx.Pointer,
        w_qb: fx.Pointer,
        w_k: fx.Pointer,
        w_k_stride0: fx.Int32,
        w_k_stride1: fx.Int32,
        w_k_scale: fx.Pointer,
        w_k_scale_stride0: fx.Int32,
        w_k_scale_stride1: fx.Int32,
        w_k_scale_stride2: fx.Int32,
        kv_cache: fx.Pointer,
        kv_block_stride: fx.Int32,
        kv_slot_stride: fx.Int32,
        block_size: fx.Int32,
        slots: fx.Pointer,
        gate_out: fx.Pointer,
        q_out: fx.Pointer,
        scratch: fx.Pointer,
        peers: fx.Pointer,
        rank: fx.Int32,
        layer: fx.Int32,
        epoch: fx.Pointer,
        health: fx.Pointer,
        alarm: fx.Pointer,
        tl: fx.Pointer,
    ):
        values = locals()
        given = {name: p.address(values[name]) if kind == "ptr" else values[name] for name, kind in PARAMS}
        walk(Step(key, SimpleNamespace(**given), events))

    @flyc.jit
    def launch(
        prefix: fx.Pointer,
        delta: fx.Pointer,
        blocks: fx.Pointer,
        blocks_token_stride: fx.Int32,
        blocks_block_stride: fx.Int32,
        ares_nw: fx.Pointer,
        ares_qk: fx.Pointer,
        in_nw: fx.Pointer,
        w_qkv: fx.Pointer,
        w_g: fx.Pointer,
        q_nw: fx.Pointer,
        kv_nw: fx.Pointer,
        w_qb: fx.Pointer,
        w_k: fx.Pointer,
        w_k_stride0: fx.Int32,
        w_k_stride1: fx.Int32,
        w_k_scale: fx.Pointer,
        w_k_scale_stride0: fx.Int32,
        w_k_scale_stride1: fx.Int32,
        w_k_scale_stride2: fx.Int32,
        kv_cache: fx.Pointer,
        kv_block_stride: fx.Int32,
        kv_slot_stride: fx.Int32,
        block_size: fx.Int32,
        slots: fx.Pointer,
        gate_out: fx.Pointer,
        q_out: fx.Pointer,
        scratch: fx.Pointer,
        peers: fx.Pointer,
        rank: fx.Int32,
        layer: fx.Int32,
        epoch: fx.Pointer,
        health: fx.Pointer,
        alarm: fx.Pointer,
        tl: fx.Pointer,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ):
        values = locals()
        kernel(*[values[name] for name, _ in PARAMS]).launch(grid=(GRID, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return launch, events


def trace(key: MlaPreBuild, target: str) -> tuple[Any, tuple[Any, ...]]:
    """What the toolchain compiles: the launcher and placeholder arguments."""
    null = flyc.from_c_void_p(fx.Uint8, None, assumed_align=4)
    return launcher(key)[0], tuple(null if kind == "ptr" else fx.Int32(1) for _, kind in PARAMS)


def trace_events(key: MlaPreBuild) -> list[Event]:
    """The hand-offs of `key` in program order, by tracing (and compiling) the kernel; needs no GPU."""
    launch, events = launcher(key)
    flyc.compile(launch, *trace(key, "gfx950")[1])
    return events
