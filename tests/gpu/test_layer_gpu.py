"""Whole layers on the GPU against the reference: eagerly, captured, replayed, moved, refused.

What must not be read is poisoned by `k3dsl.scenario`: NaN in unwritten cache slots and in padded rows, page numbers
beyond any pool in unused block-table entries.
"""

import gc

import pytest
import torch
from harness import objects

from k3dsl import CaptureError, ConfigError, Deployment, MlaDims, NotPrepared
from k3dsl.cli.demo import LIMITS
from k3dsl.nvidia.layer import shape_keys
from k3dsl.preparing import prepare
from k3dsl.reference import bits
from k3dsl.scenario import LENGTHS, Stack, captured, relative_error

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCHES = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)


def plan_of(kv_format="fp8", tp=8, page=64, batches=BATCHES, queries=(1, 4)):
    return Deployment(
        MlaDims.kimi_k3(tp), target="sm_90a", kv_format=kv_format, page_size=page, batches=batches, queries=queries
    )


PLANS = [
    *(plan_of(kv_format, tp) for kv_format in ("fp8", "bf16") for tp in (8, 16)),
    *(plan_of("fp8", 8, page, (8,), (1,)) for page in (32, 128)),
    plan_of("fp8", 8, 64, (14, 21), (7,)),
]
GPU_KEYS = [
    key
    for plan in PLANS
    for rows, q in plan.shapes()
    for key in shape_keys(
        target="sm_90a",
        heads=plan.dims.heads,
        kv_format=plan.kv_format,
        page=plan.page_size,
        core="hopper",
        rows=rows,
        q=q,
    ).all()
]


def made(plan, *, lengths=LENGTHS, q=1, layers=2, steps=4, seed=0, k_scale=1.0, q_scale=1.0):
    """(stack, prepared layers) for requests of these lengths."""
    stack = Stack(
        plan.dims,
        layers=layers,
        lengths=lengths,
        q=q,
        page=plan.page_size,
        kv_format=plan.kv_format,
        steps=steps,
        k_scale=k_scale,
        q_scale=q_scale,
        device=DEVICE,
        seed=seed,
    )
    prepared = [prepare(plan, layer.weights, cache=objects(), device=DEVICE) for layer in stack.layers]
    for layer, one in zip(stack.layers, prepared, strict=True):
        one.prepare_cache(layer.cache)
    return stack, prepared


def assert_step(stack):
    """The step that has run is the reference's."""
    limit = LIMITS[stack.kv_format]
    for i, (layer, expected) in enumerate(zip(stack.layers, stack.expected(), strict=True)):
        error = relative_error(layer.out, expected)
        assert error <= limit, f"layer {i}: relative error {error:.2e}, limit {limit:.0e}"
    assert stack.entry_error() <= limit
    assert stack.strays() == 0
    stack.adopt()


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_layers_eager_then_replayed_with_new_metadata(kv_format, tp, q):
    stack, prepared = made(plan_of(kv_format, tp), q=q, steps=5)
    stack.run(prepared)
    assert_step(stack)
    graph = captured(lambda: stack.run(prepared))
    for _ in range(4):
        stack.advance()
        graph.replay()
        assert_step(stack)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_every_number_of_rows(kv_format, rows):
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 400, (rows,), generator=generator).tolist()
    stack, prepared = made(plan_of(kv_format), lengths=tuple(lengths), layers=1, steps=1)
    stack.run(prepared)
    assert_step(stack)


@pytest.mark.parametrize("page", [32, 128])
def test_other_page_sizes(page):
    stack, prepared = made(plan_of("fp8", 8, page, (8,), (1,)))
    stack.run(prepared)
    assert_step(stack)


def test_seven_tokens_a_request():
    stack, prepared = made(plan_of("fp8", 8, 64, (14, 21), (7,)), lengths=(7, 64, 700), q=7)
    stack.run(prepared)
    assert_step(stack)


def test_scales_of_query_and_cache():
    stack, prepared = made(plan_of(), layers=1, k_scale=0.03, q_scale=0.02)
    stack.run(prepared)
    assert_step(stack)


def test_q_tokens_in_one_call_equal_q_calls():
    """Row j of a verification sees what a decode of j + 1 tokens sees."""
    plan = plan_of("bf16", batches=(2, 8), queries=(1, 4))
    stack, [layer] = made(plan, lengths=(300, 65), q=4, layers=1)
    one = stack.layers[0]
    stack.run([layer])
    for j in range(4):
        rows = torch.arange(j, 8, 4, device=DEVICE)
        out = torch.full((2, one.out.shape[1]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        layer.run(
            one.projected[rows].contiguous(),
            out,
            cache=one.cache,
            slots=stack.slots[rows].contiguous(),
            block_table=stack.block_table,
            lengths=stack.lengths - 3 + j,
        )
        assert relative_error(out, one.out[rows]) <= LIMITS["bf16"]


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_300_replays_are_bit_equal_whatever_lay_in_the_workspace(kv_format):
    stack, prepared = made(plan_of(kv_format))
    graph = captured(lambda: stack.run(prepared))
    graph.replay()
    first = [[bits(t).clone() for t in (layer.out, layer.cache)] for layer in stack.layers]
    workspace = prepared[0]._workspaces[-1]
    unequal = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(300):
        for t in (workspace.partial, workspace.stats, prepared[0]._latent.view(torch.uint8)):
            t.fill_(0xFF)
        for layer in stack.layers:
            layer.out.fill_(torch.nan)
        graph.replay()
        for layer, kept in zip(stack.layers, first, strict=True):
            for t, before in zip((layer.out, layer.cache), kept, strict=True):
                unequal += (bits(t) != before).any()
    assert int(unequal) == 0
    assert_step(stack)


def test_all_requests_empty_give_exact_zeros_and_write_nothing():
    stack, prepared = made(plan_of(), lengths=(0,) * 8)
    before = [bits(layer.cache).clone() for layer in stack.layers]
    stack.run(prepared)
    for layer, kept in zip(stack.layers, before, strict=True):
        assert not bits(layer.out).any()
        assert torch.equal(bits(layer.cache), kept)


def test_a_padded_request_is_an_empty_one():
    stack, [layer] = made(plan_of(), layers=1)
    stack.run([layer])
    full = stack.layers[0].out.clone()
    stack.layers[0].out.fill_(torch.nan)
    stack.run([layer], requests=7)
    assert torch.equal(bits(stack.layers[0].out), bits(full))
    assert not bits(full[7]).any()


def test_short_and_strided_metadata():
    stack, prepared = made(plan_of())
    wide = torch.full((12, stack.block_table.shape[1] + 9), 1 << 30, dtype=torch.int32, device=DEVICE)
    wide[:8, 4 : 4 + stack.block_table.shape[1]] = stack.block_table
    lengths = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    lengths[:8] = stack.lengths
    for layer, one in zip(stack.layers, prepared, strict=True):
        one.run(
            layer.projected,
            layer.out,
            cache=layer.cache,
            slots=stack.slots,
            block_table=wide[:, 4 : 4 + stack.block_table.shape[1]],
            lengths=lengths,
        )
    assert_step(stack)
    stack.advance()
    stack.run(prepared, requests=7)
    assert_step(stack)


def test_a_row_pitch_wider_than_the_projection():
    stack, [layer] = made(plan_of(), layers=1)
    one = stack.layers[0]
    wide = torch.full((8, stack.dims.pitch + 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, : stack.dims.pitch] = one.projected
    layer.run(
        wide[:, : stack.dims.pitch],
        one.out,
        cache=one.cache,
        slots=stack.slots,
        block_table=stack.block_table,
        lengths=stack.lengths,
    )
    assert_step(stack)


def test_pages_that_lie_apart():
    """Layers that interleave in one pool: the page stride is larger than a page."""
    plan = plan_of()
    stack = Stack(plan.dims, layers=2, lengths=LENGTHS, device=DEVICE)
    pages, page, width = stack.layers[0].cache.shape
    pool = torch.full((pages, 2, page, width), 0xFF, dtype=torch.uint8, device=DEVICE)
    for i, layer in enumerate(stack.layers):
        pool[:, i] = layer.cache
        layer.cache = pool[:, i]
    prepared = [prepare(plan, layer.weights, cache=objects(), device=DEVICE) for layer in stack.layers]
    for layer, one in zip(stack.layers, prepared, strict=True):
        one.prepare_cache(layer.cache)
    stack.run(prepared)
    assert_step(stack)


def test_two_streams_in_order_give_the_same_bits():
    stack, prepared = made(plan_of())
    stack.run(prepared)
    expected = [layer.out.clone() for layer in stack.layers]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        for layer in stack.layers:
            layer.out.fill_(torch.nan)
        last = torch.cuda.current_stream()
        for stream, layer, one in zip(streams, stack.layers, prepared, strict=True):
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                one.run(
                    layer.projected,
                    layer.out,
                    cache=layer.cache,
                    slots=stack.slots,
                    block_table=stack.block_table,
                    lengths=stack.lengths,
                )
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        for layer, kept in zip(stack.layers, expected, strict=True):
            assert torch.equal(bits(layer.out), bits(kept))


def test_the_core_alone_is_what_the_layer_runs():
    stack, [layer] = made(plan_of(), layers=1)
    stack.run([layer])
    latent = layer._latent[:8].clone()
    again = layer.stock_core(stack.layers[0].cache, stack.block_table, stack.lengths, 8)
    live = stack.lengths > 0
    assert torch.equal(bits(again[live]), bits(latent[live]))


def test_layers_share_modules_and_memory():
    stack, (one, two) = made(plan_of())
    shape = (8, 1)
    for stage in ("query", "value"):
        a, b = (getattr(layer._steps[shape], stage)._plan._function.module for layer in (one, two))
        assert a is b
    assert one._scratch is two._scratch
    assert one._workspaces[-1] is two._workspaces[-1]
    assert len(stack.layers) == 2


def test_a_capture_refuses_preparation_and_goes_on():
    stack, prepared = made(plan_of())
    fresh = prepare(plan_of(), stack.layers[0].weights, cache=objects(), device=DEVICE)
    stack.run(prepared)
    expected = [layer.out.clone() for layer in stack.layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="prepare_cache"):
            fresh.prepare_cache(stack.layers[0].cache)
        with pytest.raises(CaptureError, match="prepare"):
            prepare(plan_of(), stack.layers[0].weights, cache=objects(), device=DEVICE)
        with pytest.raises(NotPrepared):
            prepared[0].run(
                stack.layers[0].projected[:7],
                stack.layers[0].out[:7],
                cache=stack.layers[0].cache,
                slots=stack.slots,
                block_table=stack.block_table,
                lengths=stack.lengths,
            )
        stack.run(prepared)
    for layer in stack.layers:
        layer.out.fill_(torch.nan)
    graph.replay()
    for layer, kept in zip(stack.layers, expected, strict=True):
        assert torch.equal(bits(layer.out), bits(kept))


def test_a_cache_that_moves_and_graphs_of_the_old_one():
    stack, prepared = made(plan_of(), layers=1)
    one, layer = stack.layers[0], prepared[0]
    stack.run(prepared)
    expected = one.out.clone()
    graph = captured(lambda: stack.run(prepared))
    old = one.cache
    one.cache = old.clone()
    with pytest.raises(ConfigError, match="when the cache moves"):
        stack.run(prepared)
    layer.prepare_cache(one.cache)
    one.out.fill_(torch.nan)
    stack.run(prepared)
    assert torch.equal(bits(one.out), bits(expected))
    gc.collect()
    old_bits = bits(old).clone()
    one.out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(bits(one.out), bits(expected))
    assert torch.equal(bits(old), old_bits)


def test_bad_tensors_are_refused_before_any_launch():
    stack, [layer] = made(plan_of(), layers=1)
    one = stack.layers[0]
    good = {
        "projected": one.projected,
        "out": one.out,
        "slots": stack.slots,
        "block_table": stack.block_table,
        "lengths": stack.lengths,
    }
    cache = bits(one.cache).clone()
    bad = {
        "projected": [(one.projected.half(), "float16"), (one.projected.cpu(), "cpu")],
        "out": [(one.out.float(), "float32"), (one.out[:7], "axis 0 must be 8")],
        "slots": [(stack.slots.int(), "int32"), (stack.slots[:5], "8 or more"), (stack.slots.cpu(), "cpu")],
        "block_table": [(stack.block_table.long(), "int64"), (stack.block_table.cpu(), "cpu")],
        "lengths": [(stack.lengths.long(), "int64"), (stack.lengths.cpu(), "cpu")],
    }
    for name, cases in bad.items():
        for tensor, message in cases:
            with pytest.raises(ConfigError, match=message):
                layer.run(**{**good, name: tensor}, cache=one.cache)
    assert one.out.isnan().all()
    assert torch.equal(bits(one.cache), cache)
    for tensor, message in (
        (one.cache.cpu(), "cpu"),
        (torch.zeros(4, 48, 576, dtype=torch.uint8, device=DEVICE), "48"),
        (one.cache.view(torch.int8).float(), "float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer.prepare_cache(tensor)
    stack.run([layer])
    assert_step(stack)


def test_a_plan_for_another_target_is_refused():
    plan = Deployment(MlaDims.kimi_k3(8), target="sm_100a", batches=(8,))
    stack = Stack(plan.dims, layers=1, lengths=(1, 2), device=DEVICE)
    with pytest.raises(ConfigError, match="runs sm_90a, the plan is for target='sm_100a'"):
        prepare(plan, stack.layers[0].weights, cache=objects(), device=DEVICE)
