"""The driver binding on a GPU: every kind of parameter, clusters, PDL chains, capture, fresh threads, refusals."""

import threading
from dataclasses import replace

import harness
import pytest
import torch
from harness import stream
from probe import THREADS, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, ProbeKey, geometry

from k3dsl.errors import ConfigError, LaunchError
from k3dsl.nvidia.device import device
from k3dsl.nvidia.driver import Function, LaunchPlan, driver, tensor_map

pytestmark = pytest.mark.gpu

#: What tests/gpu/build_objects.py must have built.
GPU_KEYS = [ProbeKey(1), ProbeKey(4), ProbeKey(16)]
COUNT = 5000
OFFSET = -3 * 2**33 + 12345  # >> 33 gives -3: the upper word counts, and its sign


class Given:
    """Buffers of one launch, poisoned where the kernel writes."""

    def __init__(self, key: ProbeKey, count: int = COUNT) -> None:
        generator = torch.Generator("cpu").manual_seed(count)
        self.key, self.launch = key, geometry(key, count=count)
        self.source = torch.randn(count, generator=generator).cuda()
        self.keys = torch.randn(40, TILE_COLUMNS, generator=generator).bfloat16().cuda()
        self.out = torch.full((count + 8,), torch.nan, device="cuda")
        self.tile = torch.full((TILE_BYTES // 4,), -1, dtype=torch.int32, device="cuda")
        self.ranks = torch.full((self.launch.grid[0] + 1,), -1, dtype=torch.int32, device="cuda")
        self.map = tensor_map(
            driver(),
            dtype="bf16",
            address=self.keys.data_ptr(),
            dims=[TILE_COLUMNS, self.keys.shape[0]],
            strides_bytes=[TILE_COLUMNS * 2],
            box=[TILE_COLUMNS, TILE_ROWS],
        )

    def plan(self, function: Function | None = None, **changed) -> LaunchPlan:
        values = {
            "source": self.source.data_ptr(),
            "count": self.source.numel(),
            "keys": self.map,
            "scale": 0.5,
            "offset": OFFSET,
            "out": self.out.data_ptr(),
            "row": 16,
            "tile": self.tile.data_ptr(),
            "ranks": self.ranks.data_ptr(),
        }
        return LaunchPlan(function or harness.function(self.key), self.launch, self.key.params, **{**values, **changed})

    def check(self, *, scale: float = 0.5, row: int = 16) -> None:
        torch.cuda.synchronize()
        count = self.source.numel()
        assert torch.equal(self.out[:count], self.source * scale - 3.0)  # exact: scale is a power of two, one rounding
        assert self.out[count:].isnan().all()
        blocks, cluster = self.launch.grid[0], self.key.cluster
        want = [100 * cluster + i % cluster for i in range(blocks)]
        assert self.ranks.tolist() == [*want, -1]
        assert torch.equal(self.unswizzled(), self.keys[row : row + TILE_ROWS])

    def unswizzled(self) -> torch.Tensor:
        """The tile as it is in global memory: TMA put 16-byte chunk c of row r at chunk c ^ r."""
        chunks = self.tile.view(TILE_ROWS, 8, 4)
        rows = torch.arange(TILE_ROWS, device="cuda")[:, None]
        back = chunks[rows, torch.arange(8, device="cuda")[None, :] ^ rows]
        return back.reshape(TILE_ROWS, -1).view(torch.bfloat16)


@pytest.mark.parametrize("key", GPU_KEYS, ids=lambda k: f"cluster{k.cluster}")
@pytest.mark.parametrize("count", [1, THREADS, COUNT])
def test_every_kind_of_parameter(key, count):
    given = Given(key, count)
    given.plan().launch(stream())
    given.check()


@pytest.mark.parametrize("pdl", [True, False])
def test_own_stream_and_default_stream(pdl):
    for used in (torch.cuda.Stream(), torch.cuda.default_stream()):
        given = Given(ProbeKey(4))
        given.launch = replace(given.launch, pdl=pdl)
        torch.cuda.synchronize()
        given.plan().launch(used.cuda_stream)
        given.check()


def test_a_call_rewrites_what_changed():
    given, other = Given(ProbeKey(4)), Given(ProbeKey(4), 777)
    plan = given.plan()
    plan.launch(stream())
    given.check()
    plan.slot("source").value = other.source.data_ptr()
    plan.slot("count").value = other.source.numel()
    plan.slot("scale").value = 2.0
    plan.slot("row").value = 32
    for name in ("out", "tile", "ranks"):
        plan.set(name, getattr(other, name).data_ptr())
    plan.set("keys", other.keys.data_ptr())
    plan.set_grid(other.launch.grid)
    plan.launch(stream())
    other.check(scale=2.0, row=32)
    given.check()


def test_a_launch_keeps_the_values_of_its_time():
    """Values and tensor maps are copied by a launch: what is rewritten after it is for the next."""
    givens = [Given(ProbeKey(4), 600 + i) for i in range(8)]
    plan = givens[0].plan()
    torch.cuda._sleep(20_000_000)  # all launches are queued before the first one runs
    for given in givens:
        plan.set("count", given.source.numel())
        for name in ("source", "out", "tile", "ranks", "keys"):
            plan.set(name, getattr(given, name).data_ptr())
        plan.set_grid(given.launch.grid)
        plan.launch(stream())
    for given in givens:
        given.check()


@pytest.mark.parametrize("captured", [False, True])
def test_chains_wait_for_each_other(captured):
    """40 launches, each on the output of the one before, let go early by PDL: bit for bit the same as one by one."""
    key, count, length = ProbeKey(4), 100_000, 40
    given = Given(key, count)
    buffers = [given.source, torch.empty_like(given.source)]
    expected = given.source.clone()
    for _ in range(length):
        expected = expected * 0.5 - 3.0
    start = given.source.clone()
    plans = [given.plan(source=buffers[i % 2].data_ptr(), out=buffers[(i + 1) % 2].data_ptr()) for i in range(2)]
    plans[0].launch(stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            for i in range(length):
                plans[i % 2].launch(stream())
    for _ in range(20):
        buffers[0].copy_(start)
        if captured:
            graph.replay()
        else:
            for i in range(length):
                plans[i % 2].launch(stream())
        torch.cuda.synchronize()
        assert torch.equal(buffers[0], expected)


def test_capture_takes_the_values_of_its_time():
    given = Given(ProbeKey(4))
    plan = given.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert driver().is_capturing(stream())
        plan.launch(stream())
    assert not driver().is_capturing(stream())
    torch.cuda.synchronize()
    assert given.out.isnan().all()
    plan.set("scale", 8.0)
    plan.set("out", 0)
    plan.set("keys", 16)
    for _ in range(3):
        given.source.mul_(2.0)
        graph.replay()
        given.check()


def test_a_plan_first_launched_in_a_capture():
    """Code is loaded when the function is made, so that a capture loads nothing."""
    given = Given(ProbeKey(1), 333)
    plan = given.plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(stream())
    graph.replay()
    given.check()


def test_a_thread_that_never_touched_the_gpu():
    given, failures = Given(ProbeKey(4)), []
    function = harness.function(given.key)
    used = torch.cuda.Stream()
    torch.cuda.synchronize()

    def work() -> None:
        try:
            again = function.module.function(function.device)
            assert again.attribute("local_bytes") == 0
            plan = given.plan(again)
            plan.launch(used.cuda_stream)
            plan.launch(0)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    given.check()


@pytest.mark.parametrize("key", GPU_KEYS, ids=lambda k: f"cluster{k.cluster}")
def test_the_driver_sees_what_the_cubin_says(key):
    function = harness.function(key)
    facts = function.module.facts
    assert function.attribute("registers") == facts.registers
    assert function.attribute("static_smem") == facts.static_smem
    assert function.attribute("local_bytes") == facts.frame == 0
    assert function.attribute("max_threads") >= THREADS


def test_device():
    found, torch_facts = device(0), torch.cuda.get_device_properties(0)
    assert found.sm_count == torch_facts.multi_processor_count
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.name == torch.cuda.get_device_name(0)
    assert found.smem_per_block == torch_facts.shared_memory_per_block_optin
    assert found.l2_bytes == torch_facts.L2_cache_size
    assert found.target == "sm_90a"


def test_clusters_that_fit():
    function = harness.function(ProbeKey(4))
    launch = geometry(ProbeKey(4), count=1)
    fit = driver().max_active_clusters(function, launch)
    # 66 KB and 128 threads a CTA: three in an SM's shared memory
    assert device(0).sm_count // 4 // 2 <= fit <= device(0).sm_count * 3 // 4


def test_what_the_driver_would_refuse_is_refused_before():
    given = Given(ProbeKey(4))
    limit = device(0).smem_per_block
    for launch in (
        replace(given.launch, smem=limit + 16),
        replace(given.launch, grid=(3, 1, 1)),
        replace(given.launch, block=(64, 1, 1)),
    ):
        given.launch = launch
        with pytest.raises(ConfigError):
            given.plan()
    given.launch = replace(geometry(given.key, count=COUNT), smem=limit)
    given.plan().launch(stream())
    given.check()


def test_a_refused_launch_says_why_and_leaves_the_stream_valid():
    given = Given(ProbeKey(4))
    plan = given.plan()
    plan._config.grid[0] = 3  # no multiple of the cluster: past the checks
    with pytest.raises(LaunchError, match=r"probekernelProbe.*CUDA_ERROR_"):
        plan.launch(stream())
    plan.set_grid(given.launch.grid)
    plan.launch(stream())
    given.check()
