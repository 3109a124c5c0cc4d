"""mla_pre: one verify step of S rows, from the residual seam to the query that attention reads, stage by stage.

Read in the order of the stages. Each takes what the stage before hands on, so that a kernel's own hand-off can be put
in its place. Sums are float32 with torch's order (or float64, `accumulate`); the rounding points are the kernel's:

    P = bf(prefix + delta)                       the residual stream, in place
    x = bf(m * rsq(mean m^2) * in_nw)            m: softmax mix of the residual blocks and P, never rounded
    qa, g = bf(x w^T)                            gate = bf(sigmoid(g))
    qn, kn = bf(v * rsq(mean v^2) * nw)          entry = f8(kn) | f8(k_pe)
    u = bf(qn w_qb^T)                            nope | pe
    a = bf(mxfp4(nope) mxfp4(w_k)^T)             or bf(nope w_uk)
    query = f8(a) | f8(pe)                       scale 1; gathered over the ranks
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.reference.combine import up_project
from k3dsl.reference.mxfp4 import mxfp4_dequantize, mxfp4_quantize, quantize_w_uk
from k3dsl.reference.rounding import bf, f8_clamped

HIDDEN: Final = 7168
HEADS: Final = 12
NOPE: Final = 128
PE: Final = 64
LATENT: Final = 512
Q_LORA: Final = 1536
QKV: Final = Q_LORA + LATENT + PE
ENTRY: Final = LATENT + PE
_LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True)
class PreWeights:
    """One rank's weights of one layer, as `mla_pre` takes them."""

    ares_nw: Tensor  # bf16 [7168]: norm of the residual mix
    ares_qk: Tensor  # bf16 [7168]: its score vector
    in_nw: Tensor  # bf16 [7168]: input norm
    w_qkv: Tensor  # bf16 [2112, 7168]: q latent, kv latent, rope key
    w_g: Tensor  # bf16 [1536, 7168]: output gate, 12 heads x 128
    q_nw: Tensor  # bf16 [1536]
    kv_nw: Tensor  # bf16 [512]
    w_qb: Tensor  # bf16 [2304, 1536]: of each head 128 nope rows, then 64 pe rows
    w_uk_t: Tensor  # bf16 [12, 128, 512]: head, nope, latent
    w_k: Tensor  # uint8 [12, 512, 64]: w_uk_t in MXFP4, see quantize_w_uk
    w_k_scale: Tensor  # uint8 [12, 512, 4]
    eps: float = 1e-5  # of the residual mix
    out_eps: float = 1e-5  # of the input norm
    q_eps: float = 1e-5
    kv_eps: float = 1e-5

    @classmethod
    def random(cls, seed: int = 0, rank: int = 0, shared: "PreWeights | None" = None) -> "PreWeights":
        """Test weights: norms 1 + N(0, 0.1), scores N(0, 0.05), projections N(0, 0.02).

        What every rank of a group holds alike comes from `seed` alone (or from `shared`), the rest from `rank` too.
        """
        common = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(1000 * (seed + 1) + rank)

        def normal(generator: torch.Generator, *shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
            # In place and by bfloat16 pieces: a large matrix never exists in float32.
            out = torch.empty(*shape, dtype=torch.bfloat16)
            for rows in out.view(-1, shape[-1]).split(1024):
                rows.copy_(torch.randn(rows.shape, generator=generator) * std + mean)
            return out

        w_uk_t = normal(own, HEADS, NOPE, LATENT)
        w_k, w_k_scale = quantize_w_uk(w_uk_t)
        local = {
            "w_g": normal(own, HEADS * 128, HIDDEN),
            "w_qb": normal(own, HEADS * (NOPE + PE), Q_LORA),
            "w_uk_t": w_uk_t,
            "w_k": w_k,
            "w_k_scale": w_k_scale,
        }
        names = ("ares_nw", "ares_qk", "in_nw", "q_nw", "kv_nw", "w_qkv")
        if shared is not None:
            return cls(**{name: getattr(shared, name) for name in names}, **local)
        return cls(
            ares_nw=normal(common, HIDDEN, std=0.1, mean=1.0),
            ares_qk=normal(common, HIDDEN, std=0.05),
            in_nw=normal(common, HIDDEN, std=0.1, mean=1.0),
            q_nw=normal(common, Q_LORA, std=0.1, mean=1.0),
            kv_nw=normal(common, LATENT, std=0.1, mean=1.0),
            w_qkv=normal(common, QKV, HIDDEN),
            **local,
        )


@dataclass(frozen=True)
class PreStep:
    """Everything that a step hands on, in the order of the stages."""

    prefix: Tensor  # bf16 [S, 7168]
    weights: Tensor  # float32 [S, nblocks + 2]: e_s of each source, then their sum
    x: Tensor  # bf16 [S, 7168]
    qa: Tensor  # bf16 [S, 2112]
    gate: Tensor  # bf16 [S, 1536]
    qc: Tensor  # bf16 [S, 1536]
    entry: Tensor  # uint8 [S, 576]: e4m3
    qn: Tensor  # bf16 [S, 12, 128]
    pe: Tensor  # bf16 [S, 12, 64]
    latent: Tensor  # bf16 [S, 12, 512]

    def query(self, qbf16: bool = False) -> Tensor:
        """This rank's query [S, 12, 576]: float8_e4m3fn, or bf16."""
        return query(self.latent, self.pe, qbf16)


def residual(prefix: Tensor, delta: Tensor | None) -> Tensor:
    """bf(prefix + delta), or prefix as it is: bf16 [S, 7168]."""
    return prefix if delta is None else bf(prefix.to(torch.float32) + delta.to(torch.float32))


def sources(prefix: Tensor, blocks: Tensor, nblocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The residual blocks 0..nblocks-1 and, last, the prefix after its update: [S, nblocks + 1, 7168] of `dtype`."""
    return torch.cat([blocks[:, :nblocks], prefix[:, None]], dim=1).to(dtype)


def mix_weights(
    sums: Tensor,  # [S, ns, 2]: of each source sum v^2, sum v (nw qk)
    eps: float = 1e-5,
) -> Tensor:  # [S, ns + 1] of sums' dtype
    """e_s = exp2(logit log2e - max) and, last, their sum. logit = dot * rsq(square / 7168 + eps)."""
    logit = sums[..., 1] * torch.rsqrt(sums[..., 0] / HIDDEN + eps)
    base2 = logit * _LOG2E
    e = torch.exp2(base2 - base2.amax(dim=1, keepdim=True))
    return torch.cat([e, e.sum(dim=1, keepdim=True)], dim=1)


def mix_sums(v: Tensor, w: PreWeights, accumulate: torch.dtype = torch.float32) -> Tensor:
    """[S, ns, 2] of `accumulate`: of each source sum v^2 and sum v (nw qk). v: [S, ns, 7168]."""
    score = (w.ares_nw.to(v.dtype) * w.ares_qk.to(v.dtype)).to(accumulate)
    wide = v.to(accumulate)
    return torch.stack([wide.square().sum(dim=2), wide @ score], dim=2)


def mix(
    v: Tensor,  # [S, ns, 7168] float32 or float64
    weights: Tensor,  # [S, ns + 1]: as from mix_weights
    w: PreWeights,
) -> Tensor:  # [S, 7168] of v's dtype: x before it is rounded
    """m * rsq(mean m^2 + out_eps) * in_nw with m = sum_s e_s v_s / sum_s e_s, sources in ascending order."""
    m = torch.zeros_like(v[:, 0])
    for s in range(v.shape[1]):
        m = m + weights[:, s, None].to(v.dtype) * v[:, s]
    m = m / weights[:, -1, None].to(v.dtype)
    inverse = torch.rsqrt(m.square().mean(dim=1, keepdim=True) + w.out_eps)
    return m * inverse * w.in_nw.to(v.dtype)


def project(x: Tensor, weight: Tensor, accumulate: torch.dtype = torch.float32) -> Tensor:
    """bf(x w^T): bf16 [S, n]. x bf16 [S, k], weight bf16 [n, k]."""
    return bf(x.to(accumulate) @ weight.to(accumulate).T)


def gate(g: Tensor) -> Tensor:
    """bf(1 / (1 + exp2(-g log2e))) in float32. g bf16."""
    return bf(1.0 / (1.0 + torch.exp2(g.to(torch.float32) * -_LOG2E)))


def norm(v: Tensor, weight: Tensor, eps: float, accumulate: torch.dtype = torch.float32) -> Tensor:
    """bf((v * rsq(sum v^2 / n + eps)) * weight). v bf16 [S, n]."""
    wide = v.to(torch.float32)
    square = wide.to(accumulate).square().sum(dim=1, keepdim=True).to(torch.float32)
    return bf((wide * torch.rsqrt(square / v.shape[1] + eps)) * weight.to(torch.float32))


def norms(qa: Tensor, w: PreWeights, accumulate: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """From qa bf16 [S, 2112]: the normalized q latent bf16 [S, 1536], the cache entry's bytes uint8 [S, 576].

    The entry is f8 of the normalized kv latent, then f8 of the rope key as projected: no norm, no rotation.
    """
    qc = norm(qa[:, :Q_LORA], w.q_nw, w.q_eps, accumulate)
    kn = norm(qa[:, Q_LORA : Q_LORA + LATENT], w.kv_nw, w.kv_eps, accumulate)
    entry = f8_clamped(torch.cat([kn, qa[:, Q_LORA + LATENT :]], dim=1)).view(torch.uint8)
    return qc, entry


def insert(
    entry: Tensor,  # uint8 [S, 576]
    kv_cache: Tensor,  # [blocks, block_size, 576] of one byte; written in place
    slots: Tensor,  # int64 [S]; -1: not written
) -> None:
    """Row t's entry at block slots[t] // block_size, position slots[t] % block_size."""
    live = slots >= 0
    slot = slots[live]
    size = kv_cache.shape[1]
    kv_cache.view(torch.uint8)[slot // size, slot % size] = entry[live]


def split_heads(u: Tensor) -> tuple[Tensor, Tensor]:
    """[S, 2304] -> nope [S, 12, 128], pe [S, 12, 64]."""
    heads = u.unflatten(1, (HEADS, NOPE + PE))
    return heads[..., :NOPE], heads[..., NOPE:]


def absorb_mxfp4(qn: Tensor, w_k: Tensor, w_k_scale: Tensor) -> Tensor:
    """bf16 [S, 12, 512]: W_UK with both sides in MXFP4, blocks along nope.

    Taken in float64, where a sum of 128 products of e2m1 values is exact as long as block scales lie within 2^40 of
    each other; a float32 sum agrees as long as they lie within 2^11.
    """
    codes, scales = mxfp4_quantize(qn)
    a = mxfp4_dequantize(codes, scales, torch.float64)
    return bf(torch.einsum("shk,hnk->shn", a, mxfp4_dequantize(w_k, w_k_scale, torch.float64)))


def absorb_bf16(qn: Tensor, w_uk_t: Tensor, accumulate: torch.dtype = torch.float32) -> Tensor:
    """bf16 [S, 12, 512]: W_UK in bf16, w_uk_t [12, 128, 512]."""
    return bf(torch.einsum("shk,hkn->shn", qn.to(accumulate), w_uk_t.to(accumulate)))


def query(latent: Tensor, pe: Tensor, qbf16: bool = False) -> Tensor:
    """[latent 512 | pe 64] of each head: float8_e4m3fn with a scale of 1, or bf16. [S, 12, 576]."""
    both = torch.cat([latent, pe], dim=2)
    return both if qbf16 else f8_clamped(both)


def gather_heads(queries: "list[Tensor]", q_heads: int) -> Tensor:
    """Queries of all ranks, rank r's heads at 12 r; heads past the last repeat the first ones. [S, q_heads, 576]."""
    every = torch.cat([q.view(torch.uint8) if q.element_size() == 1 else q for q in queries], dim=1)
    missing = q_heads - every.shape[1]
    if not 0 <= missing <= every.shape[1]:
        raise ConfigError(f"q_heads={q_heads!r} must be {every.shape[1]} to {2 * every.shape[1]}")
    return torch.cat([every, every[:, :missing]], dim=1).view(queries[0].dtype)


def mla_pre(
    w: PreWeights,
    *,
    prefix: Tensor,  # bf16 [S, 7168]; not written: see PreStep.prefix
    delta: Tensor | None,  # bf16 [S, 7168]
    blocks: Tensor,  # bf16 [S, >= nblocks, 7168]
    nblocks: int,
    w_uk: str = "mxfp4",  # or "bf16"
    accumulate: torch.dtype = torch.float32,
) -> PreStep:
    """One rank's step. The cache is left to `insert`, the other ranks' heads to `gather_heads`."""
    p = residual(prefix, delta)
    v = sources(p, blocks, nblocks)
    weights = mix_weights(mix_sums(v, w, accumulate).to(torch.float32), w.eps)
    x = bf(mix(v, weights, w))
    qa = project(x, w.w_qkv, accumulate)
    qc, entry = norms(qa, w, accumulate)
    qn, pe = split_heads(project(qc, w.w_qb, accumulate))
    latent = absorb_mxfp4(qn, w.w_k, w.w_k_scale) if w_uk == "mxfp4" else absorb_bf16(qn, w.w_uk_t, accumulate)
    return PreStep(p, weights, x, qa, gate(project(x, w.w_g, accumulate)), qc, entry, qn, pe, latent)


@dataclass(frozen=True)
class PreStep64:
    """The same step in float64 with no rounding at all but those of its inputs."""

    prefix: Tensor  # [S, 7168]
    x: Tensor  # [S, 7168]
    gate: Tensor  # [S, 1536]
    entry: Tensor  # [S, 576]
    query: Tensor  # [S, 12, 576]


def mla_pre64(
    w: PreWeights,
    *,
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    nblocks: int,
    w_uk: str = "bf16",  # "mxfp4": the weight, not the activation, as its codes stand for it
) -> PreStep64:
    """The end-to-end chain that a step is measured against. Arguments as of `mla_pre`."""
    wide = torch.float64
    p = prefix.to(wide) if delta is None else prefix.to(wide) + delta.to(wide)
    v = torch.cat([blocks[:, :nblocks].to(wide), p[:, None]], dim=1)
    x = mix(v, mix_weights(mix_sums(v, w, wide), w.eps), w)
    qa = x @ w.w_qkv.to(wide).T
    latents = [(qa[:, :Q_LORA], w.q_nw, w.q_eps), (qa[:, Q_LORA : Q_LORA + LATENT], w.kv_nw, w.kv_eps)]
    qc, kn = (
        part * torch.rsqrt(part.square().mean(dim=1, keepdim=True) + eps) * weight.to(wide)
        for part, weight, eps in latents
    )
    qn, pe = split_heads(qc @ w.w_qb.to(wide).T)
    if w_uk == "mxfp4":
        latent = torch.einsum("shk,hnk->shn", qn, mxfp4_dequantize(w.w_k, w.w_k_scale, wide))
    else:
        latent = torch.einsum("shk,hkn->shn", qn, w.w_uk_t.to(wide))
    return PreStep64(
        prefix=p,
        x=x,
        gate=torch.sigmoid(x @ w.w_g.to(wide).T),
        entry=torch.cat([kn, qa[:, Q_LORA + LATENT :]], dim=1),
        query=torch.cat([latent, pe], dim=2),
    )


def gated_value(latent: Tensor, w_uv: Tensor, gated: Tensor) -> Tensor:
    """bf(f32(bf(latent W_UV)) * gate): bf16 [S, 1536], for a gate that is already a sigmoid, rounded to bf16.

    One rounding more than the stock order, which multiplies by the sigmoid of the raw gate.
    """
    return bf(up_project(latent, w_uv).to(torch.float32) * gated.to(torch.float32))
