"""Sparse MLA in float64: each token attends to the records that its index list names, dequantised.

    s_j = q[t, h] . K_j        out[t, h] = sum_j softmax(scale * s)_j V_j        lse[t, h] = ln sum_j exp(scale * s_j)

K_j is a record's latent (512) and rope part (64), V_j its latent. A slot that is listed twice counts twice; negative
entries are no keys. A token without a key gives zeros and -inf. Nothing but listed records is read.
"""

import math

import torch
from torch import Tensor

from k3dsl.reference.paged import ds_mla_pack, ds_mla_unpack

#: The record format by the name that users of the AMD half know it by.
fp8_ds_mla_pack = ds_mla_pack
fp8_ds_mla_unpack = ds_mla_unpack


def sparse_mla64(
    q: Tensor,  # [T, H, 576]
    records: Tensor,  # uint8 [N, 656]
    indptr: Tensor,  # int [T + 1]
    indices: Tensor,  # int [n], slots
    scale: float,
) -> tuple[Tensor, Tensor]:  # float64 [T, H, 512], [T, H]
    """Output and natural log-sum-exp, without rounding."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    for t in range(tokens):
        listed = indices[int(indptr[t]) : int(indptr[t + 1])].long()
        listed = listed[listed >= 0]
        if listed.numel() == 0:
            continue
        latent, rope = ds_mla_unpack(records[listed], dtype=torch.float64)
        scores = q[t].double() @ torch.cat([latent, rope.double()], dim=1).T * scale
        out[t] = scores.softmax(-1) @ latent
        lse[t] = scores.logsumexp(-1)
    return out, lse
