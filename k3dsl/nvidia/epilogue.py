"""Host facts of the fused MLA epilogues: which kernels there are, their parameters, how they are launched.

| op | format | what a launch does with T tokens and H heads |
|---|---|---|
| prefill | plain | k = [k_nope, k_pe on every head]; cache entry; with rope q's last 64 are rotated in place |
| prefill | fp8 | q, k and v as e4m3, an inverse scale each; e4m3 cache entry with a fourth |
| prefill | fp8_ds_mla | k and q as plain; cache entry as a 656-byte record |
| decode | plain, fp8, fp8_ds_mla | query = [ql_nope, q_pe] in 16 bits, e4m3, 16 bits; cache entry of the format |
| context | plain | k = [k_nope, k_pe]; no cache, never rotated |
| context | fp8 | k and v as unscaled e4m3; k_pe may be e4m3 already (pe_fp8) |

Inputs are bf16 or fp16, all of one call alike. The tokens of a call are no part of a key, nor are strides, page sizes
or how far a cache reaches: every offset is formed as 64 + 32 x 32 bits, which costs what a 32-bit one would.
The device code is `kernels/epilogue.py`, the torch functions are `epilogue_ops.py`; docs/epilogue.md explains both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

from k3dsl.errors import ConfigError
from k3dsl.nvidia.launch import Launch, Param

LATENT: Final = 512
NOPE: Final = 128
ROPE: Final = 64
V: Final = 128
ENTRY: Final = LATENT + ROPE
QK: Final = NOPE + ROPE
RECORD: Final = 656

OPS: Final = ("prefill", "decode", "context")
FORMATS: Final = ("plain", "fp8", "fp8_ds_mla")
DTYPES: Final = ("bf16", "fp16")
TARGETS: Final = ("sm_90a", "sm_100a", "sm_103a")
MAX_HEADS: Final = 128

THREADS: Final = 256
WARPS: Final = THREADS // 32
#: Units up to which a thread takes one: 131,072 threads are about half of what an H200 holds, so all run at once.
ONE_EACH: Final = 1 << 17
#: Units of a call: their numbers are unsigned 32-bit.
MAX_UNITS: Final = (1 << 32) - (1 << 16)


@dataclass(frozen=True)
class EpilogueKey:
    """What reaches codegen. `rope`: rotate; `pe_fp8`: k_pe is e4m3 already (context, fp8)."""

    op: str
    format: str
    dtype: str
    heads: int
    rope: bool = False
    pe_fp8: bool = False

    name: ClassVar[str] = "mla_epilogue"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.epilogue"

    @property
    def params(self) -> tuple[Param, ...]:
        """Kernel parameters. NAME_t and NAME_h are bytes from token to token and from head to head."""
        found = []
        if self.op == "decode":
            found += [*_tensor("ql_nope", "t", "h"), *_tensor("q_pe", "t", "h"), *_tensor("out")]
        else:
            found += [*_tensor("k_nope", "t", "h"), *_tensor("k_out")]
            if self.format == "fp8":
                found += [*_tensor("v", "t", "h"), *_tensor("v_out")]
            if self.op == "prefill" and (self.rope or self.format == "fp8"):
                found += _tensor("q", "t", "h")
            if self.op == "prefill" and self.format == "fp8":
                found += _tensor("q_out")
        found += _tensor("k_pe", "t")
        if self.op != "context":
            found += [*_tensor("kv_c"), *_tensor("cache"), Param("page_stride", "i64"), Param("row_stride", "i32")]
            found += [Param("slots", "ptr"), *(Param(f"block_{x}", "i32") for x in ("size", "mul", "shift"))]
            found += [Param(name, "ptr") for name in scales(self)]
            if self.rope:
                found += [Param("positions", "ptr"), Param("cos_sin", "ptr")]
        return (*found, Param("tokens", "i32"), Param("per_thread", "i32"))


def _tensor(name: str, *strides: str) -> list[Param]:
    return [Param(name, "ptr"), *(Param(f"{name}_{s}", "i32") for s in strides)]


def scales(key: EpilogueKey) -> tuple[str, ...]:
    """Parameters that are inverse scales, in the order in which a token's rows use them."""
    if key.format != "fp8" or key.op == "context":
        return ()
    return ("cache_scale", "q_scale") if key.op == "decode" else ("cache_scale", "k_scale", "v_scale", "q_scale")


def unit(key: EpilogueKey) -> int:
    """Elements of a unit: what fills a 16-byte store."""
    return 16 if key.format == "fp8" else 8


def units(key: EpilogueKey) -> int:
    """Units of a token. Records of fp8_ds_mla are not among them: they have warps of their own."""
    elements = 0 if key.op == "context" or key.format == "fp8_ds_mla" else ENTRY
    if key.op == "decode":
        elements += key.heads * ENTRY
    else:
        elements += key.heads * (QK + (V if key.format == "fp8" else 0))
        if key.op == "prefill":
            elements += key.heads * (QK if key.format == "fp8" else ROPE if key.rope else 0)
    return elements // unit(key)


def most_per_thread(key: EpilogueKey) -> int:
    """Units of a thread where tokens are many: 64 bytes of loads in flight each, whatever a unit reads."""
    return 2 if key.format == "fp8" else 4


def supports(key: EpilogueKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    for name, allowed in (("op", OPS), ("format", FORMATS), ("dtype", DTYPES)):
        if getattr(key, name) not in allowed:
            bad.append(f"{name}={getattr(key, name)!r} must be one of {', '.join(allowed)}")
    if type(key.heads) is not int or not 1 <= key.heads <= MAX_HEADS:
        bad.append(f"heads={key.heads!r} must be an int from 1 to {MAX_HEADS}")
    if key.op == "context" and key.format == "fp8_ds_mla":
        bad.append("op='context' writes no cache: format must be plain or fp8")
    if key.op == "context" and key.rope:
        bad.append("op='context' never rotates: rope must be False")
    if key.pe_fp8 and (key.op, key.format) != ("context", "fp8"):
        bad.append("pe_fp8=True is for op='context', format='fp8'")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


def share(key: EpilogueKey, tokens: int) -> int:
    """Units of a thread at `tokens` tokens: one while all threads run at once, else `most_per_thread`."""
    return 1 if tokens * units(key) <= ONE_EACH else most_per_thread(key)


def geometry(key: EpilogueKey, *, tokens: int) -> Launch:
    """The launch for `tokens` tokens: a CTA a record warp's worth of records, then the units in stretches."""
    if tokens < 1:
        raise ConfigError(f"tokens={tokens!r} must be at least 1")
    total = tokens * units(key)
    if total > MAX_UNITS:
        raise ConfigError(f"tokens={tokens}: at most {MAX_UNITS // units(key)} a call at {key.heads} heads")
    blocks = -(-total // (THREADS * share(key, tokens)))
    if key.format == "fp8_ds_mla":
        blocks += -(-tokens // WARPS)
    return Launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), pdl=True)


def division(block_size: int) -> tuple[int, int]:
    """(mul, shift) with slot // block_size == slot * mul >> shift for every 0 <= slot < 2**31; mul fits 32 bits.

    With shift = 31 + ceil(log2 d) and mul = ceil(2**shift / d) the error of mul * d is below 2**(shift - 31).
    """
    shift = 31 + (block_size - 1).bit_length()
    return -(-(1 << shift) // block_size), shift


def epilogue_keys(
    heads: int,
    *,
    kv_formats: Iterable[str] = ("fp8",),
    dtypes: Iterable[str] = ("bf16",),
    rope: Iterable[bool] = (False,),
    ops: Iterable[str] = OPS,
) -> list[EpilogueKey]:
    """Every key that an engine with these facts launches, for warm-up. kv_formats: bf16, fp8, fp8_ds_mla.

    A context pack is 16-bit for bf16 and fp8_ds_mla caches; for fp8 there are three: 16-bit, fp8, and fp8 with k_pe in
    e4m3, since which one is called depends on how the engine gathers its context.
    """
    found: dict[EpilogueKey, None] = {}
    for dtype in dtypes:
        for kv_format in kv_formats:
            kind = "plain" if kv_format == "bf16" else kv_format
            for op in ops:
                if op != "context":
                    found.update((EpilogueKey(op, kind, dtype, heads, r), None) for r in rope)
                    continue
                found[EpilogueKey(op, "plain", dtype, heads)] = None
                if kind == "fp8":
                    found.update((EpilogueKey(op, kind, dtype, heads, False, pe), None) for pe in (False, True))
    bad = [reason for key in found for reason in supports(key, TARGETS[0])]
    if bad:
        raise ConfigError.of("epilogues", sorted(set(bad)))
    return list(found)
