"""The host side of one mla_pre launch: build the object, load it once, check the arguments, pack them, launch."""

from functools import cache as once
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor

from k3dsl.amd.checks import require_launch
from k3dsl.amd.launch import Executable, Launch, LaunchPlan, Runtime, runtime_problems
from k3dsl.amd.mla_pre import contract
from k3dsl.amd.mla_pre.key import GRID, THREADS, MlaPreBuild
from k3dsl.capture import guard
from k3dsl.checks import require
from k3dsl.errors import ConfigError

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache
    from k3dsl.cache.entry import Entry

TARGET: Final = "gfx950"
LAUNCH: Final = Launch(grid=(GRID, 1, 1), block=(THREADS, 1, 1))
#: runtime -> build -> what is loaded there.
_loaded: "WeakKeyDictionary[Runtime, dict[MlaPreBuild, Executable]]" = WeakKeyDictionary()


def build(key: MlaPreBuild, *, cache: "CompileCache | None" = None) -> "Entry":
    """The object of `key` from the cache (by default the user's), compiled if it is not there. Needs no GPU.

    Raises CompileError for an object that breaks the hand-off contract: all 256 workgroups must be resident.
    """
    from k3dsl.amd.toolchain import build as compile_one
    from k3dsl.amd.toolchain import compile_key
    from k3dsl.cache import CompileCache

    guard(f"building {key.symbol}")
    found = (cache if cache is not None else CompileCache()).get_or_build(compile_key(key, TARGET), compile_one)
    contract.require(key.symbol, contract.residency_problems(found.resources))
    return found


def executable(key: MlaPreBuild, runtime: Runtime, cache: "CompileCache | None" = None) -> Executable:
    """`key` loaded on a runtime's device, once a runtime."""
    loaded = _loaded.setdefault(runtime, {})
    found = loaded.get(key)
    if found is None:
        guard(f"loading {key.symbol}")
        found = loaded[key] = Executable.load(runtime, build(key, cache=cache).payload)
    return found


@once
def hip_runtime(index: int) -> Runtime:
    """The HIP device `index`, checked to be whole: a partitioned one cannot hold all workgroups at once."""
    import torch

    from k3dsl.amd.hip import runtime

    found = runtime(index)
    units = torch.cuda.get_device_properties(index).multi_processor_count
    contract.require(f"mla_pre on device {index}", contract.residency_problems({}, units))
    return found


def values(given: dict[str, Any]) -> dict[str, int]:
    """Kernel parameters by name from the keyword arguments of `mla_pre`, which must have been checked."""

    def address(name: str) -> int:
        tensor = given[name]
        return 0 if tensor is None else int(tensor.data_ptr())

    cache, w_k, scale = given["kv_cache"], given["w_k"], given["w_k_scale"]
    pointers = (
        *("prefix", "delta", "blocks", "ares_nw", "ares_qk", "in_nw", "w_qkv", "w_g", "q_nw", "kv_nw", "w_qb", "w_k"),
        *("w_k_scale", "kv_cache", "slots", "gate_out", "q_out", "scratch", "peers", "epoch", "health", "tl"),
    )
    return {
        **{name: address(name) for name in pointers},
        "blocks_token_stride": given["blocks"].stride(0),
        "blocks_block_stride": given["blocks"].stride(1),
        "w_k_stride0": w_k.stride(0) * w_k.element_size(),
        "w_k_stride1": w_k.stride(1) * w_k.element_size(),
        **{f"w_k_scale_stride{i}": 0 if scale is None else scale.stride(i) for i in range(3)},
        "kv_block_stride": cache.stride(0),
        "kv_slot_stride": cache.stride(1),
        "block_size": cache.shape[1],
        **{name: given[name] for name in ("rank", "layer", "alarm")},
    }


def mla_pre(
    key: MlaPreBuild,
    *,
    prefix: Tensor,  # bf16 [S, 7168]; with delta updated in place
    delta: Tensor | None,  # bf16 [S, 7168]
    blocks: Tensor,  # bf16 [S, >= nblocks, 7168], last axis contiguous
    ares_nw: Tensor,  # bf16 [7168]
    ares_qk: Tensor,  # bf16 [7168]
    in_nw: Tensor,  # bf16 [7168]
    w_qkv: Tensor,  # bf16 [2112, 7168]
    w_g: Tensor,  # bf16 [1536, 7168]
    q_nw: Tensor,  # bf16 [1536]
    kv_nw: Tensor,  # bf16 [512]
    w_qb: Tensor,  # bf16 [2304, 1536]
    w_k: Tensor,  # mxfp4: uint8 [12, 512, 64]; bf16: [12, 128, 512]
    w_k_scale: Tensor | None,  # mxfp4: uint8 [12, 512, 4]; bf16: None
    kv_cache: Tensor,  # one-byte [blocks, block_size, 576], written at `slots`
    slots: Tensor,  # int64 [S], each -1 (not written here) or below 2^31
    gate_out: Tensor,  # bf16 [S, 1536], written: the sigmoid of the gate
    q_out: Tensor,  # [S, q_heads(key), 576] of e4m3 bytes, or bf16 with qbf16; written
    scratch: Tensor,  # uint8, scratch_bytes(key) or more, zeroed once
    peers: Tensor | None,  # int64 [ranks]: every rank's hand-offs, past the flags
    rank: int,
    layer: int,  # tag slot, of no other launch of the step
    epoch: Tensor,  # int32 [1], bumped on the stream since the last launch with this slot
    health: Tensor,  # int32 [2056], zeroed once
    alarm: int,  # address of this rank's alarm word on rank 0
    tl: Tensor | None = None,  # int64 [256, 16] for a build with timeline
    runtime: Runtime | None = None,
    cache: "CompileCache | None" = None,
) -> None:
    """One step of one layer on one rank, on the current stream: from the residual seam to the query.

    Ranks of a group must all launch, the same build in the same order. For the loop of an engine use PreparedMlaPre,
    which packs the arguments once. runtime: by default HIP on the tensors' device. Raises ConfigError with everything
    that is wrong with the arguments before anything is launched, CompileError, LaunchError.
    """
    given = {
        "prefix": prefix,
        "delta": delta,
        "blocks": blocks,
        "ares_nw": ares_nw,
        "ares_qk": ares_qk,
        "in_nw": in_nw,
        "w_qkv": w_qkv,
        "w_g": w_g,
        "q_nw": q_nw,
        "kv_nw": kv_nw,
        "w_qb": w_qb,
        "w_k": w_k,
        "w_k_scale": w_k_scale,
        "kv_cache": kv_cache,
        "slots": slots,
        "gate_out": gate_out,
        "q_out": q_out,
        "scratch": scratch,
        "peers": peers,
        "rank": rank,
        "layer": layer,
        "epoch": epoch,
        "health": health,
        "alarm": alarm,
        "tl": tl,
    }
    require_launch(key, **given)
    require("mla_pre", runtime_problems(runtime))
    if runtime is None:
        if prefix.device.type != "cuda":
            raise ConfigError(
                f"prefix is on {prefix.device}: mla_pre runs on a GPU, or on the runtime that it is given"
            )
        runtime = hip_runtime(prefix.device.index or 0)
    plan = LaunchPlan(executable(key, runtime, cache), LAUNCH, key.params, **values(given))
    plan.launch(runtime.stream())
