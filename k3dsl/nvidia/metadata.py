"""What is wrong with a step's metadata for a core, and the split count of cores that take one from the host."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.preparing import device_index

if TYPE_CHECKING:
    import torch


def parity_problems(parity: Any) -> list[str]:
    """Why that is no parity of a layer; empty if it is."""
    if type(parity) is int and parity in (0, 1):
        return []
    return [f"parity={parity!r} must be 0 or 1: the layer's ordinal among MLA layers modulo 2"]


def table_problems(step: Any, table: Tensor) -> list[str]:
    """Why a core cannot read tables of that width; empty if it can. step: has `entries`."""
    if table.shape[1] % step.entries:
        return [
            f"block_table has {table.shape[1]} entries a row, must be a multiple of {step.entries}: the core reads the "
            "table by tiles of 128 keys (what is beyond a request's pages may be any page)"
        ]
    return []


def fill_splits(batch: int, device: "torch.device | str | int | None" = None) -> int:
    """Splits of each row's keys that fill the device: min(256, max(1, SMs // (2 batch))), batch in rows."""
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch={batch!r} must be a positive int")
    from k3dsl.nvidia.device import device as facts

    return min(256, max(1, facts(device_index(device)).sm_count // (2 * batch)))
