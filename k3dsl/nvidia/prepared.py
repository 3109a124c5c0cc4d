"""Prepared MLA decode layers, host side: buffers, launch plans, and a `run()` with no decisions left in it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from k3dsl.cache.arguments import kernel_cache_problems
from k3dsl.checks import (
    cache_problems,
    kv_format_of,
    layout,
    lies_at,
    not_prepared,
    place,
    q_problems,
    require,
    step_problems,
    tensor_problems,
)
from k3dsl.deployment import Deployment
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError
from k3dsl.metadata import pad_requests
from k3dsl.nvidia.core import SERVED, choose, hopper, tokenspeed
from k3dsl.nvidia.layer import ShapeKeys, shape_keys
from k3dsl.nvidia.metadata import parity_problems, scratch_problems, table_problems
from k3dsl.nvidia.query import LATENT
from k3dsl.nvidia.runtime import Runtime, Workspace, runtime_of
from k3dsl.nvidia.stages import HopperCore, MlaQuery, MlaValue
from k3dsl.nvidia.stages_packages import TokenspeedCore, TrtllmCore
from k3dsl.weights import require_attention

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache

#: Entries of the table that layers are warmed with: a multiple of what any core asks for.
_WIDTH: Final = 4
#: Layouts of step tensors that a layer remembers as checked. An engine has a few for each shape.
_MOST_LAYOUTS: Final = 4096


class _Step(NamedTuple):
    """What one (rows, q) launches."""

    requests: int
    query: MlaQuery
    core: HopperCore | TokenspeedCore | TrtllmCore
    value: MlaValue
    entries: int = 1  # the width of the block table must be a multiple of it


class PreparedMla:
    """One layer on one GPU: `prepare_cache` once a cache, then `run` once a step. For one thread at a time.

    attention      weights as in k3dsl.MlaWeights
    pitches        rows -> row stride of `projected` in elements, for every number of rows to prepare
    query_scratch  uint8 [64, H, 576] (fp8 cache) or [64, H, 1152] (bf16), shared by layers whose runs are ordered
    max_context    tokens that a request may reach, a bound for planning (131072)
    core           "auto" or one of the target's cores
    dcp, parity    a DcpBox where ranks share contexts, and the layer's ordinal among MLA layers modulo 2: what is
                   prepared is then a PreparedDcp, whose page says what else there is to know
    queries        tokens of a request in a step; prepared are all (rows, q) in which q divides rows
    page_size      tokens of a page that the cache must have; by default any that the target serves
    p_dtype        type of the softmax weights in the hopper core, see Deployment
    cache          where kernels come from: by default the user's CompileCache

    The cache's format and page size are those of the tensor that prepare_cache is given. `shapes`: the prepared
    (rows, q). Raises ConfigError with every problem, CaptureError inside a stream capture.
    """

    def __new__(cls, *_arguments: Any, dcp: Any = None, **_named: Any) -> "PreparedMla":
        """A PreparedDcp where there is a box."""
        if dcp is not None and cls is PreparedMla:
            from k3dsl.nvidia.prepared_dcp import PreparedDcp

            cls = PreparedDcp
        return super().__new__(cls)

    def __init__(
        self,
        attention: Any,
        pitches: Mapping[int, int],
        query_scratch: Tensor,
        *,
        max_context: int | None = None,
        core: str = "auto",
        dcp: Any = None,
        parity: int = 0,
        queries: tuple[int, ...] = (1,),
        page_size: int | None = None,
        p_dtype: str = "auto",
        cache: "CompileCache | None" = None,
        runtime: Runtime | None = None,
    ) -> None:
        weight = getattr(attention, "W_UK_T", None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            raise ConfigError("attention has no tensor W_UK_T [H, 128, 512]")
        self._runtime = runtime if runtime is not None else runtime_of(weight.device)
        self._runtime.guard("preparing a layer")
        self._dims = MlaDims(heads=weight.shape[0])
        require_attention(attention, self._dims, self._runtime.torch_device)
        if not isinstance(pitches, Mapping):
            raise ConfigError(f"pitches is {type(pitches).__name__}, must be a mapping of rows to row strides")
        # Checks rows, queries, core and max_context, and names the shapes.
        plan = Deployment(
            self._dims,
            target=str(self._runtime.device.target),
            batches=tuple(pitches),
            queries=queries,
            core=core,
            max_context=131072 if max_context is None else max_context,
            dcp=self._admit_box(dcp, parity),
        )
        least = self._dims.pitch
        wrong = [f"pitches[{b}]={p!r} must be a multiple of 8, {least} or more" for b, p in pitches.items()
                 if type(p) is not int or p < least or p % 8]  # fmt: skip
        types = ("auto", *(p for types in hopper.P_DTYPES.values() for p in types))
        if p_dtype not in types:
            wrong.append(f"p_dtype={p_dtype!r} must be one of {', '.join(types)}")
        pages = SERVED[str(self._runtime.device.target)].pages
        if page_size is not None and page_size not in pages:
            wrong.append(f"page_size={page_size!r} must be one of {', '.join(map(str, pages))}, or None for any")
        if not isinstance(query_scratch, Tensor):
            wrong.append(f"query_scratch is {type(query_scratch).__name__}, must be a tensor")
        wrong += kernel_cache_problems(cache)
        require("PreparedMla", wrong)
        self.shapes = plan.shapes()
        self.max_context, self.parity = plan.max_context, parity
        self._attention = attention
        self._pitches = dict(pitches)
        self._scratch = query_scratch
        self._core = core
        self._p_dtype = p_dtype
        self._page_size = page_size
        self._store = cache
        self._latent = self._latents(max(rows for rows, _ in self.shapes))
        self._steps: dict[tuple[int, int], _Step] = {}
        # The engine owns its cache: a layer that held it would keep the memory of one that was given up.
        self._kv: Callable[[], Tensor | None] = lambda: None
        self._place: tuple[Any, ...] | None = None
        self._layouts: dict[Any, tuple[int, int]] = {}
        # What a graph that was captured earlier may still use: kept until the layer goes.
        self._workspaces: list[Workspace] = []
        self._retired: list[dict[tuple[int, int], _Step]] = []

    def prepare_cache(self, kv: Tensor) -> None:
        """Binds the paged cache [pages, page, 576]; compiles, loads, warms and sizes everything that `run` uses.

        Call it again when the cache moves; with a tensor that is already bound it changes nothing. Graphs that were
        captured before go on using the old one. Raises ConfigError for a cache that no core of the target reads,
        CompileError, LaunchError, CaptureError.
        """
        self._runtime.guard("prepare_cache()")
        kv_format = self._check_cache(kv)
        if self._place == place(kv):
            self._kv = ref(kv)
        else:
            self._bind(kv, kv_format)

    def _bind(self, kv: Tensor, kv_format: str) -> None:
        if self._runtime.torch_device.type == "cuda":
            torch.cuda.init()
        view = kv.view(torch.uint8) if kv_format == "fp8" else kv
        workspace = self._workspace(kv_format, kv.shape[1])
        steps = {shape: self._step(*shape, view, kv_format, workspace) for shape in self.shapes}
        # Nothing is changed until all of it is there.
        self._workspaces.append(workspace)
        before = self._steps, self._kv, self._place, self._layouts
        self._steps, self._kv, self._place, self._layouts = steps, ref(kv), place(kv), {}
        try:
            self._warm(kv)
        except BaseException:  # not warm, so not bound: what was bound before still is, and another call tries again
            self._retired.append(steps)  # what was launched may still run
            self._steps, self._kv, self._place, self._layouts = before
            raise
        self._retired.append(before[0])

    def run(
        self,
        projected: Tensor,  # bf16 [B, pitch]: q latent, kv latent, rope key, gate
        out: Tensor,  # bf16 [B, H * 128], written
        *,
        cache: Tensor,  # the one that prepare_cache was given; written at `slots`
        slots: Tensor,  # int64 [B]; -1: not written
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R], the tokens of this call included
        totals: Tensor | None = None,
        q: int = 1,
    ) -> None:
        """One step of B = R * q rows: four launches on torch's current stream, which must be one of this device.

        Metadata of fewer than R requests is padded with empty ones, which give zeros. Raises NotPrepared for a (B, q)
        that is not in `shapes`, and ConfigError, once a layout of the tensors, for one that the kernels do not take.
        """
        try:
            step, where = self._steps.get((projected.shape[0], q)), self._place
            if step is None or where is None:
                raise self._refusal(projected.shape[0], q)
            if lengths.shape[0] < step.requests or block_table.shape[0] < step.requests:
                block_table, lengths, totals = pad_requests(step.requests, block_table, lengths, totals)
            seen = (q, layout(projected), layout(out), layout(slots), layout(block_table), layout(lengths))
            strides = self._layouts.get(seen)
            source, target = projected.data_ptr(), out.data_ptr()
            if strides is None or source & 15 or target & 3 or not lies_at(cache, self._kv(), where):
                strides = self._admit(seen, projected, out, cache, slots, block_table, lengths, q)
            pitch, table_stride = strides
        except (AttributeError, IndexError, TypeError):
            require(
                "run",
                tensor_problems(
                    projected=projected, out=out, cache=cache, slots=slots, block_table=block_table, lengths=lengths
                )
                + q_problems(q),
            )
            raise
        keys = lengths.data_ptr()
        step.query.bind(source, slots.data_ptr(), pitch)
        if isinstance(step.core, TrtllmCore):
            step.core.take(cache, block_table, lengths)
        else:
            step.core.bind(block_table.data_ptr(), keys, table_stride)
        step.value.bind(source, keys, target, pitch)
        stream = self._runtime.stream()
        step.query.launch(stream)
        step.core.launch(stream)
        step.value.launch(stream)

    def stock_core(
        self,
        cache: Tensor,
        block_table: Tensor,  # int32 [R, width]
        lengths: Tensor,  # int32 [R]
        batch: int,
        q: int = 1,
        totals: Tensor | None = None,
    ) -> Tensor:  # bf16 [batch, H, 512]
        """The attention core alone: reads the queries that lie in the query scratch; returns this layer's latents."""
        given = {"cache": cache, "block_table": block_table, "lengths": lengths}
        require("stock_core", tensor_problems({"totals": totals}, **given) + q_problems(q))
        step = self._steps.get((batch, q))
        if step is None:
            raise self._refusal(batch, q)
        self._require_bound(cache)
        block_table, lengths, totals = pad_requests(step.requests, block_table, lengths, totals)
        where = self._runtime.torch_device
        bad = step_problems(self._dims, batch, q, where, block_table=block_table, lengths=lengths)
        require("stock_core", bad or table_problems(step, block_table))
        if isinstance(step.core, TrtllmCore):
            step.core.take(cache, block_table, lengths)
        else:
            step.core.bind(block_table.data_ptr(), lengths.data_ptr(), block_table.stride(0))
        step.core.launch_first(self._runtime.stream())
        return self._latent[:batch]

    def prepare_dcp(self, batch: int) -> None:
        """Buffers of a context-parallel step. Raises ConfigError: this layer was made with dcp=None."""
        raise ConfigError(f"prepare_dcp({batch!r}): the layer was made with dcp=None")

    # ---- preparation

    def _admit_box(self, box: Any, parity: Any) -> int:
        """How many ranks share a context."""
        require("PreparedMla", parity_problems(parity))
        return 1

    def _latents(self, rows: int) -> Tensor:
        """Where the core's output goes: bf16 [rows, H, 512]."""
        return torch.empty(rows, self._dims.heads, LATENT, dtype=torch.bfloat16, device=self._runtime.torch_device)

    def _check_cache(self, kv: Any) -> str:
        """The format of a cache that can be served."""
        target = str(self._runtime.device.target)
        served = SERVED[target]
        kv_format = kv_format_of(kv) if isinstance(kv, Tensor) else None
        if kv_format not in served.kv_formats:
            what = f"{kv.dtype} {list(kv.shape)}" if isinstance(kv, Tensor) else type(kv).__name__
            raise ConfigError(
                f"prepare_cache: cache is {what}, must be [pages, page, 576] of {' or '.join(served.kv_formats)} "
                f"on {target} (fp8: uint8 or float8_e4m3fn; bf16: bfloat16)"
            )
        page = kv.shape[1]
        bad = cache_problems(kv, kv_format=kv_format, page_size=self._page_size, device=self._runtime.torch_device)
        if page not in served.pages:
            bad.append(f"cache has pages of {page} tokens, must be one of {', '.join(map(str, served.pages))}")
        rows = max(rows for rows, _ in self.shapes)
        bad += scratch_problems(self._scratch, rows, self._dims.heads, kv_format, self._runtime.torch_device)
        require("prepare_cache", bad)
        return kv_format

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
            p_dtype=self._p_dtype,
        )

    def _choice(self, rows: int, q: int) -> str:
        return choose(str(self._runtime.device.target), rows, q, self._core).core

    def _work(self, rows: int, q: int) -> tokenspeed.Work:
        device = self._runtime.device
        return tokenspeed.work(
            str(device.target),
            heads=self._dims.heads,
            q=q,
            requests=rows // q,
            max_context=self.max_context,
            sm_count=device.sm_count,
        )

    def _workspace(self, kv_format: str, page: int) -> Workspace:
        """The workspace that the largest shape needs."""
        partial, stats = [0], [0]
        for rows, q in self.shapes:
            key = self._keys(rows, q, kv_format, page).core
            if isinstance(key, hopper.HopperKey):
                size = hopper.workspace(key, requests=rows // q, sm_count=self._runtime.device.sm_count)
                partial.append(size.partial)
                stats.append(size.stats)
            elif key is not None:
                partial.append(self._work(rows, q).workspace)
        return self._runtime.workspace(max(partial), max(stats))

    def _step(self, rows: int, q: int, kv: Tensor, kv_format: str, workspace: Workspace) -> _Step:
        """The plans of one shape, packed for a step of no tokens."""
        store = self._cache_of_kernels()

        def load(kernel: Any) -> Any:
            return self._runtime.function(kernel, store)

        dtype = torch.uint8 if kv_format == "fp8" else torch.bfloat16
        scratch = self._scratch.view(dtype)
        dummy = self._dummy(rows, q)
        attention = self._attention
        core, entries = self._core_stage(load, rows, q, kv, kv_format, workspace, scratch)
        return _Step(
            requests=rows // q,
            query=MlaQuery(
                load,
                attention,
                cache=kv,
                scratch=scratch,
                projected=dummy.projected,
                slots=dummy.slots,
                kv_format=kv_format,
            ),
            core=core,
            value=MlaValue(
                load,
                attention,
                latent=self._latent,
                projected=dummy.projected,
                lengths=dummy.lengths,
                out=dummy.out,
                q=q,
            ),
            entries=entries,
        )

    def _core_stage(
        self, load: Any, rows: int, q: int, kv: Tensor, kv_format: str, workspace: Workspace, scratch: Tensor
    ) -> tuple[HopperCore | TokenspeedCore | TrtllmCore, int]:
        """The core of a shape, and of how many entries its tables must be a multiple."""
        key = self._keys(rows, q, kv_format, kv.shape[1]).core
        attention, sm_count = self._attention, self._runtime.device.sm_count
        fp8 = kv_format == "fp8"
        shared: dict[str, Any] = {
            "rows": rows,
            "scratch": scratch,
            "latent": self._latent,
            "scale": float(attention.scale) * (attention._q_scale_float * attention._k_scale_float if fp8 else 1.0),
            "out_scale": float(attention._k_scale_float) if fp8 else 1.0,
        }
        if isinstance(key, tokenspeed.TokenspeedKey):
            loaded = self._runtime.host(key, self._cache_of_kernels())
            work = self._work(rows, q)
            shared |= {"partial": workspace.partial, "lse": self._package_lse()}
            core = TokenspeedCore(loaded, key=key, work=work, cache=kv, **shared)
            return core, tokenspeed.table_entries(key.page)
        if key is None:
            return TrtllmCore(q=q, max_context=self.max_context, sm_count=sm_count, **shared), 1
        space = {"partial": workspace.partial, "stats": workspace.stats}
        return self._core_of(load, key, sm_count=sm_count, cache=kv, **space, **shared), 1

    def _core_of(self, load: Any, key: Any, **rest: Any) -> HopperCore:
        return HopperCore(load, self._runtime.driver, key=key, **rest)

    def _package_lse(self) -> int:
        """Where a package's core writes its LSE; 0: nowhere."""
        return 0

    def _dummy(self, rows: int, q: int) -> "_Dummy":
        """A step that writes nothing to the cache and sees q keys of page 0."""
        where = self._runtime.torch_device
        return _Dummy(
            projected=torch.zeros(rows, self._pitches[rows], dtype=torch.bfloat16, device=where),
            out=torch.empty(rows, self._dims.heads * self._dims.v, dtype=torch.bfloat16, device=where),
            slots=torch.full((rows,), -1, dtype=torch.int64, device=where),
            table=torch.zeros(rows // q, _WIDTH, dtype=torch.int32, device=where),
            lengths=torch.full((rows // q,), q, dtype=torch.int32, device=where),
        )

    def _warm(self, kv: Tensor) -> None:
        """Every launch once, so that nothing is left to be loaded lazily; waits, so that its errors come here."""
        for rows, q in self.shapes:
            one = self._dummy(rows, q)
            self.run(one.projected, one.out, cache=kv, slots=one.slots, block_table=one.table, lengths=one.lengths, q=q)
        self._runtime.synchronize()

    def _cache_of_kernels(self) -> "CompileCache":
        if self._store is None:
            from k3dsl.cache import CompileCache

            self._store = CompileCache()
        return self._store

    # ---- what run() leaves to the first step of a layout, and its errors

    def _refusal(self, rows: int, q: int) -> Exception:
        if self._place is None:
            return ConfigError("run: no cache is bound, call prepare_cache(kv_cache) first")
        return not_prepared(self.shapes, rows, q)

    def _admit(
        self,
        seen: Any,
        projected: Tensor,
        out: Tensor,
        cache: Tensor,
        slots: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        q: int,
    ) -> tuple[int, int]:
        """Checks the tensors of a step; (row stride of projected, row stride of the table)."""
        self._require_bound(cache)
        rows = projected.shape[0]
        bad = step_problems(
            self._dims,
            rows,
            q,
            self._runtime.torch_device,
            projected=projected,
            out=out,
            slots=slots,
            block_table=block_table,
            lengths=lengths,
        )
        require("run", bad or table_problems(self._steps[rows, q], block_table))
        strides = projected.stride(0) if rows > 1 else self._dims.pitch, block_table.stride(0)
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[seen] = strides
        return strides

    def _require_bound(self, cache: Tensor) -> None:
        if self._place != place(cache):
            bound = "none" if self._place is None else f"{self._place[1]:#x} {list(self._place[2])}"
            raise ConfigError(
                f"cache at {cache.data_ptr():#x} {list(cache.shape)} is not the one that was prepared ({bound}): call "
                "prepare_cache(kv_cache) when the cache moves"
            )


class _Dummy(NamedTuple):
    projected: Tensor
    out: Tensor
    slots: Tensor
    table: Tensor
    lengths: Tensor
