"""Prepared layers of a context-parallel group: PreparedMla(dcp=box) is a PreparedDcp. And `virtual_step`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final, NamedTuple
from weakref import ref

from torch import Tensor

from k3dsl.checks import layout, lies_at, place, q_problems, require, step_problems, tensor_problems
from k3dsl.errors import ConfigError
from k3dsl.metadata import pad_requests
from k3dsl.nvidia import dcp
from k3dsl.nvidia.core import choose, tokenspeed
from k3dsl.nvidia.core.hopper_dcp import HopperDcpKey
from k3dsl.nvidia.dcp_box import DcpBox
from k3dsl.nvidia.dcp_stages import DcpCore, DcpQuery, DcpValue
from k3dsl.nvidia.layer import ShapeKeys, shape_keys
from k3dsl.nvidia.metadata import parity_problems, table_problems
from k3dsl.nvidia.prepared import PreparedMla
from k3dsl.nvidia.query import LATENT
from k3dsl.nvidia.runtime import Workspace
from k3dsl.nvidia.stages import HopperCore
from k3dsl.nvidia.stages_packages import TokenspeedCore, TrtllmCore
from k3dsl.nvidia.toolchain import compile_key

#: Where ranks meet in prepare_cache.
_COMES: Final = "prepare_cache"
_READY: Final = "prepare_cache ready"


class DcpStep(NamedTuple):
    """What one (rows, q) launches."""

    requests: int
    query: DcpQuery
    core: HopperCore | TokenspeedCore
    value: DcpValue
    entries: int = 1


class PreparedDcp(PreparedMla):
    """One layer of one rank. As PreparedMla, and:

    * every rank makes the same layers in the same order, and steps them in the same order with the same (B, q);
    * `parity` alternates between one layer and the next, over the end of a step too (an even number of layers);
    * `prepare_cache` is collective, and a rank that fails in it says so to the others;
    * `run` takes the local shard's `lengths` and `block_table`, slots of -1 for tokens of other ranks, and `totals`,
      int32 [R], the lengths of whole contexts. Requests with a total of 0 give zeros;
    * `run` raises PeerError once a wait was given up (DcpBox.check); max_context is that of whole contexts.
    """

    _steps: dict[tuple[int, int], DcpStep]  # type: ignore[assignment]
    _awaited: str = ""  # where the others wait for the prepare_cache under way

    def prepare_cache(self, kv: Tensor) -> None:
        """As PreparedMla's, and collective: where the cache of any rank has moved, all bind theirs anew. Raises
        ConfigError on every rank for a plan that differs between them, naming what does, PeerError for a rank that does
        not come."""
        self._awaited = _COMES
        try:
            self._runtime.guard("prepare_cache()")
            kv_format = self._check_cache(kv)
            bound = self._place == place(kv)
            self._awaited = ""
            if self._box.every(_COMES, bound):
                self._kv = ref(kv)
                return
            self._awaited = _COMES
            self._bind(kv, kv_format)
        except BaseException as error:
            if self._awaited:
                self._box.fail(self._awaited, error)
            raise

    def prepare_dcp(self, batch: int) -> None:
        """Collective: what `batch` rows need of the group, see `prepare_cache`, which asks for all its batches.

        Raises ConfigError if the ranks differ in the shapes of that batch, or if the device cannot hold a launch whose
        CTAs wait for those of other ranks.
        """
        shapes = [list(shape) for shape in self.shapes if shape[0] == batch]
        try:
            if not shapes:
                raise ConfigError(f"prepare_dcp({batch!r}) must be one of {sorted({b for b, _ in self.shapes})}")
            if self._place is None:
                raise ConfigError("prepare_dcp: no cache is bound, call prepare_cache(kv_cache) first")
            self._require_resident(shapes, self._steps)
        except BaseException as error:
            self._box.fail("prepare_dcp", error)
            raise
        self._box.agree("prepare_dcp", {"shapes": shapes, "parity": self.parity})

    def run(
        self,
        projected: Tensor,
        out: Tensor,
        *,
        cache: Tensor,
        slots: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        totals: Tensor | None = None,
        q: int = 1,
    ) -> None:
        """One step of this rank, see PreparedMla.run. Raises PeerError if an earlier wait was given up."""
        self._box.check()
        if self._box.is_virtual:
            raise ConfigError("run: ranks of one device step together, by virtual_step(layers, calls)")
        step, _held = self.bound(projected, out, cache, slots, block_table, lengths, totals, q)
        stream = self._runtime.stream()
        step.query.launch(stream)
        step.core.launch(stream)
        step.value.launch(stream)

    def bound(
        self,
        projected: Tensor,
        out: Tensor,
        cache: Tensor,
        slots: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        totals: Tensor | None,
        q: int,
    ) -> tuple[DcpStep, tuple[Tensor, ...]]:
        """The stages of a step, bound to its tensors; and its metadata, which may have been made here, to be held until
        all is launched."""
        try:
            step, where = self._steps.get((projected.shape[0], q)), self._place
            if step is None or where is None:
                raise self._refusal(projected.shape[0], q)
            if totals is None:
                raise ConfigError("run: totals is needed, int32 [R]: lengths are those of one rank's shard")
            requests = step.requests
            if lengths.shape[0] < requests or block_table.shape[0] < requests or totals.shape[0] < requests:
                n = min(lengths.shape[0], totals.shape[0], block_table.shape[0])
                block_table, lengths, padded = pad_requests(requests, block_table[:n], lengths[:n], totals[:n])
                assert padded is not None
                totals = padded
            seen = (q, *map(layout, (projected, out, slots, block_table, lengths, totals)))
            strides = self._layouts.get(seen)
            source, target = projected.data_ptr(), out.data_ptr()
            if strides is None or source & 15 or target & 3 or not lies_at(cache, self._kv(), where):
                device = self._runtime.torch_device
                require("run", step_problems(self._dims, projected.shape[0], q, device, totals=totals))
                strides = self._admit(seen, projected, out, cache, slots, block_table, lengths, q)
            pitch, table_stride = strides
        except (AttributeError, IndexError, TypeError):
            require(
                "run",
                tensor_problems(
                    projected=projected,
                    out=out,
                    cache=cache,
                    slots=slots,
                    block_table=block_table,
                    lengths=lengths,
                    totals=totals,
                )
                + q_problems(q),
            )
            raise
        keys, all_keys = lengths.data_ptr(), totals.data_ptr()
        step.query.bind(source, slots.data_ptr(), pitch)
        self._bind_core(step, block_table.data_ptr(), keys, table_stride, all_keys)
        step.value.bind(source, keys, all_keys, target, pitch)
        return step, (block_table, lengths, totals)

    def stock_core(
        self,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        batch: int,
        q: int = 1,
        totals: Tensor | None = None,
    ) -> Tensor:  # bf16 [batch, D * H, 512]
        """The core alone, over the queries of all ranks that lie in this layer's mailbox and the local shard."""
        given = {"cache": cache, "block_table": block_table, "lengths": lengths}
        require("stock_core", tensor_problems({"totals": totals}, **given) + q_problems(q))
        step = self._steps.get((batch, q))
        if step is None:
            raise self._refusal(batch, q)
        self._require_bound(cache)
        if totals is None:
            raise ConfigError("stock_core: totals is needed, int32 [R]: lengths are those of one rank's shard")
        block_table, lengths, padded = pad_requests(step.requests, block_table, lengths, totals)
        assert padded is not None
        where = self._runtime.torch_device
        bad = step_problems(self._dims, batch, q, where, block_table=block_table, lengths=lengths, totals=padded)
        require("stock_core", bad or table_problems(step, block_table))
        self._bind_core(step, block_table.data_ptr(), lengths.data_ptr(), block_table.stride(0), padded.data_ptr())
        step.core.launch_first(self._runtime.stream())
        return self._latent[:batch]

    @property
    def box(self) -> DcpBox:
        """The group's mailboxes on this rank."""
        return self._box

    @staticmethod
    def _bind_core(step: DcpStep, table: int, lengths: int, stride: int, totals: int) -> None:
        if type(step.core) is HopperCore:
            step.core.bind(table, lengths, stride)
        else:
            step.core.bind(table, lengths, stride, totals)  # type: ignore[call-arg]

    # ---- preparation

    def _admit_box(self, box: Any, parity: Any) -> int:
        bad = []
        if not isinstance(box, DcpBox):
            raise ConfigError(f"dcp={box!r} must be None or a DcpBox")
        where = self._runtime.torch_device
        if box.heads != self._dims.heads:
            bad.append(f"the box is for {box.heads} heads a rank, the weights have {self._dims.heads}")
        if box.device.type != where.type or (where.index is not None and box.device.index != where.index):
            bad.append(f"the box is on {box.device}, the weights are on {where}")
        require("PreparedMla", bad + parity_problems(parity))
        self._box = box
        return box.size

    def _latents(self, rows: int) -> Tensor:
        return self._box.rows.view(self._box.cap, -1, LATENT)

    def _check_cache(self, kv: Any) -> str:
        kv_format = super()._check_cache(kv)
        if kv_format != self._box.kv_format:
            raise ConfigError(f"prepare_cache: the box is for kv_format={self._box.kv_format!r}, the cache {kv_format}")
        return kv_format

    def _choice(self, rows: int, q: int) -> str:
        return choose(str(self._runtime.device.target), rows, q, self._core, self._box.size).core

    def _keys(self, rows: int, q: int, kv_format: str, page: int) -> ShapeKeys:
        device = self._runtime.device
        return shape_keys(
            target=str(device.target),
            heads=self._dims.heads,
            kv_format=kv_format,
            page=page,
            core=self._choice(rows, q),
            rows=rows,
            q=q,
            max_context=self.max_context,
            sm_counts=(device.sm_count,),
            dcp=self._box.size,
            interleave=self._box.interleave,
            rank=self._box.rank,
            multicast=self._box.multicast != 0,
            p_dtype=self._p_dtype,
        )

    def _work(self, rows: int, q: int) -> tokenspeed.Work:
        device = self._runtime.device
        return tokenspeed.work(
            str(device.target),
            heads=self._dims.heads * self._box.size,
            q=q,
            requests=rows // q,
            max_context=dcp.local_bound(self.max_context, self._box.size),
            sm_count=device.sm_count,
            pack=q > 1,
        )

    def _step(self, rows: int, q: int, kv: Tensor, kv_format: str, workspace: Workspace) -> Any:
        store, box = self._cache_of_kernels(), self._box

        def load(kernel: Any) -> Any:
            return self._runtime.function(kernel, store)

        scratch = self._scratch.view(kv.dtype)
        dummy = self._dummy(rows, q)
        gathered = box.q[self.parity].view(kv.dtype)
        core, entries = self._core_stage(load, rows, q, kv, kv_format, workspace, gathered)
        assert not isinstance(core, TrtllmCore)  # which has no LSE: `choose` never takes it here
        return DcpStep(
            requests=rows // q,
            query=DcpQuery(
                load,
                self._attention,
                cache=kv,
                scratch=scratch,
                projected=dummy.projected,
                slots=dummy.slots,
                kv_format=kv_format,
                box=box,
                parity=self.parity,
            ),
            core=core,
            value=DcpValue(
                load,
                self._attention,
                box=box,
                parity=self.parity,
                projected=dummy.projected,
                lengths=dummy.lengths,
                totals=dummy.lengths,
                out=dummy.out,
                q=q,
                sm_count=self._runtime.device.sm_count,
            ),
            entries=entries,
        )

    def _core_of(self, load: Any, key: Any, **rest: Any) -> HopperCore:
        rest["lse"] = self._box.rows_lse.data_ptr()
        if isinstance(key, HopperDcpKey):
            return DcpCore(load, self._runtime.driver, key=key, box=self._box, **rest)
        return HopperCore(load, self._runtime.driver, key=key, **rest)

    def _package_lse(self) -> int:
        return self._box.rows_lse.data_ptr()

    def _warm(self, kv: Tensor) -> None:
        """Agreement with the other ranks, then every launch once without them: to this rank's own box, and no wait."""
        box = self._box
        self._require_resident(self.shapes, self._steps)
        page, target = kv.shape[1], str(self._runtime.device.target)
        facts = {
            "target": target,
            "heads": self._dims.heads,
            "parity": self.parity,
            "queries": sorted({q for _, q in self.shapes}),
            "batches": sorted({rows for rows, _ in self.shapes}),
            "pitches": sorted([rows, pitch] for rows, pitch in self._pitches.items()),
            "page_size": page,
            "max_context": self.max_context,
            "p_dtype": self._p_dtype,
            "core": [str(_of_any_rank(self._keys(*shape, box.kv_format, page).core)) for shape in self.shapes],
            "kernels": self._fingerprint(target, page),
        }
        self._awaited = ""
        box.agree(_COMES, facts)
        self._awaited = _READY
        stream = self._runtime.stream()
        for rows, q in self.shapes:
            one = self._dummy(rows, q)
            step, _ = self.bound(one.projected, one.out, kv, one.slots, one.table, one.lengths, one.lengths, q)
            step.query.alone(stream)
            step.core.launch_first(stream)
            step.value.alone(stream)
        self._runtime.synchronize()
        box.arm()
        self._awaited = ""
        box.ready(_READY)

    def _fingerprint(self, target: str, page: int) -> str:
        """Of the kernels that all ranks must have alike: their keys cover shapes, sources and toolchain."""
        keys = [key for shape in self.shapes for key in self._keys(*shape, self._box.kv_format, page).all()]
        # tokenspeed's have the rank compiled in.
        alike = [key for key in dict.fromkeys(keys) if not isinstance(key, tokenspeed.TokenspeedKey)]
        return sha256("".join(compile_key(key, target).digest for key in alike).encode()).hexdigest()[:16]

    def _require_resident(self, shapes: Any, steps: Mapping[tuple[int, int], DcpStep]) -> None:
        """Every CTA of MlaQuery waits for those of all ranks, so a launch must fit the device as a whole."""
        bad = []
        for rows, q in shapes:
            stage = steps[rows, q].query
            launch = dcp.query_geometry(stage.kernel, heads=self._dims.heads, rows=rows)
            clusters = launch.grid[0] * launch.grid[1] * launch.grid[2] // launch.cluster[0]
            held = self._runtime.driver.max_active_clusters(stage.function, launch)
            if held < clusters:
                bad.append(
                    f"rows={rows}, q={q}: MlaQuery has {clusters} clusters of {launch.cluster[0]} CTAs that wait for "
                    f"other ranks, and this device holds {held} at once"
                )
        require("context parallelism", bad)


def virtual_step(
    layers: Sequence[PreparedMla],
    calls: Sequence[Mapping[str, Any]],
    q: int = 1,
    stopped: Sequence[int] = (),
) -> None:
    """One step of all ranks of DcpBox.virtual, on torch's current stream: what `run` does on each, in an order in which
    no launch waits for one that comes after it.

    layers: one a rank, all with one parity; calls: a rank's arguments of `run` but q, by name. Ranks in `stopped`
    launch nothing, as a dead process: the others give up, each after its box's timeout, one after the other. Raises
    PeerError as `run`.
    """
    boxes = [getattr(layer, "box", None) for layer in layers]
    size = boxes[0].size if boxes and isinstance(boxes[0], DcpBox) else 0
    good = [
        isinstance(box, DcpBox) and box.is_virtual and box.rank == r and box.same_group(boxes[0])
        for r, box in enumerate(boxes)
    ]
    if len(layers) != size or len(calls) != size or not all(good) or len({layer.parity for layer in layers}) != 1:
        raise ConfigError(
            f"virtual_step: {len(layers)} layers and {len(calls)} calls must be those of all {size or ''} ranks of one "
            "DcpBox.virtual, in their order, with one parity"
        )
    live = [
        (layer, dict(calls[r])) for r, layer in enumerate(layers) if r not in stopped and isinstance(layer, PreparedDcp)
    ]
    for layer, _ in live:
        layer.box.check()
    if not live:
        return
    every = [layer.bound(**{"totals": None, **call}, q=q) for layer, call in live]  # holds what they made until the end
    steps = [step for step, _ in every]
    if len({step.requests for step in steps}) > 1:
        rows = ", ".join(str(step.requests * q) for step in steps)
        raise ConfigError(f"virtual_step: the calls have {rows} rows, must all have the same: ranks wait for each row")
    stream = live[0][0]._runtime.stream()
    for step in steps:
        step.query.publish(stream)
    for step in steps:
        step.query.launch(stream)  # publishes the same again, and finds everything
        step.core.launch(stream)
    for step in steps:
        step.value.push(stream)
    for step in steps:
        step.value.merge(stream)
    # The next launch may begin early, as the next layer's MlaQuery does: all of these are behind one that waited.


def _of_any_rank(key: Any) -> Any:
    """A core's key as every rank should have it: in some objects the rank is compiled in."""
    return replace(key, rank=0) if isinstance(key, tokenspeed.TokenspeedKey) else key
