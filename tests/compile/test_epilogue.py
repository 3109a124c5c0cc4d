"""The epilogues: every build compiles within its limits, and its PTX, run on the CPU, gives the oracle's bytes."""

from dataclasses import replace

import epilogue_cases as ec
import pytest
import torch
from epilogue_cases import Case
from ptx_grid import Memory, program, run

from k3dsl import reference
from k3dsl.nvidia import epilogue as facts
from k3dsl.nvidia import toolchain
from k3dsl.nvidia.epilogue import EpilogueKey, epilogue_keys
from k3dsl.nvidia.epilogue_checks import check
from k3dsl.nvidia.epilogue_ops import arguments

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def compiler():
    with toolchain.Compiler() as it:
        yield it


def every_key(heads: int) -> list[EpilogueKey]:
    return epilogue_keys(
        heads, kv_formats=("bf16", "fp8", "fp8_ds_mla"), dtypes=facts.DTYPES, rope=(False, True)
    )  # fmt: skip


def label(key: EpilogueKey) -> str:
    extra = "-rope" * key.rope + "-pe8" * key.pe_fp8
    return f"{key.op}-{key.format}-{key.dtype}-h{key.heads}{extra}"


@pytest.mark.parametrize("target", facts.TARGETS)
@pytest.mark.parametrize(
    "key", [*every_key(12), *(k for h in (1, 64, 128) for k in epilogue_keys(h, kv_formats=("fp8",)))], ids=label
)
def test_builds(compiler, key, target):
    found = compiler.build(toolchain.compile_key(key, target)).resources
    assert found["frame"] == found["stack"] == found["spill_stores"] == found["spill_loads"] == 0
    # Unrotated: five CTAs an SM, so that 1280 threads with 64 bytes of loads each keep memory busy.
    assert found["registers"] <= (80 if key.rope else 48)


@pytest.mark.parametrize("key", every_key(3), ids=label)
def test_loads_follow_the_dependency_wait(key):
    ops = [".".join(op) for _, _, op, _ in program(key).statements]
    waits = [i for i, op in enumerate(ops) if op == "griddepcontrol.wait"]
    assert len(waits) == (3 if key.format == "fp8_ds_mla" else 2)
    assert all(ops[i + 1] == "griddepcontrol.launch_dependents" for i in waits)
    assert min(i for i, op in enumerate(ops) if op.startswith(("ld.global", "st.global"))) > waits[0]
    # The short paths ask L2 for their line while they wait, and have its address by then.
    prefetches = [i for i, op in enumerate(ops) if op == "prefetch.global.L2"]
    assert len(prefetches) == len(waits) - 1


def emulate(call: ec.Call, *, many: bool = False) -> dict[str, torch.Tensor]:
    """The call by the kernel's PTX. many: by the path of many tokens."""
    case, tensors = call.case, vars(ec.keys(call))
    key = EpilogueKey(case.op, case.format, case.dtype, case.heads, case.rope, case.pe_fp8)
    fp8 = case.format == "fp8"
    outs = {"out": 576} if case.op == "decode" else {"k_out": 192}
    if fp8 and case.op != "decode":
        outs |= {"v_out": 128} | ({"q_out": 192} if case.op == "prefill" else {})
    dtype = ec.E4M3 if fp8 else ec.DTYPES[case.dtype]
    results = {n: torch.empty(case.tokens, case.heads, width, dtype=dtype) for n, width in outs.items()}
    lead = ("ql_nope", "k_nope")
    tensors = {n: tensors[n] for n in sorted(tensors, key=lambda n: n not in lead)}
    assert check(key, tensors, results, case.tokens) == []
    values, memory = arguments(key, {**tensors, **results}, case.tokens), Memory()
    for name, t in {**tensors, **results}.items():
        if name in values:
            values[name] = memory.place(t, name in results or name == "cache" or (name == "q" and not fp8))
    shape = facts.geometry(key, tokens=case.tokens)
    if many:
        values["per_thread"] = facts.most_per_thread(key)
        blocks = -(-case.tokens * facts.units(key) // (facts.THREADS * values["per_thread"]))
        records = -(-case.tokens // facts.WARPS) if key.format == "fp8_ds_mla" else 0
        shape = replace(shape, grid=(records + blocks, 1, 1))
    run(key, shape, values, memory)
    found = {} if case.op == "context" else {"cache": tensors["cache"]}
    renamed = {"out": "query", "k_out": "k", "v_out": "v", "q_out": "q"}
    found |= {renamed[n]: t for n, t in results.items()}
    if case.op == "prefill" and not fp8:
        found["q_in"] = tensors["q"]
    return found


VALUES = ("normal", "special", "tiny", "huge", "zero", "wide")
CASES = [
    Case(op, kind, dtype, rope=rope, pe_fp8=pe, values=values)
    for op, kind in ec.KINDS
    for dtype in ec.DTYPES
    for rope in ((False,) if op == "context" else (False, True))
    for pe in ((False, True) if (op, kind) == ("context", "fp8") else (False,))
    for values in VALUES
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bytes(case):
    call = ec.make(case)
    want = call.copy().run(reference)
    ec.same_bits(emulate(call), want)


SHAPES = [
    Case(op, kind, heads=heads, tokens=tokens, rope=op != "context", pages=6, page_size=page, strided=strided)
    for op, kind in ec.KINDS
    for heads, tokens, page, strided in ((1, 1, 8, True), (2, 33, 7, True), (12, 9, 64, False), (5, 8, 2, True))
]


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_shapes(case, many):
    call = ec.make(case)
    want = call.copy().run(reference)
    ec.same_bits(emulate(call, many=many), want)


@pytest.mark.parametrize("kind", facts.FORMATS)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_negative_slots_skip_the_insert_alone(op, kind):
    call = ec.make(Case(op, kind, tokens=6))
    call.args["slot_mapping"].copy_(torch.tensor([-1, 0, -(2**40), 31, -1, 9]))
    before = ec.clone(call.args["kv_cache"])
    want = call.copy().run(reference)
    got = emulate(call)
    ec.same_bits(got, want)
    pattern, after = (c.reshape(-1, c.shape[-1]).view(torch.uint8) for c in (before, call.args["kv_cache"]))
    changed = (pattern != after).any(1).nonzero().flatten().tolist()
    assert changed == [0, 9, 31]


@pytest.mark.parametrize("kind", facts.FORMATS)
def test_slots_beyond_the_first_4_gigabytes(kind):
    """Page 40 of pages 2**28 bytes apart. The machine's buffers are small: the cache is named from where it is used."""
    call = ec.make(Case("decode", kind, tokens=2, strided=False, pages=1, page_size=16))
    call.args["slot_mapping"].copy_(torch.tensor([40 * 16 + 3, 40 * 16]))
    near = call.copy()
    near.args["slot_mapping"].copy_(torch.tensor([3, 0]))
    want = near.run(reference)
    case, tensors = call.case, vars(ec.keys(call))
    key = EpilogueKey("decode", kind, "bf16", case.heads)
    out = {"out": torch.empty_like(want["query"])}
    values, memory = arguments(key, {**tensors, **out}, 2), Memory()
    for name, t in {**tensors, **out}.items():
        if name in values:
            values[name] = memory.place(t, name in ("out", "cache"))
    values["page_stride"] = 1 << 28
    values["cache"] -= 40 << 28
    run(key, facts.geometry(key, tokens=2), values, memory)
    ec.same_bits({"cache": tensors["cache"], "query": out["out"]}, want)
