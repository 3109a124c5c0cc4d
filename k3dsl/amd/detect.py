"""Which AMD GPUs are here. Loads torch only where AMD's driver is."""

from pathlib import Path
from typing import Final

from k3dsl.amd.device import TARGETS

#: Where the amdgpu driver opens its compute interface.
_DRIVER: Final = Path("/dev/kfd")


def architectures() -> list[str]:
    """What torch's devices are, as gfx950; none without AMD's driver or a torch for it."""
    if not _DRIVER.exists():
        return []
    try:
        import torch
    except ImportError:
        return []
    if torch.version.hip is None or not torch.cuda.is_available():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.gcnArchName).partition(":")[0] for device in devices]


def present(index: int) -> str | None:
    """The target of torch's device `index`; None where there is no such AMD device, or no kernels for it."""
    found = architectures()[index : index + 1]
    return found[0] if found and found[0] in TARGETS else None
