"""Decode context parallelism: who holds what, and that shards merge to the whole."""

import pytest
import torch
from cases import DCP, CoreCase, core_inputs, empty_cache, page_table, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl import reference as ref
from k3dsl.errors import ConfigError

groups = st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 4, 16, 64]))


@settings(deadline=None, max_examples=200)
@given(groups, st.integers(0, 2000))
def test_local_len_counts_owned_positions(group, total):
    dcp, interleave = group
    owners = ref.owner(torch.arange(total), dcp, interleave)
    counts = [int(ref.local_len(torch.tensor(total), dcp, rank, interleave)) for rank in range(dcp)]
    assert counts == [int((owners == rank).sum()) for rank in range(dcp)]
    assert sum(counts) == total
    if interleave == 1:
        assert counts == [(total - rank + dcp - 1) // dcp for rank in range(dcp)]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([(1, 1), (2, 1), (2, 16), (8, 1), (8, 16), (8, 64), (3, 32)]), st.sampled_from([64, 128]))
def test_slots_are_filled_in_order(group, page):
    """On each rank, owned positions in order take consecutive offsets, page after page of its table."""
    dcp, interleave = group
    total = 3 * page * dcp
    table = torch.tensor([[7, 2, 9]])
    position = torch.arange(total)
    for rank in range(dcp):
        slot = ref.local_slots(position, table.expand(total, -1), page, dcp, rank, interleave)
        mine = slot[slot >= 0]
        assert torch.equal(slot >= 0, ref.owner(position, dcp, interleave) == rank)
        assert torch.equal(mine, slots_of(table, 0, torch.arange(len(mine)), page))


def shards(x, dcp: int, interleave: int):
    """Each rank's (cache, block table, lengths), holding its share of the keys of `x`. NaN elsewhere."""
    page = x.cache.shape[1]
    for rank in range(dcp):
        lengths = ref.local_len(x.lengths, dcp, rank, interleave)
        generator = torch.Generator().manual_seed(rank)
        table, pages = page_table(tuple(lengths.tolist()), page, generator)
        cache = empty_cache(pages, page, x.kv_format)
        for r, key in enumerate(x.keys):
            position = torch.arange(len(key))
            own = position[ref.owner(position, dcp, interleave) == rank]
            slots = slots_of(table, r, torch.arange(len(own)), page)
            ref.write_entries(cache, slots, key[own, :512], key[own, 512:], x.kv_format, 2.0)
        yield rank, cache, table, lengths


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize(("dcp", "interleave"), DCP)
def test_union_of_shards_is_the_whole(dcp, interleave, q):
    """Requests with fewer keys than ranks among them: some ranks hold none."""
    x = core_inputs(CoreCase((1, 5, 25, 64, 700, 0), q=q, heads=3), seed=11)
    whole, whole_lse = x.call(ref.core64)
    partials, lses, empty = [], [], 0
    for rank, cache, table, lengths in shards(x, dcp, interleave):
        visible = ref.visible_keys(lengths, q, totals=x.lengths, dcp=(dcp, rank, interleave))
        changes = {"cache": cache, "block_table": table, "lengths": lengths, "visible": visible}
        out, lse = x.call(ref.core64, **changes)
        empty += int((lengths == 0).sum())
        partials.append(out)
        lses.append(lse)
    merged, lse = ref.merge(torch.stack(partials), torch.stack(lses), torch.float64)
    assert empty >= dcp  # the empty request everywhere, and more with large turns
    assert torch.allclose(merged, whole, rtol=1e-11, atol=1e-12)
    assert torch.allclose(lse, whole_lse, rtol=1e-12)
    # As the kernels do it: bf16 partials, float32 LSE, one more rounding.
    single = torch.stack([p.bfloat16() for p in partials]), torch.stack([v.float() for v in lses])
    rounded, _ = ref.merge(*single)
    assert (rounded.double() - whole).norm() / whole.norm() < 2**-8


def test_visible_keys_of_a_rank():
    """Ranks see, of each row's bound on the whole context, their own share and never more than they hold."""
    totals = torch.tensor([10, 3, 0])
    seen = torch.zeros(3, 4, dtype=torch.int64)
    for rank in range(4):
        lengths = ref.local_len(totals, 4, rank, 2)
        visible = ref.visible_keys(lengths, 4, totals=totals, dcp=(4, rank, 2))
        assert bool((visible <= lengths[:, None]).all())
        seen += visible
    assert seen.tolist() == [[7, 8, 9, 10], [0, 1, 2, 3], [0, 0, 0, 0]]
    with pytest.raises(ConfigError, match="totals is needed with 4 context-parallel ranks"):
        ref.visible_keys(totals, 1, dcp=(4, 0, 2))
