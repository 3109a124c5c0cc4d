"""What is computed: the dimensions of one tensor-parallel shard of an MLA layer, and the formats of its cache."""

from dataclasses import dataclass, fields
from typing import Final

from k3dsl.errors import ConfigError

#: Paged-cache formats and the bytes that one token takes in each.
KV_BYTES: Final = {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656}


@dataclass(frozen=True)
class MlaDims:
    """One rank's shard of an MLA decode layer. Sizes in elements; `eps` is the RMSNorm epsilon.

    Raises ConfigError with every bad value.
    """

    heads: int = 12
    hidden: int = 7168
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v: int = 128
    eps: float = 1e-5

    def __post_init__(self) -> None:
        bad = [
            f"{f.name}={getattr(self, f.name)!r} must be a positive int"
            for f in fields(self)
            if f.name != "eps" and (type(getattr(self, f.name)) is not int or getattr(self, f.name) < 1)
        ]
        if type(self.eps) is not float or not 0.0 < self.eps < 1.0:
            bad.append(f"eps={self.eps!r} must be a float between 0 and 1")
        if bad:
            raise ConfigError.of("MlaDims", bad)

    @classmethod
    def kimi_k3(cls, tp: int = 8) -> "MlaDims":
        """Kimi-K3 (96 heads) on `tp` tensor-parallel ranks: 12 heads a rank at tp=8, 6 at tp=16."""
        if type(tp) is not int or tp not in (8, 16):
            raise ConfigError(f"tp={tp!r}: Kimi-K3's decode layers are served at tp 8 (12 heads) and tp 16 (6 heads)")
        return cls(heads=96 // tp)

    @property
    def latent(self) -> int:
        """Elements of a cache entry: latent and rope part, 576."""
        return self.kv_lora + self.rope

    @property
    def qk(self) -> int:
        """Elements of one head's query before absorption, 192."""
        return self.nope + self.rope

    @property
    def projected(self) -> int:
        """Columns of the packed projection without the gate: q latent, kv latent, rope key; 2112."""
        return self.q_lora + self.kv_lora + self.rope

    @property
    def pitch(self) -> int:
        """Columns of the packed projection with the gate: the row stride of `projected`; 3648 at 12 heads."""
        return self.projected + self.heads * self.v

    @property
    def scale(self) -> float:
        """Softmax scale, (nope + rope) ** -0.5."""
        return self.qk**-0.5
