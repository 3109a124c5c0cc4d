"""The hopper core over a shard of a context: its builds, and its causal mask by the length of the whole context."""

import pytest
import torch
from cases import CoreCase, core_inputs
from test_hopper import ERROR, LSE, TARGET, Machine

from k3dsl import reference as ref
from k3dsl.nvidia import toolchain
from k3dsl.nvidia.core import hopper, hopper_dcp

pytestmark = pytest.mark.compile

KEYS = [
    hopper_dcp.choose(heads=heads, q=q, page=64, kv=kv) for heads, q in ((24, 4), (96, 2), (96, 4)) for kv in hopper.KV
]


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_builds(compiler, key):
    assert isinstance(key, hopper_dcp.HopperDcpKey)
    found = compiler.build(toolchain.compile_key(key, TARGET)).resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    assert found["registers"] * key.threads <= 65536


def test_one_token_needs_no_core_of_its_own():
    assert type(hopper_dcp.choose(heads=96, q=1, page=64, kv="fp8")) is hopper.HopperKey


@pytest.mark.parametrize(
    ("ranks", "interleave", "rank", "kv"),
    [(2, 1, 0, "fp8"), (8, 1, 7, "bf16"), (4, 16, 1, "fp8"), (4, 16, 1, "bf16"), (2, 64, 1, "fp8")],
)
def test_tokens_see_what_the_whole_context_allows(ranks, interleave, rank, kv):
    """Totals at which the last tokens lie on all, one or none of the ranks; shards of no key."""
    totals = torch.tensor(
        [1, 3, ranks, ranks * interleave + 2, 2 * ranks * interleave + interleave, 0, 150 * ranks + 3]
    )
    local = ref.local_len(totals, ranks, rank, interleave)
    given = core_inputs(CoreCase(tuple(local.tolist()), q=4, heads=3 if kv == "fp8" else 14, kv_format=kv))
    machine = Machine(given, seed=rank)
    machine.key = hopper_dcp.choose(heads=machine.key.heads, q=4, page=64, kv=kv)
    totals = totals.to(torch.int32)
    machine.values |= {"totals": machine.memory.place(totals), "ranks": ranks, "rank": rank, "interleave": interleave}
    out, lse = machine.core()
    visible = ref.visible_keys(given.lengths, 4, totals=totals, dcp=(ranks, rank, interleave))
    want, want_lse = given.call(ref.core64, visible=visible)
    unseen = want_lse == -torch.inf
    assert ((lse == -torch.inf) == unseen).all()
    assert (out[unseen] == 0).all()
    assert (out.double() - want).norm() <= ERROR[machine.key.p] * want.norm()
    assert (lse.double() - want_lse)[~unseen].abs().max() <= LSE
