"""Host facts of MlaValue: the up-projection by W_UV and the output gate, the last kernel of an MLA decode layer.

out[b, 128h + v] = bf(f32(bf(sum_l latent[b, h, l] W_UV[h, l, v])) * sigmoid(gate[b, 128h + v])), with float32
accumulation; rows b of a request with lengths[b // q] <= 0 are exact zeros, whatever latent and gate hold there.
The device code is `kernels/value.py`; docs/value.md says who owns what.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from k3dsl.errors import ConfigError
from k3dsl.nvidia.launch import Launch, Param

LATENT: Final = 512
V: Final = 128
#: Row tiles that are built. 32 halves the reads of W_UV from 17 rows on.
TILES: Final = (16, 32)
MAX_HEADS: Final = 128
TARGETS: Final = ("sm_90a", "sm_100a", "sm_103a")
#: Output columns of a CTA. 16 gives 96 CTAs at 12 heads and 16 rows: most of an H200's 132 SMs, one wave.
COLUMNS: Final = 16
#: Warps of a CTA; each takes 512 / WARPS latents.
WARPS: Final = 8
#: Pairs from one block of partial sums to the next: 32 lanes and 4 to shift the banks by half.
PAIRS: Final = 36


def smem_bytes(tile: int) -> int:
    """Dynamic shared memory of a CTA: a float32 partial of tile x COLUMNS outputs per warp, padded."""
    return WARPS * (tile // 16) * (COLUMNS // 8) * 2 * PAIRS * 8


@dataclass(frozen=True)
class ValueKey:
    """What reaches codegen: the heads of the rank (row strides of latent and out) and the rows of a CTA."""

    heads: int
    tile: int = 16

    name: ClassVar[str] = "mla_value"
    device_module: ClassVar[str] = "k3dsl.nvidia.kernels.value"
    params: ClassVar[tuple[Param, ...]] = (
        Param("latent", "ptr"),  # bf16 [rows, heads, 512], contiguous, 16-byte aligned
        Param("weight", "ptr"),  # bf16 [heads, 512, 128], latent axis contiguous, 16-byte aligned
        Param("gate", "ptr"),  # bf16 [rows, heads * 128], row stride gate_pitch, 4-byte aligned
        Param("lengths", "ptr"),  # int32 [rows / q]
        Param("out", "ptr"),  # bf16 [rows, heads * 128], contiguous, 4-byte aligned
        Param("rows", "i32"),
        Param("q", "i32"),
        Param("head_stride", "i32"),  # of weight, elements, a multiple of 8
        Param("v_stride", "i32"),  # of weight, elements, a multiple of 8
        Param("gate_pitch", "i32"),  # elements, even
    )

    @property
    def smem(self) -> int:
        """Dynamic shared memory of a CTA, bytes."""
        return smem_bytes(self.tile)


def supports(key: ValueKey, target: str) -> list[str]:
    """Reasons why `key` cannot be built for `target`; empty if it can."""
    bad = []
    if type(key.heads) is not int or not 1 <= key.heads <= MAX_HEADS:
        bad.append(f"heads={key.heads!r} must be an int from 1 to {MAX_HEADS}")
    if key.tile not in TILES:
        bad.append(f"tile={key.tile!r} must be one of {', '.join(map(str, TILES))}")
    if target not in TARGETS:
        bad.append(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return bad


def tile_for(rows: int) -> int:
    """The row tile that serves `rows` rows."""
    return 16 if rows <= 16 else 32


def geometry(key: ValueKey, *, rows: int) -> Launch:
    """The launch for `rows` rows: grid (column blocks, heads, row tiles)."""
    if rows < 1:
        raise ConfigError(f"rows={rows!r} must be at least 1")
    grid = (V // COLUMNS, key.heads, -(-rows // key.tile))
    return Launch(grid=grid, block=(32 * WARPS, 1, 1), smem=smem_bytes(key.tile), pdl=True)


def arguments(key: ValueKey, *, latent: Any, weight: Any, gate: Any, lengths: Any, out: Any, q: int) -> dict[str, int]:
    """The kernel's parameters for these tensors, by the names of `ValueKey.params`.

    latent: bf16 [rows, heads, 512]; weight: bf16 [heads, 512, 128] with strides (any, 1, any); gate: bf16
    [rows, heads * 128] with unit last stride; lengths: int32 [>= rows / q], contiguous; out: bf16 [rows, heads * 128].
    Raises ConfigError with every shape, dtype, stride or alignment that the kernel does not take.
    """
    rows, h = int(latent.shape[0]), key.heads
    want = {
        "latent": (latent, (rows, h, LATENT), "bfloat16", 16),
        "weight": (weight, (h, LATENT, V), "bfloat16", 16),
        "gate": (gate, (rows, h * V), "bfloat16", 4),
        "out": (out, (rows, h * V), "bfloat16", 4),
    }
    bad = []
    for name, (tensor, shape, dtype, align) in want.items():
        if tuple(tensor.shape) != shape:
            bad.append(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")
        if str(tensor.dtype) != f"torch.{dtype}":
            bad.append(f"{name} is {tensor.dtype}, must be torch.{dtype}")
        if tensor.data_ptr() % align:
            bad.append(f"{name} starts at {tensor.data_ptr():#x}, must be {align}-byte aligned")
    for name, tensor in (("latent", latent), ("out", out), ("lengths", lengths)):
        if not tensor.is_contiguous():
            bad.append(f"{name} has strides {tuple(tensor.stride())}, must be contiguous")
    if str(lengths.dtype) != "torch.int32":
        bad.append(f"lengths is {lengths.dtype}, must be torch.int32")
    if type(q) is not int or q < 1 or rows % q:
        bad.append(f"q={q!r} must be a positive int that divides the {rows} rows")
    elif len(tuple(lengths.shape)) != 1 or lengths.shape[0] < rows // q:
        bad.append(f"lengths has shape {tuple(lengths.shape)}, must be 1-D with at least {rows // q} entries")
    if not bad:
        # The stride of an axis of one is never multiplied by anything but 0, so any value of it is served.
        head_stride = int(weight.stride(0)) if h > 1 else 0
        v_stride = int(weight.stride(2))
        gate_pitch = int(gate.stride(0)) if rows > 1 else 0
        if weight.stride(1) != 1 or not all(0 <= s < 2**31 and s % 8 == 0 for s in (head_stride, v_stride)):
            bad.append(
                f"weight has strides {tuple(weight.stride())}: the latent axis must have 1, the others multiples of 8"
            )
        if gate.stride(1) != 1 or not 0 <= gate_pitch < 2**31 or gate_pitch % 2:
            bad.append(f"gate has strides {tuple(gate.stride())}: the last must be 1, the row stride even")
    if bad:
        raise ConfigError.of("MlaValue", bad)
    return {
        "latent": latent.data_ptr(),
        "weight": weight.data_ptr(),
        "gate": gate.data_ptr(),
        "lengths": lengths.data_ptr(),
        "out": out.data_ptr(),
        "rows": rows,
        "q": q,
        "head_stride": head_stride,
        "v_stride": v_stride,
        "gate_pitch": gate_pitch,
    }
