"""The fused epilogues on the GPU against the oracle, byte for byte; caches beyond 2^32 bytes; capture and replay."""

import epilogue_cases as ec
import harness
import pytest
import torch
from epilogue_cases import Case

from k3dsl import reference
from k3dsl.errors import ConfigError
from k3dsl.nvidia import epilogue as facts
from k3dsl.nvidia import epilogue_ops as ops
from k3dsl.nvidia.epilogue import epilogue_keys

pytestmark = pytest.mark.gpu

HEADS = (1, 3, 12, 64, 128)
FORMATS = ("bf16", "fp8", "fp8_ds_mla")
#: What tests/gpu/build_objects.py must have built.
GPU_KEYS = [
    key for heads in HEADS for key in epilogue_keys(heads, kv_formats=FORMATS, dtypes=facts.DTYPES, rope=(False, True))
]


@pytest.fixture(autouse=True)
def built_objects(monkeypatch):
    """Kernels from where the other tests have them, not from the user's cache."""
    monkeypatch.setattr(ops, "_function", lambda key, device, stream: harness.function(key))
    monkeypatch.setattr(ops, "_plans", {})


def compare(case: Case) -> None:
    call = ec.make(case)
    want = call.copy().run(reference)
    there = call.copy("cuda")
    got = there.run(ops)
    torch.cuda.synchronize()
    ec.same_bits(got, want, call.args["k_pe"].dtype if case.rope else None)
    # Inputs, and what lies between pages, are as they were.
    for name, t in there.args.items():
        if name not in ("kv_cache", "q"):
            assert torch.equal(ec.whole(t).cpu(), ec.whole(call.args[name])), name
    if "kv_cache" in there.args:
        gap = ec.whole(there.args["kv_cache"]).cpu().view(case.pages, -1)
        pages = case.page_size * there.args["kv_cache"].shape[2] * there.args["kv_cache"].element_size()
        assert torch.equal(gap[:, pages:], ec.whole(call.args["kv_cache"]).view(case.pages, -1)[:, pages:])


def cases() -> list[Case]:
    found = []
    for op, kind in ec.KINDS:
        for dtype in ec.DTYPES:
            for rope in (False,) if op == "context" else (False, True):
                for pe in (False, True) if (op, kind) == ("context", "fp8") else (False,):
                    one = Case(op, kind, dtype, rope=rope, pe_fp8=pe)
                    found += [ec.but(one, values=v) for v in ("normal", "special", "tiny", "huge", "zero", "wide")]
                    found += [ec.but(one, heads=h, tokens=33, pages=6) for h in HEADS]
    for op, kind in ec.KINDS:  # both paths around their boundary, the row split of 64 tokens, single tokens
        for tokens in (1, 2, 64, 65, 200, 1000):
            found.append(Case(op, kind, heads=12, tokens=tokens, pages=40, page_size=64, strided=tokens % 2 == 0))
        found.append(Case(op, kind, heads=64, tokens=300, pages=7, page_size=96, rope=op != "context"))
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_bytes(case):
    compare(case)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", facts.FORMATS)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_33_tokens_in_random_slots(op, kind, seed):
    compare(Case(op, kind, tokens=33, pages=16, page_size=16, seed=seed, values="wide"))


@pytest.mark.parametrize("kind", facts.FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 64, 1000])
def test_page_sizes(kind, page_size):
    compare(Case("decode", kind, tokens=40, page_size=page_size, pages=-(-60 // page_size)))


@pytest.mark.parametrize("kind", facts.FORMATS)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_cache_beyond_4_gigabytes(op, kind):
    """A pool of interleaved layers: pages 64 MiB apart, 80 of them, used at both ends and in the middle."""
    width, dtype = {"plain": (576, torch.bfloat16), "fp8": (576, ec.E4M3), "fp8_ds_mla": (656, torch.uint8)}[kind]
    stride, pages, page_size = 64 << 20, 80, 64
    pool = torch.zeros(pages * stride, dtype=torch.uint8, device="cuda")
    view = pool.view(dtype) if dtype != torch.uint8 else pool
    cache = view.as_strided((pages, page_size, width), (stride // dtype.itemsize, width, 1))
    case = Case(op, kind, tokens=6, pages=1, page_size=64)
    call = ec.make(case).copy("cuda")
    far = [0, 79 * 64 + 63, 40 * 64, -1, 33 * 64 + 1, 78 * 64]
    call.args["slot_mapping"] = torch.tensor(far, device="cuda")
    call.args["kv_cache"] = cache
    call.run(ops)
    small = ec.make(case)
    small.args["slot_mapping"] = torch.tensor([0, 1, 2, -1, 3, 4])
    small.run(reference)
    torch.cuda.synchronize()
    want = small.args["kv_cache"][0].contiguous().view(torch.uint8)
    for near, slot in enumerate(s for s in far if s >= 0):
        at = slot // 64 * stride + slot % 64 * width * dtype.itemsize
        assert torch.equal(pool[at : at + want.shape[1]].cpu(), want[near]), slot
        pool[at : at + want.shape[1]] = 0
    assert int(torch.count_nonzero(pool)) == 0


@pytest.mark.parametrize("kind", facts.FORMATS)
def test_a_captured_step_allocates_nothing_and_follows_its_slots(kind):
    case = Case("decode", kind, heads=12, tokens=16, pages=8, page_size=16)
    call = ec.make(case).copy("cuda")
    out = torch.empty(16, 12, 576, dtype=ec.E4M3 if kind == "fp8" else torch.bfloat16, device="cuda")
    call.run(ops, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = torch.cuda.memory_allocated()
        call.run(ops, out=out)
        assert torch.cuda.memory_allocated() == held
    for seed in range(5):
        fresh = ec.make(ec.but(case, seed=seed))
        for name, t in fresh.args.items():
            call.args[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        want = fresh.run(reference)
        ec.same_bits({"cache": call.args["kv_cache"], "query": out}, want)


@pytest.mark.parametrize(("op", "kind"), ec.KINDS)
def test_reads_nothing_before_the_kernel_before_has_written_it(op, kind):
    """Inputs change right before every launch, which starts early (programmatic launch)."""
    case = Case(op, kind, heads=12, tokens=64, pages=8, page_size=16)
    call = ec.make(case).copy("cuda")
    names = [n for n in call.args if n != "kv_cache"]
    sets = [ec.make(ec.but(case, seed=s)) for s in range(3)]
    want = [s.copy().run(reference) for s in sets]
    device = [s.copy("cuda") for s in sets]
    fill = call.args["kv_cache"].clone() if op != "context" else None
    for i in range(30):
        if fill is not None:
            call.args["kv_cache"].copy_(fill)
        for name in names:
            call.args[name].copy_(device[i % 3].args[name])
        got = call.run(ops)
        torch.cuda.synchronize()
        ec.same_bits(got, want[i % 3])


def test_300_replays_are_bit_equal():
    case = Case("decode", "fp8_ds_mla", heads=12, tokens=64, pages=8, page_size=16, values="wide")
    call = ec.make(case).copy("cuda")
    out = torch.empty(64, 12, 576, dtype=torch.bfloat16, device="cuda")
    call.run(ops, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call.run(ops, out=out)
    first, cache = out.clone(), call.args["kv_cache"].clone()
    for _ in range(300):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)
    assert torch.equal(call.args["kv_cache"], cache)


def test_debug_names_the_slot():
    call = ec.make(Case("decode", "fp8")).copy("cuda")
    call.args["slot_mapping"][1] = 32
    with pytest.raises(ConfigError, match=r"\[32\]"):
        call.run(ops, debug=True)


def test_tensors_on_the_cpu_are_refused():
    with pytest.raises(ConfigError, match="must be on a CUDA device"):
        ec.make(Case("context", "plain")).run(ops)


def test_from_the_second_thread_and_on_a_side_stream():
    from threading import Thread

    case = Case("decode", "fp8", heads=12, tokens=8, pages=8)
    call = ec.make(case)
    want, there, got = call.copy().run(reference), call.copy("cuda"), {}
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got.update(there.run(ops))
            torch.cuda.current_stream().synchronize()

    thread = Thread(target=work)
    thread.start()
    thread.join()
    ec.same_bits(got, want)
