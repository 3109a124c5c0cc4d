"""Memory of which every process of a group has every part: what is used of torch.distributed's symmetric memory.

torch 2.6 to 2.13: `_symmetric_memory.empty` allocates, `rendezvous` maps the memory of all ranks into each process and
gives a handle with `buffer_ptrs` (the start of each rank's allocation, in this process) and `multicast_ptr` (0 where
there is none). A tensor may begin after its allocation's start, so every rank says where its own does.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from k3dsl.errors import ConfigError, ToolchainError
from k3dsl.nvidia.exchange import StoreExchange

#: torch makes a multicast object at every rendezvous unless this says otherwise.
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_boxes = iter(range(1 << 62))


class Shared(NamedTuple):
    """own: this rank's bytes; addresses: where each rank's are in this process; multicast: of all, or 0; handle: what
    keeps them mapped."""

    own: Tensor
    addresses: list[int]
    multicast: int
    handle: Any


def exchange_of(group: Any, seconds: float) -> StoreExchange:
    """The exchange of a process group (None: all processes), each time a new one. Collective in order, not in time."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigError("this process is not in the group")
    store = dist.distributed_c10d._get_default_store()
    prefix = dist.PrefixStore(f"k3dsl/{group.group_name}/{next(_boxes)}", store)
    return StoreExchange(prefix, rank, size, seconds)


def allocate(group: Any, size: int, device: torch.device, exchange: StoreExchange, multicast: bool) -> Shared:
    """`size` bytes on every rank of `group`, mapped by each. Collective. Without `multicast` none is made."""
    import torch.distributed as dist

    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError as error:
        raise ToolchainError(f"torch {torch.__version__} has no symmetric memory: {error}") from error
    group = dist.group.WORLD if group is None else group
    with torch.cuda.device(device), _multicast(multicast):
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, group)
    start = own.data_ptr() - int(handle.buffer_ptrs[exchange.rank])
    starts = [int(theirs["start"]) for theirs in exchange.share("DcpBox memory", {"start": start})]
    addresses = [int(at) + offset for at, offset in zip(handle.buffer_ptrs, starts, strict=True)]
    shared = int(handle.multicast_ptr or 0) if multicast else 0
    if multicast and not shared:
        raise ConfigError("multicast=True, but the symmetric memory of this group has no multicast address")
    return Shared(own, addresses, shared + start if multicast else 0, handle)


@contextmanager
def _multicast(wanted: bool) -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    if not wanted:
        os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if not wanted and before is None:
            del os.environ[_NO_MULTICAST]
        elif before is not None:
            os.environ[_NO_MULTICAST] = before
