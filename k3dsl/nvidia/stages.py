"""The stages of a layer, each one or two launches packed once: MlaQuery, HopperCore, MlaValue.

A stage is bound to a layer's weights, cache and buffers and to a number of rows. `bind` rewrites what a step may change
(addresses, two strides) and checks nothing; `launch` launches. Who checks is the constructor, once, and whoever calls.

A launch has addresses alone, so a stage holds the weights and buffers behind them: an engine that gives its own
attribute another tensor, or makes one anew at each access, frees nothing that a plan or a captured graph reads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from torch import Tensor

from k3dsl.nvidia import query, value
from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.driver import Driver, Function, LaunchPlan, TensorMap

#: A kernel key -> its kernel, loaded on the device.
Load: TypeAlias = Callable[[Any], Function]
#: log2(e): the kernels take exponentials of base 2.
LOG2E: Final = 1.4426950408889634


class MlaQuery:
    """One launch: queries of `rows` rows into `scratch`, their cache entries into `cache`.

    attention: as in k3dsl.MlaWeights; cache [pages, page, 576] e4m3 bytes or bf16; scratch [>= rows, H, 576] of the
    same element; projected, slots: tensors of one step, replaced by `bind`. Raises ConfigError for what the kernel does
    not take.
    """

    def __init__(
        self,
        load: Load,
        attention: Any,
        *,
        cache: Tensor,
        scratch: Tensor,
        projected: Tensor,  # bf16 [rows, >= 2112]
        slots: Tensor,  # int64 [>= rows]
        kv_format: str,
        extended: tuple[Any, dict[str, Any]] | None = None,  # another key, and what its kernel takes besides
    ) -> None:
        rows, heads = projected.shape[0], scratch.shape[1]
        self.key = query.config(heads, rows, kv_format)
        fixed = {
            "q_norm": held(attention.q_a_layernorm.weight),
            "kv_norm": held(attention.kv_a_layernorm.weight),
            "q_b": held(attention.q_b_proj.weight),
            "w_uk": held(attention.W_UK_T),
            "query": scratch[:rows],
            "q_scale_inv": held(attention._q_scale_inv),
            "k_scale_inv": held(attention._k_scale_inv),
        }
        self._hold = tuple(fixed.values())
        values = query.arguments(
            self.key,
            projected=projected,
            slots=slots,
            cache=cache,
            **fixed,
            eps=float(attention.rms_norm_eps),
        )
        launch = query.geometry(self.key, heads=heads, rows=rows)
        kernel, more = extended or (self.key, {})
        self.function = load(kernel)
        self._plan = LaunchPlan(self.function, launch, kernel.params, **values, **more)
        self._projected, self._slots, self._pitch = (self._plan.slot(n) for n in ("projected", "slots", "row_pitch"))
        self.launch: Callable[[int], None] = self._plan.launch

    def bind(self, projected: int, slots: int, pitch: int) -> None:
        """Addresses and the row stride of `projected` in elements, for the launches to come."""
        self._projected.value = projected
        self._slots.value = slots
        self._pitch.value = pitch


class HopperCore:
    """Two launches, core and merge: latent outputs of `rows` rows, q of them a request, from `scratch` and `cache`.

    scratch and cache as in MlaQuery; partial, stats: byte buffers of `hopper.workspace` at least; latent bf16
    [>= rows, H, 512]; scale: softmax scale times the scales of query and key; lse: address of float32 [rows, H] for the
    base-2 LSE, or 0.
    """

    def __init__(
        self,
        load: Load,
        driver: Driver,
        *,
        key: hopper.HopperKey,
        rows: int,
        sm_count: int,
        cache: Tensor,
        scratch: Tensor,
        partial: Tensor,
        stats: Tensor,
        latent: Tensor,
        scale: float,
        out_scale: float,
        lse: int = 0,
        more: dict[str, Any] | None = None,  # what the key's kernel takes besides
    ) -> None:
        self.key = key
        self._hold = scratch, partial, stats, latent
        requests = rows // key.q
        self.merge_key = hopper.merge_key(key, requests=requests)
        splits = hopper.splits(key, sm_count)
        slots = hopper.workspace(key, requests=requests, sm_count=sm_count).slots
        size = cache.element_size()
        kv = hopper.kv_maps(
            key, pages=cache.shape[0], page_stride=cache.stride(0) * size, token_stride=cache.stride(1) * size
        )
        own = hopper.query_maps(key, rows=rows)
        maps = {name: TensorMap(driver, address=cache.data_ptr(), **facts) for name, facts in kv.items()}
        maps |= {name: TensorMap(driver, address=scratch.data_ptr(), **facts) for name, facts in own.items()}
        shared = {"partial": partial.data_ptr(), "stats": stats.data_ptr(), "requests": requests, "splits": splits}
        core = hopper.geometry(key, requests=requests, sm_count=sm_count)
        values = {**maps, **shared, "lengths": 0, "table": 0, "table_stride": 0, "slots": slots}
        values |= {"scale_log2": scale * LOG2E, **(more or {})}
        self._core = LaunchPlan(load(key), core, key.params, **values)
        self._first = LaunchPlan(load(key), replace(core, pdl=False), key.params, **values)
        merge = hopper.merge_geometry(self.merge_key, key, requests=requests)
        self._merge = LaunchPlan(
            load(self.merge_key), merge, self.merge_key.params, **shared, lengths=0, out=latent.data_ptr(), lse=lse,
            slots=slots, columns=key.columns, out_scale=out_scale,
        )  # fmt: skip
        self._lengths, self._table, self._stride = (self._core.slot(n) for n in ("lengths", "table", "table_stride"))
        self._merge_lengths = self._merge.slot("lengths")
        self._launch_core, self._launch_merge = self._core.launch, self._merge.launch

    def bind(self, table: int, lengths: int, stride: int) -> None:
        """Addresses of the metadata and the row stride of the table in entries, for the launches to come."""
        self._table.value = table
        self._lengths.value = lengths
        self._merge_lengths.value = lengths
        self._stride.value = stride

    def launch(self, stream: int) -> None:
        """Core, then merge, after MlaQuery."""
        self._launch_core(stream)
        self._launch_merge(stream)

    def launch_first(self, stream: int) -> None:
        """The same after any other work of the stream, which is over when the core starts.

        The core reads the metadata and old tiles before it waits for the kernel in front of it. MlaQuery makes that
        right, as it waits before it releases the core; after another kernel the launch itself must wait.
        """
        for name in ("lengths", "table", "table_stride"):
            self._first.set(name, self._core.slot(name).value)
        self._first.launch(stream)
        self._launch_merge(stream)


class MlaValue:
    """One launch: `latent` up-projected and gated into the output of `rows` rows; zeros for empty requests.

    latent bf16 [>= rows, H, 512]; projected, lengths, out: tensors of one step, replaced by `bind`.
    """

    def __init__(
        self,
        load: Load,
        attention: Any,
        *,
        latent: Tensor,
        projected: Tensor,  # bf16 [rows, >= 2112 + H * 128]: the gate follows column 2112
        lengths: Tensor,  # int32 [>= rows / q]
        out: Tensor,  # bf16 [rows, H * 128]
        q: int,
    ) -> None:
        rows, heads = projected.shape[0], latent.shape[1]
        self.key = value.ValueKey(heads, value.tile_for(rows))
        gate = projected[:, query.PROJECTED : query.PROJECTED + heads * value.V]
        weight = held(attention.W_UV)
        self._hold = latent, weight
        values = value.arguments(
            self.key, latent=latent[:rows], weight=weight, gate=gate, lengths=lengths, out=out, q=q
        )
        self._plan = LaunchPlan(load(self.key), value.geometry(self.key, rows=rows), self.key.params, **values)
        self._gate, self._lengths, self._out, self._pitch = (
            self._plan.slot(n) for n in ("gate", "lengths", "out", "gate_pitch")
        )
        self.launch: Callable[[int], None] = self._plan.launch

    def bind(self, projected: int, lengths: int, out: int, pitch: int) -> None:
        """Addresses and the row stride of `projected` in elements, for the launches to come."""
        self._gate.value = projected + 2 * query.PROJECTED
        self._lengths.value = lengths
        self._out.value = out
        self._pitch.value = pitch


def held(weight: Tensor) -> Tensor:
    """A tensor of our own on the memory of `weight`: it stays whatever the engine's tensor is made to point at."""
    return weight.detach()
