"""The stages that run other packages' kernels: TokenspeedCore and TrtllmCore. Their protocol is HopperCore's.

TokenspeedCore launches an object of our cache and is bound by addresses; TrtllmCore calls FlashInfer and takes tensors.
"""

from collections.abc import Callable
from ctypes import c_float, c_int32
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.errors import ConfigError
from k3dsl.nvidia.core import packages
from k3dsl.nvidia.core.tokenspeed import ENTRY, LATENT, ROPE, TokenspeedKey, Work
from k3dsl.nvidia.host_object import HostObject, HostPlan, tensor_type

#: By number of dynamic extents and strides, as the package declares its arguments.
_QUERY, _CACHE, _TABLE, _OUT, _LSE, _FLAT = (
    tensor_type(*facts) for facts in ((4, 3, False), (3, 2, False), (2, 1), (4, 3), (3, 2), (1, 0))
)
_ALIGN: Final = 32


class TokenspeedCore:
    """One call of the package's launcher: the decode kernel and, with more than one split, its reducer.

    work: the cut of this shape; cache [pages, page, 576] e4m3 bytes; scratch [>= rows, H, 576]; partial: at least
    `work.workspace` bytes, 32-byte aligned; latent bf16 [>= rows, H, 512]; scale: softmax scale times the scales of
    query and key; lse: address of float32 [rows, H] for the base-2 LSE, if the key has one.
    """

    def __init__(
        self,
        loaded: HostObject,
        *,
        key: TokenspeedKey,
        work: Work,
        rows: int,
        cache: Tensor,
        scratch: Tensor,
        partial: Tensor,
        latent: Tensor,
        scale: float,
        out_scale: float,
        lse: int = 0,
    ) -> None:
        bad = []
        if work.splits > max(key.capacity, 1):
            bad.append(f"{work.splits} splits must be at most {max(key.capacity, 1)}, which the object was built for")
        if partial.numel() * partial.element_size() < work.workspace:
            bad.append(f"partial has {partial.numel()} bytes, must have {work.workspace} or more")
        if partial.data_ptr() % _ALIGN:
            bad.append(f"partial at {partial.data_ptr():#x} must be a multiple of {_ALIGN}")
        if bool(lse) != key.lse:
            bad.append(f"lse={lse:#x} must be {'an address' if key.lse else '0'} for an object with lse={key.lse}")
        if cache.element_size() != 1 or cache.shape[1] != key.page:
            bad.append(f"cache is {cache.dtype} {list(cache.shape)}, must be bytes [pages, {key.page}, {ENTRY}]")
        elif cache.stride(0) >= 1 << 31:
            bad.append(f"cache has pages {cache.stride(0)} bytes apart, must be below 2**31")
        if bad:
            raise ConfigError.of("TokenspeedCore", bad)
        self.key, self.work = key, work
        self._hold = scratch, partial, latent
        self._fence = torch.empty(1, dtype=torch.int8, device=latent.device)
        requests, heads = rows // key.q, key.heads
        query, entries = scratch.data_ptr(), cache.data_ptr()
        rows_of = (key.q * heads * ENTRY, heads * ENTRY, ENTRY)
        pages = (cache.stride(0), cache.stride(1))
        out = (key.q * heads * LATENT, heads * LATENT, LATENT)
        self._whole = key.ranks > 1
        self._table = _TABLE(0, (requests, 0), (0,))
        self._lengths = _FLAT(0, (requests,))
        self._bounds = _FLAT(0, (requests,))
        values: list[Any] = [
            _QUERY(query, (requests, key.q, heads, LATENT), rows_of),
            _QUERY(query + LATENT, (requests, key.q, heads, ROPE), rows_of),
            _CACHE(entries, (cache.shape[0], key.page, LATENT), pages),
            _CACHE(entries + LATENT, (cache.shape[0], key.page, ROPE), pages),
            self._table,
            _OUT(latent.data_ptr(), (requests, key.q, heads, LATENT), out),
        ]
        if key.lse:
            values.append(_LSE(lse, (requests, key.q, heads), (key.q * heads, heads)))
        if key.capacity:
            values.append(_FLAT(partial.data_ptr(), (work.workspace,)))
        values += [c_int32(work.splits), self._lengths, self._bounds, c_float(scale), c_float(out_scale)]
        self._plan = HostPlan(loaded, values)
        self._shape, self._stride = self._table.shape, self._table.strides
        self.launch: Callable[[int], None] = self._plan.launch

    def bind(self, table: int, lengths: int, stride: int, totals: int = 0) -> None:
        """Addresses of the metadata and the row stride of the table in entries, for the launches to come.

        totals: of the whole contexts' lengths, where the key has ranks and `lengths` are those of a shard.
        """
        self._table.data = table
        self._shape[1] = stride
        self._stride[0] = stride
        self._lengths.data = lengths
        self._bounds.data = totals if self._whole else lengths

    def launch_first(self, stream: int) -> None:
        """The same after any other work of the stream, which is over when the core starts.

        Its warps read the lengths before they wait for the kernel in front, and the launcher knows no launch that
        waits: so a fill is put in front, which does.
        """
        self._fence.zero_()
        self.launch(stream)


class TrtllmCore:
    """One call of FlashInfer's trtllm-gen decode with prepared tensors; `take` gives those of a step.

    Raises ToolchainError, naming what to install, where FlashInfer, its launcher or its cubins are missing.
    """

    def __init__(
        self,
        *,
        rows: int,
        q: int,
        scratch: Tensor,  # bytes [>= rows, H, 576]
        latent: Tensor,  # bf16 [>= rows, H, 512]
        scale: float,
        out_scale: float,
        max_context: int,
        sm_count: int,
    ) -> None:
        heads = scratch.shape[1]
        self._requests = rows // q
        self._step: dict[str, Tensor] = {}
        self._decode, self._arguments = packages.trtllm_call(
            query=scratch[:rows].view(self._requests, q, heads, ENTRY),
            max_seq=max_context,
            scales=(scale, out_scale),
            out=latent[:rows].view(self._requests, q, heads, LATENT),
            sm_count=sm_count,
        )

    def take(self, cache: Tensor, table: Tensor, lengths: Tensor) -> None:
        """The cache [pages, page, 576] and metadata, int32 [>= R, width] and [>= R], of the launch to come."""
        self._step = {
            "kv_cache": packages.trtllm_cache(cache),
            "block_tables": table[: self._requests],
            "seq_lens": lengths[: self._requests],
        }

    def launch(self, stream: int) -> None:
        """On torch's current stream, which `stream` is."""
        step, self._step = self._step, {}  # the engine's tensors are not held beyond the call
        try:
            self._decode(**self._arguments, **step)
        except Exception as error:
            raise packages.trtllm_failed(error) from error

    def launch_first(self, stream: int) -> None:
        """The same: FlashInfer's call is one for any stream."""
        self.launch(stream)
