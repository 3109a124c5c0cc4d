"""DCP on the device: MlaQuery that publishes, and DcpValue. Every build within its limits; their PTX, run on the CPU
for several ranks that share memory, does what the oracle does, arms what it must, and gives up in time."""

import pytest
import query_cases as qc
import torch
from ptx_grid import Memory
from ptx_peers import launch, program
from query_cases import QueryCase

from k3dsl import reference as ref
from k3dsl.nvidia import dcp, toolchain
from k3dsl.nvidia import query as queries
from k3dsl.nvidia import value as values

pytestmark = pytest.mark.compile

NAN = float("nan")
PATIENT, SHORT = 10**9, 3000  # nanoseconds


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


QUERIES = [
    *((rows, "fp8", 16, False, "sm_90a") for rows in (1, 2, 4, 8, 16, 32, 64)),
    *((rows, "bf16", 2, True, "sm_90a") for rows in (2, 64)),
    *((rows, "fp8", 8, False, target) for rows in (2, 64) for target in ("sm_100a", "sm_103a")),
]


@pytest.mark.parametrize(("rows", "kv", "ranks", "multicast", "target"), QUERIES)
def test_query_builds(compiler, rows, kv, ranks, multicast, target):
    key = dcp.query_config(12, rows, kv, ranks, multicast)
    found = compiler.build(toolchain.compile_key(key, target)).resources  # refuses local memory
    ctas = 2 if (key.schedule, key.tile) in (("narrow", 1), ("wide", 16)) else 1
    assert found["registers"] * dcp.THREADS * ctas <= 65536


VALUES = [
    *((heads, ranks, tile, "sm_90a") for heads, ranks in ((12, 2), (12, 8), (6, 16)) for tile in values.TILES),
    *((6, 16, 32, target) for target in ("sm_100a", "sm_103a")),
]


@pytest.mark.parametrize(("heads", "ranks", "tile", "target"), VALUES)
def test_value_builds(compiler, heads, ranks, tile, target):
    key = dcp.DcpValueKey(heads, ranks, tile)
    found = compiler.build(toolchain.compile_key(key, target)).resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    assert found["registers"] * dcp.THREADS * dcp.CTAS_A_SM <= 65536
    assert key.smem * dcp.CTAS_A_SM <= 227 * 1024


def operations(key) -> list[str]:
    return [".".join(op) for _, _, op, _ in program(key).statements]


def test_stores_to_other_ranks_are_ordinary_unless_asked_for():
    """Multicast can take a machine's GPUs out of service: no instruction of it without the user's word."""
    plain, all_at_once = (operations(dcp.query_config(12, 1, "fp8", 8, m)) for m in (False, True))
    assert not any("multimem" in op for op in plain + operations(dcp.DcpValueKey(12, 8)))
    assert sum(op == "st.relaxed.sys.global.v4.b32" for op in plain) == 8
    assert sum(op.startswith("multimem.st.relaxed.sys") for op in all_at_once) == 2
    assert not any(op.startswith("st.relaxed.sys.global.v") for op in all_at_once)


def test_weights_are_requested_before_the_dependency_wait():
    ops = operations(dcp.DcpValueKey(12, 8))
    waits = [i for i, op in enumerate(ops) if op == "griddepcontrol.wait"]
    weights = [i for i, op in enumerate(ops) if op.startswith("ld.global.L1::no_allocate")]
    assert len(weights) == 4
    assert any(max(weights) < wait for wait in waits)
    assert max(i for i, op in enumerate(ops) if op == "ld.relaxed.sys.global.b32") > min(waits)


class Boxes:
    """The mailboxes of all ranks, in one memory, armed."""

    def __init__(self, ranks: int, heads: int, element: int = 1) -> None:
        self.memory, self.ranks, self.heads = Memory(), ranks, heads
        every = ranks * heads
        self.q, self.q_at = self.place((2, 64, every, 576 * element), torch.uint8, torch.int32, dcp.ARMED)
        self.partial, self.partial_at = self.place(
            (2, ranks, 64, heads, 512), torch.bfloat16, torch.int32, dcp.ARMED_PARTIAL
        )
        self.lse, self.lse_at = self.place((2, ranks, 64, heads), torch.float32, torch.int32, dcp.ARMED)
        tables = [torch.tensor(at) for at in (self.q_at, self.partial_at, self.lse_at)]
        self.keep = tables
        self.q_peers, self.peers, self.lse_peers = (self.memory.place(t) for t in tables)
        self.marks = [[torch.zeros(1, dtype=torch.int64) for _ in range(2)] for _ in range(ranks)]
        self.marks_at = [[self.memory.place(t, writable=True) for t in both] for both in self.marks]

    def place(self, shape, dtype, words, armed):
        tensors = [torch.empty(shape, dtype=dtype) for _ in range(self.ranks)]
        for tensor in tensors:
            tensor.view(words).fill_(armed)
        return tensors, [self.memory.place(t, writable=True) for t in tensors]

    def late(self, tensor: torch.Tensor, writable: bool = False) -> int:
        """What the kernel before writes."""
        at = self.memory.place(tensor, writable)
        self.memory.buffers[-1].constant = False
        return at

    def common(self, rank: int, parity: int) -> dict:
        poison, alarm = self.marks_at[rank]
        return {"poison": poison, "alarm": alarm, "limit": PATIENT, "parity": parity, "rank": rank}

    def lost(self, rank: int):
        """What the rank's first wait that was given up leaves; None: none was."""
        poison, alarm = (int(t[0]) for t in self.marks[rank])
        assert poison == alarm
        return dcp.peer_error(alarm, 1.0) if alarm else None


def query_group(rows: int, ranks: int, heads: int, kv: str, parity: int):
    """(boxes, key, launch, the ranks' inputs, their parameters)."""
    boxes, key = Boxes(ranks, heads, queries.ELEMENT[kv]), dcp.query_config(heads, rows, kv, ranks)
    given, each = [], []
    for rank in range(ranks):
        inputs = qc.inputs(QueryCase(rows, heads=heads, kv_format=kv), seed=rank)
        tensors = inputs.tensors()
        found = queries.arguments(key.query, **tensors)
        for p in queries.QueryKey.params:
            if p.kind == "ptr" and found[p.name]:
                found[p.name] = boxes.memory.place(tensors[p.name], writable=p.name in ("cache", "query"))
                boxes.memory.buffers[-1].constant = p.name in ("q_norm", "kv_norm", "q_b", "w_uk")
        found |= {"box": boxes.q_at[rank], "peers": boxes.q_peers, **boxes.common(rank, parity)}
        given.append(inputs)
        each.append(found)
    return boxes, key, dcp.query_geometry(key, heads=heads, rows=rows), given, each


@pytest.mark.parametrize(
    ("rows", "ranks", "heads", "kv", "parity"),
    [(1, 2, 2, "fp8", 0), (5, 4, 1, "bf16", 1), (17, 2, 1, "fp8", 1)],
)
def test_queries_of_all_ranks_reach_all_ranks(rows, ranks, heads, kv, parity):
    boxes, key, shape, given, each = query_group(rows, ranks, heads, kv, parity)
    for found in each:
        launch(key, shape, {**found, "limit": 0}, boxes.memory)
    for found in each:
        launch(key, shape, found, boxes.memory)
    want = torch.cat([x.tensors()["query"][:rows].view(torch.uint8).view(rows, heads, -1) for x in given], 1)
    for rank in range(ranks):
        qc.check(given[rank])
        assert torch.equal(boxes.q[rank][parity, :rows], want)
        assert (boxes.q[rank][parity, rows:] == 0xFF).all()
        assert (boxes.q[rank][1 - parity] == 0xFF).all()
        assert boxes.lost(rank) is None


def test_a_rank_that_publishes_nothing_is_named():
    boxes, key, shape, _, each = query_group(2, 4, 1, "fp8", 1)
    for rank in (0, 1, 3):
        launch(key, shape, {**each[rank], "limit": 0}, boxes.memory)
    for rank in (0, 3):
        launch(key, shape, {**each[rank], "limit": SHORT}, boxes.memory)
        error = boxes.lost(rank)
        assert (error.rank, error.peer, error.region, error.parity) == (rank, 2, "q", 1)
        assert error.row in (0, 1)
    assert boxes.lost(1) is None


def value_group(rows: int, ranks: int, heads: int, q: int, parity: int, seed: int = 0):
    """(boxes, key, the ranks' parameters, outputs, and what the oracle says: published parts and outputs)."""
    g = torch.Generator().manual_seed(seed)
    boxes, key = Boxes(ranks, heads), dcp.DcpValueKey(heads, ranks, values.tile_for(rows))
    every, requests = ranks * heads, rows // q
    totals = torch.randint(1, 9000, (requests,), generator=g, dtype=torch.int32)
    totals[1:2], totals[2:3] = 0, 1  # nobody has a key; one rank has one
    each, outs, parts, gates, weights = [], [], [], [], []
    for rank in range(ranks):
        local = ref.local_len(totals, ranks, rank, 16).to(torch.int32)
        latent = torch.randn(rows, every, 512, generator=g).bfloat16()
        lse = torch.randn(rows, every, generator=g) * 4
        latent[0, 0, :7] = -0.0
        lse[-1, 0] = -torch.inf  # as a token in front of the first key
        latent[-1, 0] = 0.0
        empty = (local == 0).repeat_interleave(q)
        latent[empty], lse[empty] = NAN, NAN  # what a core may leave of an empty shard
        packed = torch.randn(rows, 2112 + heads * 128, generator=g).bfloat16()
        packed[(totals == 0).repeat_interleave(q)] = NAN
        weight = (torch.randn(heads, 256, 512, generator=g) * 0.05).bfloat16()[:, 128:].transpose(1, 2)
        gate = packed[:, 2112:]
        out = torch.full((rows, heads * 128), NAN, dtype=torch.bfloat16)
        some = torch.zeros(rows, heads, 512, dtype=torch.bfloat16)
        plain = values.ValueKey(heads, key.tile)
        found = values.arguments(plain, latent=some, weight=weight, gate=gate, lengths=totals, out=out, q=q)
        boxes.q[rank][parity, :rows] = 3
        found |= {
            "latent": boxes.late(latent),
            "latent_lse": boxes.late(lse),
            "peers": boxes.peers,
            "lse_peers": boxes.lse_peers,
            "box": boxes.q_at[rank],
            "partial": boxes.partial_at[rank],
            "lse": boxes.lse_at[rank],
            "weight": boxes.memory.place(weight),
            "gate": boxes.late(gate),
            "lengths": boxes.late(local),
            "totals": boxes.late(totals),
            "out": boxes.late(out, writable=True),
            "entry": 576,
            **boxes.common(rank, parity),
        }
        each.append(found)
        outs.append(out)
        parts.append(ref.published(latent, lse, local, q))
        gates.append(gate)
        weights.append(weight)
    want = []
    for rank in range(ranks):
        mine = slice(rank * heads, (rank + 1) * heads)
        merged, _ = ref.merge(torch.stack([p[:, mine] for p, _ in parts]), torch.stack([x[:, mine] for _, x in parts]))
        want.append(ref.value(merged, weights[rank], gates[rank], totals, q))
    return boxes, key, each, outs, parts, want


def halves(key: dcp.DcpValueKey, rows: int):
    """((launch, parameters) of the CTAs that push, those of the CTAs that merge)."""
    grid = dcp.value_grid(key, rows=rows, sm_count=132)
    return (
        (dcp.value_geometry(key, grid.pushers), {"pushers": grid.pushers}),
        (dcp.value_geometry(key, grid.mergers), {"pushers": 0}),
    )


@pytest.mark.parametrize(
    ("rows", "ranks", "heads", "q", "parity"),
    [(1, 2, 2, 1, 1), (8, 4, 2, 4, 0), (17, 2, 1, 1, 1), (3, 16, 1, 1, 0), (40, 2, 3, 4, 0)],
)
def test_shards_are_merged_where_their_head_is(rows, ranks, heads, q, parity):
    boxes, key, each, outs, parts, want = value_group(rows, ranks, heads, q, parity)
    push, merge = halves(key, rows)
    for found in each:
        launch(key, push[0], {**found, **push[1]}, boxes.memory)
    for rank in range(ranks):
        assert (boxes.q[rank] == 0xFF).all()  # what the core has read is armed again
        mine = slice(rank * heads, (rank + 1) * heads)
        for source, (partial, lse) in enumerate(parts):
            there = boxes.partial[rank][parity, source, :rows]
            assert torch.equal(there.view(torch.int16), partial[:, mine].contiguous().view(torch.int16))
            assert torch.equal(boxes.lse[rank][parity, source, :rows], lse[:, mine])
    for found in each:
        launch(key, merge[0], {**found, **merge[1]}, boxes.memory)
    for rank in range(ranks):
        assert boxes.lost(rank) is None
        assert (boxes.partial[rank].view(torch.int32) == dcp.ARMED_PARTIAL).all()
        assert (boxes.lse[rank].view(torch.int32) == dcp.ARMED).all()
        # Here products are exact and sums of float32 in the oracle's order or not: a rounding may differ.
        assert (outs[rank].float() - want[rank].float()).abs().max() <= 2**-7 * want[rank].float().abs().max()
        assert (outs[rank] != want[rank]).float().mean() < 1e-3
        zero = (want[rank] == 0).all(1)
        assert (outs[rank][zero].view(torch.int16) == 0).all()


def test_pushers_and_mergers_in_one_launch():
    """The pushers come first: with one rank's left to do, its own launch finds everything."""
    boxes, key, each, outs, _, want = value_group(2, 2, 1, 1, 0)
    push, _ = halves(key, 2)
    grid = dcp.value_grid(key, rows=2, sm_count=132)
    launch(key, push[0], {**each[1], **push[1]}, boxes.memory)
    launch(key, dcp.value_geometry(key, sum(grid)), {**each[0], "pushers": grid.pushers}, boxes.memory)
    assert boxes.lost(0) is None
    assert torch.equal(outs[0], want[0])


@pytest.mark.parametrize("region", ["lse", "partial"])
def test_a_part_that_never_comes_is_named(region):
    boxes, key, each, _, _, _ = value_group(2, 4, 1, 1, 1)
    push, merge = halves(key, 2)
    for found in each:
        launch(key, push[0], {**found, **push[1]}, boxes.memory)
    if region == "lse":
        boxes.lse[0][1, 2, 1, 0].view(torch.int32).fill_(dcp.ARMED)
    else:
        boxes.partial[0][1, 2, 1, 0, 500:502].view(torch.int32).fill_(dcp.ARMED_PARTIAL)
    launch(key, merge[0], {**each[0], **merge[1], "limit": SHORT}, boxes.memory)
    error = boxes.lost(0)
    assert (error.rank, error.peer, error.region, error.row, error.parity) == (0, 2, region, 1, 1)
    # What is poisoned gives up at once, however long the bound, and keeps the first record.
    assert launch(key, merge[0], {**each[0], **merge[1], "limit": 1 << 62}, boxes.memory)
    assert boxes.lost(0).region == region


def test_grids():
    for rows in (1, 3, 16, 17, 64):
        for heads, ranks in ((12, 2), (12, 8), (6, 16)):
            key = dcp.DcpValueKey(heads, ranks, values.tile_for(rows))
            grid = dcp.value_grid(key, rows=rows, sm_count=132)
            assert grid.pushers % dcp.CLUSTER == grid.mergers % dcp.CLUSTER == 0
            assert grid.pushers >= dcp.CLUSTER
            assert sum(grid) <= dcp.CTAS_A_SM * 132
    assert dcp.value_grid(dcp.DcpValueKey(12, 8, 32), rows=64, sm_count=20).pushers == dcp.CLUSTER
