"""What a GPU has: read once a device, never assumed. And the targets that k3dsl builds for, named in one place.

Needs the driver alone: no torch, no CUDA runtime.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

from k3dsl.errors import ConfigError
from k3dsl.nvidia.driver import Driver, driver

#: CUdevice_attribute
_SM_COUNT, _SMEM_PER_BLOCK, _SMEM_PER_SM, _MAJOR, _MINOR = 16, 97, 81, 75, 76
_L2_BYTES = 38


@dataclass(frozen=True)
class Target:
    """What is the same for every GPU of an architecture.

    capability: (major, minor); smem: most bytes of shared memory of a CTA, static and dynamic together (227 KB, CUDA
    programming guide, table of compute capabilities); registers: of a thread at most, and of an SM.
    """

    name: str
    capability: tuple[int, int]
    smem: int = 232448
    thread_registers: int = 255
    sm_registers: int = 65536
    block_threads: int = 1024


TARGETS: Final[dict[str, Target]] = {
    t.name: t for t in (Target("sm_90a", (9, 0)), Target("sm_100a", (10, 0)), Target("sm_103a", (10, 3)))
}


def check_target(target: str) -> Target:
    """The facts of a target by its name. Raises ConfigError naming the targets that there are."""
    if target not in TARGETS:
        raise ConfigError(f"target={target!r} must be one of {', '.join(TARGETS)}")
    return TARGETS[target]


@dataclass(frozen=True)
class Device:
    """One GPU. Sizes in bytes; `target` is None where k3dsl has no kernels for it."""

    index: int
    name: str
    capability: tuple[int, int]
    target: str | None
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int


def read(index: int, driver: Driver) -> Device:
    """The facts of device `index`, as CUDA_VISIBLE_DEVICES counts them."""
    count = driver.device_count()
    if not 0 <= index < count:
        raise ConfigError(f"device={index!r} must be from 0 to {count - 1}" if count else "there is no CUDA device")
    capability = (driver.attribute(_MAJOR, index), driver.attribute(_MINOR, index))
    return Device(
        index=index,
        name=driver.device_name(index),
        capability=capability,
        target=next((t.name for t in TARGETS.values() if t.capability == capability), None),
        sm_count=driver.attribute(_SM_COUNT, index),
        smem_per_block=driver.attribute(_SMEM_PER_BLOCK, index),
        smem_per_sm=driver.attribute(_SMEM_PER_SM, index),
        l2_bytes=driver.attribute(_L2_BYTES, index),
    )


@cache
def device(index: int = 0) -> Device:
    """The facts of device `index`. Raises ToolchainError without a driver, ConfigError without the device."""
    return read(index, driver())
