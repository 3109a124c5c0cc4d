"""The hopper core and its merge on the GPU against float64 attention on the same bytes."""

import random
from dataclasses import replace

import harness
import pytest
import torch
from cases import CORE_CASES, CoreCase, CoreInputs, core_inputs
from core_runs import Run, Workspace

from k3dsl import reference as ref
from k3dsl.nvidia.core import hopper

pytestmark = pytest.mark.gpu

FORMATS = ("fp8", "bf16")
#: Relative error of the output before it is rounded to bf16, by the type of P. f16: 11 bits, and what QK in FP8 loses
#: (2e-4). bf16: 8 bits, half a unit is 2e-3. e4m3: 4 bits, a quarter of a unit on average is 2.5 %; where few keys
#: weigh most it comes through.
ERROR = {"f16": 4e-4, "bf16": 2.5e-3, "e4m3": 3e-2}
BF16 = 1.8e-3  # rounding the output adds this
#: Base-2 LSE. Scores of FP8 products are off by up to 1e-3; near -1e5 float32 itself has steps of 2^-7.
LSE_ABSOLUTE, LSE_RELATIVE = 2e-3, 2e-7

#: (case, type of P; None: the default)
VALUES = [
    *((case.of(kv), None) for kv in FORMATS for case in CORE_CASES),
    *((replace(CORE_CASES[3], name="p", q=q), p) for q in (1, 2, 4) for p in hopper.P_DTYPES["fp8"]),
    *((CoreCase((65, 1000), spike=12.0, q=q, name="sharp"), p) for q in (1, 4) for p in hopper.P_DTYPES["fp8"]),
    *((CoreCase((200, 90), heads=6, q=q, name="narrow"), None) for q in (1, 2, 3, 5, 6, 7, 8)),
    *((CoreCase((200, 90), q=q, page=page, name="blocks"), None) for q in (5, 6, 7, 8) for page in (32, 128)),
    (CoreCase((300, 2, 129), heads=96, q=8, name="many_blocks"), None),
    (CoreCase((300, 2, 129), heads=96, q=8, kv_format="bf16", name="many_blocks"), None),
    (CoreCase((100,) * 64, name="r64"), None),
    (CoreCase(tuple(range(0, 640, 10)), name="r64_ramp"), None),
    (CoreCase(tuple(range(0, 640, 10)), kv_format="bf16", page=32, name="r64_ramp"), None),
]
LONG = [
    CoreCase((length,), kv_format=kv, q=q, heads=heads, name=f"long{length}")
    for kv in FORMATS
    for heads, q in ((12, 1), (12, 4), (6, 1), (96, 1))
    for length in (1000, 8192, 40000)
]
#: Shapes of the random batches.
SHAPES = [(12, 1, "fp8"), (12, 4, "fp8"), (6, 1, "fp8"), (96, 1, "fp8"), (12, 1, "bf16"), (12, 4, "bf16")]


def keys_of(heads: int, q: int, page: int, kv: str, p: str | None, requests) -> list:
    key = hopper.choose(heads=heads, q=q, page=page, kv=kv, p=p)
    return [key, *(hopper.merge_key(key, requests=r) for r in requests)]


#: What tests/gpu/build_objects.py must have built.
GPU_KEYS = list(
    dict.fromkeys(
        key
        for heads, q, page, kv, p, requests in [
            *((c.heads, c.q, c.page, c.kv_format, p, [len(c.lengths)]) for c, p in VALUES),
            *((c.heads, c.q, c.page, c.kv_format, None, [1]) for c in LONG),
            *((h, q, 64, kv, None, range(1, 65)) for h, q, kv in SHAPES),
        ]
        for key in keys_of(heads, q, page, kv, p, requests)
    )
)


def ident(value) -> str:
    return getattr(value, "id", None) or str(value or "")


def check(run: Run, *, slack: float = 1.0) -> None:
    """One launch of `run` against float64."""
    out, lse = run()
    want, want_lse = run.given.call(ref.core64)
    unseen = want_lse == -torch.inf
    assert (out[unseen].view(torch.int16) == 0).all()  # +0
    assert (lse[unseen] == -torch.inf).all()
    if unseen.all():
        return
    assert torch.isfinite(out).all()
    off = (lse.double() - want_lse)[~unseen].abs()
    # What QK loses grows with the query.
    bound = LSE_ABSOLUTE * run.given.spike + LSE_RELATIVE * want_lse[~unseen].abs()
    assert (off <= bound).all(), f"lse off by {off.max().item():.2e}"
    limit = ERROR[run.key.p] * slack
    unrounded = run.unrounded()
    for r in range(len(run.given.lengths)):
        norm = want[r].norm()
        if norm > 0:
            assert (unrounded[r] - want[r]).norm() / norm <= limit, f"request {r}"
            assert (out[r].double() - want[r]).norm() / norm <= (limit**2 + BF16**2) ** 0.5, f"request {r}"


def slack_of(case: CoreCase) -> float:
    """Where scores are large, float32 holds them with steps that count: at -8.5e5, 2^-4 before the scale of 0.1."""
    return 20.0 if case.low else 4.0 if case.spike > 1 else 1.0


@pytest.mark.parametrize(("case", "p"), VALUES, ids=ident)
def test_values(case, p):
    check(Run(core_inputs(case, device="cuda"), p=p), slack=slack_of(case))


@pytest.mark.parametrize("case", LONG, ids=ident)
def test_long(case):
    check(Run(core_inputs(case, device="cuda")))


@pytest.mark.parametrize("sm_count", [1, 2, 7, 40, 131])
@pytest.mark.parametrize("kv", FORMATS)
def test_any_number_of_ctas(kv, sm_count):
    """Rings that wrap, many requests a CTA, CTAs with nothing to do: the same values."""
    for q in (1, 4):
        case = CoreCase((900, 0, 64, 1, 130, 2000), q=q, kv_format=kv)
        check(Run(core_inputs(case, device="cuda"), sm_count=sm_count))


@pytest.mark.parametrize("case", [c.of(kv) for kv in FORMATS for c in CORE_CASES], ids=ident)
def test_poison_changes_no_bit(case):
    """NaN past every length and in every other page, huge page numbers in unused entries."""
    clean, poisoned = (Run(core_inputs(case, device="cuda", poison=p))() for p in (False, True))
    assert torch.equal(clean[0].view(torch.int16), poisoned[0].view(torch.int16))
    assert torch.equal(clean[1].view(torch.int32), poisoned[1].view(torch.int32))


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("q", [2, 4, 8])
def test_tokens_are_requests_of_one_token(kv, q):
    """q tokens in one call are q calls of one token, each with its own length: the same but for rounding."""
    case = CoreCase((300, 70, 9), q=q, kv_format=kv)
    given = core_inputs(case, device="cuda")
    out, lse = Run(given)()
    query = given.query.unflatten(0, (-1, q))
    for t in range(q):
        one = replace(
            given,
            q=1,
            query=query[:, t].contiguous(),
            lengths=(given.lengths - (q - 1) + t).to(torch.int32).contiguous(),
        )
        got, got_lse = Run(one)()
        norm = got.double().norm()
        assert (out[:, t].double() - got[:, 0].double()).norm() / norm < 5e-3
        assert (lse[:, t] - got_lse[:, 0]).abs().max() < LSE_ABSOLUTE


GPU_KEYS += [
    k for kv in FORMATS for q in (1, 2, 4, 8) for k in keys_of(12, q, 64, kv, None, [3, 6]) if k not in GPU_KEYS
]


def random_lengths(rnd: random.Random) -> tuple[int, ...]:
    top = rnd.choice([100, 700, 5000, 20000])
    count = rnd.choice([1, 2, 3, 8, 17, 64]) if top < 20000 else rnd.choice([1, 2, 5])
    draw = [
        lambda: rnd.randint(1, top),
        lambda: 64 * rnd.randint(0, top // 64),
        lambda: 1 + 64 * rnd.randint(0, top // 64),
        lambda: 0,
    ]
    return tuple(rnd.choice(draw)() for _ in range(count))


@pytest.mark.parametrize(("heads", "q", "kv"), SHAPES)
def test_random_batches(heads, q, kv):
    """Batches back to back on one workspace, each three times: the same bits every time, and the right values."""
    rnd = random.Random(heads * 100 + q)
    for seed in range(6):
        lengths = [random_lengths(rnd) for _ in range(4)]
        lengths = [x[: 64 // q] for x in lengths]
        cases = [CoreCase(x, heads=heads, q=q, kv_format=kv) for x in lengths]
        given = [core_inputs(c, device="cuda", seed=seed) for c in cases]
        sizes = [
            hopper.workspace(hopper.choose(heads=heads, q=q, page=64, kv=kv), requests=len(x), sm_count=132)
            for x in lengths
        ]
        shared = Workspace.of(*sizes)
        sm_count = rnd.choice([132, 132, 97, 64, 16])
        runs = [Run(x, workspace=shared, sm_count=sm_count) for x in given]
        first = [run() for run in runs]
        for run in runs * 3:
            run.launch()
        torch.cuda.synchronize()
        for run, (out, lse) in zip(runs, first, strict=True):
            assert torch.equal(run.out.view(torch.int16), out.view(torch.int16))
            assert torch.equal(run.lse.view(torch.int32), lse.view(torch.int32))
        check(rnd.choice(runs))


def moved(given: CoreInputs, case: CoreCase, seed: int) -> CoreInputs:
    """Other lengths and tables for the tensors of `given`: what an engine does between replays."""
    fresh = core_inputs(case, device="cuda", seed=seed)
    pages = min(given.cache.shape[0], fresh.cache.shape[0])
    given.cache.view(torch.uint8)[:pages].copy_(fresh.cache.view(torch.uint8)[:pages])
    given.block_table.fill_(1 << 30)
    given.block_table[:, : fresh.block_table.shape[1]].copy_(fresh.block_table)
    given.lengths.copy_(fresh.lengths)
    given.query.view(torch.uint8).copy_(fresh.query.view(torch.uint8))
    return given


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("kv", FORMATS)
def test_replays(kv, q):
    """A captured launch serves whatever lengths and tables are there at its replay; 300 replays give the same bits."""
    largest = CoreCase((3000, 3000, 3000, 3000), q=q, kv_format=kv)
    run = Run(core_inputs(largest, device="cuda"))
    graph = harness.captured(run.launch)
    for seed, lengths in enumerate([(3000, 1, 64, 0), (1, 2, 3, 4), (0, 0, 0, 0), (65, 2999, 640, 7), (512,) * 4]):
        moved(run.given, replace(largest, lengths=lengths), seed + 1)
        run.workspace.poison()
        run.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        out, lse = run.out.clone(), run.lse.clone()
        want, want_lse = run.given.call(ref.core64)
        limit = (ERROR[run.key.p] ** 2 + BF16**2) ** 0.5
        assert (out.double() - want).norm() <= limit * want.norm()
        assert ((lse == -torch.inf) == (want_lse == -torch.inf)).all()
        for _ in range(60):
            run.out.fill_(torch.nan)
            run.workspace.poison()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(run.out.view(torch.int16), out.view(torch.int16))
            assert torch.equal(run.lse.view(torch.int32), lse.view(torch.int32))


def test_two_streams():
    """Two calls at once, each with its own workspace."""
    runs = [Run(core_inputs(CoreCase((4000, 77 + i, 900)), device="cuda", seed=i)) for i in range(2)]
    alone = [run() for run in runs]
    streams = [torch.cuda.Stream() for _ in runs]
    for run in runs:
        run.out.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(50):
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                run.launch()
    torch.cuda.synchronize()
    for run, (out, _) in zip(runs, alone, strict=True):
        assert torch.equal(run.out.view(torch.int16), out.view(torch.int16))


def test_without_lse():
    run = Run(core_inputs(CoreCase((100, 0, 65)), device="cuda"), lse=False)
    out, lse = run()
    assert torch.equal(out.view(torch.int16), Run(run.given)()[0].view(torch.int16))
    assert lse.isnan().all()


@pytest.mark.parametrize("kv", FORMATS)
def test_pages_beyond_four_gigabytes(kv):
    case = CoreCase((1000, 64), kv_format=kv)
    given = core_inputs(case, device="cuda")
    width = 576 * given.cache.element_size()
    pages = -(-(5 << 30) // (64 * width))
    wide = torch.full((pages, 64, width), 0xFF, dtype=torch.uint8, device="cuda")
    count = given.cache.shape[0]
    wide[pages - count :] = given.cache.view(torch.uint8)
    want = Run(given)()
    far = replace(given, cache=wide if kv == "fp8" else wide.view(torch.bfloat16))
    far.block_table = torch.where(given.block_table < count, given.block_table + (pages - count), given.block_table)
    got = Run(far)()
    assert torch.equal(got[0].view(torch.int16), want[0].view(torch.int16))
    assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32))


GPU_KEYS += [k for kv in FORMATS for k in keys_of(12, 1, 64, kv, None, [2, 3, 4, 6]) if k not in GPU_KEYS]
