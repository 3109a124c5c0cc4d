"""The host side of sparse MLA on gfx950: the functions that engines call, and the prepared object."""

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from k3dsl.amd.checks import each
from k3dsl.amd.device import TARGETS
from k3dsl.amd.launch import Executable, Launch, LaunchPlan, Runtime, runtime_problems
from k3dsl.amd.sparse_mla import checks
from k3dsl.amd.sparse_mla.key import (
    LATENT,
    MAX_HEADS,
    QK,
    RECORD,
    WARM_HEADS,
    WAVE,
    WAVE_BYTES,
    SparseMlaKey,
    warm_keys,
    waves,
)
from k3dsl.capture import guard
from k3dsl.checks import require
from k3dsl.errors import ConfigError, K3Error

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache

TARGET: Final = "gfx950"
#: Layouts of step tensors that a layer remembers as checked.
_MOST_LAYOUTS: Final = 4096


class Launcher:
    """One kernel on one device with its packed arguments. Threads take turns."""

    def __init__(self, key: SparseMlaKey, runtime: Runtime, cache: "CompileCache | None" = None) -> None:
        from k3dsl.amd.toolchain import build, compile_key
        from k3dsl.cache import CompileCache

        guard(f"loading {key.symbol}", runtime.capturing)
        store = cache if cache is not None else CompileCache()
        entry = store.get_or_build(compile_key(key, TARGET), build)
        self.key, self.runtime = key, runtime
        self._units = getattr(runtime, "compute_units", TARGETS[TARGET].compute_units)
        self._lock = threading.Lock()
        zero: dict[str, Any] = {name: 0.0 if kind == "f32" else 0 for name, kind in key.params}
        self._plan = LaunchPlan(Executable.load(runtime, entry.payload), _geometry(1, 4), key.params, **zero)
        self._slots = {name: self._plan.slot(name) for name, _ in key.params}

    def launch(
        self, q: Tensor, kv: Tensor, indices: Tensor, indptr: Tensor, out: Tensor, lse: Tensor | None, scale: float
    ) -> None:
        """All tokens of `q`, at least one, on the current stream. Everything has been checked."""
        tokens, slots = q.shape[0], self._slots
        per = waves(tokens, self._units)
        with self._lock:
            slots["q"].value, slots["kv"].value = q.data_ptr(), kv.data_ptr()
            slots["indices"].value, slots["indptr"].value = indices.data_ptr(), indptr.data_ptr()
            slots["out"].value = out.data_ptr()
            slots["lse"].value = (out if lse is None else lse).data_ptr()
            slots["q_stride0"].value, slots["q_stride1"].value = q.stride(0), q.stride(1)
            slots["out_stride0"].value, slots["out_stride1"].value = out.stride(0), out.stride(1)
            slots["scale"].value = scale * checks.LOG2E
            slots["index_bytes"].value = 4 * indices.shape[0]
            slots["waves"].value = per
            self._plan.launch_as(_geometry(tokens, per), self.runtime.stream())


def _geometry(tokens: int, per: int) -> Launch:
    """One workgroup a token."""
    return Launch((tokens, 1, 1), (per * WAVE, 1, 1), per * WAVE_BYTES)


_lock = threading.Lock()
#: runtime -> key -> what is loaded there.
_launchers: "WeakKeyDictionary[Runtime, dict[SparseMlaKey, Launcher]]" = WeakKeyDictionary()


def launcher(key: SparseMlaKey, runtime: Runtime, cache: "CompileCache | None" = None) -> Launcher:
    """The launcher of a key on a runtime's device; the first time its object comes from the cache, or is built."""
    found = _launchers.get(runtime, {}).get(key)
    if found is None:
        with _lock:
            known = _launchers.setdefault(runtime, {})
            found = known.get(key)
            if found is None:
                found = known[key] = Launcher(key, runtime, cache)
    return found


def _runtime_problem(q: Tensor) -> str | None:
    """Why `q` does not lie where the kernel runs."""
    if q.device.type != "cuda":
        return f"q is on {q.device}, must be on a gfx950 GPU"
    if torch.version.hip is None:
        return f"q is on {q.device}, a GPU of torch without HIP: must be on a gfx950 GPU"
    try:
        _hip(q.device)
    except K3Error as error:
        return str(error)
    return None


def _device(device: Any, default: str) -> torch.device:
    try:
        return torch.device(default if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} must be a device of torch: {error}") from None


def _hip(device: torch.device) -> Runtime:
    from k3dsl.amd.hip import runtime

    return runtime(torch.cuda.current_device() if device.index is None else device.index)


def sparse_mla_problems(
    q: Any,
    kv_buffer: Any,
    kv_indptr: Any,
    kv_indices: Any,
    softmax_scale: Any = 1.0,
    *,
    kv_lora_rank: Any = LATENT,
    qk_rope_head_dim: Any = 64,
    has_invalid: bool = False,
    return_lse: bool = False,
    out: Any = None,
    runtime: Runtime | None = None,
    **options: Any,
) -> list[str]:
    """Every reason why `flydsl_sparse_mla_fp8ds_fwd` does not serve these arguments; [] if it does."""
    bad = checks.problems(
        q,
        kv_buffer,
        kv_indptr,
        kv_indices,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        out=out,
        options=options,
    )
    bad += runtime_problems(runtime)
    if runtime is None and isinstance(q, Tensor):
        where = _runtime_problem(q)
        bad = [where, *bad] if where else bad
    bad += checks.scale_problems(softmax_scale)
    flags = {"has_invalid": has_invalid, "return_lse": return_lse}
    return bad + [f"{what}={value!r} must be a bool" for what, value in flags.items() if type(value) is not bool]


def flydsl_sparse_mla_fp8ds_supported(
    q: Any, kv_buffer: Any, kv_indptr: Any, kv_indices: Any, softmax_scale: Any = 1.0, **options: Any
) -> bool:
    """Whether `flydsl_sparse_mla_fp8ds_fwd` serves these arguments, by their metadata alone: safe during a capture.

    Options are those of the function and those of its siblings that it does not serve (kv_scale, q_scale, attn_sink,
    extra_*, inv_rope_*, out_mxfp8, kv_splits, skip_reduce, dot_precision). `sparse_mla_problems` says why not.
    """
    return not sparse_mla_problems(q, kv_buffer, kv_indptr, kv_indices, softmax_scale, **options)


def flydsl_sparse_mla_fp8ds_fwd(
    q: Tensor,  # bf16 [T, H, 576], 1 <= H <= 16: latent 512, rope 64; strided, rows aligned to 4 bytes
    kv_buffer: Tensor,  # one-byte records of 656: [N, 656], [N, 1, 656], [N, 1, 1, 656] or [blocks, block, 656]
    kv_indptr: Tensor,  # int [T + 1]
    kv_indices: Tensor,  # int [n]: slots, by token
    softmax_scale: float,
    *,
    kv_lora_rank: int = LATENT,
    qk_rope_head_dim: int = 64,
    has_invalid: bool = False,
    out: Tensor | None = None,  # bf16 [T, H, >= 512]: the first 512 columns are written
    return_lse: bool = False,
    runtime: Runtime | None = None,
    cache: "CompileCache | None" = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each token to the records in its list, and with return_lse the natural log-sum-exp, fp32 [T, H].

    A slot that is listed twice counts twice. With has_invalid, negative entries are masked; without, there must be
    none. A token without a key gives zeros and -inf. Only records that are listed are read. The caches' scales must be
    powers of two, as the cache's writer makes them.

    Runs on the current stream of q's device and waits for nothing. int64 or strided lists are converted on the device.
    runtime: by default HIP. Raises ConfigError (a ValueError) with every reason why the arguments are not served;
    CaptureError where a kernel would have to be loaded inside a capture: warm up before.
    """
    bad = sparse_mla_problems(
        q,
        kv_buffer,
        kv_indptr,
        kv_indices,
        softmax_scale,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        has_invalid=has_invalid,
        return_lse=return_lse,
        out=out,
        runtime=runtime,
        **options,
    )
    if bad:
        raise ConfigError.of("sparse MLA", bad)
    tokens, heads = q.shape[:2]
    if out is None:
        out = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if return_lse else None
    if tokens == 0:
        return out, lse
    indptr = kv_indptr.to(torch.int32).contiguous()
    indices = kv_indices.to(torch.int32).contiguous()
    if indices.numel() == 0:
        indices = torch.zeros(1, dtype=torch.int32, device=q.device)  # a pointer that may be followed
    key = SparseMlaKey(heads, has_invalid, return_lse)
    where = runtime if runtime is not None else _hip(q.device)
    launcher(key, where, cache).launch(q, kv_buffer, indices, indptr, out, lse, float(softmax_scale))
    return out, lse


def flydsl_sparse_mla_fp8ds_warmup(
    device: "torch.device | str | int | None" = None,
    *,
    heads: Iterable[int] = WARM_HEADS,
    runtime: Runtime | None = None,
    cache: "CompileCache | None" = None,
) -> int:
    """Builds, loads and runs every kernel for these head counts once, on one token and one record of zeros, then waits.

    28 kernels for the usual counts. Call it before a capture. Returns how many there are. Raises ConfigError for a head
    count or a device that is not served, CaptureError inside a capture.
    """
    guard("flydsl_sparse_mla_fp8ds_warmup()")
    keys = warm_keys(*each(heads=heads))
    require("sparse MLA", runtime_problems(runtime))
    where = _device(device, "cuda" if runtime is None else "cpu")
    if runtime is None:
        if where.type != "cuda" or torch.version.hip is None:
            raise ConfigError(f"device={str(where)!r} must be a gfx950 GPU of torch with HIP")
        runtime = _hip(where)
    add = getattr(getattr(runtime, "memory", None), "add", lambda tensor: tensor)  # an emulator wants to know
    record = add(torch.zeros(1, RECORD, dtype=torch.uint8, device=where))
    q = add(torch.zeros(1, MAX_HEADS, QK, dtype=torch.bfloat16, device=where))
    indptr, index = (add(torch.tensor(x, dtype=torch.int32, device=where)) for x in ([0, 1], [0]))
    out = add(torch.empty(1, MAX_HEADS, LATENT, dtype=torch.bfloat16, device=where))
    lse = add(torch.empty(1, MAX_HEADS, dtype=torch.float32, device=where))
    for key in keys:
        some = slice(None, key.heads)
        target = lse.view(-1)[some] if key.lse else None
        launcher(key, runtime, cache).launch(q[:, some], record, index, indptr, out[:, some], target, 1.0)
    runtime.synchronize()
    return len(keys)


class PreparedSparseMla:
    """Sparse MLA of one layer with everything decided: `prepare_cache` once a cache, then `run` once a step.

    heads, has_invalid, return_lse  what the kernel is built for
    softmax_scale                   a finite number
    cache, runtime                  where kernels come from (the user's CompileCache) and where they run (HIP)

    A step may have any number of tokens: the kernel is the same. Raises ConfigError with every problem, CaptureError
    inside a stream capture.
    """

    def __init__(
        self,
        heads: int,
        softmax_scale: float,
        *,
        has_invalid: bool = False,
        return_lse: bool = False,
        cache: "CompileCache | None" = None,
        runtime: Runtime | None = None,
    ) -> None:
        guard("preparing sparse MLA")
        self.key = SparseMlaKey(heads, has_invalid, return_lse)
        require("PreparedSparseMla", checks.scale_problems(softmax_scale) + runtime_problems(runtime))
        self._scale = float(softmax_scale)
        self._store, self._runtime = cache, runtime
        self._kv: Tensor | None = None
        self._launcher: Launcher | None = None
        self._checked: set[Any] = set()  # layouts of step tensors in which nothing was wrong

    def prepare_cache(self, kv: Tensor) -> None:
        """Binds the records, builds and loads the kernel. Call it again when the cache moves."""
        guard("prepare_cache()")
        bad = checks.cache_problems(kv, None)
        if not bad and self._runtime is None:
            where = _runtime_problem(kv)
            bad = [where.replace("q is", "kv_buffer is")] if where else []
        if bad:
            raise ConfigError.of("sparse MLA", bad)
        runtime = self._runtime if self._runtime is not None else _hip(kv.device)
        self._launcher, self._kv = launcher(self.key, runtime, self._store), kv
        self._checked = set()

    def run(
        self,
        q: Tensor,  # bf16 [T, H, 576]
        kv_indptr: Tensor,  # int32 [T + 1], contiguous
        kv_indices: Tensor,  # int32 [n], contiguous, n >= 1
        out: Tensor,  # bf16 [T, H, >= 512], written
        lse: Tensor | None = None,  # fp32 [T, H], written; with return_lse
    ) -> None:
        """One step on the current stream: one launch. Allocates and converts nothing, and waits for nothing.

        Raises ConfigError for tensors that do not fit, or before `prepare_cache`.
        """
        if self._launcher is None or self._kv is None:
            raise ConfigError("run() before prepare_cache(): there is no cache to read")
        layout = tuple(map(_layout, (q, kv_indptr, kv_indices, out, lse)))
        if layout not in self._checked:
            self._require(q, kv_indptr, kv_indices, out, lse)
            if len(self._checked) < _MOST_LAYOUTS:
                self._checked.add(layout)
        if q.shape[0]:
            self._launcher.launch(q, self._kv, kv_indices, kv_indptr, out, lse, self._scale)

    def _require(self, q: Any, kv_indptr: Any, kv_indices: Any, out: Any, lse: Any) -> None:
        assert self._kv is not None
        bad = checks.query_problems(q, self.key.heads)
        if not bad and q.device != self._kv.device:
            bad.append(f"q is on {q.device}, the cache on {self._kv.device}")
        if not bad:
            tokens, heads = q.shape[:2]
            bad = checks.list_problems(kv_indptr, kv_indices, tokens, self._kv.device, packed=True)
            bad += checks.out_problems(out, tokens, heads, self._kv.device)
            if self.key.lse:
                bad += checks.lse_problems(lse, tokens, heads, self._kv.device)
            elif lse is not None:
                bad.append("lse is given, the layer was prepared without return_lse")
            if not bad and kv_indices.numel() == 0:
                bad.append("kv_indices has no entries, must have one at least: its pointer is followed")
        if bad:
            raise ConfigError.of("sparse MLA", bad)


def _layout(tensor: Any) -> Any:
    """All that the checks look at, and nothing of the contents."""
    if not isinstance(tensor, Tensor):
        return type(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 3
