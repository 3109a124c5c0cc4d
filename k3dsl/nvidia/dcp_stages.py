"""The stages of a context-parallel step: DcpQuery, the core over the local shard, DcpValue. Protocol: stages.py's.

Ranks of one device cannot wait for each other inside launches, so each stage also has its halves: `publish` does not
wait, `push` sends and `merge` receives.
"""

from typing import Any

from torch import Tensor

from k3dsl.nvidia import dcp, query, value
from k3dsl.nvidia.core.hopper_dcp import HopperDcpKey
from k3dsl.nvidia.dcp_box import DcpBox
from k3dsl.nvidia.driver import LaunchPlan
from k3dsl.nvidia.stages import HopperCore, Load, MlaQuery, held

_BOTH, _PUSH, _MERGE = 0, 1, 2


class DcpQuery(MlaQuery):
    """MlaQuery, then its queries to every rank, then all ranks' queries here: one launch. Arguments as for MlaQuery."""

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
        box: DcpBox,
        parity: int,
    ) -> None:
        heads, rows = scratch.shape[1], projected.shape[0]
        key = dcp.query_config(heads, rows, kv_format, box.size, box.multicast != 0)
        self._box = box
        self._start = box.multicast or box.q_peers.data_ptr()
        more = {
            "box": box.q.data_ptr(),
            "peers": self._start,
            "poison": box.poison.data_ptr(),
            "alarm": box.alarm.data_ptr(),
            "limit": box.limit,
            "parity": parity,
            "rank": box.rank,
        }
        super().__init__(
            load, attention, cache=cache, scratch=scratch, projected=projected, slots=slots, kv_format=kv_format,
            extended=(key, more),
        )  # fmt: skip
        self.kernel: dcp.DcpQueryKey = key
        self._limit, self._peers = self._plan.slot("limit"), self._plan.slot("peers")

    def publish(self, stream: int) -> None:
        """The launch that sends and does not wait."""
        limit, self._limit.value = self._limit.value, 0
        try:
            self.launch(stream)
        finally:
            self._limit.value = limit

    def alone(self, stream: int) -> None:
        """The same to this rank's own box in place of every other's: loads what later launches need. Nothing with
        multicast: an ordinary address takes no multicast store."""
        if self.kernel.multicast:
            return
        self._peers.value = self._box.alone[0].data_ptr()
        try:
            self.publish(stream)
        finally:
            self._peers.value = self._start


class DcpCore(HopperCore):
    """HopperCore over a shard, for several tokens a request."""

    def __init__(self, load: Load, driver: Any, *, key: HopperDcpKey, box: DcpBox, **rest: Any) -> None:
        context = {"totals": 0, "ranks": box.size, "rank": box.rank, "interleave": box.interleave}
        super().__init__(load, driver, key=key, more=context, **rest)
        self._totals = self._core.slot("totals")

    def bind(self, table: int, lengths: int, stride: int, totals: int = 0) -> None:
        """As HopperCore's; totals: address of the lengths of whole contexts."""
        super().bind(table, lengths, stride)
        self._totals.value = totals

    def launch_first(self, stream: int) -> None:
        """The core alone, after any other work of the stream."""
        self._first.set("totals", self._totals.value)
        super().launch_first(stream)


class DcpValue:
    """One launch: outputs of the local shard to their heads' ranks; this rank's heads merged, up-projected, gated.

    projected, lengths, totals, out: tensors of one step, replaced by `bind`.
    """

    def __init__(
        self,
        load: Load,
        attention: Any,
        *,
        box: DcpBox,
        parity: int,
        projected: Tensor,  # bf16 [rows, >= 2112 + H * 128]: the gate follows column 2112
        lengths: Tensor,  # int32 [>= rows / q], of the local shard
        totals: Tensor,  # int32 [>= rows / q], of whole contexts
        out: Tensor,  # bf16 [rows, H * 128]
        q: int,
        sm_count: int,
    ) -> None:
        rows, heads = projected.shape[0], box.heads
        self.key = key = dcp.DcpValueKey(heads, box.size, value.tile_for(rows))
        gate = projected[:, query.PROJECTED : query.PROJECTED + heads * value.V]
        weight = held(attention.W_UV)
        self._hold, self._box = (weight, box), box
        some = box.rows.view(-1, heads, value.LATENT)[:rows]  # of the right shape; the kernel has them all
        plain = value.ValueKey(heads, key.tile)
        values: dict[str, Any] = value.arguments(
            plain, latent=some, weight=weight, gate=gate, lengths=totals, out=out, q=q
        )
        self.grid = dcp.value_grid(key, rows=rows, sm_count=sm_count)
        values |= {
            "latent": box.rows.data_ptr(),
            "latent_lse": box.rows_lse.data_ptr(),
            "peers": box.peers.data_ptr(),
            "lse_peers": box.lse_peers.data_ptr(),
            "box": box.q.data_ptr(),
            "partial": box.partial.data_ptr(),
            "lse": box.lse.data_ptr(),
            "lengths": lengths.data_ptr(),
            "totals": totals.data_ptr(),
            "poison": box.poison.data_ptr(),
            "alarm": box.alarm.data_ptr(),
            "limit": box.limit,
            "entry": box.entry,
            "parity": parity,
            "rank": box.rank,
            "pushers": self.grid.pushers,
        }
        launch = dcp.value_geometry(key, sum(self.grid))
        self._plan = LaunchPlan(load(key), launch, key.params, **values)
        names = ("gate", "lengths", "totals", "out", "gate_pitch", "pushers", "peers", "lse_peers")
        (
            self._gate, self._lengths, self._totals, self._out, self._pitch, self._pushers, self._peers,
            self._lse_peers,
        ) = (self._plan.slot(n) for n in names)  # fmt: skip
        self._half = _BOTH

    def bind(self, projected: int, lengths: int, totals: int, out: int, pitch: int) -> None:
        """Addresses and the row stride of `projected` in elements, for the launches to come."""
        self._gate.value = projected + 2 * query.PROJECTED
        self._lengths.value = lengths
        self._totals.value = totals
        self._out.value = out
        self._pitch.value = pitch

    def launch(self, stream: int) -> None:
        """Push and merge."""
        if self._half != _BOTH:
            self._be(_BOTH)
        self._plan.launch(stream)

    def push(self, stream: int) -> None:
        """The launch of the CTAs that push, which wait for nobody."""
        self._be(_PUSH)
        self._plan.launch(stream)

    def merge(self, stream: int) -> None:
        """The launch of the CTAs that merge."""
        self._be(_MERGE)
        self._plan.launch(stream)

    def alone(self, stream: int) -> None:
        """`push` to this rank's own box in place of every other's: loads what later launches need."""
        before = self._peers.value, self._lse_peers.value
        self._peers.value, self._lse_peers.value = (table.data_ptr() for table in self._box.alone[1:])
        try:
            self.push(stream)
        finally:
            self._peers.value, self._lse_peers.value = before

    def _be(self, half: int) -> None:
        pushers, mergers = self.grid
        self._half = half
        self._pushers.value = 0 if half == _MERGE else pushers
        self._plan.set_grid(({_BOTH: pushers + mergers, _PUSH: pushers, _MERGE: mergers}[half], 1, 1))
