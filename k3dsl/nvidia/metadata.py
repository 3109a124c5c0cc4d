"""What is wrong with a layer's scratch or a step's metadata, and the split count of cores that take one."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from k3dsl.checks import on_device
from k3dsl.errors import ConfigError
from k3dsl.nvidia.query import ELEMENT, ENTRY, MAX_ROWS
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


def scratch_problems(scratch: Tensor, rows: int, heads: int, kv_format: str, device: "torch.device") -> list[str]:
    """Why queries of so many rows cannot lie in `scratch`; empty if they can."""
    entry = ENTRY * ELEMENT[kv_format]
    good = (
        scratch.dim() == 3
        and scratch.shape[2] * scratch.element_size() == entry
        and scratch.shape[1] == heads
        and scratch.shape[0] >= rows
        and scratch.is_contiguous()
        and scratch.data_ptr() % 16 == 0
        and on_device(scratch, device)
    )
    if good:
        return []
    return [
        f"query_scratch is {scratch.dtype} {list(scratch.shape)} on {scratch.device}, must be contiguous "
        f"uint8 [{MAX_ROWS}, {heads}, {entry}] on the device for a {kv_format} cache"
    ]


def fill_splits(batch: int, device: "torch.device | str | int | None" = None) -> int:
    """Splits of each row's keys that fill the device: min(256, max(1, SMs // (2 batch))), batch in rows."""
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch={batch!r} must be a positive int")
    from k3dsl.nvidia.device import device as facts

    return min(256, max(1, facts(device_index(device)).sm_count // (2 * batch)))
