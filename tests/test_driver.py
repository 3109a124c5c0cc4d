"""Modules, launches and tensor maps against a driver in Python: what it is asked to do, and what is refused before."""

import ctypes
import gc
import threading

import pytest
from fake_cuda import FakeCuda, FakeDriver, fake_build, make_cubin

from k3dsl.errors import CompileError, ConfigError, LaunchError, ToolchainError
from k3dsl.nvidia import driver as drivers
from k3dsl.nvidia.device import TARGETS, check_target, device, read
from k3dsl.nvidia.driver import (
    Driver,
    Launch,
    LaunchAttribute,
    LaunchConfig,
    LaunchPlan,
    Module,
    Param,
    TensorMap,
    tensor_map,
)

PARAMS = (
    Param("source", "ptr"),
    Param("rows", "i32"),
    Param("scale", "f32"),
    Param("keys", "tmap"),
    Param("stride", "i64"),
)
LAUNCH = Launch(grid=(16, 3, 1), block=(128, 1, 1), cluster=(8, 1, 1), smem=65536, pdl=True)


def keys(driver: Driver, address: int = 0x7F00) -> TensorMap:
    return tensor_map(
        driver, dtype="bf16", address=address, dims=[576, 64, 10], strides_bytes=[1152, 73728], box=[64, 8, 1]
    )


def values(driver: Driver) -> dict:
    return {"source": 0x10_0000_0010, "rows": -3, "scale": 0.125, "keys": keys(driver), "stride": -(2**40)}


def make_plan(driver: FakeDriver, launch: Launch = LAUNCH, **changed) -> LaunchPlan:
    function = Module.load(driver, make_cubin(PARAMS, block=(128, 1, 1))).function(0)
    return LaunchPlan(function, launch, PARAMS, **{**values(driver), **changed})


def test_layout_of_the_structures():
    """cuda.h: CUlaunchConfig and CUlaunchAttribute on a 64-bit machine."""
    assert ctypes.sizeof(LaunchConfig) == 56
    assert (LaunchConfig.smem.offset, LaunchConfig.stream.offset) == (24, 32)
    assert (LaunchConfig.attributes.offset, LaunchConfig.count.offset) == (40, 48)
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8


def test_a_launch_as_the_driver_sees_it():
    driver = FakeDriver()
    make_plan(driver).launch(0xABCD)
    (launch,) = driver.launches
    assert (launch.grid, launch.block, launch.cluster) == ((16, 3, 1), (128, 1, 1), (8, 1, 1))
    assert (launch.smem, launch.pdl, launch.stream, launch.device) == (65536, True, 0xABCD, 0)
    assert launch.attributes == (4, 6)
    found = launch.values(PARAMS)
    assert driver.tensor_map(found.pop("keys")).address == 0x7F00
    assert found == {"source": 0x10_0000_0010, "rows": -3, "scale": 0.125, "stride": -(2**40)}


@pytest.mark.parametrize(
    ("launch", "attributes"),
    [
        (Launch((1, 1, 1), (128, 1, 1), pdl=False), ()),
        (Launch((1, 1, 1), (128, 1, 1), pdl=True), (6,)),
        (Launch((2, 1, 1), (128, 1, 1), (2, 1, 1), pdl=False), (4,)),
    ],
)
def test_attributes_only_where_asked_for(launch, attributes):
    driver = FakeDriver()
    make_plan(driver, launch).launch(1)
    assert driver.launches[0].attributes == attributes
    assert driver.launches[0].pdl is launch.pdl
    assert driver.launches[0].cluster == launch.cluster


def test_a_call_rewrites_what_changed():
    driver = FakeDriver()
    plan = make_plan(driver)
    rows, source = plan.slot("rows"), plan.slot("source")
    plan.launch(1)
    rows.value, source.value = 64, 0x20
    plan.set_grid((8, 1, 2))
    plan.launch(2)
    plan.set("scale", 2)
    plan.set("keys", 0x8000)
    plan.launch(2)
    first, second, third = (x.values(PARAMS) for x in driver.launches)
    assert (first["rows"], second["rows"], second["source"], third["scale"]) == (-3, 64, 0x20, 2.0)
    assert [x.grid for x in driver.launches] == [(16, 3, 1), (8, 1, 2), (8, 1, 2)]
    assert [x.stream for x in driver.launches] == [1, 2, 2]
    assert driver.tensor_map(second["keys"]).address == 0x7F00
    assert driver.tensor_map(third["keys"]).address == 0x8000
    assert plan.launch_facts == Launch((8, 1, 2), (128, 1, 1), (8, 1, 1), 65536)


def test_a_launch_is_one_call_of_the_driver():
    driver = FakeDriver()
    plan = make_plan(driver)
    plan.launch(5)  # the first in this thread finds no context
    driver.calls.clear()
    plan.launch(5)
    assert driver.calls == {"cuLaunchKernelEx": 1}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rows": 2**31}, "rows=2147483648 must be an int from -2147483648 to 2147483647"),
        ({"rows": 1.0}, "rows=1.0 must be an int"),
        ({"rows": True}, "rows=True must be an int"),
        ({"source": -1}, "source=-1 must be an int from 0"),
        ({"source": None}, "source=None must be an int"),
        ({"scale": "1"}, "scale='1' must be a float"),
        ({"keys": 16}, "keys=16 must be a TensorMap"),
        ({"pages": 4}, "pages is no parameter, they are source, rows"),
    ],
)
def test_values_are_checked(changed, why):
    driver = FakeDriver()
    with pytest.raises(ConfigError, match=why):
        make_plan(driver, **changed)
    assert driver.launches == []


def test_every_problem_in_one_error():
    driver = FakeDriver()
    function = Module.load(driver, make_cubin(PARAMS, block=(128, 1, 1))).function(0)
    launch = Launch(grid=(12, 1, 1), block=(64, 1, 1), cluster=(8, 1, 1), smem=232449)
    with pytest.raises(ConfigError) as error:
        LaunchPlan(function, launch, PARAMS, source=1, rows="a", scale=1.0)
    text = str(error.value)
    for part in (
        "6 problems",
        "keys is missing",
        "stride is missing",
        "rows='a'",
        "grid (12, 1, 1) must be a multiple of the cluster (8, 1, 1)",
        "block (64, 1, 1) must be (128, 1, 1), as compiled",
        "smem=232449 must be from 0 to 232448 bytes",
    ):
        assert part in text


@pytest.mark.parametrize(
    "launch",
    [
        Launch((0, 1, 1), (128, 1, 1)),
        Launch((1, 65536, 1), (128, 1, 1)),
        Launch((1, 1), (128, 1, 1)),  # type: ignore[arg-type]
        Launch((1, 1, 1), (128, 1, 1), (0, 1, 1)),
        Launch((32, 1, 1), (128, 1, 1), (32, 1, 1)),
        Launch((1, 1, 1), (128, 1, 1), smem=-1),
    ],
)
def test_launches_that_no_device_takes(launch):
    driver = FakeDriver()
    with pytest.raises(ConfigError):
        make_plan(driver, launch)
    assert driver.calls["cuLaunchKernelEx"] == 0


def test_block_has_its_limit_where_the_kernel_has_none():
    driver = FakeDriver()
    function = Module.load(driver, make_cubin(())).function(0)
    with pytest.raises(ConfigError, match="must have from 1 to 1024 threads"):
        LaunchPlan(function, Launch((1, 1, 1), (1025, 1, 1)), ())


def test_static_shared_memory_counts():
    driver = FakeDriver()
    function = Module.load(driver, make_cubin((), static_smem=1024)).function(0)
    with pytest.raises(ConfigError, match="from 0 to 231424 bytes"):
        LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1), smem=232448), ())
    LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1), smem=231424), ()).launch(1)
    assert driver.launches[0].smem == 231424


def test_parameters_must_be_those_of_the_cubin():
    driver = FakeDriver()
    function = Module.load(driver, make_cubin(PARAMS[:2])).function(0)
    with pytest.raises(ConfigError, match=r"have \[8, 4\] bytes, they must have \[8, 4, 4\]"):
        LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1)), PARAMS[:3], source=0, rows=1, scale=1.0)
    with pytest.raises(ConfigError, match="kind 'u8' must be one of ptr, i32, i64, f32, tmap"):
        LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1)), [Param("source", "u8")], source=0)


def test_set_is_checked():
    plan = make_plan(FakeDriver())
    with pytest.raises(ConfigError, match="rows=4294967296"):
        plan.set("rows", 2**32)
    with pytest.raises(ConfigError, match="multiple of 16"):
        plan.set("keys", 0x8001)
    with pytest.raises(ConfigError, match=r"grid \(9, 1, 1\) must be a multiple"):
        plan.set_grid((9, 1, 1))
    assert plan.slot("rows").value == -3
    assert plan.launch_facts.grid == (16, 3, 1)


def test_attributes_are_set_once_and_only_raised():
    driver = FakeDriver()
    function = Module.load(driver, make_cubin(())).function(0)
    for smem in (60000, 50000, 60000, 70000):
        LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1), smem=smem), ()).launch(1)
    assert driver.calls["cuFuncSetAttribute"] == 2
    LaunchPlan(function, Launch((16, 1, 1), (32, 1, 1), (16, 1, 1)), ()).launch(1)
    assert driver.calls["cuFuncSetAttribute"] == 3
    assert driver.cuda.allowed == {(function.handle, 8): 70000, (function.handle, 14): 1}
    assert [launch.cluster[0] for launch in driver.launches] == [1, 1, 1, 1, 16]


def test_one_module_has_a_function_for_each_device():
    driver = FakeDriver(devices=2)
    module = Module.load(driver, make_cubin(()))
    first, second = module.function(0), module.function(1)
    assert first.handle != second.handle
    assert module.function(1) == second
    assert driver.calls["cuLibraryLoadData"] == 1
    assert driver.calls["cuKernelGetFunction"] == driver.calls["cuFuncLoad"] == 2
    for function in (first, second):
        LaunchPlan(function, Launch((1, 1, 1), (32, 1, 1), smem=60000), ()).launch(1)
    assert [launch.device for launch in driver.launches] == [0, 1]
    assert len(driver.cuda.allowed) == 2


def test_code_is_loaded_before_the_first_launch_and_nothing_in_a_capture():
    driver = FakeDriver()
    plan = make_plan(driver)
    plan.launch(3)
    assert not driver.is_capturing(3)
    with driver.capture(3):
        assert driver.is_capturing(3)
        before = driver.calls["cuStreamIsCapturing"]
        assert not driver.is_capturing(0)
        assert driver.calls["cuStreamIsCapturing"] == before
        for _ in range(3):
            plan.launch(3)
        assert driver.violations == []
        Module.load(driver, make_cubin(())).function(0)
    assert "cuLibraryLoadData" in driver.violations
    assert "cuFuncLoad" in driver.violations
    assert len(driver.launches) == 4


def test_current_context_is_left_as_it_was():
    driver = FakeDriver(devices=2)
    driver.ensure_context(1)
    before = driver.calls["cuCtxSetCurrent"]
    Module.load(driver, make_cubin(())).function(0)
    seen = ctypes.c_void_p()
    driver.cuda.cuCtxGetCurrent(ctypes.byref(seen))
    assert seen.value == 0xC1
    driver.ensure_context(0)
    driver.cuda.cuCtxGetCurrent(ctypes.byref(seen))
    assert seen.value == 0xC1
    assert driver.calls["cuCtxSetCurrent"] > before


def test_a_thread_without_a_context():
    driver = FakeDriver()
    plan = make_plan(driver)
    failures = []

    def work() -> None:
        try:
            plan.launch(9)
            plan.launch(9)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert [launch.stream for launch in driver.launches] == [9, 9]
    assert driver.calls["cuLaunchKernelEx"] == 3
    assert driver.calls["cuDevicePrimaryCtxRetain"] == 1


def test_a_module_lives_as_long_as_its_plans():
    driver = FakeDriver()
    plan = make_plan(driver)
    gc.collect()
    assert len(driver.cuda.loaded) == 1
    plan.launch(1)
    del plan
    gc.collect()
    assert driver.cuda.loaded == {}
    assert driver.calls["cuLibraryUnload"] == 1


def test_refusals_name_the_status_and_what_was_attempted():
    driver = FakeDriver()
    plan = make_plan(driver)
    plan.launch(1)
    driver.fail("cuLaunchKernelEx", 700)
    with pytest.raises(LaunchError) as error:
        plan.launch(1)
    for part in ("kernel_of_a_test", "sm_90a", "device 0", "grid=(16, 3, 1)", "CUDA_ERROR_ILLEGAL_ADDRESS (700"):
        assert part in str(error.value)
    driver.fail("cuLibraryLoadData", 200)
    with pytest.raises(
        LaunchError, match=r"loading a cubin of \d+ bytes: cuLibraryLoadData answered CUDA_ERROR_INVALID_IM"
    ):
        Module.load(driver, make_cubin(()))
    plan.launch(1)
    assert len(driver.launches) == 2


def test_objects_that_do_not_load():
    driver = FakeDriver()
    with pytest.raises(CompileError, match="not a readable cubin"):
        Module.load(driver, b"garbage")
    assert driver.calls["cuLibraryLoadData"] == 0
    with pytest.raises(LaunchError, match="cuLibraryLoadData"):
        Module.load(driver, make_cubin((), arch="sm_100a"))
    driver.fail("cuKernelGetFunction", 2)
    with pytest.raises(LaunchError, match="loading a kernel on device 0"):
        Module.load(driver, make_cubin(())).function(0)


def test_what_newer_drivers_have_is_not_needed():
    driver = FakeDriver(without=("cuFuncLoad", "cuKernelGetParamInfo"))
    make_plan(driver).launch(1)
    assert len(driver.launches) == 1


def test_a_driver_that_is_too_old():
    with pytest.raises(ToolchainError, match=r"too old: it has no cuLibraryLoadData, cuKernelGetFunction"):
        Driver(FakeCuda(without=("cuLibraryLoadData", "cuKernelGetFunction")))
    with pytest.raises(ToolchainError, match=r"serves CUDA 12\.9, kernels need 13\.0"):
        FakeDriver(version=12090)


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(drivers.ctypes, "CDLL", missing)
    monkeypatch.setattr(drivers, "_driver", None)
    with pytest.raises(ToolchainError, match=r"no CUDA driver \(libcuda.so.1: cannot open"):
        drivers.driver()


def test_clusters_that_fit():
    driver = FakeDriver(sm_count=132)
    function = Module.load(driver, make_cubin(())).function(0)
    assert driver.max_active_clusters(function, Launch((16, 1, 1), (128, 1, 1), (16, 1, 1), smem=200000)) == 8
    assert driver.cuda.allowed == {(function.handle, 8): 200000, (function.handle, 14): 1}


# ---- tensor maps


def test_a_map_as_the_driver_encodes_it():
    driver = FakeDriver()
    found = keys(driver)
    assert found.at % 64 == 0
    assert found.address == 0x7F00
    (encoded,) = driver.cuda.maps
    assert encoded == driver.tensor_map(found.bytes())
    assert (encoded.dtype, encoded.address, encoded.dims) == (9, 0x7F00, (576, 64, 10))
    assert (encoded.strides_bytes, encoded.box, encoded.steps) == ((1152, 73728), (64, 8, 1), (1, 1, 1))
    assert (encoded.interleave, encoded.swizzle, encoded.l2_promotion, encoded.fill) == (0, 3, 2, 0)


def test_a_map_of_bytes_with_one_dim():
    driver = FakeDriver()
    facts = {"dtype": "e4m3", "address": 16, "dims": [64], "strides_bytes": [], "box": [64]}
    tensor_map(driver, **facts, swizzle=64, l2_promotion=256)
    tensor_map(driver, **facts, swizzle=0, l2_promotion=0)
    assert [(m.dtype, m.swizzle, m.l2_promotion, m.strides_bytes) for m in driver.cuda.maps] == [
        (0, 2, 3, ()),
        (0, 0, 0, ()),
    ]


def test_a_map_points_elsewhere_in_place():
    driver = FakeDriver()
    found = keys(driver)
    at, before = found.at, found.bytes()
    found.encode(0x9000)
    assert found.at == at
    assert found.bytes() != before
    assert driver.tensor_map(found.bytes()).address == 0x9000


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "int4"}, "dtype='int4' must be one of u8, e4m3, bf16"),
        ({"swizzle": 256}, "swizzle=256 must be one of 0, 32, 64, 128"),
        ({"l2_promotion": 1}, "l2_promotion=1 must be one of 0, 64, 128, 256"),
        ({"address": 8}, "address=8 must be a positive multiple of 16"),
        ({"address": 0}, "address=0 must be a positive multiple of 16"),
        ({"dims": [576, 64]}, "2 dims, 2 strides, 3 box sizes"),
        ({"dims": [576, 0, 10]}, r"dims\[1\]=0 must be from 1 to 2\*\*32"),
        ({"strides_bytes": [1150, 73728]}, r"strides_bytes\[0\]=1150 must be a multiple of 16"),
        ({"strides_bytes": [1152, 2**40]}, r"strides_bytes\[1\]=1099511627776 must be"),
        ({"box": [64, 257, 1]}, r"box\[1\]=257 must be from 1 to 256"),
        ({"box": [128, 8, 1]}, "a box row of 256 bytes .* must fit the swizzle of 128 bytes"),
        ({"box": [4, 8, 1]}, "a box row of 8 bytes .* must be a multiple of 16"),
    ],
)
def test_maps_that_the_hardware_does_not_take(changed, why):
    driver = FakeDriver()
    facts = {
        "dtype": "bf16",
        "address": 0x7F00,
        "dims": [576, 64, 10],
        "strides_bytes": [1152, 73728],
        "box": [64, 8, 1],
    }
    with pytest.raises(ConfigError, match=why):
        tensor_map(driver, **{**facts, **changed})
    assert driver.cuda.maps == []


# ---- devices


@pytest.mark.parametrize(
    ("capability", "target"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((8, 0), None), ((12, 0), None)],
)
def test_target_of_a_device(capability, target):
    found = read(0, FakeDriver(capability=capability, sm_count=148))
    assert found.target == target
    assert found.capability == capability
    assert (found.sm_count, found.smem_per_block, found.name) == (148, 232448, "Fake GPU")


def test_the_device_of_the_process(fake_driver):
    assert device(0) is device(0)
    assert device(0).sm_count == 132
    with pytest.raises(ConfigError, match="device=1 must be from 0 to 0"):
        device(1)
    assert drivers.driver() is fake_driver


def test_no_device():
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        read(0, FakeDriver(devices=0))


def test_targets_are_named_in_the_refusal():
    with pytest.raises(ConfigError, match="target='sm_90' must be one of sm_90a, sm_100a, sm_103a"):
        check_target("sm_90")
    assert [check_target(name).smem for name in TARGETS] == [232448] * 3


def test_an_object_without_a_compiler():
    from k3dsl.nvidia.toolchain import compile_key
    from k3dsl.nvidia.value import ValueKey

    driver = FakeDriver(capability=(10, 3))
    built = fake_build(compile_key(ValueKey(heads=12), "sm_103a"))
    module = Module.load(driver, built.payload)
    assert [size for _, size in module.facts.params] == [8] * 5 + [4] * 5
    assert built.resources["arch"] == "sm_103a"
