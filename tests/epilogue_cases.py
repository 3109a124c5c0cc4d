"""Cases of the fused epilogues: the same call for the oracle and for the kernels, inputs with all that may go wrong."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A call: op, format and dtype as in EpilogueKey; `values`: how inputs are drawn; `strided` or packed inputs."""

    op: str
    format: str
    dtype: str = "bf16"
    heads: int = 3
    tokens: int = 5
    rope: bool = False
    pe_fp8: bool = False
    page_size: int = 8
    pages: int = 4
    values: str = "normal"
    strided: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        """For test ids."""
        rope = "-rope" if self.rope else ""
        pe = "-pe8" if self.pe_fp8 else ""
        return f"{self.op}-{self.format}-{self.dtype}-h{self.heads}-t{self.tokens}{rope}{pe}-{self.values}"


@dataclass
class Call:
    """Tensors of a call, and `run(ops)` that makes it with the functions of `ops`: results by name, cache and q too."""

    case: Case
    args: dict[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, ops: Any, **more: Any) -> dict[str, Tensor]:
        case, a = self.case, self.args
        if case.op == "context":
            if case.format == "plain":
                return {"k": ops.context_pack(a["k_nope"], a["k_pe"], **more)}
            k, v = ops.context_pack_fp8(a["k_nope"], a["v"], a["k_pe"], **more)
            return {"k": k, "v": v}
        names = {
            ("prefill", "plain"): "fused_mla_key_concat_kv_cache_insert",
            ("prefill", "fp8"): "fused_mla_qkv_quant_kv_cache_fp8_insert",
            ("prefill", "fp8_ds_mla"): "fused_mla_key_concat_ds_mla_insert",
        }
        function = getattr(ops, names.get((case.op, case.format), "fused_mla_decode_q_concat_kv_cache_insert"))
        got = function(**a, **self.kwargs, **more)
        found = {"cache": a["kv_cache"]}
        if case.op == "decode":
            return {**found, "query": got}
        if case.format == "fp8":
            return {**found, **dict(zip("qkv", got, strict=True))}
        return {**found, "k": got, "q_in": a["q"]}

    def copy(self, device: Any = None) -> "Call":
        """The same call on other memory (of `device`), strides kept."""
        return Call(
            self.case, {n: clone(t, device) for n, t in self.args.items()},
            {n: clone(t, device) for n, t in self.kwargs.items()},
        )  # fmt: skip


def but(case: Case, **changes: Any) -> Case:
    """The case with other fields."""
    return replace(case, **changes)


def whole(t: Tensor) -> Tensor:
    """The bytes of the tensor's storage, with what lies between its rows."""
    return torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def clone(t: Any, device: Any = None) -> Any:
    """A tensor with the same values, strides and offset in its own storage; other objects as they are."""
    if not isinstance(t, Tensor):
        return t
    moved = whole(t).to(device or t.device, copy=True)
    elements = moved[: moved.numel() // t.element_size() * t.element_size()].view(t.dtype)
    return elements.as_strided(t.shape, t.stride(), t.storage_offset())


def draw(case: Case, g: torch.Generator, *shape: int) -> Tensor:
    """Values of the case's kind in its dtype."""
    x = torch.randn(shape, generator=g)
    if case.values == "special":
        kinds = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 448.0, 464.0, 1e-30, 6e4, -6e4])
        x = torch.where(torch.rand(shape, generator=g) < 0.3, kinds[torch.randint(10, shape, generator=g)], x)
    elif case.values == "tiny":
        x = x * 1e-6
    elif case.values == "huge":
        x = x * (1e37 if case.dtype == "bf16" else 2e4)
    elif case.values == "zero":
        x = x * 0.0
    elif case.values == "wide":  # every tile of a record of another size
        x = x * torch.exp2(torch.randint(-20, 15, (*shape[:-1], 1), generator=g).float())
    return x.to(DTYPES[case.dtype])


def padded(case: Case, g: torch.Generator, *shape: int) -> Tensor:
    """A tensor of `shape` inside a wider one (if the case is strided), as a slice of a GEMM's result is."""
    if not case.strided:
        return draw(case, g, *shape)
    return draw(case, g, *shape[:-1], shape[-1] + 64)[..., 32 : 32 + shape[-1]]


def make(case: Case) -> Call:
    """The tensors of a case on the CPU. Caches have padded pages and are filled with a pattern."""
    g = torch.Generator().manual_seed(case.seed)
    t, h = case.tokens, case.heads
    a: dict[str, Any] = {}
    k_pe = padded(case, g, t, 64)
    if case.op == "decode":
        ql = draw(case, g, h, t, 512).transpose(0, 1) if case.strided else draw(case, g, t, h, 512)
        a |= {"ql_nope": ql, "q_pe": padded(case, g, t, h, 64)}
    else:
        a |= {"k_nope": padded(case, g, t, h, 128)}
    if case.op == "prefill":
        a["q"] = padded(case, g, t, h, 192)
    if case.format == "fp8" and case.op != "decode":
        a["v"] = padded(case, g, t, h, 128)
    a["k_pe"] = k_pe.to(torch.float32).clamp(-448, 448).to(E4M3) if case.pe_fp8 else k_pe
    kwargs: dict[str, Any] = {}
    if case.op == "context":
        return Call(case, a)
    a["kv_c_normed"] = draw(case, g, t, 512)
    if case.values == "wide":
        a["kv_c_normed"] = draw(case, g, t * 4, 128).reshape(t, 512)
    width, dtype = 576, DTYPES[case.dtype]
    if case.format == "fp8_ds_mla":
        width, dtype = 656, torch.uint8
    elif case.format == "fp8":
        dtype = E4M3
    pad = 3 if case.strided else 0  # entries between pages
    store = torch.full((case.pages, case.page_size + pad, width), 1, dtype=torch.uint8)
    if dtype.itemsize == 2:
        store = torch.full((case.pages, case.page_size + pad, width), -7.0).to(dtype)
    a["kv_cache"] = (store if dtype in (torch.uint8, DTYPES[case.dtype]) else store.view(dtype))[:, : case.page_size]
    slots = torch.randperm(case.pages * case.page_size, generator=g)[:t]
    slots[torch.rand(t, generator=g) < 0.3] = -1
    a["slot_mapping"] = slots
    if case.rope:
        a["positions"] = torch.randint(0, 50, (t,), generator=g)
        angle = torch.arange(50.0)[:, None] * 50000.0 ** (-torch.arange(0, 64, 2) / 64.0)
        a["cos_sin_cache"] = torch.cat([angle.cos(), angle.sin()], 1)
    one = torch.ones(1)
    if case.format == "fp8":
        kwargs = {"q_scale_inv": one * 0.7, "cache_scale_inv": one * 3.1}
        if case.op == "prefill":
            kwargs |= {"k_scale_inv": one * 1.3, "v_scale_inv": one * 0.11}
    elif case.op == "decode":
        kwargs = {"ds_mla": case.format == "fp8_ds_mla"}
    return Call(case, a, kwargs)


def keys(call: Call) -> SimpleNamespace:
    """The call's tensors by the names that the kernels' parameters have."""
    renamed = {"kv_c_normed": "kv_c", "kv_cache": "cache", "slot_mapping": "slots", "cos_sin_cache": "cos_sin"}
    tensors = {renamed.get(n, n): t for n, t in call.args.items()}
    tensors |= {n.removesuffix("_inv"): t for n, t in call.kwargs.items() if isinstance(t, Tensor)}
    return SimpleNamespace(**tensors)


KINDS = [
    ("prefill", "plain"), ("prefill", "fp8"), ("prefill", "fp8_ds_mla"), ("decode", "plain"), ("decode", "fp8"),
    ("decode", "fp8_ds_mla"), ("context", "plain"), ("context", "fp8"),
]  # fmt: skip


def one_nan(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` with every NaN of its rotated part (the last 64 values, 16-bit) the same NaN."""
    t = t.contiguous().clone()
    rotated = t[..., -64:] if t.dtype == dtype else t[..., -128:].view(dtype) if t.shape[-1] == 656 else t[..., :0]
    if rotated.dtype == dtype:
        rotated[rotated.isnan()] = torch.nan
    return t


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor], rotated: torch.dtype | None = None) -> None:
    """Equal to the bit, with the first difference in the message.

    rotated: the 16-bit dtype of values that went through RoPE. Which NaN arithmetic gives is nobody's promise (an H200
    gives 0x7fff where this CPU gives 0xffff), so there any NaN equals any other.
    """
    for name, w in want.items():
        g = got[name]
        assert g.dtype == w.dtype, f"{name}: {g.dtype} is not {w.dtype}"
        assert g.shape == w.shape, f"{name}: {g.shape} is not {w.shape}"
        if rotated is not None:
            g, w = one_nan(g.cpu(), rotated), one_nan(w.cpu(), rotated)
        a, b = (x.contiguous().cpu().view(torch.uint8) for x in (g, w))
        if not torch.equal(a, b):
            at = (a != b).nonzero()
            first = at[0].tolist()
            raise AssertionError(
                f"{name}: {len(at)} bytes differ, first at {first}: {a[tuple(first)]} instead of {b[tuple(first)]}"
            )
