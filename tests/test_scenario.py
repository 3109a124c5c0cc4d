"""The decode loop in small: slots, tables and lengths as an engine would have them."""

import pytest
import torch

from k3dsl import MlaDims
from k3dsl.scenario import LENGTHS, UNUSED_PAGE, Requests, Stack, relative_error


@pytest.mark.parametrize("q", [1, 4])
def test_steps_advance_and_no_slot_is_used_twice(q):
    requests = Requests(LENGTHS, q, page=64, steps=70)
    first = requests.step()
    assert first.lengths.tolist() == [max(n, q) if n else 0 for n in LENGTHS]
    for _ in range(70):
        step = requests.step()
        live = step.slots[step.slots >= 0]
        assert len(live.unique()) == len(live) == q * 7
        assert int(live.min()) >= 64  # page 0 belongs to nobody
        assert (step.slots[-q:] == -1).all()
        for r, length in enumerate(step.lengths.tolist()):
            pages = -(-length // 64)
            assert (step.block_table[r, :pages] < requests.pages).all()
            for t in range(q if length else 0):
                position = length - q + t
                page = step.block_table[r, position // 64]
                assert step.slots[r * q + t] == page * 64 + position % 64
        used = step.block_table[step.block_table != UNUSED_PAGE]
        assert len(used.unique()) == len(used)
        before = step.lengths
        requests.advance()
        grown = requests.step().lengths - before
        assert ((grown >= 1) & (grown <= q))[:-1].all()


def test_a_stack_is_poisoned_and_compares_entries_and_strays():
    stack = Stack(MlaDims.kimi_k3(16), layers=1, lengths=(3, 65, 0), steps=2)
    layer = stack.layers[0]
    assert layer.projected[2].isnan().all()
    assert layer.out.isnan().all()
    written = int((layer.cache.view(torch.float8_e4m3fn).float()[..., 0].isnan().logical_not()).sum())
    assert written == 2 + 64
    stack.expected()
    assert stack.entry_error() == float("inf")  # the twin has the step's entries, the cache has not
    layer.cache.copy_(layer.twin)
    assert (stack.entry_error(), stack.strays()) == (0.0, 0)
    layer.cache[0, 0, 5] = 1
    assert stack.strays() == 1


def test_relative_error():
    one = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(one, one) == 0.0
    assert relative_error(one + torch.tensor([[0.5, 0.0], [0.0, 0.0]]), one) == pytest.approx(0.1)
    assert relative_error(one + 1e-3, one) == float("inf")
    assert relative_error(torch.full((1, 2), torch.nan), one[:1]) == float("inf")
