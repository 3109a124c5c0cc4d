"""Whether an AMD GPU is here that k3dsl has kernels for. Loads torch only where AMD's driver is."""

from pathlib import Path
from typing import Final

from k3dsl.amd.device import TARGETS

#: Where the amdgpu driver opens its compute interface.
_DRIVER: Final = Path("/dev/kfd")


def present(index: int) -> str | None:
    """The target of torch's device `index`; None without AMD's driver, a torch for it, such a device, or kernels."""
    if not _DRIVER.exists():
        return None
    try:
        import torch
    except ImportError:
        return None
    if torch.version.hip is None or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    arch = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    return arch if arch in TARGETS else None
