"""Sparse MLA cases as data, and a run of one on the emulator against float64."""

import mmap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3dsl.amd import PreparedSparseMla
from k3dsl.cache import CompileCache
from k3dsl.reference.sparse_mla import fp8_ds_mla_pack, sparse_mla64

SCALE = 192**-0.5
#: float64 attention against sums in fp32 with P in bf16: seen are 5e-3 and 3e-6.
OUT_LIMIT, LSE_LIMIT = 2e-2, 1e-3
LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """lengths of the tokens' lists; invalid: how entries become negative; wide: how far values and scales spread."""

    name: str
    heads: int
    lengths: tuple[int, ...]
    has_invalid: bool = False
    lse: bool = True
    invalid: str = "none"  # none, some, all, first, last, ragged
    values: str = "normal"  # or scales (2^-13..2^7), spread (logits over +-1e4), negative (scale), huge (cache)
    duplicates: bool = False
    records: int = 700
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of the emulator


@dataclass
class Made:
    """The tensors of a case. Records that no list names are NaN bytes throughout, slot 0 among them."""

    q: Tensor
    kv: Tensor
    indptr: Tensor
    indices: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    want: tuple[Tensor, Tensor]


def make(case: Case) -> Made:
    rng = torch.Generator().manual_seed(case.seed)
    tokens, total = len(case.lengths), sum(case.lengths)
    rows = case.records if not case.duplicates else 5
    slots = torch.randint(1, rows, (total,), generator=rng, dtype=torch.int32)
    if case.values == "huge":
        offsets = torch.tensor([0, (1 << 32) // 656 - 3, (1 << 32) // 656 + 1, (5 << 30) // 656 - rows - 1])
        slots = slots + offsets[torch.randint(0, 4, (total,), generator=rng)].int()
    kv = _memory((5 << 30) // 656 if case.values == "huge" else rows)
    listed = slots.unique().long()
    n = len(listed)
    magnitude = torch.ones(n, 4, 1)
    if case.values == "scales":  # every scale of the writer, in one record
        magnitude = torch.exp2(torch.randint(-13, 8, (n, 4, 1), generator=rng).float()) * 448 / 3.5
    latent = (torch.randn(n, 4, 128, generator=rng) * magnitude).clamp(-57344, 57344).flatten(1)
    q = torch.randn(tokens, case.heads, 576, generator=rng)
    if case.values == "scales":  # so that logits stay of order one: each quarter counts as much
        q[:, :, :512] /= 448 * 8
    scale = SCALE
    if case.values == "spread":
        scale = 1e4 / (24 * 3)  # products have a deviation of 24
    if case.values == "negative":
        scale = -SCALE
    kv[listed] = fp8_ds_mla_pack(latent.bfloat16(), torch.randn(n, 64, generator=rng).bfloat16())
    indptr = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)
    _mask(case, slots, indptr, rng)
    indices = slots if total else torch.zeros(1, dtype=torch.int32)
    q = q.bfloat16()
    want = sparse_mla64(q, kv, indptr, indices, scale)
    out = torch.full((tokens, case.heads, 512), 7.0, dtype=torch.bfloat16)
    return Made(q, kv, indptr, indices, out, torch.full((tokens, case.heads), 7.0), scale, want)


def _memory(records: int) -> Tensor:
    """NaN bytes; many records: memory that exists where it is written, zeros elsewhere."""
    if records < 1 << 20:
        return torch.full((records, 656), 0xFF, dtype=torch.uint8)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, records * 656, flags=flags), dtype=torch.uint8).view(records, 656)


def _mask(case: Case, slots: Tensor, indptr: Tensor, rng: torch.Generator) -> None:
    negative = torch.tensor([-1, -1, -(2**31), -77], dtype=torch.int32)
    if case.invalid in ("some", "ragged"):
        gone = torch.rand(len(slots), generator=rng) < 0.4
        if case.invalid == "ragged":  # as an engine pads: whole tiles are masked, some in the middle
            gone = torch.rand(len(slots) // 16 + 1, generator=rng).repeat_interleave(16)[: len(slots)] < 0.6
        slots[gone] = negative[torch.randint(0, 4, (int(gone.sum()),), generator=rng)]
    for begin, end in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
        if case.invalid == "all":
            slots[begin:end] = -1
        if case.invalid == "first":
            slots[begin : begin + 33] = -1
        if case.invalid == "last":
            slots[max(begin, end - 33) : end] = -1


def run(case: Case, made: Made, cache: CompileCache, **options: Any) -> Any:
    """Runs the case on the emulator, into made.out and made.lse; the emulator's runtime."""
    from tools.gfx950 import Memory
    from tools.gfx950.runtime import EmulatorRuntime

    memory = Memory(kv=made.kv, q=made.q, indptr=made.indptr, indices=made.indices, out=made.out, lse=made.lse)
    runtime = EmulatorRuntime(memory, **{**case.options, **options})
    layer = PreparedSparseMla(
        case.heads, made.scale, has_invalid=case.has_invalid, return_lse=case.lse, cache=cache, runtime=runtime
    )
    layer.prepare_cache(made.kv)
    layer.run(made.q, made.indptr, made.indices, made.out, made.lse if case.lse else None)
    return runtime


def errors(made: Made) -> tuple[float, float]:
    """Largest error of out over the largest output, and of lse; tokens without a key must be exact."""
    out, lse = made.want
    empty = lse[:, 0].isneginf()
    assert (made.out[empty] == 0).all()
    assert (made.lse[empty].isneginf() | (made.lse[empty] == 7)).all()
    assert made.out.isfinite().all()
    if empty.all():
        return 0.0, 0.0
    wrong = (made.out.double() - out)[~empty].abs().max() / out.abs().max()
    return float(wrong), float((made.lse.double() - lse)[~empty].abs().max())


def check(case: Case, made: Made) -> tuple[float, float]:
    out, lse = errors(made)
    assert out < OUT_LIMIT, f"{case.name}: out is off by {out} of the maximum"
    if case.lse:
        assert lse < LSE_LIMIT * max(1.0, _largest(made) / 1e3), f"{case.name}: lse is off by {lse}"
    else:
        assert (made.lse == 7).all()
    return out, lse


def _largest(made: Made) -> float:
    """Of the log-sum-exps. In fp32 one of 1e4 is known to 1e-3 at best."""
    known = made.want[1][made.want[1].isfinite()]
    return float(known.abs().max()) if known.numel() else 0.0


HEADS = (1, 2, 4, 6, 8, 12, 16)
WEAK = {"model": "weak", "seed": 1}


def subset() -> list[Case]:
    """What CI runs: each build family, each kind of list, each kind of value once."""
    return [
        Case("lengths", 16, LENGTHS),
        Case("one-head", 1, (5, 64, 129), options=WEAK),
        Case("twelve", 12, LENGTHS, lse=False),
        Case("masked", 12, LENGTHS, True, invalid="some", options={"model": "weak", "seed": 2, "quantum": 13}),
        Case("all-masked", 12, (0, 1, 64, 129), True, invalid="all"),
        Case("tiles-masked", 12, (40, 300, 129), True, invalid="ragged", options=WEAK),
        Case("first-masked", 12, (32, 33, 34, 200), True, invalid="first"),
        Case("last-masked", 12, (32, 33, 34, 200), True, invalid="last", lse=False),
        Case("duplicates", 16, (64, 200), duplicates=True),
        Case("scales", 16, (64, 300), values="scales"),
        Case("spread", 16, (64, 300), values="spread"),
        Case("negative", 16, (64, 300), values="negative"),
        Case("top-2048", 16, (2048, 0, 2048), options={"seed": 3, "quantum": 100_000}),
    ]


def sweep() -> list[Case]:
    """Every build with every kind of list; every kind of value."""
    found = []
    for h in HEADS:
        for lse in (False, True):
            found.append(Case(f"h{h}-lse{lse:d}", h, (*LENGTHS, 500), lse=lse, seed=h))
            found.append(Case(f"h{h}-lse{lse:d}-2048", h, (2048, 1, 2047), lse=lse, seed=h, records=5000))
            for kind in ("none", "some", "all", "first", "last", "ragged"):
                name = f"h{h}-lse{lse:d}-invalid-{kind}"
                found.append(Case(name, h, (*LENGTHS, 500), True, lse=lse, invalid=kind, seed=h))
                found.append(Case(f"{name}-2048", h, (2048, 1, 2047), True, lse=lse, invalid=kind, records=5000))
        for seed, quantum in ((1, 1000), (2, 7), (3, 100), (4, 100_000)):
            options = {"model": "weak", "seed": seed, "quantum": quantum}
            found.append(Case(f"h{h}-weak{seed}", h, (*LENGTHS, 300), seed=seed, options=options))
            name = f"h{h}-weak{seed}-invalid"
            found.append(Case(name, h, (*LENGTHS, 300), True, invalid="ragged", seed=seed, options=options))
        for values in ("scales", "spread"):
            found.append(Case(f"h{h}-{values}", h, (*LENGTHS, 600, 2048), values=values, seed=h))
        found.append(Case(f"h{h}-duplicates", h, (*LENGTHS, 600, 2048), duplicates=True, seed=h))
    found.append(Case("huge", 12, (*LENGTHS, 2048), values="huge"))
    found.append(Case("huge-invalid", 12, (*LENGTHS, 2048), True, invalid="some", values="huge"))
    return found
