"""Facts of the sparse MLA kernel that host and device share. No torch, no FlyDSL here.

For token t and head h, over the keys j that its index list names:

    s_j = q[t, h] . K_j        out[t, h] = sum_j softmax(scale * s)_j V_j        lse[t, h] = ln sum_j exp(scale * s_j)

K_j is a record's dequantised latent (512) and its rope part (64), V_j the latent.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from k3dsl.errors import ConfigError

LATENT: Final = 512
ROPE: Final = 64
QK: Final = LATENT + ROPE
#: One key in the cache: 512 e4m3, four fp32 scales (one for 128 columns), 64 bf16.
RECORD: Final = 656
SCALES_AT: Final = 512
ROPE_AT: Final = 528
MAX_HEADS: Final = 16
#: Head counts that warm-up builds; any count up to MAX_HEADS can be.
WARM_HEADS: Final = (1, 2, 4, 6, 8, 12, 16)

WAVE: Final = 64
#: Keys of a tile: each wave works on its own, wave w of W on tiles w, w + W, ...
TILE: Final = 32
#: Most waves of a workgroup; a launch has two or four.
MAX_WAVES: Final = 4
#: LDS of a wave, bytes: two tiles of latents and of scales, one of rope parts.
LATENT_BYTES: Final = TILE * LATENT
ROPE_BYTES: Final = TILE * ROPE * 2
SCALE_BYTES: Final = TILE * 16
WAVE_BYTES: Final = 2 * LATENT_BYTES + ROPE_BYTES + 2 * SCALE_BYTES

#: Parameters of the kernel in order.
PARAMS: Final = (
    ("q", "ptr"),  # bf16 [T, H, 576], rows aligned to 4 bytes
    ("kv", "ptr"),  # u8 [N, 656], aligned to 16 bytes
    ("indices", "ptr"),  # i32 [n]
    ("indptr", "ptr"),  # i32 [T + 1]
    ("out", "ptr"),  # bf16 [T, H, >= 512], rows aligned to 4 bytes
    ("lse", "ptr"),  # f32 [T, H]; out where it is not written
    ("q_stride0", "i32"),  # elements
    ("q_stride1", "i32"),
    ("out_stride0", "i32"),
    ("out_stride1", "i32"),
    ("scale", "f32"),  # softmax scale times log2(e)
    ("index_bytes", "i32"),  # bounds every read of `indices`
    ("waves", "i32"),  # of a workgroup
)


@dataclass(frozen=True)
class SparseMlaKey:
    """What reaches codegen, and nothing else. Raises ConfigError with every bad value.

    heads        H, 1 to 16
    has_invalid  index lists may hold negative entries, which are masked
    lse          the kernel writes the log-sum-exp
    """

    heads: int
    has_invalid: bool = False
    lse: bool = False

    name: ClassVar[str] = "sparse_mla"
    device_module: ClassVar[str] = "k3dsl.amd.sparse_mla.kernel"
    params: ClassVar[tuple[tuple[str, str], ...]] = PARAMS

    def __post_init__(self) -> None:
        bad = []
        if type(self.heads) is not int or not 1 <= self.heads <= MAX_HEADS:
            bad.append(f"heads={self.heads!r} must be an int from 1 to {MAX_HEADS}")
        bad += [
            f"{name}={getattr(self, name)!r} must be a bool"
            for name in ("has_invalid", "lse")
            if type(getattr(self, name)) is not bool
        ]
        if bad:
            raise ConfigError.of("SparseMlaKey", bad)

    @property
    def symbol(self) -> str:
        """Name of the kernel in its object."""
        return f"sparse_mla_h{self.heads}" + "_invalid" * self.has_invalid + "_lse" * self.lse


def warm_keys(heads: tuple[int, ...] = WARM_HEADS) -> tuple[SparseMlaKey, ...]:
    """Every build for these head counts: 28 for the usual ones."""
    return tuple(SparseMlaKey(h, invalid, lse) for h in heads for invalid in (False, True) for lse in (False, True))


def waves(tokens: int, compute_units: int) -> int:
    """Waves of a workgroup: four, which fill a compute unit's LDS, as long as each token has a compute unit of its own;
    else two, so that two workgroups share one and each hides the other's beginning and end."""
    return 4 if tokens <= compute_units else 2
