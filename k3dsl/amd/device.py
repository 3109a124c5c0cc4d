"""The AMD targets that k3dsl builds for, named in one place."""

from dataclasses import dataclass
from typing import Final

from k3dsl.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """What is the same for every GPU of an architecture.

    mach: its number in an ELF header; lds: bytes of a compute unit; registers: vector and accumulation registers of a
    lane together; compute_units: of a whole device (MI355X: 8 XCDs of 32); waves: of a SIMD at most.
    """

    name: str
    mach: int
    lds: int
    registers: int
    compute_units: int
    waves: int


TARGETS: Final[dict[str, Target]] = {
    t.name: t for t in (Target("gfx950", mach=0x04F, lds=160 * 1024, registers=512, compute_units=256, waves=8),)
}


def check_target(target: str) -> Target:
    """The facts of a target by its name. Raises ConfigError naming the targets that there are."""
    if target not in TARGETS:
        raise ConfigError(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return TARGETS[target]
