"""What a rank's health words say: whether it failed, and what each workgroup waited for when it gave up.

int32 words, 8 a record: a header (word 0: FAILED, sticky), then one record for each of the 256 workgroups, written at
the workgroup's first give-up only: [1, region id, pair index, expected tag, tag seen, workgroup, clock, 0].
"""

from dataclasses import dataclass
from typing import Any, Final

from k3dsl.amd.mla_pre.key import GRID, HEALTH_WORDS, SECOND, MlaPreBuild
from k3dsl.amd.mla_pre.layout import regions
from k3dsl.errors import ConfigError

RECORD: Final = 8
#: Records hold the low 31 bits of the clock.
_CLOCK: Final = 1 << 31
#: Of every region that a build waits on.
_NAMES: Final = {region.id: region.name for region in regions(MlaPreBuild(tokens=1, ranks=8)).values()}


@dataclass(frozen=True)
class Tag:
    """A hand-off's tag taken apart: (epoch mod 2^22) * 256 + slot + 1."""

    epoch: int
    slot: int

    @classmethod
    def of(cls, tag: int) -> "Tag | None":
        """None for 0, which is no tag: memory that nobody wrote."""
        return None if tag <= 0 else cls((tag - 1) >> 8, (tag - 1) & 0xFF)

    def __str__(self) -> str:
        return f"epoch {self.epoch} slot {self.slot}"


@dataclass(frozen=True)
class GiveUp:
    """One workgroup's first give-up."""

    workgroup: int
    region: str  # its name, or the number in hexadecimal where it is unknown
    pair: int
    expected: int
    seen: int
    clock: int
    ticks: int  # after the first give-up of the rank

    def __str__(self) -> str:
        seen = Tag.of(self.seen)
        return (
            f"+{self.ticks / SECOND * 1e3:9.3f} ms workgroup {self.workgroup:3d} gave up on "
            f"{self.region}[{self.pair}]: waited for {Tag.of(self.expected)}, saw {'nothing' if seen is None else seen}"
        )


@dataclass(frozen=True)
class Health:
    """A rank's health, decoded. Truthy while the rank is sound."""

    failed: bool
    records: tuple[GiveUp, ...]  # by time

    def __bool__(self) -> bool:
        return not self.failed and not self.records

    def lines(self) -> list[str]:
        """For people: the verdict, then each workgroup's first give-up, the earliest first."""
        if self:
            return ["sound: no wait was given up"]
        head = "FAILED" if self.failed else "not marked FAILED"
        return [f"{head}; {len(self.records)} of {GRID} workgroups gave up", *map(str, self.records)]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def decode_health(health: Any) -> Health:
    """Decodes a rank's health words: int32 [2056], a tensor on any device (it is copied to the host) or a sequence.

    Records come in the order of their clocks, which wrap after 21 s: the largest gap is taken to lie before the first.
    Raises ConfigError for another number of words, or what is none.
    """
    given = health.detach().cpu().flatten().tolist() if hasattr(health, "detach") else health
    try:
        words = [int(w) for w in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"health is {type(health).__name__}, must be a tensor or a sequence of {HEALTH_WORDS} int32 words: {error}"
        ) from None
    if len(words) != HEALTH_WORDS:
        raise ConfigError(
            f"health has {len(words)} words, must have {HEALTH_WORDS}: a header and {GRID} records of {RECORD}"
        )
    found = [words[at : at + RECORD] for at in range(RECORD, HEALTH_WORDS, RECORD) if words[at]]
    clocks = sorted({r[6] for r in found})
    gaps = [((clock - clocks[i - 1]) % _CLOCK or _CLOCK, clock) for i, clock in enumerate(clocks)]
    first = max(gaps)[1] if gaps else 0
    records = [
        GiveUp(r[5], _NAMES.get(r[1], f"0x{r[1]:08x}"), r[2], r[3], r[4], r[6], (r[6] - first) % _CLOCK) for r in found
    ]
    return Health(bool(words[0]), tuple(sorted(records, key=lambda r: (r.ticks, r.workgroup))))
