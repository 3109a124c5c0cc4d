"""Cases of MlaValue and their inputs: padded requests whose rows hold NaN, gates at the ends of the sigmoid."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3dsl import reference
from k3dsl.nvidia import value as facts

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int = 2
    q: int = 1
    lengths: str = "mixed"  # some 0; "all": none of them; "none": all
    tile: int = 0  # 0: as rows ask

    @property
    def key(self) -> facts.ValueKey:
        return facts.ValueKey(self.heads, self.tile or facts.tile_for(self.rows))

    @property
    def name(self) -> str:
        return f"b{self.rows}-h{self.heads}-q{self.q}-{self.lengths}" + f"-tile{self.tile}" * bool(self.tile)


def inputs(case: Case, device: Any = "cpu", seed: int = 0) -> dict[str, Any]:
    """Arguments of `value.arguments`. The output is filled with NaN, and so are the rows of empty requests."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    rows, heads, requests = case.rows, case.heads, case.rows // case.q
    lengths = torch.randint(1, 9000, (requests + 2,), generator=g, dtype=torch.int32)
    if case.lengths == "mixed":
        lengths[torch.rand(requests + 2, generator=g) < 0.4] = 0
    elif case.lengths == "none":
        lengths.zero_()
    packed = normal(rows, 2112 + heads * 128)
    packed[-1, 2112:2120] = torch.tensor([INF, -INF, 100.0, -100.0, 0.0, -0.0, -87.5, -88.5])
    latent = normal(rows, heads, 512)
    empty = (lengths[:requests] == 0).repeat_interleave(case.q)
    packed[empty], latent[empty] = NAN, NAN
    kv_b = normal(heads, 256, 512) * 0.05
    return {
        "latent": latent.to(device),
        "weight": kv_b.to(device)[:, 128:].transpose(1, 2),
        "gate": packed.to(device)[:, 2112:],
        "lengths": lengths.to(device),
        "out": torch.full((rows, heads * 128), NAN, dtype=torch.bfloat16, device=device),
        "q": case.q,
    }


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distance of bf16 values in steps; -0 and 0 are one."""
    x, y = (t.view(torch.int16).int() for t in (a, b))
    x, y = (torch.where(t < 0, -32768 - t, t) for t in (x, y))
    return (x - y).abs()


def check(case: Case, given: dict[str, Any], got: Tensor) -> None:
    """`got` against the oracle: exact zeros, and elsewhere equal but for the order of a sum.

    That can turn one rounding of the up-projection, which the gate may carry across a power of two: one step or two, on
    few elements. Where terms cancel, a step of the small result may be less than what float32 keeps of the terms: there
    the bound is 2^-20 of their absolute sum.
    """
    want = reference.value(given["latent"], given["weight"], given["gate"], given["lengths"], case.q)
    empty = (given["lengths"][: case.rows // case.q] <= 0).repeat_interleave(case.q)
    assert (got[empty].view(torch.int16) == 0).all(), "rows of empty requests are not +0"
    assert not got[~empty].isnan().any()
    terms = reference.value(given["latent"].abs(), given["weight"].abs(), given["gate"], given["lengths"], case.q)
    steps, apart = ulps(got, want), (got.float() - want.float()).abs()
    bad = (steps > 2) & (apart > terms.float() * 2.0**-20)
    assert not bad.any(), f"{int(steps[bad].max())} steps off"
    assert (steps > 0).float().mean() < 0.01, f"{float((steps > 0).float().mean()):.2%} of the elements differ"
