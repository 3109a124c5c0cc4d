"""The prepared gfx950 layer where there is no GPU: it runs on the oracle, says so, and refuses what it must."""

from typing import Any

import pytest
import torch
from mla_pre_cases import aligned

from k3dsl import reference
from k3dsl.amd.layer import builds
from k3dsl.amd.prepared import PreparedMlaPre
from k3dsl.amd.rank import MlaPreRank
from k3dsl.amd.weights import MlaPreWeights, arguments_of, oracle_weights
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError, NotPrepared, PeerError
from k3dsl.reference import mla_pre as oracle

DIMS, PAGE = MlaDims(), 16


@pytest.fixture(scope="module")
def weights() -> MlaPreWeights:
    return MlaPreWeights.random(DIMS, seed=2)


def step(rows: int, nblocks: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return aligned(*shape, dtype=torch.bfloat16).copy_(torch.randn(*shape, generator=generator) * std)

    return {
        "prefix": normal(rows, 7168, std=2.0),
        "delta": normal(rows, 7168, std=0.5),
        "blocks": normal(rows, nblocks, 7168, std=2.0),
    }


def requests(rows: int, q: int, past: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Tables, lengths and slots of requests that hold `past` tokens; -1 < past: an empty padded request."""
    pages = torch.randperm(63, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.full((rows // q, 4), 1 << 30, dtype=torch.int32)
    lengths, slots, used = [], [], 0
    for r, tokens in enumerate(past):
        if tokens < 0:
            lengths.append(0)
            slots += [-1] * q
            continue
        need = -(-(tokens + q) // PAGE)
        table[r, :need] = pages[used : used + need]
        used += need
        lengths.append(tokens + q)
        slots += [int(table[r, p // PAGE]) * PAGE + p % PAGE for p in range(tokens, tokens + q)]
    return {
        "slots": torch.tensor(slots),
        "block_table": table,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def cache_with_history(seed: int = 3) -> torch.Tensor:
    """Random finite entries everywhere: what was cached before."""
    values = torch.randn(64, PAGE, 576, generator=torch.Generator().manual_seed(seed))
    out = aligned(64, PAGE, 576, dtype=torch.uint8)
    return out.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))


def expected(
    weights: MlaPreWeights, given: dict[str, Any], meta: dict[str, Any], cache: torch.Tensor, q: int
) -> tuple[oracle.PreStep, torch.Tensor]:
    """The layer put together by hand from the oracle's parts."""
    pre = oracle_weights(weights, arguments_of(weights, "mxfp4"))
    found = oracle.mla_pre(pre, nblocks=given["blocks"].shape[1], **given)
    oracle.insert(found.entry, cache, meta["slots"])
    latent, _ = reference.core(
        found.query(), cache, meta["block_table"], meta["lengths"], q, scale=DIMS.scale, kv_format="fp8"
    )
    return found, oracle.gated_value(latent.flatten(0, 1), weights.W_UV, found.gate)


@pytest.mark.parametrize(("rows", "q", "past"), [(4, 1, [0, 15, 40, -1]), (8, 4, [3, 30]), (1, 1, [0])])
def test_a_step_is_the_oracles_parts_in_order(weights: MlaPreWeights, rows: int, q: int, past: list[int]) -> None:
    layer = PreparedMlaPre(weights, batches=(rows,), queries=(q,), max_context=64)
    given, meta, cache = step(rows, 3), requests(rows, q, past), cache_with_history()
    twin = cache.clone()
    found, want = expected(weights, {k: v.clone() for k, v in given.items()}, meta, twin, q)
    layer.prepare_cache(cache)
    assert layer.describe() == "mla_pre on reference, decode attention on reference"
    out = torch.full((rows, 1536), torch.nan, dtype=torch.bfloat16)
    for _ in range(2):
        given = step(rows, 3)
        cache.copy_(cache_with_history())
        layer.run(out=out, cache=cache, q=q, **given, **meta)
    assert torch.equal(given["prefix"], found.prefix)
    assert torch.equal(cache, twin)
    assert torch.equal(layer.rank.query(rows), found.query().view(torch.uint8))
    torch.testing.assert_close(
        out, want, rtol=2**-7, atol=1e-3
    )  # one product in float32, one in bf16 as a library does
    assert float((out != want).float().mean()) < 0.01
    if -1 in past:
        assert not out[past.index(-1)].any()
    assert int(layer.rank.epoch) == 2


def test_a_runtime_is_one(weights: MlaPreWeights) -> None:
    with pytest.raises(ConfigError, match="runtime=5 must be None for HIP, or what has the methods"):
        PreparedMlaPre(weights, batches=(2,), runtime=5)  # type: ignore[arg-type]


def test_what_was_not_prepared_is_named(weights: MlaPreWeights) -> None:
    layer = PreparedMlaPre(weights, batches=(2, 4), queries=(1, 2), nblocks=(1, 2))
    assert layer.shapes == ((2, 1), (4, 1), (2, 2), (4, 2))
    cache, meta = cache_with_history(), requests(2, 1, [3, 4])
    out = torch.zeros(2, 1536, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="no cache is bound"):
        layer.run(out=out, cache=cache, **step(2, 1), **meta)
    layer.prepare_cache(cache)
    with pytest.raises(NotPrepared, match=r"nblocks=3, delta=True is not prepared.*nblocks=\(..., 3\)"):
        layer.run(out=out, cache=cache, **step(2, 3), **meta)
    with pytest.raises(ConfigError, match=r"nblocks=\[1\] must be an int, or None for all of blocks"):
        layer.run(out=out, cache=cache, nblocks=[1], **step(2, 1), **meta)  # type: ignore[arg-type]
    with pytest.raises(NotPrepared, match=r"deltas=\(..., False\)"):
        layer.run(out=out, cache=cache, **(step(2, 1) | {"delta": None}), **meta)
    with pytest.raises(NotPrepared, match=r"\(rows, q\)=\(3, 1\) is not prepared"):
        layer.run(out=out, cache=cache, **step(3, 1), **requests(3, 1, [1, 2, 3]))
    with pytest.raises(NotPrepared, match=r"\(rows, q\)=\(2, 4\) is not prepared"):
        layer.attend(out, cache=cache, block_table=meta["block_table"], lengths=meta["lengths"], rows=2, q=4)


def test_a_known_layout_does_not_let_the_prefix_in_twice(weights: MlaPreWeights) -> None:
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(1,))
    cache, meta = cache_with_history(), requests(2, 1, [3, 4])
    layer.prepare_cache(cache)
    out = torch.zeros(2, 1536, dtype=torch.bfloat16)
    layer.run(out=out, cache=cache, **step(2, 1), **meta)
    given = step(2, 1, seed=1)
    prefix, before, epoch = given["prefix"], given["prefix"].clone(), int(layer.rank.epoch)
    for what, same in (("delta", prefix), ("blocks", prefix[:, None])):
        with pytest.raises(ConfigError, match=f"prefix and {what} overlap in memory"):
            layer.run(out=out, cache=cache, **(given | {what: same}), **meta)
    assert torch.equal(prefix, before)
    assert int(layer.rank.epoch) == epoch


def test_bad_tensors_are_refused_before_anything_is_written(weights: MlaPreWeights) -> None:
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(1,))
    cache, meta = cache_with_history(), requests(2, 1, [3, 4])
    layer.prepare_cache(cache)
    before, given = cache.clone(), step(2, 1)
    kept = given["prefix"].clone()
    out = torch.zeros(2, 1536, dtype=torch.bfloat16)
    wrong = meta | {"slots": meta["slots"].int()}
    with pytest.raises(ConfigError, match="slots is int32, must be int64"):
        layer.run(out=out, cache=cache, **given, **wrong)
    with pytest.raises(ConfigError, match="is not the one that was prepared"):
        layer.run(out=out, cache=cache.clone(), **given, **meta)
    assert torch.equal(cache, before)
    assert torch.equal(given["prefix"], kept)
    assert int(layer.rank.epoch) == 0
    with pytest.raises(ConfigError, match="lengths is int64, must be int32"):
        layer.attend(out, cache=cache, block_table=meta["block_table"], lengths=meta["lengths"].long(), rows=2)


def test_a_cache_of_another_kind_is_refused(weights: MlaPreWeights) -> None:
    layer = PreparedMlaPre(weights, batches=(1,), nblocks=(1,), page_size=16)
    with pytest.raises(ConfigError, match="pages of 32 tokens, must have 16"):
        layer.prepare_cache(torch.zeros(4, 32, 576, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="kv_cache is bfloat16"):
        layer.prepare_cache(torch.zeros(4, 16, 576, dtype=torch.bfloat16))


def test_every_problem_of_a_layer_is_in_one_error(weights: MlaPreWeights) -> None:
    with pytest.raises(ConfigError) as error:
        PreparedMlaPre(weights, batches=(17,), queries=(9,), nblocks=(0,), deltas=(), max_context=0)
    for says in ("batches: 17", "queries: 9", "nblocks: 0", "deltas is empty", "max_context=0"):
        assert says in str(error.value)
    with pytest.raises(ConfigError, match="queries: 3 divides none of batches"):
        PreparedMlaPre(weights, batches=(4,), queries=(3,))
    rank = MlaPreRank((2,), w_uk="bf16")
    with pytest.raises(ConfigError) as error:
        PreparedMlaPre(weights, batches=(4,), rank=rank, combine=lambda latent, lse: latent)
    for says in ("the rank serves widths (2,), not 4", "made for w_uk='bf16'", "combine is given with ranks=1"):
        assert says in str(error.value)


def test_attention_is_checked_whole(weights: MlaPreWeights) -> None:
    with pytest.raises(ConfigError) as error:
        PreparedMlaPre(weights.mla, batches=(1,))
    for name in ("ares_nw", "ares_qk", "in_nw", "w_qkv", "w_g"):
        assert f"{name} is missing" in str(error.value)

    class Scaled:
        _q_scale_float = 0.5

        def __getattr__(self, name: str) -> Any:
            return getattr(weights, name)

    with pytest.raises(ConfigError, match=r"_q_scale_float=0.5 must be 1.0"):
        PreparedMlaPre(Scaled(), batches=(1,))


def test_bf16_absorption(weights: MlaPreWeights) -> None:
    """The variant for deployments without FP4 weights."""
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(2,), w_uk="bf16")
    cache, meta, given = cache_with_history(), requests(2, 1, [3, 20]), step(2, 2)
    layer.prepare_cache(cache)
    pre = oracle_weights(weights, arguments_of(weights, "mxfp4"))
    want = oracle.mla_pre(pre, nblocks=2, w_uk="bf16", **given).query()
    layer.run(out=torch.zeros(2, 1536, dtype=torch.bfloat16), cache=cache, **given, **meta)
    assert torch.equal(layer.rank.query(2), want.view(torch.uint8))


def test_layers_share_a_rank_and_take_slots(weights: MlaPreWeights) -> None:
    rank = MlaPreRank((1, 2), per_run=False)
    layers = [PreparedMlaPre(weights, batches=(1, 2), nblocks=(n,), rank=rank) for n in (1, 2)]
    assert [layer.slot for layer in layers] == [0, 1]
    assert PreparedMlaPre(weights, batches=(2,), nblocks=(1,), rank=rank, slot=91).slot == 91
    with pytest.raises(ConfigError, match="slot=1 is another layer's: with per_run=False"):
        PreparedMlaPre(weights, batches=(2,), nblocks=(1,), rank=rank, slot=1)
    with pytest.raises(ConfigError, match="slot=256 must be an int from 0 to 255"):
        PreparedMlaPre(weights, batches=(2,), nblocks=(1,), rank=rank, slot=256)
    caches = [cache_with_history() for _ in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.prepare_cache(cache)
    assert layers[0].decode is layers[1].decode
    out = torch.zeros(2, 1536, dtype=torch.bfloat16)
    for _ in range(2):
        rank.begin_step()
        for n, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            layer.run(out=out, cache=cache, **step(2, n + 1), **requests(2, 1, [3, 4]))
    assert int(rank.epoch) == 2  # once a step, not once a layer


def test_the_health_of_a_rank() -> None:
    rank = MlaPreRank((1,))
    assert rank.poll()
    rank.check()
    rank.health[0] = 1
    rank.health[8:16] = torch.tensor([1, 0, 5, 257, 0, 0, 40, 0])
    rank._flags[0] = 1
    assert not rank.poll()
    with pytest.raises(PeerError, match="gave up waiting") as error:
        rank.check()
    assert "1 of 256 workgroups gave up" in str(error.value)
    assert "alarms of ranks [0]" in str(error.value)
    epoch = int(rank.epoch)
    rank.reset()
    assert rank.poll()
    rank.check()
    assert int(rank.epoch) == epoch + 2


def test_a_rank_of_several_needs_its_peers() -> None:
    with pytest.raises(ConfigError, match="peers are none, must be those of rank 1 of 8"):
        MlaPreRank((8,), ranks=8, rank=1)
    with pytest.raises(ConfigError, match="rank=8 must be an int from 0 to 7"):
        MlaPreRank((8,), ranks=8, rank=8)
    with pytest.raises(ConfigError, match="widths is empty"):
        MlaPreRank(())


def test_the_builds_of_a_layer() -> None:
    keys = builds((8, 4, 8), ranks=8)
    assert len(keys) == 16
    assert [key.nblocks for key in keys[:8]] == list(range(1, 9))
    assert {key.tokens for key in keys} == {8, 4}
    assert all(key.delta and key.q_heads == 96 for key in keys)
    with pytest.raises(ConfigError, match="tokens=32"):
        builds((32,))


def test_prepare_gives_layers_of_one_rank(weights: MlaPreWeights) -> None:
    """`k3dsl.prepare` with a plan of gfx950: layers share a rank, and their shapes are the plan's."""
    import k3dsl

    plan = k3dsl.Deployment(DIMS, target="gfx950", page_size=PAGE, batches=(1, 2), queries=(1, 2), max_context=64)
    first, second = (k3dsl.prepare(plan, weights) for _ in range(2))
    assert isinstance(first, PreparedMlaPre)
    assert first.rank is second.rank
    assert (first.slot, second.slot) == (0, 1)
    assert first.shapes == plan.shapes() == ((1, 1), (2, 1), (2, 2))
    with pytest.raises(ConfigError, match="pages of 32 tokens, must have 16"):
        first.prepare_cache(torch.zeros(1, 32, 576, dtype=torch.uint8))
    cache, given, meta = cache_with_history(), step(2, 4), requests(2, 1, [3, 9])
    first.prepare_cache(cache)
    out = torch.full((2, 1536), torch.nan, dtype=torch.bfloat16)
    table, lengths = meta["block_table"][:1], meta["lengths"][:1]  # a row of metadata too few: an empty request
    first.run(
        out=out,
        cache=cache,
        slots=torch.tensor([int(meta["slots"][0]), -1]),
        block_table=table,
        lengths=lengths,
        **given,
    )
    assert bool(out[0].isfinite().all())
    assert bool(out[0].any())
    assert not out[1].any()


def test_what_attention_refuses_is_refused_before_the_prefix_has_its_delta(weights: MlaPreWeights) -> None:
    """A step that is tried again must not add it twice."""
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(1,), max_context=64)
    cache, meta, out = cache_with_history(), requests(2, 1, [3, 4]), torch.zeros(2, 1536, dtype=torch.bfloat16)
    layer.prepare_cache(cache)
    given, before = step(2, 1), cache.clone()
    prefix = given["prefix"].clone()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lengths": meta["lengths"].long()}, "lengths is int64, must be int32"),
        ({"out": out.float()}, "out is float32, must be bfloat16"),
        ({"totals": meta["lengths"].long()}, "totals is int64, must be int32"),
        ({"totals": meta["lengths"][:1]}, r"totals has shape \[1\], axis 0 must be 2 or more"),
        ({"cache": cache.clone()}, "is not the one that was prepared"),
    ]
    for twice in range(2):
        for changes, says in wrong:
            with pytest.raises(ConfigError, match=says):
                layer.run(**{"out": out, "cache": cache, **given, **meta, **changes})
        assert torch.equal(given["prefix"], prefix)
        assert torch.equal(cache, before)
        if not twice:  # what was right once is no reason to take what is wrong
            layer.run(out=out, cache=cache, **given, **meta)
            given["prefix"].copy_(prefix)
            before = cache.clone()
    with pytest.raises(ConfigError, match="is not the one that was prepared"):
        layer.attend(out, cache=cache.clone(), block_table=meta["block_table"], lengths=meta["lengths"], rows=2)


@pytest.mark.parametrize(
    "name", ["prefix", "blocks", "out", "cache", "slots", "block_table", "lengths", "totals", "delta"]
)
def test_what_is_no_tensor_is_named(weights: MlaPreWeights, name: str) -> None:
    layer = PreparedMlaPre(weights, batches=(2,), nblocks=(1,), max_context=64)
    cache, given = cache_with_history(), step(2, 1)
    layer.prepare_cache(cache)
    prefix = given["prefix"]
    before = prefix.clone()
    whole = {"out": torch.zeros(2, 1536).bfloat16(), "cache": cache, **given, **requests(2, 1, [3, 4]), name: [1]}
    with pytest.raises(ConfigError, match=f"{name} is list, must be a"):
        layer.run(**whole)
    assert torch.equal(prefix, before)


def test_shapes_that_cannot_be_are_named(weights: MlaPreWeights) -> None:
    for changes in ({"batches": 2}, {"queries": None}, {"nblocks": 3}, {"deltas": True}, {"page_size": 0}):
        ((name, value),) = changes.items()
        with pytest.raises(ConfigError, match=f"{name}={value} must be"):
            PreparedMlaPre(weights, **{"batches": (2,), **changes})
    with pytest.raises(ConfigError, match="rank is int, must be None or an MlaPreRank"):
        PreparedMlaPre(weights, batches=(2,), rank=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="widths=5 must be a tuple"):
        MlaPreRank(5)  # type: ignore[arg-type]
