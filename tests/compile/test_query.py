"""MlaQuery: every build compiles within its limits, and its PTX, run on the CPU, computes what the oracle does."""

import re
import struct
import subprocess
from dataclasses import replace
from importlib import metadata

import pytest
import query_cases as qc
import torch
from ptx_cluster import Cluster, Program
from ptx_grid import Memory, program
from query_cases import QueryCase

from k3dsl.nvidia import query as facts
from k3dsl.nvidia import toolchain

pytestmark = pytest.mark.compile

BUILDS = [key for kv_format in facts.ELEMENT for key in qc.every_build(kv_format)]
SMEM_LIMIT = 227 * 1024


def name(key: facts.QueryKey) -> str:
    return f"{key.schedule}{key.tile}-{key.kv_format}"


def launch(given: qc.QueryInputs, code: Program | None = None, target: str = "sm_90a") -> None:
    """Run the PTX of the case's build over its whole grid; outputs land in `given`."""
    key, case = given.case.build, given.case
    code = code or program(key, target)
    memory = Memory()
    values = facts.arguments(key, **given.tensors())
    for param in key.params:
        if param.kind == "ptr" and values[param.name]:
            tensor = given.tensors()[param.name]
            values[param.name] = memory.place(tensor, writable=param.name in ("cache", "query"))
            memory.buffers[-1].constant = param.name in ("q_norm", "kv_norm", "q_b", "w_uk")
    values["eps"] = struct.unpack("I", struct.pack("f", values["eps"]))[0]
    shape = facts.geometry(key, heads=case.heads, rows=case.rows)
    assert shape.block == (code.threads, 1, 1)
    for z in range(shape.grid[2]):
        for y in range(shape.grid[1]):
            cluster = Cluster(code, shape.cluster[0], shape.smem, shape.grid, y, z)
            cluster.run([values[p.name] for p in key.params], memory.buffers)


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


@pytest.mark.parametrize("target", facts.TARGETS)
@pytest.mark.parametrize("key", BUILDS, ids=name)
def test_builds(compiler, key, target):
    built = compiler.build(toolchain.compile_key(key, target))  # refuses local memory: spills, indexed arrays
    ctas = 2 if (key.schedule, key.tile) in facts.TWO_A_SM else 1
    assert built.resources["registers"] * facts.THREADS * ctas <= 65536
    assert facts.smem(key.schedule, key.tile).total <= SMEM_LIMIT


@pytest.mark.parametrize("key", qc.every_build("fp8"), ids=name)
def test_weights_are_requested_before_the_dependency_wait(key):
    ops = [".".join(op) for _, _, op, _ in program(key).statements]
    wait = ops.index("griddepcontrol.wait")
    assert ops[wait + 1] == "griddepcontrol.launch_dependents"
    weights = [i for i, op in enumerate(ops) if op.startswith("ld.global.nc.L1::no_allocate")]
    assert len(weights) == facts.PART_ROWS * facts.LORA // 8 // facts.THREADS
    staged = [i for i, op in enumerate(ops) if op.startswith("cp.async.cg")]
    assert len(staged) == facts.NOPE * facts.PART_COLUMNS // 8 // facts.THREADS
    assert max(weights + staged) < wait


def nvdisasm() -> str:
    files = metadata.files("nvidia-cuda-nvdisasm") or []
    return str(next(f for f in files if f.name == "nvdisasm").locate())


@pytest.mark.parametrize("key", qc.every_build("fp8"), ids=name)
def test_machine_code(compiler, key, tmp_path):
    """ptxas keeps the weight loads above the wait, and the MMAs are tensor-core instructions, no more than counted."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiler.build(toolchain.compile_key(key, "sm_90a")).payload)
    text = subprocess.run([nvdisasm(), "-c", file], capture_output=True, text=True, check=True).stdout
    ops = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    wait = ops.index("ACQBULK")
    assert ops.index("PREEXIT") > wait
    for weight, count in (("LDG.E.NA.128.CONSTANT", 18), ("LDGSTS.E.BYPASS.128", 4)):
        at = [i for i, op in enumerate(ops) if op == weight]
        assert len(at) == count
        assert max(at) < wait
    absorb = facts.NOPE // 16 * max(1, key.tile // 16)
    project = 18 * -(-key.tile // 4) if key.schedule == "narrow" else 36 * (key.tile // 16)
    assert sum(op.startswith("HMMA.16816.F32.BF16") for op in ops) == project + absorb
    assert not [op for op in ops if op.startswith(("LDL", "STL"))]


CASES = [
    *(QueryCase(b, heads=2, kv_format=f) for f in facts.ELEMENT for b in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 48, 64)),
    *(QueryCase(rows, heads=12) for rows in (1, 8, 33)),
    QueryCase(63, heads=6, name="two_tiles"),
    QueryCase(1, heads=1, name="one_head"),
    QueryCase(64, heads=1, name="few_ctas_for_the_insert"),
    QueryCase(17, heads=1, key=facts.QueryKey("narrow", 8, "fp8"), name="narrow_tiles"),
    QueryCase(5, heads=1, key=facts.QueryKey("wide", 64, "bf16"), kv_format="bf16", name="mostly_padding"),
    QueryCase(6, heads=2, page=32, gap=64, token_gap=64, pitch=4096, slots="first", name="strides"),
    QueryCase(20, heads=2, page=128, gap=576 * 7, pitch=2112, slots="all", kv_format="bf16", name="strides"),
    QueryCase(3, heads=2, slots="none", copied_uk=True, name="own_w_uk"),
    QueryCase(20, heads=2, q_scale=0.25, k_scale=2.0, eps=1e-3, name="scales"),
    QueryCase(2, heads=2, q_scale=1e-3, k_scale=1e-3, name="saturates"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_values(case):
    given = qc.inputs(case)
    launch(given)
    qc.check(given)


@pytest.mark.parametrize("kv_format", facts.ELEMENT)
@pytest.mark.parametrize("rows", [3, 20])
def test_bad_rows_stay_in_their_rows(rows, kv_format):
    case = QueryCase(rows, heads=1, kv_format=kv_format, slots="all")
    given = qc.inputs(case, bad_rows={1: torch.nan, rows - 1: torch.inf})
    launch(given)
    qc.check(given, bad_rows=(1, rows - 1))
    clean = qc.inputs(case)
    launch(clean)
    assert torch.equal(clean.query[0], given.query[0])


@pytest.mark.parametrize("key", [facts.QueryKey("narrow", 4, "fp8"), facts.QueryKey("wide", 32, "fp8")], ids=name)
def test_packed_arithmetic_is_bit_identical(key):
    given = [qc.inputs(QueryCase(4, heads=1, key=key)) for _ in range(2)]
    launch(given[0], target="sm_90a")
    launch(given[1], target="sm_100a")
    assert any("f32x2" in op for _, _, op, _ in program(key, "sm_100a").statements)
    assert torch.equal(given[0].query_bytes, given[1].query_bytes)
    assert torch.equal(given[0].cache_bytes, given[1].cache_bytes)


@pytest.mark.parametrize(
    "what",
    [
        "bar.sync",
        "barrier.cluster.arrive",
        "barrier.cluster.wait",
        "mbarrier.wait",
        "cp.async.wait_group",
        "griddepcontrol.wait",
    ],
)
@pytest.mark.parametrize("key", [facts.QueryKey("narrow", 2, "fp8"), facts.QueryKey("wide", 16, "fp8")], ids=name)
def test_no_synchronization_is_idle(key, what):
    """Each barrier and wait, left out, is noticed: so each protects something, and the machine sees races."""
    whole = program(key)
    found = [i for i, (_, _, op, _) in enumerate(whole.statements) if ".".join(op).startswith(what)]
    assert found
    for index in found:
        code = replace_statement(whole, index)
        given = qc.inputs(replace(QueryCase(2, heads=1), key=key))
        with pytest.raises(AssertionError):
            launch_and_check(given, code)


def launch_and_check(given: qc.QueryInputs, code: Program) -> None:
    launch(given, code)
    qc.check(given)


def replace_statement(whole: Program, index: int) -> Program:
    """The program without one statement."""
    code = object.__new__(Program)
    code.__dict__.update(whole.__dict__)
    raw, *_ = whole.statements[index]
    nothing = (raw, None, ["nothing"], [])
    code.statements = [*whole.statements[:index], nothing, *whole.statements[index + 1 :]]
    return code
