"""The cut of tokenspeed's shapes as a pure function, its keys, and what a deployment for Blackwell lists."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_cuda import fake_build

from k3dsl import CompileCache, ConfigError, Deployment, MlaDims
from k3dsl.nvidia import host_object, toolchain
from k3dsl.nvidia.core import HOSTS, tokenspeed
from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
from k3dsl.nvidia.image import MACHINES
from k3dsl.preparing import lacking

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)


def cut(target="sm_100a", heads=12, q=1, requests=1, bound=131072, sms=148, pack=False):
    return tokenspeed.work(target, heads=heads, q=q, requests=requests, max_context=bound, sm_count=sms, pack=pack)


@pytest.mark.parametrize(
    ("target", "heads", "bound", "sms", "splits"),
    [
        ("sm_100a", 12, 131072, 148, {1: 74, 2: 64, 4: 37, 8: 18}),
        ("sm_100a", 96, 16384, 148, {1: 64, 2: 32, 4: 16, 8: 9, 16: 4, 32: 2, 64: 1}),
        ("sm_103a", 12, 131072, 152, {1: 74, 2: 38, 4: 19, 8: 9}),
    ],
)
def test_the_published_table_of_splits(target, heads, bound, sms, splits):
    assert {b: cut(target, heads, 1, b, bound, sms).splits for b in splits} == splits


@pytest.mark.parametrize(
    ("target", "heads", "q", "tile", "rows", "groups"),
    [
        ("sm_100a", 12, 1, 64, 12, 1),
        ("sm_100a", 12, 4, 64, 48, 1),
        ("sm_100a", 12, 5, 64, 60, 1),
        ("sm_100a", 12, 6, 128, 72, 1),
        ("sm_100a", 12, 8, 128, 96, 1),
        ("sm_100a", 6, 8, 64, 48, 1),
        ("sm_103a", 12, 1, 128, 12, 1),
        ("sm_103a", 12, 4, 128, 48, 1),
        ("sm_100a", 96, 4, 128, 96, 4),
        ("sm_103a", 40, 4, 128, 80, 2),
    ],
)
def test_tile_and_fold(target, heads, q, tile, rows, groups):
    found = cut(target, heads, q)
    assert (found.tile, found.rows, found.groups) == (tile, rows, groups)


def test_packed_rows_cross_tokens():
    folded, packed = cut(heads=96, q=4), cut(heads=96, q=4, pack=True)
    assert (folded.rows, folded.groups) == (96, 4)
    assert (packed.rows, packed.groups) == (128, 3)
    assert cut(heads=12, q=4, pack=True) == cut(heads=12, q=4)  # the 64-row tile holds them


def test_the_least_splits_count_rows_and_the_automatic_ones_requests():
    assert tokenspeed.fill(8, 148) == 9
    assert cut(q=1, requests=8).splits == 18
    # 2 requests of 4 tokens: the same 8 rows, but the automatic choice sees 2
    assert cut(q=4, requests=2).splits == 64
    assert cut("sm_103a", q=4, requests=2, sms=152).splits == 32


def test_no_split_is_empty_at_the_bound_and_workspace_counts_them():
    for target in tokenspeed.TARGETS:
        for requests in (1, 2, 3, 8, 64):
            for bound in (1, 128, 129, 1000, 131072, 1 << 20):
                found = cut(target, requests=requests, bound=bound)
                blocks = -(-bound // 128)
                share = -(-blocks // found.splits)
                assert (found.splits - 1) * share < blocks
                expected = 0 if found.splits == 1 else requests * 12 * found.splits * 513 * 4
                assert found.workspace == expected


def test_bands_and_capacity():
    assert tokenspeed.bands(12, 74, 148) == 2
    assert tokenspeed.bands(12, 1, 148) == 1  # no reducer
    assert tokenspeed.bands(96, 18, 148) == 1  # halves would take two waves for one
    assert tokenspeed.bands(148, 4, 148) == 1
    keys = [
        tokenspeed.key_for("sm_100a", heads=12, q=1, requests=b, page=64, max_context=131072, sm_count=148)
        for b in (1, 2, 4, 8)
    ]
    assert [(k.capacity, k.bands) for k in keys] == [(128, 2), (64, 2), (64, 2), (32, 1)]
    single = tokenspeed.key_for("sm_100a", heads=12, q=1, requests=64, page=64, max_context=128, sm_count=148, ranks=8)
    assert single == TokenspeedKey(12, capacity=0, lse=True)


@pytest.mark.parametrize("name", ["heads", "q", "requests", "bound", "sms"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ConfigError, match="must be a positive int"):
        cut(**{name: 0})


def test_partials_beyond_32_bit_offsets_are_refused():
    with pytest.raises(ConfigError, match="at most 2147483647 can be addressed"):
        tokenspeed.work("sm_103a", heads=128, q=8, requests=64, max_context=1 << 20, sm_count=100_000)


def test_what_a_key_may_hold():
    shard = TokenspeedKey(96, 4, lse=True, pack=True, ranks=8, rank=7, interleave=16)
    assert tokenspeed.supports(shard, "sm_100a") == []
    for change, field in (
        ({"rank": 8}, "rank"),
        ({"ranks": 33}, "ranks"),
        ({"interleave": 0}, "interleave"),
        ({"ranks": 1, "rank": 0}, "interleave"),
        ({"q": 1}, "ranks"),
        ({"lse": False}, "ranks"),
    ):
        [problem] = tokenspeed.supports(replace(shard, **change), "sm_100a")
        assert problem.startswith(f"{field}=")
    bad = tokenspeed.supports(TokenspeedKey(0, 9, 128, 3, 4), "sm_90a")
    assert [p.partition("=")[0] for p in bad] == ["heads", "q", "page", "capacity", "bands", "target"]
    assert tokenspeed.supports(TokenspeedKey(96, 8, 32, 256, 2, True, True), "sm_103a") == []
    assert [tokenspeed.table_entries(page) for page in (32, 64)] == [4, 2]


def test_objects_of_shards():
    """At q = 1 one object serves every rank; above, each has its own: tokens see what the whole context allows."""
    shape = {"heads": 96, "page": 64, "max_context": 16384}
    assert tokenspeed.keys_for("sm_100a", host="x86-64", ranks=8, interleave=16, q=1, requests=1, **shape) == (
        TokenspeedKey(96, capacity=64, lse=True),
    )
    keys = tokenspeed.keys_for("sm_100a", host="x86-64", ranks=8, interleave=16, q=4, requests=2, **shape)
    one = TokenspeedKey(96, 4, capacity=16, lse=True, pack=True, ranks=8, interleave=16)
    assert keys == tuple(replace(one, rank=rank) for rank in range(8))
    assert tokenspeed.keys_for("sm_100a", host="x86-64", ranks=8, rank=3, interleave=16, q=4, requests=2, **shape) == (
        keys[3],
    )
    assert tokenspeed.keys_for(
        "sm_100a", host="x86-64", q=4, requests=2, sm_counts=(148,), **{**shape, "heads": 12}
    ) == (TokenspeedKey(12, 4, capacity=64),)


# ---- keys of a deployment


@pytest.mark.parametrize(
    ("target", "tp", "host", "count", "core"),
    [
        ("sm_100a", 8, "x86-64", 17, 8),
        ("sm_100a", 16, "x86-64", 15, 7),
        ("sm_103a", 8, "x86-64", 18, 9),
        ("sm_103a", 16, "aarch64", 16, 8),
    ],
)
def test_keys_of_a_deployment(target, tp, host, count, core):
    plan = Deployment(MlaDims.kimi_k3(tp), target=target, batches=BATCHES, queries=(1, 4), epilogues=(), host=host)
    keys = plan.keys()
    kernels = [key.kernel for key in keys]
    assert (len(set(keys)), kernels.count("mla_tokenspeed")) == (count, core)
    assert {key.target for key in keys} == {target}
    facts = next(key for key in keys if key.kernel == "mla_tokenspeed").toolchain
    assert facts["tokenspeed-mla"] == "2.0.4"
    assert facts["host_isa"] == host
    assert facts["options"] == "--opt-level 2"


def test_keys_are_the_same_without_the_package_and_in_every_process():
    code = (
        "import sys, json\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('tokenspeed_mla', 'cutlass', 'flashinfer'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "from k3dsl import Deployment, MlaDims\n"
        "print(json.dumps([k.digest for k in Deployment(MlaDims.kimi_k3(8), target='sm_103a').keys()]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    seen = json.loads(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    assert seen == [key.digest for key in Deployment(MlaDims.kimi_k3(8), target="sm_103a").keys()]  # noqa: SIM118


def test_another_bound_may_need_other_objects():
    def capacities(bound):
        plan = Deployment(MlaDims.kimi_k3(8), target="sm_100a", batches=(1,), max_context=bound)
        return [k.params["capacity"] for k in plan.keys() if k.kernel == "mla_tokenspeed"]  # noqa: SIM118

    assert capacities(131072) == [128]
    assert capacities(4096) == [32]
    assert capacities(128) == [0]


def test_without_the_package_a_build_names_it(monkeypatch):
    key = toolchain.compile_key(TokenspeedKey(12), "sm_100a")
    real = toolchain.package_version
    monkeypatch.setattr(toolchain, "package_version", lambda name: None if name == "tokenspeed-mla" else real(name))
    monkeypatch.setattr(toolchain, "installed", lambda: "4.8.1")
    message = "tokenspeed-mla is not installed: pip install --no-deps tokenspeed-mla==2.0.4"
    with pytest.raises(toolchain.ToolchainError, match=message):
        toolchain.build(key)


def test_another_version_of_the_package_loads_what_this_one_built_and_builds_nothing(monkeypatch):
    """A node that serves may have the version of its engine: objects need none of them."""
    before = toolchain.compile_key(TokenspeedKey(12), "sm_100a")
    real = toolchain.package_version
    monkeypatch.setattr(toolchain, "package_version", lambda name: "2.0.3" if name == "tokenspeed-mla" else real(name))
    monkeypatch.setattr(toolchain, "installed", lambda: "4.8.1")
    assert toolchain.compile_key(TokenspeedKey(12), "sm_100a") == before
    assert before.toolchain["tokenspeed-mla"] == "2.0.4"
    with pytest.raises(toolchain.ToolchainError, match=r"tokenspeed-mla is 2\.0\.3: pip install"):
        toolchain.build(before)


def test_a_warm_up_says_first_what_it_lacks(monkeypatch, tmp_path):
    plans = [Deployment(MlaDims.kimi_k3(8), target=t, batches=(1, 8), epilogues=()) for t in ("sm_90a", "sm_100a")]
    cache = CompileCache(tmp_path)
    monkeypatch.setattr(toolchain, "package_version", lambda name: None)
    monkeypatch.setattr(toolchain, "installed", lambda: "4.8.1")
    [said] = lacking(plans, cache)
    assert said.startswith("mla_tokenspeed for sm_100a cannot be built: tokenspeed-mla is not installed: pip install")
    assert lacking(plans[0], cache) == []
    for key in plans[1].keys():  # noqa: SIM118 - a method, not a dict's
        cache.get_or_build(key, fake_build)
    assert lacking(plans, cache) == []  # what is there need not be built
    monkeypatch.setattr(toolchain, "installed", lambda: None)
    assert lacking(plans, cache) == ["the compiler is not installed: pip install 'k3dsl[nvidia]'"]


# ---- host code


def test_hosts(monkeypatch):
    """The ISA is that of the machines with the GPUs; what is built elsewhere for them has the same keys."""
    assert set(tokenspeed.SM_COUNTS) == set(HOSTS) == set(MACHINES) == set(host_object.TARGETS)
    for machine, isa in (("x86_64", "x86-64"), ("aarch64", "aarch64"), ("arm64", "aarch64"), ("riscv64", "riscv64")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert host_object.host_isa() == isa
        plan = Deployment(MlaDims.kimi_k3(8), target="sm_103a", batches=(1, 4), core="tokenspeed")
        if isa in HOSTS:
            assert plan.keys() == replace(plan, host=isa).keys()
        else:
            with pytest.raises(ConfigError, match="host='riscv64' must be one of x86-64, aarch64"):
                plan.keys()
        assert len(replace(plan, host="aarch64").keys()) > 0
    splits = [tokenspeed.SM_COUNTS[host] for host in HOSTS]
    assert splits == [(148,), (152,)]
    with pytest.raises(ConfigError, match="host='sparc' must be one of x86-64, aarch64, or empty"):
        replace(plan, host="sparc")
