"""What the partials of the hopper core amount to: its merge in float64, for tests of the core alone."""

import torch
from torch import Tensor

from k3dsl.nvidia.core import hopper


def merged(
    key: hopper.HopperKey,
    partial: Tensor,  # [blocks * slots * block * 512], f16 for FP8, float32 for BF16
    stats: Tensor,  # float32 [blocks * block * slots * 2]
    lengths: list[int],
    *,
    sm_count: int,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # float64 [R, q, H, 512], float64 [R, q, H]
    """Output and base-2 LSE of a launch of the core, by the host's cut."""
    slots = hopper.workspace(key, requests=len(lengths), sm_count=sm_count).slots
    cut = hopper.cut(lengths, hopper.splits(key, sm_count))
    width = key.blocks * key.block
    partial = partial.view(key.blocks, slots, key.block, hopper.LATENT).transpose(1, 2).flatten(0, 1)
    stats = stats.view(width, slots, 2)
    out = torch.zeros(len(lengths), key.columns, hopper.LATENT, dtype=torch.float64, device=partial.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64, device=partial.device)
    for r, (first, last) in enumerate(zip(cut.first, cut.last, strict=True)):
        if first > last:
            continue
        o = partial[: key.columns, first + r : last + r + 1].double()
        m, total = stats[: key.columns, first + r : last + r + 1].double().unbind(-1)
        top = m.amax(1, keepdim=True)
        weight = torch.exp2(m - top)
        if key.partial == "f16":  # of O / l
            o = o * total[..., None]
        total = (weight * total).sum(1)
        seen = total != 0
        out[r, seen] = (weight[..., None] * o).sum(1)[seen] / total[seen, None] * out_scale
        lse[r, seen] = (total.log2() + top[:, 0])[seen]
    return out.unflatten(1, (key.q, key.heads)), lse.unflatten(1, (key.q, key.heads))
