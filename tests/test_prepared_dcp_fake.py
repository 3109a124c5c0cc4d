"""Context-parallel layers on a FakeDriver: what is launched, in which order, with what, and what is refused."""

import pytest
import torch
from fake_runtime import STREAM, Bench, step
from rank_threads import ranks_of, together

from k3dsl import CaptureError, ConfigError, Deployment, LaunchError, MlaDims, NotPrepared, PeerError
from k3dsl.nvidia import DcpBox, PreparedMla, dcp, local_lengths, virtual_step
from k3dsl.nvidia.prepared_dcp import PreparedDcp
from k3dsl.nvidia.stages import HopperCore

RANKS = 2


class Group:
    """Layers of all ranks of a virtual group."""

    def __init__(self, bench: Bench, changes=None, **box) -> None:
        plan, changes = bench.plan, changes or {}
        self.bench, self.kv = bench, []
        self.boxes = DcpBox.virtual(plan.dcp, heads=plan.dims.heads, device="cpu", interleave=16, **box)
        self.layers = [
            bench.layer(
                seed=r,
                dcp=b,
                parity=1,
                query_scratch=torch.zeros(64, plan.dims.heads, 576, dtype=torch.uint8),
                **changes.get(r, {}),
            )
            for r, b in enumerate(self.boxes)
        ]

    def prepare(self) -> "Group":
        self.kv = [self.bench.kv() for _ in self.layers]
        for layer, kv in zip(self.layers, self.kv, strict=True):
            layer.prepare_cache(kv)
        return self

    def calls(self, rows: int, q: int = 1) -> list[dict]:
        one = [step(self.bench.plan.dims, rows, q) for _ in self.layers]
        totals = torch.full((rows // q,), 9, dtype=torch.int32)
        return [{**c, "cache": kv, "totals": totals} for c, kv in zip(one, self.kv, strict=True)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    plan = Deployment(MlaDims.kimi_k3(tp=8), "sm_90a", batches=(1, 4, 32), queries=(1, 4), dcp=RANKS, interleave=16)
    return Bench(tmp_path_factory.mktemp("objects"), plan)


@pytest.fixture
def group(bench):
    bench.fake.launches.clear()
    return Group(bench).prepare()


def launched(bench, start: int = 0) -> list[str]:
    names = {"query_dcp": "query", "DcpCore": "core", "hopper": "core", "merge": "merge", "value_dcp": "value"}
    found = []
    for one in bench.fake.launches[start:]:
        found.append(next((short for part, short in names.items() if part in one.symbol), one.symbol))
    return found


def params(layer, rows, q, stage):
    one = layer._steps[rows, q]
    return {"query": one.query.kernel.params, "value": one.value.key.params, "core": one.core.key.params}[stage]


def test_keys_of_a_deployment(bench):
    names = [key.kernel for key in bench.plan.keys()]  # noqa: SIM118 - a method
    assert set(names) - {"mla_epilogue"} == {
        "mla_query_dcp",
        "mla_hopper",
        "mla_hopper_dcp",
        "mla_merge",
        "mla_value_dcp",
    }
    core = next(k for k in bench.plan.keys() if k.kernel == "mla_hopper_dcp")  # noqa: SIM118
    assert core.params["heads"] == 24


@pytest.mark.parametrize("changes", [{"dcp": 3}, {"dcp": True}, {"dcp": 16}, {"interleave": 0}])
def test_a_deployment_names_ranks_that_cannot_be(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Deployment(MlaDims.kimi_k3(tp=8), "sm_90a", **changes)


def test_a_box_makes_another_layer(group):
    assert all(type(layer) is PreparedDcp for layer in group.layers)
    assert all(isinstance(layer, PreparedMla) for layer in group.layers)
    assert type(group.bench.layer) is not PreparedDcp


def test_preparing_reaches_no_other_rank(bench):
    """Launches that warm up send to the rank's own box, and wait for nothing; then the box is armed."""
    bench.fake.launches.clear()
    group = Group(bench)
    kv = bench.kv()
    group.layers[1].prepare_cache(kv)
    box, layer = group.boxes[1], group.layers[1]
    shapes = len(layer.shapes)
    assert len(bench.fake.launches) == 4 * shapes
    rows, q = layer.shapes[0]
    query, _, _, value = bench.fake.launches[:4]
    assert query.values(params(layer, rows, q, "query"))["limit"] == 0
    assert query.values(params(layer, rows, q, "query"))["peers"] == box.alone[0].data_ptr()
    assert value.values(params(layer, rows, q, "value"))["peers"] == box.alone[1].data_ptr()
    assert value.values(params(layer, rows, q, "value"))["lse_peers"] == box.alone[2].data_ptr()
    assert value.grid[0] == value.values(params(layer, rows, q, "value"))["pushers"]  # nobody merges
    assert (box.alone[1] == box.partial.data_ptr()).all()
    assert box.armed()
    assert layer._steps[rows, q].query._peers.value == box.q_peers.data_ptr()


@pytest.mark.parametrize(("rows", "q"), [(1, 1), (4, 4), (32, 1)])
def test_a_virtual_step(group, rows, q):
    start = len(group.bench.fake.launches)
    calls = group.calls(rows, q)
    virtual_step(group.layers, calls, q)
    new = group.bench.fake.launches[start:]
    assert len(new) == RANKS + 3 * RANKS + 2 * RANKS
    assert {one.stream for one in new} == {STREAM}
    for r, layer in enumerate(group.layers):
        box, call, one = group.boxes[r], calls[r], layer._steps[rows, q]
        publish = new[r].values(one.query.kernel.params)
        gather = new[RANKS + 3 * r].values(one.query.kernel.params)
        core = new[RANKS + 3 * r + 1].values(one.core.key.params)
        push = new[4 * RANKS + r].values(one.value.key.params)
        merge = new[5 * RANKS + r].values(one.value.key.params)
        assert (publish["limit"], gather["limit"]) == (0, box.limit)
        assert publish["peers"] == gather["peers"] == box.q_peers.data_ptr()
        assert gather["rank"] == push["rank"] == merge["rank"] == r
        assert gather["parity"] == push["parity"] == merge["parity"] == 1
        assert gather["projected"] == call["projected"].data_ptr()
        assert core["lengths"] == call["lengths"].data_ptr()
        assert core["table"] == call["block_table"].data_ptr()
        if q > 1:
            assert core["totals"] == call["totals"].data_ptr()
            assert (core["ranks"], core["rank"], core["interleave"]) == (RANKS, r, 16)
        for half in (push, merge):
            assert half["lengths"] == call["lengths"].data_ptr()
            assert half["totals"] == call["totals"].data_ptr()
            assert half["out"] == call["out"].data_ptr()
            assert half["gate"] == call["projected"].data_ptr() + 2 * 2112
        grid = dcp.value_grid(one.value.key, rows=rows, sm_count=132)
        assert (push["pushers"], new[4 * RANKS + r].grid[0]) == (grid.pushers, grid.pushers)
        assert (merge["pushers"], new[5 * RANKS + r].grid[0]) == (0, grid.mergers)


def test_the_core_reads_the_mailbox_and_writes_its_lse(group):
    layer, box = group.layers[0], group.boxes[0]
    core = layer._steps[4, 1].core
    assert core._core.slot("query").address == box.q[1].data_ptr()
    assert core._merge.slot("lse").value == box.rows_lse.data_ptr()
    assert core._merge.slot("out").value == box.rows.data_ptr()
    assert core._merge.slot("columns").value == 24


def test_a_step_of_a_real_rank(group):
    """As of a process of its own: one launch a stage, pushers and mergers together."""
    layer, box = group.layers[1], group.boxes[1]
    box.is_virtual = False
    start = len(group.bench.fake.launches)
    layer.run(**group.calls(4)[1])
    query, _core, _merge, value = group.bench.fake.launches[start:]
    one = layer._steps[4, 1]
    assert query.values(one.query.kernel.params)["limit"] == 10 * 10**9
    assert value.grid == (sum(one.value.grid), 1, 1)
    assert value.values(one.value.key.params)["pushers"] == one.value.grid.pushers


def test_missing_requests_are_padded_with_totals(group):
    call = group.calls(4)[0]
    short = {name: call[name][:3] for name in ("block_table", "lengths", "totals")}
    group.boxes[0].is_virtual = False
    group.layers[0].run(**{**call, **short})
    assert len(group.bench.fake.launches)


def test_padded_metadata_of_one_rank_is_not_that_of_another(group, monkeypatch):
    """It lives until it is launched: memory that was given back would be the next rank's."""
    calls = [{**c, "lengths": c["lengths"][:3] + r} for r, c in enumerate(group.calls(4))]
    seen, layer = [], type(group.layers[0])
    bound = layer.bound

    def note(self, *arguments, **named):
        found = bound(self, *arguments, **named)
        seen.append([(t.data_ptr(), t.clone()) for t in found[1] if t.dtype == torch.int32])
        return found

    monkeypatch.setattr(layer, "bound", note)
    start = len(group.bench.fake.launches)
    virtual_step(group.layers, calls)
    places = [at for rank in seen for at, _ in rank]
    assert len(set(places)) == len(places)
    for r in range(RANKS):
        push = group.bench.fake.launches[start + 4 * RANKS + r].values(params(group.layers[r], 4, 1, "value"))
        assert push["lengths"] == seen[r][1][0]
        assert seen[r][1][1].tolist() == [1 + r] * 3 + [0]


def test_refusals_of_a_step(group):
    calls = group.calls(4)
    with pytest.raises(ConfigError, match="virtual_step"):
        group.layers[0].run(**calls[0])
    with pytest.raises(ConfigError, match="parity"):
        virtual_step(group.layers[::-1], calls)
    with pytest.raises(ConfigError, match="2 ranks"):
        virtual_step(group.layers[:1], calls[:1])
    with pytest.raises(ConfigError, match="totals"):
        virtual_step(group.layers, [{**c, "totals": None} for c in calls])
    with pytest.raises(ConfigError, match="totals is int64"):
        virtual_step(group.layers, [{**c, "totals": c["totals"].long()} for c in calls])
    with pytest.raises(NotPrepared):
        virtual_step(group.layers, group.calls(2))


def test_a_wait_that_was_given_up_poisons_the_box(group):
    box = group.boxes[0]
    box.check()
    box._alarm.value = dcp.record("partial", peer=1, row=17, rank=0, parity=1)
    calls = group.calls(4)
    start = len(group.bench.fake.launches)
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 0 waited 10 s for rank 1: region partial") as caught:
            virtual_step(group.layers, calls)
        error = caught.value
        assert (error.rank, error.peer, error.region, error.row, error.parity, error.seconds) == (
            0, 1, "partial", 17, 1, 10.0,
        )  # fmt: skip
    assert len(group.bench.fake.launches) == start
    box.q[0, 3] = 5
    assert not box.armed()
    for one in group.boxes:
        one.reset()
    assert box.armed()
    virtual_step(group.layers, calls)


def test_a_stopped_rank_launches_nothing(group):
    start = len(group.bench.fake.launches)
    virtual_step(group.layers, group.calls(4), stopped=(1,))
    new = group.bench.fake.launches[start:]
    assert len(new) == 6
    assert {one.values(params(group.layers[0], 4, 1, "query"))["rank"] for one in new[:2]} == {0}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"queries": (1,)}, "queries"),
        ({"max_context": 4096}, "max_context"),
        ({"parity": 0}, "parity"),
        ({"pitches": {1: 4096, 4: 4096, 32: 4096}}, "pitches"),
    ],
)
def test_plans_that_differ_are_named(bench, changes, name):
    group = Group(bench)
    if "parity" in changes:
        group.layers[1].parity = 0
    else:
        arguments = {"query_scratch": torch.zeros(64, 12, 576, dtype=torch.uint8), "parity": 1, **changes}
        group.layers[1] = bench.layer(dcp=group.boxes[1], **arguments)
    group.layers[0].prepare_cache(bench.kv())
    with pytest.raises(ConfigError, match=f"{name} differs: rank 0 has .*rank 1 has"):
        group.layers[1].prepare_cache(bench.kv())
    assert group.layers[1]._place is None
    right = bench.layer(dcp=group.boxes[1], query_scratch=torch.zeros(64, 12, 576, dtype=torch.uint8), parity=1)
    right.prepare_cache(bench.kv())  # it may come again
    assert right._place is not None


def test_a_launch_that_cannot_be_resident_is_refused(bench):
    group = Group(bench)
    driver = bench.runtime.driver
    real, driver.max_active_clusters = driver.max_active_clusters, lambda function, launch: 11
    try:
        with pytest.raises(ConfigError, match="12 clusters of 8 CTAs that wait for other ranks, and this device holds"):
            group.layers[0].prepare_cache(bench.kv())
    finally:
        driver.max_active_clusters = real
    assert group.layers[0]._place is None


def test_prepare_dcp(group):
    for layer in group.layers:
        layer.prepare_dcp(4)
    with pytest.raises(ConfigError, match=r"prepare_dcp\(5\) must be one of"):
        group.layers[0].prepare_dcp(5)
    with pytest.raises(ConfigError, match="no cache is bound"):
        Group(group.bench).layers[0].prepare_dcp(4)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 13, "ranks": 16},
        {"ranks": 3},
        {"interleave": 0},
        {"kv_format": "fp16"},
        {"timeout": 0},
        {"timeout": 1e9},
        {"heads": True},
    ],
)
def test_refused_boxes(changes):
    arguments = {"ranks": 2, "heads": 12, "device": "cpu", **changes}
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DcpBox.virtual(arguments.pop("ranks"), **arguments)


def test_refused_layers(bench):
    boxes = DcpBox.virtual(2, heads=6, device="cpu")
    with pytest.raises(ConfigError, match="6 heads a rank"):
        bench.layer(dcp=boxes[0])
    with pytest.raises(ConfigError, match="parity=2"):
        bench.layer(dcp=DcpBox.virtual(2, heads=12, device="cpu")[0], parity=2)
    with pytest.raises(ConfigError, match="DcpBox"):
        bench.layer(dcp=object())


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (8, 1), (4, 16), (16, 64)])
def test_local_lengths(ranks, interleave):
    totals = torch.tensor([0, 1, ranks - 1, ranks, 17, 4099, 63, 64, 65])
    every = [local_lengths(totals, ranks=ranks, rank=r, interleave=interleave) for r in range(ranks)]
    assert all(x.dtype == torch.int32 for x in every)
    for i, total in enumerate(totals.tolist()):
        owners = [(p // interleave) % ranks for p in range(total)]
        assert [int(x[i]) for x in every] == [owners.count(r) for r in range(ranks)]
    with pytest.raises(ConfigError):
        local_lengths(totals, ranks=2, rank=2)


# ---- ranks that wait for each other


def processes(group: Group, seconds: float = 5.0) -> Group:
    """The group as if each rank were a process: they wait for each other."""
    for box, exchange in zip(group.boxes, ranks_of(len(group.boxes), seconds), strict=True):
        box._exchange, box.is_virtual = exchange, False
    return group


def on_all(group: Group, work):
    """work(layer, rank) on every rank at once; their errors."""
    return together(*(lambda r=r, layer=layer: work(layer, r) for r, layer in enumerate(group.layers)))


def test_a_cache_that_moves_on_one_rank_is_bound_on_all(bench):
    group = processes(Group(bench))
    caches = [bench.kv() for _ in group.layers]
    assert on_all(group, lambda layer, r: layer.prepare_cache(caches[r])) == [None, None]
    steps = [layer._steps for layer in group.layers]
    assert on_all(group, lambda layer, r: layer.prepare_cache(caches[r])) == [None, None]
    assert [layer._steps for layer in group.layers] == steps  # all are bound: nothing was done
    caches[1] = bench.kv()
    assert on_all(group, lambda layer, r: layer.prepare_cache(caches[r])) == [None, None]
    assert group.layers[1]._place[1] == caches[1].data_ptr()
    assert on_all(group, lambda layer, _: layer.prepare_dcp(4)) == [None, None]


def test_a_failure_of_one_rank_is_told_and_both_may_come_again(bench, monkeypatch):
    group = processes(Group(bench))
    caches = [bench.kv() for _ in group.layers]

    def refuse(self, what):
        raise CaptureError(f"{what} inside a capture")

    runtime = group.layers[0]._runtime
    capturing = type("Capturing", (), {"__getattr__": lambda self, name: getattr(runtime, name), "guard": refuse})()
    group.layers[0]._runtime = capturing
    mine, others = on_all(group, lambda layer, r: layer.prepare_cache(caches[r]))
    assert isinstance(mine, CaptureError)
    assert "prepare_cache: rank 0 failed: CaptureError" in str(others)
    group.layers[0]._runtime = runtime
    assert on_all(group, lambda layer, r: layer.prepare_cache(caches[r])) == [None, None]
    mine, others = on_all(group, lambda layer, r: layer.prepare_dcp(3 if r == 0 else 4))
    assert "prepare_dcp(3) must be one of" in str(mine)
    assert "rank 0 failed: ConfigError: prepare_dcp(3) must be one of" in str(others)
    assert on_all(group, lambda layer, _: layer.prepare_dcp(4)) == [None, None]


def test_a_cache_of_one_rank_of_one_device_may_move_alone(group):
    group.layers[0].prepare_cache(group.bench.kv())
    for layer in group.layers:
        layer.prepare_dcp(4)
    group.layers[1].prepare_cache(group.bench.kv())
    for layer in group.layers:
        layer.prepare_dcp(4)


def test_stock_core_checks_totals(group):
    layer, call = group.layers[0], group.calls(4, 4)[0]
    given = {name: call[name] for name in ("cache", "block_table", "lengths", "totals")}
    for totals, says in (
        (given["totals"].long(), "totals is int64, must be int32"),
        ([9], "totals is list, must be a tensor"),
    ):
        with pytest.raises(ConfigError, match=says):
            layer.stock_core(**{**given, "totals": totals}, batch=4, q=4)


@pytest.mark.parametrize("where", ["core", "armed"])
def test_a_rank_that_cannot_warm_up_says_so_and_may_come_again(bench, monkeypatch, where):
    """The others are past the comparison by then, and wait for its device."""
    group = Group(bench)
    layer, said = group.layers[0], []
    fail = group.boxes[0]._exchange.fail

    def note(what, error):
        said.append((what, str(error)))
        fail(what, error)

    def refuse(*_):
        raise LaunchError("out of memory")

    monkeypatch.setattr(group.boxes[0]._exchange, "fail", note)
    with monkeypatch.context() as broken:
        if where == "core":
            broken.setattr(HopperCore, "launch_first", refuse)
        else:
            broken.setattr(group.boxes[0], "arm", refuse)
        with pytest.raises(LaunchError, match="out of memory"):
            layer.prepare_cache(bench.kv())
    assert said == [("prepare_cache ready", "out of memory")]
    assert layer._place is None
    for one in group.layers:
        one.prepare_cache(bench.kv())
    assert [one._exchange._times["prepare_cache"] for one in group.boxes] == [1, 1]


def test_ranks_of_two_groups_or_of_two_sizes_are_no_step(group):
    other = Group(group.bench).prepare()
    start = len(group.bench.fake.launches)
    mine, theirs = group.calls(4), other.calls(4)
    with pytest.raises(ConfigError, match=r"all 2 ranks of one DcpBox.virtual"):
        virtual_step([group.layers[0], other.layers[1]], [mine[0], theirs[1]])
    with pytest.raises(ConfigError, match="the calls have 4, 1 rows, must all have the same"):
        virtual_step(group.layers, [mine[0], group.calls(1)[1]])
    assert len(group.bench.fake.launches) == start


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"interleave": 2**31}, "interleave=2147483648 must be an int from 1 to 1048576"),
        ({"kv_format": []}, r"kv_format=\[\] must be one of fp8, bf16"),
        ({"device": "nope"}, "device='nope' must be a GPU"),
        ({"device": -1}, "device=-1 must be a GPU"),
    ],
)
def test_what_a_box_cannot_read_is_named(changes, says):
    with pytest.raises(ConfigError, match=says):
        DcpBox.virtual(2, **{"heads": 12, "device": "cpu", **changes})


def test_bounds_of_a_group_are_named_before_it_is_asked_for():
    with pytest.raises(
        ConfigError, match=r"(?s)prepare_timeout=inf must be .* at most 604800.*multicast=1 must be a bool"
    ):
        DcpBox(heads=12, prepare_timeout=float("inf"), multicast=1)


def test_local_lengths_of_small_ints():
    for dtype in (torch.uint8, torch.int8, torch.int16):
        totals = torch.tensor([0, 1, 2, 3, 127], dtype=dtype)
        for ranks, interleave in ((2, 1), (16, 16)):
            for rank in range(ranks):
                want = local_lengths(totals.long(), ranks=ranks, rank=rank, interleave=interleave)
                assert torch.equal(local_lengths(totals, ranks=ranks, rank=rank, interleave=interleave), want)


def test_local_lengths_takes_ints():
    totals = torch.tensor([5])
    for changes in ({"ranks": None}, {"rank": True}, {"interleave": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            local_lengths(totals, **{"ranks": 2, "rank": 0, **changes})
    with pytest.raises(ConfigError, match=r"totals is torch\.float32, must be a tensor of ints"):
        local_lengths(totals.float(), ranks=2, rank=0)


def test_a_layer_without_a_group_has_a_parity_all_the_same(bench):
    for parity in (2, True, "x"):
        with pytest.raises(ConfigError, match=f"parity={parity!r} must be 0 or 1"):
            bench.layer(parity=parity)
    with pytest.raises(ConfigError, match="pitches is list, must be a mapping"):
        bench.layer(pitches=[4])
