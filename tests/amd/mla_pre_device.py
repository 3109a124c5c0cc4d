"""One emulated mla_pre step with its inputs, and its hand-offs read back out of the scratch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3dsl.amd.mla_pre.key import (
    GRID,
    HEADS,
    HEALTH_WORDS,
    HIDDEN,
    NOPE,
    PARAMS,
    PEER_HEAD,
    POINTS,
    Q_LORA,
    QKV_A,
    MlaPreBuild,
    peer_bytes,
    q_heads,
    scratch_bytes,
)
from k3dsl.amd.mla_pre.layout import QC_ROWS, X_ROWS, regions
from k3dsl.reference import mla_pre as reference

BF16, I32, U8 = torch.bfloat16, torch.int32, torch.uint8
PAGES, PAGE = 4, 16


@dataclass
class Rank:
    """What one rank owns. Tensors that the kernel writes start with a pattern, so that a store too many is seen."""

    key: MlaPreBuild
    weights: reference.PreWeights
    inputs: dict[str, Tensor]
    rank: int = 0
    outs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.key.tokens
        width = 2 if self.key.qbf16 else 1
        self.prefix = self.inputs["prefix"].clone()
        self.outs = {
            "kv_cache": torch.full((PAGES, PAGE, 576), 0xA5, dtype=U8),
            "gate_out": torch.full((s, HEADS * 128), -7.0, dtype=BF16),
            "q_out": torch.full((s, q_heads(self.key), 576 * width), 0x5A, dtype=U8),
            "scratch": torch.zeros(scratch_bytes(self.key), dtype=U8),
            "epoch": torch.zeros(1, dtype=I32),
            "health": torch.zeros(HEALTH_WORDS, dtype=I32),
            "alarm": torch.zeros(64, dtype=I32),
            "tl": torch.zeros(GRID, POINTS, dtype=torch.int64),
        }
        self.peer = torch.zeros(max(peer_bytes(self.key), 256), dtype=U8)

    def buffers(self) -> dict[str, Tensor]:
        """Everything that the kernel touches, by name."""
        w = self.weights
        names = ("ares_nw", "ares_qk", "in_nw", "w_qkv", "w_g", "q_nw", "kv_nw", "w_qb", "w_k_scale")
        found = {name: getattr(w, name) for name in names}
        found["w_k"] = w.w_k if self.key.w_uk == "mxfp4" else w.w_uk_t
        found |= {"prefix": self.prefix, **{k: v for k, v in self.inputs.items() if v is not None and k != "prefix"}}
        return found | self.outs

    def arguments(self, layer: int, peers: int = 0, alarm: int | None = None) -> dict[str, int]:
        """Kernel arguments by name."""
        found = {name: t.data_ptr() for name, t in self.buffers().items()}
        blocks, w_k, scale = self.inputs["blocks"], self.buffers()["w_k"], self.weights.w_k_scale
        found.setdefault("delta", 0)
        cache = self.outs["kv_cache"]
        return found | {
            "blocks_token_stride": blocks.stride(0),
            "blocks_block_stride": blocks.stride(1),
            "w_k_stride0": w_k.stride(0) * w_k.element_size(),
            "w_k_stride1": w_k.stride(1) * w_k.element_size(),
            **{f"w_k_scale_stride{i}": scale.stride(i) for i in range(3)},
            "kv_block_stride": cache.stride(0),
            "kv_slot_stride": cache.stride(1),
            "block_size": cache.shape[1],
            "peers": peers,
            "rank": self.rank,
            "layer": layer,
            "alarm": found["alarm"] + 4 * self.rank if alarm is None else alarm,
        }

    def pairs(self, region: str) -> tuple[Tensor, Tensor]:
        """Values and tags of a region of the scratch."""
        r = regions(self.key)[region]
        both = self.outs["scratch"][r.offset : r.offset + r.pairs * 8].view(I32).view(-1, 2)
        return both[:, 0].clone(), both[:, 1].clone()

    def floats(self, region: str, *shape: int) -> Tensor:
        """A region's values as float32."""
        return self.pairs(region)[0].view(torch.float32).view(*shape)

    def halves(self, region: str, *shape: int) -> Tensor:
        """A region's values as bf16, two a pair."""
        return self.pairs(region)[0].view(BF16).view(*shape)

    def rows(self, name: str) -> Tensor:
        """The plain rows "x" or "qc"."""
        r, width = {"x": (X_ROWS, HIDDEN), "qc": (QC_ROWS, Q_LORA)}[name]
        return self.outs["scratch"][r.offset :][: self.key.tokens * r.pitch].view(BF16).view(-1, width).clone()

    @property
    def qa(self) -> Tensor:
        return self.halves("qa", self.key.tokens, QKV_A)

    @property
    def qn(self) -> Tensor:
        return self.halves("qn", self.key.tokens, HEADS, NOPE)


def inputs(key: MlaPreBuild, seed: int, slots: list[int] | None = None, wide: int = 0) -> dict[str, Any]:
    """Activations of realistic scale: prefix and blocks N(0, 2), delta N(0, 0.5)."""
    g = torch.Generator().manual_seed(seed)
    s = key.tokens
    normal = lambda std, *shape: (torch.randn(shape, generator=g) * std).to(BF16)  # noqa: E731
    found = {"prefix": normal(2.0, s, HIDDEN), "blocks": normal(2.0, s, key.nblocks + wide, HIDDEN)}
    found["delta"] = normal(0.5, s, HIDDEN) if key.delta else None
    found["blocks"][:, key.nblocks :] = torch.nan  # blocks that are not this layer's
    chosen = torch.randperm(PAGES * PAGE, generator=g)[:s] if slots is None else torch.tensor(slots)
    return found | {"slots": chosen.to(torch.int64)}


def launch(ranks: list[Rank], layer: int, epoch: int, compiled: Any, **options: Any) -> Any:
    """One step of all ranks together on the emulator; its result. `compiled`: the FlyDSL launcher of their key."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from tools.gfx950 import Memory, flydsl_backend

    memory, several = Memory(), len(ranks) > 1
    table = torch.tensor([r.peer.data_ptr() + PEER_HEAD for r in ranks]) if several else torch.zeros(1)
    memory.add(table, "peers")
    for r in ranks:
        r.outs["epoch"][0] = epoch
        for name, tensor in r.buffers().items():
            mine = name in r.outs or name == "prefix"  # weights that all ranks hold alike are one tensor here
            memory.add(tensor, f"{name} of {r.rank}", device=r.rank if mine else None, read_only=not mine)
        if several:
            memory.add(r.peer, f"peer buffer of {r.rank}", device=r.rank, peer=True)
    with flydsl_backend.emulating(memory, collect=True, **options) as session:
        for r in ranks:
            session.device = r.rank
            alarm = ranks[0].peer.data_ptr() + 4 * r.rank if several else None
            values = r.arguments(layer, table.data_ptr() if several else 0, alarm)
            pointer = functools.partial(flyc.from_c_void_p, fx.Uint8, assumed_align=4)
            compiled(*(pointer(values[n]) if kind == "ptr" else fx.Int32(values[n]) for n, kind in PARAMS))
        return session.run()


def near(got: Tensor, want: Tensor, *, ulps: int = 1, rate: float = 0.01, floor: float = 1e-5) -> None:
    """bf16 tensors that differ by `ulps` units in the last place at most (or `floor`), and in few elements."""
    a, b = got.float(), want.float()
    unit = torch.exp2(torch.floor(torch.log2(torch.maximum(a.abs(), b.abs()).clamp(min=1e-30))) - 7)
    apart = (a - b).abs() / (unit * ulps + floor)
    assert apart.max() <= 1, f"{apart.max()} times the bound at {apart.argmax()}"
    assert (a != b).float().mean() <= rate


def gated(got: Tensor, g: Tensor) -> None:
    """The gate is that of g, or of a neighbour of it where the sum came out on the other side of a rounding."""
    steps = [reference.gate((g.view(torch.int16) + step).view(BF16)) for step in (0, -1, 1)]
    assert (got == steps[0]).float().mean() > 0.99
    nearest = torch.stack([(got.float() - s.float()).abs() for s in steps]).argmin(0)
    near(got, torch.stack(steps).gather(0, nearest[None])[0], rate=1e-3)


def check(r: Rank) -> None:
    """Every stage against a computation from the kernel's own hand-off before it, and nothing else written."""
    key, w, s, ns = r.key, r.weights, r.key.tokens, r.key.sources
    assert not r.outs["health"].any()
    prefix = reference.residual(r.inputs["prefix"], r.inputs["delta"])
    assert torch.equal(r.prefix, prefix)
    v = reference.sources(prefix, r.inputs["blocks"], key.nblocks)
    part = r.floats("part", 56, s, ns, 2).double().sum(0)
    sums = reference.mix_sums(v, w, torch.float64)
    scale = torch.stack([sums[..., 0], (v.double() * (w.ares_nw.double() * w.ares_qk.double())).abs().sum(2)], 2)
    assert ((part - sums).abs() / scale).max() < 1e-6
    weights = r.floats("wgt", s, ns + 1)
    torch.testing.assert_close(weights.double(), reference.mix_weights(part, key.eps), rtol=1e-5, atol=1e-6)
    x = r.rows("x")
    near(x, reference.bf(reference.mix(v.double(), weights.double(), w).float()), rate=1e-3)
    near(r.qa, reference.project(x, w.w_qkv))
    gated(r.outs["gate_out"], reference.project(x, w.w_g))
    qc, entry = reference.norms(r.qa, w)
    near(r.rows("qc"), qc, rate=1e-3)
    slots = r.inputs["slots"]
    cache = torch.full_like(r.outs["kv_cache"], 0xA5).view(-1, 576)
    mine = slots >= 0
    cache[slots[mine]] = entry[mine]
    assert (cache != r.outs["kv_cache"].view(-1, 576)).float().mean() <= 1e-3  # neighbours where rsq differs
    untouched = torch.ones(len(cache), dtype=torch.bool)
    untouched[slots[mine]] = False
    assert torch.equal(cache[untouched], r.outs["kv_cache"].view(-1, 576)[untouched])
    qn, pe = reference.split_heads(reference.project(r.rows("qc"), w.w_qb))
    near(r.qn, qn)
    mx = key.w_uk == "mxfp4"
    latent = reference.absorb_mxfp4(r.qn, w.w_k, w.w_k_scale) if mx else reference.absorb_bf16(r.qn, w.w_uk_t)
    if key.qbf16:
        got = r.outs["q_out"].view(BF16).view(s, HEADS, 576)
        near(got[..., :512], latent, rate=0.0 if mx else 0.01)
        near(got[..., 512:], pe)
    elif key.ranks == 1:
        want = reference.query(latent, pe).view(U8)
        got = r.outs["q_out"]
        exact = want[..., :512] == got[..., :512]
        assert exact.all() if mx else exact.float().mean() > 0.999
        assert (want[..., 512:] == got[..., 512:]).float().mean() > 0.995  # from sums in another order
