"""The bench of context parallelism with D ranks in turns on one GPU: whether they are right, and a rough time."""

from typing import Any, Final

import torch

from k3dsl.cli.bench import question
from k3dsl.scenario import relative_error
from k3dsl.scenario_parallel import INTERLEAVES, ParallelCase, deal

harness, work = question("harness"), question("dcp_rank")
#: Layers of a timed graph: all ranks' caches of all of them are on one device.
LAYERS: Final = 4


def _layer(attention: Any, case: Any, box: Any, parity: int, cache: Any) -> Any:
    from k3dsl.nvidia import PreparedMla

    scratch = torch.zeros(64, case.heads, 576, dtype=torch.uint8, device=cache.device)
    pitch = 2112 + case.heads * 128
    layer = PreparedMla(attention, {case.rows: pitch}, scratch, max_context=work.MAX_CONTEXT, queries=(case.q,),
                        dcp=box, parity=parity, page_size=work.PAGE, cache=work.store())  # fmt: skip
    layer.prepare_cache(cache)
    return layer


def _boxes(case: Any, timeout: float) -> list[Any]:
    from k3dsl.nvidia import DcpBox

    return DcpBox.virtual(case.dcp, heads=case.heads, interleave=case.interleave, device="cuda", timeout=timeout)


def check(me: Any, dcp: int, heads: int, dry: bool, timeout: float) -> list[dict[str, Any]]:
    """All ranks against one device (the reference) for short, odd and long requests, padding, ranks without a key."""
    return [
        _check(ParallelCase(dcp, interleave, q, heads=heads), timeout) for interleave in INTERLEAVES for q in (1, 4)
    ]


def _check(case: ParallelCase, timeout: float) -> dict[str, Any]:
    from k3dsl.nvidia import virtual_step

    boxes, errors, zeros = _boxes(case, timeout), [], True
    for parity in range(2):
        step = deal(case, device="cuda", seed=parity)
        outs = [
            torch.full((case.rows, case.heads * 128), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in boxes
        ]
        shards = [step.shards[r] for r in range(case.dcp)]
        layers = [_layer(s.attention, case, b, parity, s.cache) for s, b in zip(shards, boxes, strict=True)]
        calls = [
            {"projected": s.projected, "out": out, "cache": s.cache, "slots": s.slots, "block_table": s.block_table,
             "lengths": s.lengths, "totals": step.totals}
            for s, out in zip(shards, outs, strict=True)
        ]  # fmt: skip
        virtual_step(layers, calls, q=case.q)
        torch.cuda.synchronize()
        expected = step.expected()
        for rank, out in enumerate(outs):
            want = step.block(expected, rank)
            live = want.any(dim=1)
            errors.append(relative_error(out[live], want[live]))
            zeros &= bool((out[~live] == 0).all())
    for box in boxes:
        box.check()
    return {"case": case.id, "error": max(errors), "zeros": zeros, "armed": all(box.armed() for box in boxes)}


def measure(me: Any, shape: Any, timeout: float) -> dict[str, Any]:
    """us of a layer of all ranks together, one after the other on this GPU."""
    from k3dsl.nvidia import virtual_step

    boxes = _boxes(shape, timeout)
    calls = []
    for index in range(LAYERS):
        layers = [work.Layer(shape, rank, index, "cuda") for rank in range(shape.dcp)]
        made = [_layer(x.weights, shape, b, index % 2, x.cache) for x, b in zip(layers, boxes, strict=True)]
        arguments = [x.call(x.out) for x in layers]
        calls.append(lambda m=made, a=arguments, keep=layers: virtual_step(m, a, q=shape.q))
    us = harness.graph_us(calls, shape.repeats)
    for box in boxes:
        box.check()
    armed = all(box.armed() for box in boxes)
    del calls, layers, made, arguments
    torch.cuda.empty_cache()
    return {"us": us, "armed": armed}
