"""Prepared gfx950 layers, host side: from the residual seam to the gated value, one `run()` a layer."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from k3dsl.amd.aiter import AiterDecode
from k3dsl.amd.aiter import present as aiter_present
from k3dsl.amd.checks import cache_problems, each, launch_problems, require_numbers
from k3dsl.amd.decode import Decode, GatedValue, GroupCombine, ReferenceDecode
from k3dsl.amd.launch import runtime_problems
from k3dsl.amd.layer import builds
from k3dsl.amd.mla_pre.key import MAX_BLOCKS, MlaPreBuild
from k3dsl.amd.rank import MlaPreRank
from k3dsl.amd.weights import arguments_of, oracle_weights, require_pre_attention
from k3dsl.capture import guard
from k3dsl.checks import layout, lies_at, not_prepared, place, require, step_problems, tensor_problems
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError, NotPrepared
from k3dsl.metadata import pad_requests
from k3dsl.reference import mla_pre as oracle

if TYPE_CHECKING:
    from k3dsl.amd.launch import LaunchPlan, Runtime
    from k3dsl.cache import CompileCache
    from k3dsl.deployment import Deployment

#: Layouts of step tensors that a layer remembers as checked.
_MOST_LAYOUTS: Final = 4096
_NBLOCKS: Final = tuple(range(1, MAX_BLOCKS + 1))


class PreparedMlaPre:
    """One MLA layer of one rank: `prepare_cache` once a cache, then `run` once a step. For one thread at a time.

    attention    weights, see k3dsl.amd.MlaPreWeights; their fp8 scales must be 1
    batches      rows of every step to prepare, 1 to 16
    queries      tokens of a request in a step; prepared are all (rows, q) in which q divides rows
    rank         what the rank's layers share; by default one of this layer's own, on one rank
    w_uk         W_UK in "mxfp4" (4-bit weights and activations) or "bf16"
    nblocks      numbers of residual blocks to prepare: a layer of Kimi-K3 always meets the same one, 1 to 8
    deltas       whether steps come with a delta to add to the prefix: (True,), (False,) or both
    slot         tag slot, the layer's number in a step; by default the next one of the rank
    page_size    tokens of a page that the cache must have; by default any
    max_context  tokens that a request may reach on this rank, a bound for planning
    cache        where kernels come from: by default the user's CompileCache
    runtime      where they run: by default HIP on a GPU; on a CPU the reference, which says so in `executor`
    decode       attention after the query: by default aiter, or the reference where there is none (`decode.name`)
    combine      (latent [B, q_heads, 512], lse [B, q_heads]) -> [B, 12, 512] over the ranks; needed from two ranks on

    Raises ConfigError with every problem, CaptureError inside a stream capture.
    """

    def __init__(
        self,
        attention: Any,
        *,
        batches: Iterable[int],
        queries: Iterable[int] = (1,),
        rank: MlaPreRank | None = None,
        w_uk: str = "mxfp4",
        nblocks: Iterable[int] = _NBLOCKS,
        deltas: Iterable[bool] = (True,),
        slot: int | None = None,
        page_size: int | None = None,
        max_context: int = 131072,
        cache: "CompileCache | None" = None,
        runtime: "Runtime | None" = None,
        decode: Decode | None = None,
        combine: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        guard("preparing a layer")
        self._dims = MlaDims()
        require_pre_attention(attention, self._dims, w_uk)
        device = attention.W_UK_T.device
        batches, queries, nblocks, deltas = each(batches=batches, queries=queries, nblocks=nblocks, deltas=deltas)
        require_numbers(batches, queries, nblocks, deltas, max_context, page_size)
        require("PreparedMlaPre", runtime_problems(runtime))
        self.shapes = tuple(dict.fromkeys((b, q) for q in queries for b in batches if b % q == 0))
        self.rank = rank if rank is not None else MlaPreRank(batches, device=device, w_uk=w_uk)
        _require_rank(self.rank, batches, w_uk, device, combine)
        if runtime is None and device.type == "cuda":
            from k3dsl.amd.mla_pre.launch import hip_runtime

            runtime = hip_runtime(device.index or 0)
        self._runtime, self._store = runtime, cache
        if runtime is None and self.rank.ranks > 1:
            raise ConfigError(f"weights are on {device}: the reference runs one rank, the rank has {self.rank.ranks}")
        #: Where mla_pre runs: a runtime's name, or "reference".
        self.executor = "reference" if runtime is None else str(getattr(runtime, "name", type(runtime).__name__))
        self._attention, self._device = attention, device
        self._weights = arguments_of(attention, w_uk)
        eps = float(attention.rms_norm_eps)
        every = builds(batches, ranks=self.rank.ranks, w_uk=w_uk, deltas=deltas, eps=eps)
        self._keys = {(key.tokens, key.nblocks, key.delta): key for key in every if key.nblocks in nblocks}
        self.slot = self.rank.take_slot(self, slot)
        self._page_size, self._max_context = page_size, max_context
        self._combine = combine
        self._value = GatedValue(attention.W_UV, max(batches))
        self._own_decode = decode
        self.decode: Decode | None = decode  #: bound by prepare_cache where none was given
        heads, most = self.rank.q_heads, max(batches)
        self._latent = torch.empty(most, heads, self._dims.kv_lora, dtype=torch.bfloat16, device=device)
        self._lse = torch.empty(most, heads, dtype=torch.float32, device=device) if self.rank.ranks > 1 else None
        self._oracle = oracle_weights(attention, self._weights) if runtime is None else None
        self._plans: dict[tuple[int, int, bool], LaunchPlan] = {}
        self._kv: Callable[[], Tensor | None] = lambda: None
        self._place: tuple[Any, ...] | None = None
        self._layouts: set[Any] = set()
        self._retired: list[Any] = []

    def prepare_cache(self, kv: Tensor) -> None:
        """Binds the paged cache, one-byte [blocks, block_size, 576]; compiles, loads and packs all that `run` uses.

        Call it again when the cache moves; graphs that were captured before go on using the old one. On several ranks
        it is not collective: nothing of mla_pre is launched. Raises ConfigError for a cache that is not served,
        CompileError, LaunchError, CaptureError.
        """
        guard("prepare_cache()")
        bad = cache_problems(kv, self._device)
        if not bad and self._page_size is not None and kv.shape[1] != self._page_size:
            bad.append(f"kv_cache has pages of {kv.shape[1]} tokens, must have {self._page_size}")
        decode = self._own_decode
        if not bad and decode is None:
            decode = self._shared_decode(kv.shape[1])
        if decode is not None:
            bad += decode.problems(kv)
        require("prepare_cache", bad)
        assert decode is not None
        if self._place == place(kv):
            self._kv = ref(kv)
            return
        plans = {} if self._runtime is None else {shape: self._plan(key, kv) for shape, key in self._keys.items()}
        decode.warm(kv, self.shapes, self.rank.q_heads)
        self._retired.append((self._plans, self.decode))  # a graph may still use them
        self._plans, self.decode, self._kv, self._place = plans, decode, ref(kv), place(kv)
        self._layouts = set()

    def run(
        self,
        prefix: Tensor,  # bf16 [B, 7168]; with delta updated in place
        out: Tensor,  # bf16 [B, 1536], written: what o_proj takes
        *,
        blocks: Tensor,  # bf16 [B, >= nblocks, 7168]
        delta: Tensor | None,  # bf16 [B, 7168]
        cache: Tensor,  # the one that prepare_cache was given; written at `slots`
        slots: Tensor,  # int64 [B]; -1: not written here
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R]: keys of this rank, the tokens of this call included
        totals: Tensor | None = None,  # int32 [R]: keys of all ranks; needed from two ranks on
        nblocks: int | None = None,  # by default all of `blocks`
        q: int = 1,
    ) -> None:
        """One step of B = R * q rows on the current stream: `project`, then `attend`. What either refuses is refused
        before anything is written.

        Raises NotPrepared for a (B, q), a number of blocks or a delta that was not prepared; ConfigError, once a layout
        of the tensors, for one that is not served.
        """
        try:
            rows = prefix.shape[0]
            metadata = self._metadata(out, cache, block_table, lengths, totals, rows, q)
        except (AttributeError, IndexError):
            given = {"prefix": prefix, "out": out, "cache": cache, "block_table": block_table, "lengths": lengths}
            require("run", tensor_problems({"totals": totals}, **given))
            raise
        self.project(prefix, blocks=blocks, delta=delta, cache=cache, slots=slots, nblocks=nblocks)
        self._attend(out, cache, *metadata, rows, q)

    def project(
        self,
        prefix: Tensor,
        *,
        blocks: Tensor,
        delta: Tensor | None,
        cache: Tensor,
        slots: Tensor,
        nblocks: int | None = None,
    ) -> None:
        """The mla_pre part of `run`: query and gate into the rank's buffers, entries into the cache."""
        try:
            rows, count = prefix.shape[0], blocks.shape[1] if nblocks is None else nblocks
            shape = (rows, count, delta is not None)
            key = self._keys.get(shape)
            if key is None or self._place is None:
                raise self._refusal(rows, count, delta is not None)
            seen = (
                shape,
                layout(prefix),
                None if delta is None else layout(delta),
                layout(blocks),
                layout(slots),
            )
            second = 0 if delta is None else delta.data_ptr()
            first, third, fourth = prefix.data_ptr(), blocks.data_ptr(), slots.data_ptr()
            if (
                seen not in self._layouts
                or (first | second | third) & 15
                or first in (second, third)  # a layout says nothing of what shares memory: at least the same tensor
                or not lies_at(cache, self._kv(), self._place)
            ):
                self._admit(seen, key, prefix, delta, blocks, cache, slots)
        except (AttributeError, IndexError, TypeError):
            bad = tensor_problems({"delta": delta}, prefix=prefix, blocks=blocks, cache=cache, slots=slots)
            if type(nblocks) not in (int, type(None)):
                bad.append(f"nblocks={nblocks!r} must be an int, or None for all of blocks")
            require("run", bad)
            raise
        rank = self.rank
        if rank.per_run:
            rank.begin_step()
        if self._runtime is None:
            self._project_on_reference(prefix, delta, blocks, count, cache, slots)
            return
        plan = self._plans[shape]
        plan.slot("prefix").value = first
        plan.slot("delta").value = second
        plan.slot("blocks").value = third
        plan.slot("blocks_token_stride").value = blocks.stride(0)
        plan.slot("blocks_block_stride").value = blocks.stride(1)
        plan.slot("slots").value = fourth
        plan.launch(self._runtime.stream())

    def attend(
        self,
        out: Tensor,
        *,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        totals: Tensor | None = None,
        rows: int,
        q: int = 1,
    ) -> None:
        """The rest of `run`, from the query that `project` left: decode attention, combination, value, gate.

        Metadata of fewer than B / q requests is padded with empty ones. Empty requests give exact zeros, whatever
        their rows hold.
        """
        self._attend(out, cache, *self._metadata(out, cache, block_table, lengths, totals, rows, q), rows, q)

    def _metadata(
        self, out: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, totals: Tensor | None, rows: int, q: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(block_table, lengths, totals) of R requests, checked together with `out` and `cache`."""
        if (rows, q) not in self.shapes or self.decode is None:
            raise self._refusal(rows, None, None, q)
        requests = rows // q
        if lengths.shape[0] < requests or block_table.shape[0] < requests:
            block_table, lengths, totals = pad_requests(requests, block_table, lengths, totals)
        known = None if totals is None else layout(totals)
        seen = (rows, q, layout(out), layout(block_table), layout(lengths), known)
        if seen not in self._layouts:
            self._admit_metadata(seen, rows, q, out, block_table, lengths, totals)
        if cache is not self._kv():
            self._require_bound(cache)
        return block_table, lengths, totals

    def _attend(
        self, out: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, totals: Tensor | None, rows: int, q: int
    ) -> None:
        assert self.decode is not None
        requests, rank = rows // q, self.rank
        empty = rank.empty(rows)
        if rank.needs_plan(self.decode, rows, q):
            self.decode.plan(cache, block_table, lengths, totals, rows, q)
            keys = (lengths if totals is None else totals)[:requests]
            torch.le(keys[:, None].expand(-1, q), 0, out=empty.view(requests, q))
        latent = self._latent[:rows]
        lse = None if self._lse is None else self._lse[:rows]
        self.decode.run(rank.query(rows), cache, block_table, lengths, totals, q, latent, lse)
        if self._combine is not None and lse is not None:
            latent = self._combine(latent, lse)
        self._value(latent, rank.gate(rows), out)
        # Selected, not multiplied: the rows of a padded request may hold NaN from the prefix on.
        out.masked_fill_(empty[:, None], 0.0)

    @property
    def builds(self) -> tuple[MlaPreBuild, ...]:
        """The kernels that the layer prepares."""
        return tuple(self._keys.values())

    def memory(self) -> list[Tensor]:
        """Every tensor that lasts and that a launch of this layer touches but the cache: for an emulator's bounds."""
        return [*(t for t in self._weights.values() if t is not None), *self.rank.memory()]

    def describe(self) -> str:
        """Where the two halves run, for people."""
        decode = "not prepared yet" if self.decode is None else f"on {self.decode.name}"
        return f"mla_pre on {self.executor}, decode attention {decode}"

    # ---- preparation

    def _shared_decode(self, page: int) -> Decode:
        """The rank's decode for caches of this page: layers of one step share its lists of pages."""
        rank, scale = self.rank, float(self._attention.scale)
        facts = (page, scale, self._max_context, self.shapes)
        found: Decode | None = rank.decodes.get(facts)
        if found is None:
            if self._device.type == "cuda" and aiter_present():
                found = AiterDecode(scale, -(-self._max_context // page), rank.ranks, rank.rank)
            else:
                found = ReferenceDecode(scale, rank.ranks, rank.rank)
            rank.decodes[facts] = found
        return found

    def _arguments(
        self, key: MlaPreBuild, prefix: Tensor, delta: Tensor | None, blocks: Tensor, kv: Tensor, slots: Tensor
    ) -> dict[str, Any]:
        rank = self.rank
        return {
            **{"prefix": prefix, "delta": delta, "blocks": blocks, **self._weights, "kv_cache": kv, "slots": slots},
            "gate_out": rank.gate(key.tokens),
            "q_out": rank.query(key.tokens),
            "scratch": rank.scratch,
            "peers": rank.table(key.tokens),
            "rank": rank.rank,
            "layer": self.slot,
            "epoch": rank.epoch,
            "health": rank.health,
            "alarm": rank.alarm,
            "tl": None,
        }

    def _plan(self, key: MlaPreBuild, kv: Tensor) -> "LaunchPlan":
        """The launch of one build, packed for this cache; the tensors of a step are filled in by each run."""
        from k3dsl.amd.launch import LaunchPlan
        from k3dsl.amd.mla_pre.launch import LAUNCH, executable, values

        assert self._runtime is not None
        rows = key.tokens
        like = torch.zeros(rows, 8, self._dims.hidden, dtype=torch.bfloat16, device="meta")
        slots = torch.zeros(rows, dtype=torch.int64, device="meta")
        given = self._arguments(key, like[:, 0], like[:, 1] if key.delta else None, like, kv, slots)
        for name in ("prefix", "delta", "blocks", "slots"):
            given[name] = None
        packed = values(given | {"blocks": like}) | {"blocks": 0}
        return LaunchPlan(executable(key, self._runtime, self._store), LAUNCH, key.params, **packed)

    # ---- what run() leaves to the first step of a layout, and its errors

    def _admit(
        self,
        seen: Any,
        key: MlaPreBuild,
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Tensor,
        cache: Tensor,
        slots: Tensor,
    ) -> None:
        self._require_bound(cache)
        require("run", launch_problems(key, **self._arguments(key, prefix, delta, blocks, cache, slots)))
        self._remember(seen)

    def _admit_metadata(
        self,
        seen: Any,
        rows: int,
        q: int,
        out: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        totals: Tensor | None,
    ) -> None:
        bad = step_problems(self._dims, rows, q, self._device, out=out, block_table=block_table, lengths=lengths)
        if totals is not None:
            wrong = step_problems(self._dims, rows, q, self._device, lengths=totals)
            bad += [line.replace("lengths", "totals", 1) for line in wrong]
        elif self.rank.ranks > 1:
            bad += [f"totals is None, must be int32 [{rows // q}] on {self.rank.ranks} ranks: lengths are one rank's"]
        require("run", bad)
        self._remember(seen)

    def _require_bound(self, cache: Tensor) -> None:
        if place(cache) != self._place:
            raise ConfigError(
                f"run: cache at {cache.data_ptr():#x} {list(cache.shape)} is not the one that was prepared: call "
                "prepare_cache(kv_cache) when the cache moves"
            )

    def _remember(self, seen: Any) -> None:
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts.add(seen)

    def _refusal(self, rows: int, nblocks: int | None, delta: bool | None, q: int = 1) -> Exception:
        if self._place is None:
            return ConfigError("run: no cache is bound, call prepare_cache(kv_cache) first")
        if nblocks is None or rows not in {r for r, _ in self.shapes}:
            return not_prepared(self.shapes, rows, q)
        counts = sorted({n for _, n, _ in self._keys})
        deltas = sorted({d for _, _, d in self._keys})
        add = [] if nblocks in counts else [f"nblocks=(..., {nblocks})"]
        add += [] if delta in deltas else [f"deltas=(..., {delta})"]
        return NotPrepared(
            f"rows={rows}, nblocks={nblocks}, delta={delta} is not prepared. Prepared are nblocks {counts} and delta "
            f"{deltas}. To add it: {' and '.join(add)}"
        )

    def _project_on_reference(
        self, prefix: Tensor, delta: Tensor | None, blocks: Tensor, nblocks: int, cache: Tensor, slots: Tensor
    ) -> None:
        assert self._oracle is not None
        step = oracle.mla_pre(
            self._oracle, prefix=prefix, delta=delta, blocks=blocks, nblocks=nblocks, w_uk=self.rank.w_uk
        )
        rows = prefix.shape[0]
        prefix.copy_(step.prefix)
        oracle.insert(step.entry, cache, slots)
        self.rank.query(rows).copy_(step.query().view(torch.uint8))
        self.rank.gate(rows).copy_(step.gate)


def _require_rank(rank: MlaPreRank, batches: tuple[int, ...], w_uk: str, device: torch.device, combine: Any) -> None:
    if not isinstance(rank, MlaPreRank):
        raise ConfigError(f"rank is {type(rank).__name__}, must be None or an MlaPreRank")
    bad = [f"the rank serves widths {rank.widths}, not {b}" for b in batches if b not in rank.widths]
    if rank.w_uk != w_uk:
        bad.append(f"the rank was made for w_uk={rank.w_uk!r}, the layer has {w_uk!r}")
    if rank.device.type != device.type or (rank.device.index or 0) != (device.index or 0):
        bad.append(f"the rank is on {rank.device}, the weights are on {device}")
    if (rank.ranks > 1) != (combine is not None):
        bad.append(f"combine is {'missing' if combine is None else 'given'} with ranks={rank.ranks}")
    require("PreparedMlaPre", bad)


#: Ranks that layers of one deployment share, by device and facts; gone with the last layer.
_ranks: "WeakValueDictionary[Any, MlaPreRank]" = WeakValueDictionary()


def prepare_layer(
    plan: "Deployment",
    attention: Any,
    *,
    cache: "CompileCache | None" = None,
    device: "torch.device | str | int | None" = None,
    runtime: "Runtime | None" = None,
    rank: MlaPreRank | None = None,
    w_uk: str = "mxfp4",
    nblocks: Iterable[int] = _NBLOCKS,
) -> PreparedMlaPre:
    """The PreparedMlaPre of a deployment, see `k3dsl.prepare`. Layers of one deployment share their rank's buffers.

    With plan.dcp > 1 and no `rank`, the default group of torch.distributed is the group; its first layer is prepared
    collectively. Raises ConfigError for a plan of another target or weights that do not fit it.
    """
    if plan.target != "gfx950":
        raise ConfigError(f"target={plan.target!r} must be gfx950")
    if plan.kv_format != "fp8":
        raise ConfigError(f"kv_format={plan.kv_format!r} must be fp8: records are for k3dsl.amd.PreparedSparseMla")
    require_pre_attention(attention, plan.dims, w_uk, device if isinstance(device, torch.device | str) else None)
    where = attention.W_UK_T.device
    widths = tuple(dict.fromkeys(rows for rows, _ in plan.shapes()))
    facts = (where, widths, plan.dcp, w_uk)
    rank = rank if rank is not None else _ranks.get(facts)
    if rank is None:
        if plan.dcp == 1:
            rank = MlaPreRank(widths, device=where, w_uk=w_uk)
        else:
            rank = MlaPreRank.of_group(widths, device=where, w_uk=w_uk)
        _ranks[facts] = rank
    combine = None
    if rank.ranks > 1:
        combine = GroupCombine(None, heads=plan.dims.heads, rows=max(widths), device=where)
    return PreparedMlaPre(
        attention,
        batches=widths,
        queries=plan.queries,
        rank=rank,
        w_uk=w_uk,
        nblocks=nblocks,
        page_size=plan.page_size,
        max_context=plan.max_context,
        cache=cache,
        runtime=runtime,
        combine=combine,
    )
