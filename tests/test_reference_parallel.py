"""The oracle of context parallelism: D ranks give what one device gives, and every mailbox word has its place."""

import itertools

import pytest
import torch
from cases import bf16_steps, empty_cache, page_table, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl import reference as ref
from k3dsl.errors import ConfigError
from k3dsl.scenario import relative_error
from k3dsl.scenario_parallel import INTERLEAVES, MERGE_ERROR, ParallelCase, deal, edge_totals

groups = st.tuples(st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 16, 64]))
totals = st.lists(st.integers(0, 1500), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(groups, totals)
def test_lengths_of_the_ranks_sum_to_the_total(group, lengths):
    dcp, interleave = group
    whole = torch.tensor(lengths, dtype=torch.int32)
    parts = ref.split_lengths(whole, dcp, interleave)
    assert torch.equal(torch.stack(parts).sum(dim=0), whole)
    assert all(part.dtype == torch.int32 for part in parts)
    # In turns of I, no rank is ahead of one before it, nor behind the first by more than a turn.
    for before, after in itertools.pairwise(parts):
        assert bool((before >= after).all())
    assert bool((parts[0] - parts[-1] <= interleave).all())


@settings(deadline=None, max_examples=60)
@given(groups, st.sampled_from([64, 128]), st.integers(1, 1500), st.integers(0, 3))
def test_every_position_has_one_slot_on_one_rank(group, page, total, seed):
    """Over all ranks each position has exactly one slot, no rank uses a slot twice, and each shard is dense."""
    dcp, interleave = group
    position = torch.arange(total)
    homes = torch.zeros(total, dtype=torch.int64)
    for rank in range(dcp):
        generator = torch.Generator().manual_seed(seed + rank)
        table, _ = page_table((-(-total // (page * dcp)) * page,), page, generator, spare=1)
        slot = ref.local_slots(position, table.expand(total, -1), page, dcp, rank, interleave)
        mine = slot[slot >= 0]
        homes += slot >= 0
        count = int(ref.local_len(torch.tensor(total), dcp, rank, interleave))
        assert len(mine.unique()) == len(mine) == count
        assert torch.equal(mine, slots_of(table, 0, torch.arange(count), page))
    assert bool((homes == 1).all())


@settings(deadline=None, max_examples=60)
@given(groups, st.integers(1, 8), totals)
def test_bounds_of_the_ranks_sum_to_the_causal_bound(group, q, lengths):
    """Row t of a request sees min(total, total - (q - 1) + t) keys, each on one rank."""
    dcp, interleave = group
    whole = torch.tensor(lengths)
    seen = torch.zeros(len(lengths), q, dtype=torch.int64)
    for rank, local in enumerate(ref.split_lengths(whole, dcp, interleave)):
        seen += ref.visible_keys(local, q, totals=whole, dcp=(dcp, rank, interleave))
    want = (whole[:, None] - (q - 1) + torch.arange(q)).clamp(min=0)
    assert torch.equal(seen, want)


@settings(deadline=None, max_examples=20)
@given(groups, st.lists(st.integers(0, 400), min_size=1, max_size=3), st.sampled_from(["fp8", "bf16", "fp8_ds_mla"]))
def test_a_dealt_cache_holds_every_entry_once(group, lengths, kv_format):
    """The shards together are the cache: position by position, bit for bit, and nothing but poison beside."""
    dcp, interleave = group
    page, local = 64, 128
    table, pages = page_table(tuple(lengths), page, torch.Generator().manual_seed(1))
    cache = empty_cache(pages, page, kv_format)
    view = ref.bits(cache)
    count = torch.arange(view.shape[2] // 4, dtype=torch.int32)
    for r, length in enumerate(lengths):
        slots = slots_of(table, r, torch.arange(length), page)
        # Its request and position in every word of an entry: a copy of the wrong one is seen.
        words = (r << 24) + (torch.arange(length, dtype=torch.int32)[:, None] << 10) + count
        view[slots // page, slots % page] = words.contiguous().view(torch.uint8)
    cache = view.view(torch.bfloat16) if kv_format == "bf16" else view
    for rank in range(dcp):
        mine, used = page_table(
            tuple(-(-n // (local * dcp)) * local for n in lengths), local, torch.Generator().manual_seed(rank)
        )
        shard = empty_cache(used, local, kv_format)
        ref.shard_cache(cache, table, torch.tensor(lengths), shard, mine, dcp, rank, interleave, kv_format)
        left = ref.bits(shard)
        for r, length in enumerate(lengths):
            position = torch.arange(length)
            position = position[position // interleave % dcp == rank]
            slot = slots_of(mine, r, torch.arange(len(position)), local)
            words = (r << 24) + (position.to(torch.int32)[:, None] << 10) + count
            assert torch.equal(left[slot // local, slot % local], words.contiguous().view(torch.uint8))
            left[slot // local, slot % local] = 0xFF
        assert bool((left == 0xFF).all())


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("dcp", [2, 4, 8])
def test_ranks_give_what_one_device_gives(dcp, interleave, q):
    x = deal(ParallelCase(dcp, interleave, q, heads=1))
    expected = x.expected()
    whole = x.whole
    outs = ref.parallel_layer(list(x.shards.values()), x.totals, q, interleave)
    held = torch.stack([s.lengths for s in x.shards.values()])
    assert bool((held == 0)[:, whole.lengths > 0].any())  # some rank is without a key of a live request
    for rank, out in enumerate(outs):
        want = x.block(expected, rank)
        live = want.any(dim=1)
        assert relative_error(out[live], want[live]) < MERGE_ERROR
        assert not ref.bits(out[~live]).any()
    assert not ref.bits(expected[(whole.lengths == 0).repeat_interleave(q)]).any()


def test_the_new_tokens_are_written_once_and_where_they_are_read():
    """Each rank writes its own of the step's tokens: their entries are those that one device writes."""
    x = deal(ParallelCase(4, 16, 4, heads=1))
    twin = x.whole.cache.clone()
    ref.insert(x.whole.projected, x.attention, twin, x.whole.slots)
    before = [s.cache.clone() for s in x.shards.values()]
    ref.parallel_layer(list(x.shards.values()), x.totals, 4, 16)
    written = torch.stack([s.slots >= 0 for s in x.shards.values()]).sum(dim=0)
    assert torch.equal(written, (x.whole.slots >= 0).to(written.dtype))
    flat = twin.flatten(0, 1)
    for shard, old in zip(x.shards.values(), before, strict=True):
        mine = shard.slots >= 0
        assert torch.equal(shard.cache.flatten(0, 1)[shard.slots[mine]], flat[x.whole.slots[mine]])
        old.flatten(0, 1)[shard.slots[mine]] = shard.cache.flatten(0, 1)[shard.slots[mine]]
        assert torch.equal(old, shard.cache)


def test_mailboxes_are_by_rank_then_row_then_head():
    dcp, heads, rows = 3, 2, 5
    queries = [
        torch.arange(rows * heads, dtype=torch.uint8).view(rows, heads, 1).expand(-1, -1, 576) + 100 * d
        for d in range(2)
    ]
    box = ref.query_mailbox(queries)
    assert box.shape == (64, 4, 576)
    assert [int(box[4, h, 0]) for h in range(4)] == [8, 9, 108, 109]
    assert bool((box[rows:] == 0xFF).all())
    sent = []
    for s in range(dcp):
        number = torch.arange(rows * dcp * heads).view(rows, dcp * heads) + 1000.0 * s
        sent.append((number[..., None].expand(-1, -1, 512).bfloat16(), number))
    for rank in range(dcp):
        partial, lse = ref.partial_mailbox(sent, rank)
        assert partial.shape == (dcp, 64, heads, 512)
        for s in range(dcp):
            want = sent[s][1][:, rank * heads : (rank + 1) * heads]
            assert torch.equal(lse[s, :rows], want)
            assert torch.equal(partial[s, :rows, :, 3], want.bfloat16())
        assert bool((partial[:, rows:].contiguous().view(torch.int32) == ref.ARMED_PARTIAL).all())
        assert bool((lse[:, rows:].contiguous().view(torch.int32) == ref.ARMED_LSE).all())


def test_no_sent_word_looks_as_if_it_had_not_arrived():
    """Not for NaN rows, empty shards or values that round to -0 either."""
    x = deal(ParallelCase(4, 64, 4, heads=1))
    whole = ref.gathered([ref.query(s.projected, s.attention) for s in x.shards.values()])
    assert not bool((whole.view(torch.uint8) == 0xFF).any())
    for rank, shard in x.shards.items():
        ref.insert(shard.projected, shard.attention, shard.cache, shard.slots)
        partial, lse = ref.partial_of(whole, shard, rank, 4, x.totals, 4, 64)
        assert not bool((partial.view(torch.int32) == ref.ARMED_PARTIAL).any())
        assert not bool((partial.view(torch.int16) == -(1 << 15)).any())
        assert bool(lse.isfinite().all())
        none = (shard.lengths == 0).repeat_interleave(4)
        assert bool((lse[none] == ref.EMPTY).all())
        assert not ref.bits(partial[none]).any()


def test_what_an_empty_rank_sends_has_no_weight():
    """A rank without keys changes no bit, wherever it stands among the sources."""
    x = deal(ParallelCase(2, 64, 1, heads=1, totals=(40, 7)))
    assert x.shards[1].lengths.tolist() == [0, 0]
    outs = ref.parallel_layer(list(x.shards.values()), x.totals, 1, 64)
    for rank, out in enumerate(outs):
        steps = bf16_steps(out, x.block(x.expected(), rank))
        # One source of weight 1: the merge is the identity, so only sums of another order remain.
        assert steps.max() <= 1
        assert (steps == 0).float().mean() > 0.95


def test_short_metadata_is_padded():
    x = deal(ParallelCase(2, 1, 2, heads=1, totals=(9, 70, 0)))
    caches = [s.cache.clone() for s in x.shards.values()]
    full = ref.parallel_layer(list(x.shards.values()), x.totals, 2, 1)
    for shard, cache in zip(x.shards.values(), caches, strict=True):
        shard.cache, shard.lengths, shard.block_table = cache, shard.lengths[:2], shard.block_table[:2]
    short = ref.parallel_layer(list(x.shards.values()), x.totals[:2], 2, 1)
    assert all(torch.equal(ref.bits(a), ref.bits(b)) for a, b in zip(full, short, strict=True))


def test_what_does_not_divide_is_refused():
    x = deal(ParallelCase(2, 1, 1, heads=1, totals=(9, 70, 3)))
    with pytest.raises(ConfigError, match="q=2 must divide the 3 rows"):
        ref.parallel_layer(list(x.shards.values()), x.totals, 2)
    with pytest.raises(ConfigError, match="dcp=3 must divide the 2 heads"):
        ref.head_block(x.attention, 3, 0)


def test_the_edges_are_what_the_cases_promise():
    for dcp in (2, 4, 8):
        assert {0, 1, dcp - 1, dcp, 17, 4096 + 3} <= set(edge_totals(dcp))
