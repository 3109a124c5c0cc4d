"""What the sparse MLA kernel is written with beside k3dsl/amd/primitives.py: uniform branches, LDS by number, LDS-DMA.

The names of FlyDSL that are not promised to stay (`flydsl._mlir`) were seen in version 0.5.0.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, rocdl, scf
from flydsl.expr.typing import T

from k3dsl.amd import primitives as p
from k3dsl.amd.sparse_mla.key import WAVE


def either(condition: Any, then: Callable[[], Sequence[Any]], otherwise: Sequence[Any]) -> list[Any]:
    """`then()` where `condition` holds, which is the same in all lanes; else `otherwise`."""
    other = [p.raw(v) for v in otherwise]
    op = scf.IfOp(p.raw(condition), [v.type for v in other], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp([p.raw(v) for v in then()])
    with ir.InsertionPoint(op.else_block):
        scf.YieldOp(other)
    kinds = [type(v) if hasattr(v, "ir_value") else (lambda x: x) for v in otherwise]
    return [kind(v) for kind, v in zip(kinds, op.results, strict=True)]


def finite(value: fx.Float32) -> fx.Float32:
    """0 for -inf: where all keys so far are masked, exponentials of -inf - 0 are 0 and not NaN."""
    return p.choose(value == fx.Float32(float("-inf")), fx.Float32(0.0), value)


def bounded(address: fx.Int64, size: fx.Int32) -> ir.Value:
    """A buffer resource of `size` bytes: reads past it bring 0."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), p.raw(address))
    flags = fx.Int32((7 << 12) | (4 << 15)).ir_value()
    zero = fx.Int16(0).ir_value()
    return rocdl.make_buffer_rsrc(ir.Type.parse("!llvm.ptr<8>"), pointer, zero, p.raw(p.long(size)), flags)


def load_to_lds(place: fx.Int32, addresses: Sequence[fx.Int64], lanes: int = WAVE) -> None:
    """LDS-DMA of 16 bytes a lane from each address. Of load k, lane l lands at place + 1024 k + 16 l; address k must be
    1024 k short, because an instruction's offset counts on both sides.

    As text, because the compiler would make every read of LDS wait for all DMA. It counts the loads that it knows and
    waits for at least those: more loads in flight can only make it wait longer.
    """
    body = ["s_mov_b32 m0, $0", "s_nop 0"]
    body += [f"global_load_lds_dwordx4 ${k + 1}, off offset:{1024 * k}" for k in range(len(addresses))]
    if lanes == 32:
        body = ["s_mov_b32 exec_hi, 0", *body, "s_mov_b32 exec_hi, -1"]
    constraints = ",".join(["s", *["v"] * len(addresses), "~{memory}", "~{m0}"])
    llvm.inline_asm(
        None, [p.word(p.uniform(place)), *map(p.raw, addresses)], "\n".join(body), constraints, has_side_effects=True
    )


def wait_for_loads() -> None:
    """All loads of the wave, those into LDS among them, are done."""
    llvm.inline_asm(None, [], "s_waitcnt vmcnt(0)", "~{memory}", has_side_effects=True)


def wait_for_lds() -> None:
    """All reads of LDS are done: what they read may be overwritten."""
    llvm.inline_asm(None, [], "s_waitcnt lgkmcnt(0)", "~{memory}", has_side_effects=True)


def pointer(place: fx.Int32, extra: int) -> ir.Value:
    """A byte of LDS by its number; `extra` becomes the instruction's offset."""
    kind = ir.Type.parse("!llvm.ptr<3>")
    base = llvm.inttoptr(kind, p.word(place))
    flags = llvm.GEPNoWrapFlags.inbounds
    return llvm.getelementptr(kind, base, [p.word(extra)], [-(2**31)], T.i8, flags) if extra else base


def load_lds(place: fx.Int32, kind: ir.Type, extra: int) -> ir.Value:
    size = 16 if isinstance(kind, ir.VectorType) else 4
    return llvm.load(kind, pointer(place, extra), alignment=size)


def lds_words(place: fx.Int32, extra: int) -> ir.Value:
    """Four dwords of LDS."""
    return load_lds(place, p.words_type(4), extra)


def store_lds(place: fx.Int32, value: Any, extra: int) -> None:
    raw = p.raw(value)
    size = 16 if isinstance(raw.type, ir.VectorType) else 4
    llvm.store(raw, pointer(place, extra), alignment=size)


def transposed(place: fx.Int32, extra: int) -> ir.Value:
    """Eight bytes of a column as two dwords: each 16 lanes read 8 rows of 16 bytes, lanes 2r and 2r + 1 the halves of
    row r, and lane i receives column i."""
    return rocdl.ds_read_tr8_b64_(ir.VectorType.get([2], T.i32), pointer(place, extra))


def permuted(lane: fx.Int32, value: fx.Int32, offsets: Sequence[int]) -> list[fx.Int32]:
    """For each offset, `value` of the lane whose number times 4 is `lane` + offset.

    As text, because the compiler would spend an addition and a wait on each.
    """
    count = len(offsets)
    body = [f"ds_bpermute_b32 ${k}, ${count}, ${count + 1} offset:{offset}" for k, offset in enumerate(offsets)]
    constraints = ",".join(["=&v"] * count + ["v", "v"])
    kind = llvm.StructType.get_literal([T.i32] * count)
    text = "\n".join([*body, "s_waitcnt lgkmcnt(0)"])
    found = llvm.inline_asm(kind, [p.word(lane), p.word(value)], text, constraints, has_side_effects=True)
    return [fx.Int32(llvm.extractvalue(T.i32, found, [k])) for k in range(count)]


def extract(vector: ir.Value, at: int) -> fx.Float32:
    """A float of a vector of dwords."""
    return p.as_float(fx.Int32(llvm.extractelement(vector, p.word(at))))


def times_pair(value: fx.Float32, vector: ir.Value, pair: int) -> list[fx.Float32]:
    """`value` times floats 2 pair and 2 pair + 1 of a vector of dwords, by one packed product."""
    both = fx.Vector.from_elements([extract(vector, 2 * pair), extract(vector, 2 * pair + 1)])
    product = both * fx.Vector.from_elements([value, value])
    return [product[0], product[1]]


def splat(value: fx.Float32) -> ir.Value:
    """Four times the same."""
    return p.raw(fx.Vector.from_elements([value] * 4))


def widen(words: Sequence[fx.Int32], scale: fx.Float32) -> ir.Value:
    """Eight e4m3 of two dwords times a power of two, as bf16 in four."""
    kind = ir.VectorType.get([2], T.bf16)
    pairs = [
        llvm.bitcast(T.i32, rocdl.cvt_scalef32_pk_bf16_fp8(kind, p.word(w), p.number(scale), high))
        for w in words
        for high in (False, True)
    ]
    return p.join([fx.Int32(v) for v in pairs])
