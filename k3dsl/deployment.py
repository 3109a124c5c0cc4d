"""A deployment: the frozen facts from which every compile key follows, on any machine, with and without a GPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k3dsl.amd import keys as amd
from k3dsl.dims import KV_BYTES, MlaDims
from k3dsl.errors import ConfigError
from k3dsl.nvidia.core import HOSTS, SERVED, Choice, choose, lse_problems
from k3dsl.nvidia.core.hopper import P_DTYPES
from k3dsl.nvidia.dcp import MAX_HEADS as RANK_HEADS
from k3dsl.nvidia.dcp import RANKS, interleave_problems
from k3dsl.nvidia.epilogue import DTYPES, EpilogueKey, epilogue_keys

if TYPE_CHECKING:
    from k3dsl.cache import CompileKey

REFERENCE: Final = "reference"
#: Rows of a step at most: the query scratch that all layers share has 64.
MAX_ROWS: Final = 64
MAX_QUERIES: Final = 8
#: Rows of a step where none are named.
BATCHES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
#: Kimi-K3's position limit.
MAX_CONTEXT: Final = 1 << 20
#: Heads of a rank that layers are prepared for: Kimi-K3 at tp 16 and tp 8.
HEADS: Final = (6, 12)
#: Everything but the heads is fixed in the kernels.
_FIXED: Final = ("q_lora", "kv_lora", "nope", "rope", "v")


@dataclass(frozen=True)
class Deployment:
    """Which layers run where, in which shapes.

    dims         one rank's shard of the layer
    target       architecture string as its toolchain spells it, or "reference" (plain torch on any device)
    kv_format    format of the paged cache: fp8, bf16; on reference and on gfx950 also fp8_ds_mla
    page_size    tokens of a cache page
    max_context  tokens that a request may reach: a bound for planning, not a limit of the kernels
    batches      rows (tokens) of a step, each 1 to 64; on gfx950 1 to 16, and up to there by default
    queries      tokens of a request in one step: 1 for plain decode, more for the verification of drafts
    core         attention core, "auto" or one of the target's
    dcp          ranks that share a context: each has `dims.heads` heads and a part of every context
    interleave   consecutive positions of a context on one rank, for dcp > 1
    epilogues    16-bit dtypes of the engine's tensors (bf16, fp16) that the fused epilogues of this cache format are
                 built for, rotating and not; () for an engine that calls none
    p_dtype      type of the softmax weights in the hopper core: auto, for an fp8 cache f16 (the default) or e4m3, which
                 is faster with many heads or drafts and rounds to 4 bits (docs/hopper.md)
    host         ISA of the machines with the GPUs, x86-64 or aarch64, for cores with host code (tokenspeed); "": that
                 of this machine

    The prepared shapes are all (rows, q) in which q divides rows. Raises ConfigError with every problem at once.
    """

    dims: MlaDims
    target: str
    kv_format: str = "fp8"
    page_size: int = 64
    max_context: int = 131072
    batches: tuple[int, ...] = BATCHES
    queries: tuple[int, ...] = (1,)
    core: str = "auto"
    dcp: int = 1
    interleave: int = 1
    epilogues: tuple[str, ...] = ("bf16",)
    p_dtype: str = "auto"
    host: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", str(self.target))
        if self.target == amd.TARGET and self.batches is BATCHES:
            object.__setattr__(self, "batches", amd.BATCHES)
        for field in ("batches", "queries", "epilogues"):
            value = getattr(self, field)
            if isinstance(value, Iterable) and not isinstance(value, str | bytes):
                object.__setattr__(self, field, tuple(value))
        bad = [*self._bad_numbers(), *self._bad_target(), *self._bad_p_dtype()]
        if bad:
            raise ConfigError.of("Deployment", bad)

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The prepared (rows, q), in the order of the queries and then of the batches."""
        return tuple(dict.fromkeys((b, q) for q in self.queries for b in self.batches if b % q == 0))

    def choice(self, rows: int, q: int) -> Choice:
        """The core of a shape and why it is that one."""
        if self.target == REFERENCE:
            return Choice(REFERENCE, "plain torch, on any device")
        if self.target == amd.TARGET:
            return Choice(*amd.choice(self))
        return choose(self.target, rows, q, self.core, self.dcp)

    def keys(self) -> "list[CompileKey]":
        """Every key that the shapes and the epilogues need, each once. The same with and without a GPU."""
        if self.target == REFERENCE:
            return []
        if self.target == amd.TARGET:
            from k3dsl.amd.toolchain import compile_key as amd_key

            return [amd_key(key, self.target) for key in amd.deployment_keys(self)]
        from k3dsl.nvidia.layer import shape_keys
        from k3dsl.nvidia.toolchain import compile_key

        kernels: list[Any] = [
            key
            for rows, q in self.shapes()
            for key in shape_keys(
                target=self.target,
                heads=self.dims.heads,
                kv_format=self.kv_format,
                page=self.page_size,
                core=self.choice(rows, q).core,
                rows=rows,
                q=q,
                dcp=self.dcp,
                interleave=self.interleave,
                max_context=self.max_context,
                host=self.host,
                p_dtype=self.p_dtype,
            ).all()
        ]
        kernels += self.epilogue_keys()
        return [compile_key(key, self.target) for key in dict.fromkeys(kernels)]

    def epilogue_keys(self) -> list[EpilogueKey]:
        """The kernels of the fused epilogues, which `k3dsl.nvidia.prepare_epilogues` loads ahead of a capture."""
        if self.target in (REFERENCE, amd.TARGET):
            return []
        return epilogue_keys(self.dims.heads, kv_formats=(self.kv_format,), dtypes=self.epilogues, rope=(False, True))

    def _bad_numbers(self) -> list[str]:
        bad = []
        if not isinstance(self.dims, MlaDims):
            bad.append(f"dims={self.dims!r} must be an MlaDims")
        for field, least, most in (("batches", 1, MAX_ROWS), ("queries", 1, MAX_QUERIES)):
            values = getattr(self, field)
            if not isinstance(values, tuple) or not values:
                bad.append(f"{field}={values!r} must be a non-empty tuple of ints")
            else:
                wrong = [v for v in values if type(v) is not int or not least <= v <= most]
                bad += [f"{field}: {v!r} must be an int from {least} to {most}" for v in wrong]
        if not bad:
            idle = [q for q in self.queries if all(b % q for b in self.batches)]
            bad += [f"queries: {q} divides none of batches={self.batches}, so it has no shape" for q in idle]
        if type(self.max_context) is not int or not 1 <= self.max_context <= MAX_CONTEXT:
            bad.append(f"max_context={self.max_context!r} must be an int from 1 to {MAX_CONTEXT}")
        if not isinstance(self.epilogues, tuple):
            bad.append(f"epilogues={self.epilogues!r} must be a tuple of {', '.join(DTYPES)}, or empty")
        else:
            wrong_dtypes = [d for d in self.epilogues if d not in DTYPES]
            bad += [f"epilogues: {d!r} must be one of {', '.join(DTYPES)}" for d in wrong_dtypes]
        if self.host not in ("", *HOSTS):
            bad.append(f"host={self.host!r} must be one of {', '.join(HOSTS)}, or empty for this machine's")
        return bad if self.target == amd.TARGET else bad + self._bad_ranks()

    def _bad_ranks(self) -> list[str]:
        bad = []
        heads = self.dims.heads if isinstance(self.dims, MlaDims) else 1
        if type(self.dcp) is not int or self.dcp not in (1, *RANKS):
            bad.append(f"dcp={self.dcp!r} must be one of {', '.join(map(str, (1, *RANKS)))}")
        elif self.dcp > 1 and self.target == REFERENCE:
            bad.append(f"dcp={self.dcp!r} must be 1 on {REFERENCE}: k3dsl.reference.parallel_layer has the whole group")
        elif self.dcp > 1 and type(heads) is int and self.dcp * heads > RANK_HEADS:
            bad.append(f"dcp={self.dcp!r} with {heads} heads must have {RANK_HEADS} heads at most on all ranks")
        bad += interleave_problems(self.interleave)
        return bad

    def _bad_p_dtype(self) -> list[str]:
        served = SERVED.get(self.target)
        allowed: tuple[str, ...] = ("auto",)
        if served is not None and "hopper" in served.cores and self.kv_format in tuple(P_DTYPES):
            allowed += P_DTYPES[self.kv_format]
        if self.p_dtype in allowed:
            return []
        return [
            f"p_dtype={self.p_dtype!r} must be {' or '.join(allowed)} for kv_format={self.kv_format!r} on {self.target}"
        ]

    def _bad_target(self) -> list[str]:
        if self.target == amd.TARGET:
            return amd.problems(self) + self._bad_fixed()
        served = SERVED.get(self.target)
        if served is None and self.target != REFERENCE:
            return [
                f"target={self.target!r} must be one of {', '.join([*SERVED, amd.TARGET, REFERENCE])}",
                *self._bad_anywhere(),
            ]
        bad = []
        formats = tuple(KV_BYTES) if served is None else served.kv_formats
        if self.kv_format not in formats:
            bad.append(f"kv_format={self.kv_format!r} must be one of {', '.join(formats)} on {self.target}")
        if served is None:
            if type(self.page_size) is not int or self.page_size < 1:
                bad.append(f"page_size={self.page_size!r} must be a positive int")
            if self.core not in ("auto", REFERENCE):
                bad.append(f"core={self.core!r} must be auto or {REFERENCE} on {REFERENCE}")
            return bad
        if type(self.page_size) is not int or self.page_size not in served.pages:
            bad.append(
                f"page_size={self.page_size!r} must be one of {', '.join(map(str, served.pages))} on {self.target}"
            )
        if self.core not in ("auto", *served.cores):
            bad.append(f"core={self.core!r} must be auto or one of {', '.join(served.cores)} on {self.target}")
        elif type(self.dcp) is int and self.dcp > 1:
            bad += lse_problems(self.core, self.dcp)
        return bad + self._bad_dims()

    def _bad_anywhere(self) -> list[str]:
        """What no target takes: where the target itself is wrong, nothing narrower can be said."""
        targets = SERVED.values()
        allowed = {
            "kv_format": tuple(KV_BYTES),
            "page_size": tuple(dict.fromkeys(p for t in targets for p in t.pages)),
            "core": tuple(dict.fromkeys(["auto", REFERENCE, *(c for t in targets for c in t.cores)])),
        }
        return [
            f"{name}={value!r} must be one of {', '.join(map(str, values))}"
            for name, values in allowed.items()
            for value in [getattr(self, name)]
            if isinstance(value, bool) or value not in values
        ]

    def _bad_fixed(self) -> list[str]:
        if not isinstance(self.dims, MlaDims):
            return []
        model = MlaDims()
        return [
            f"dims.{name}={getattr(self.dims, name)!r} must be {getattr(model, name)} on {self.target}"
            for name in _FIXED
            if getattr(self.dims, name) != getattr(model, name)
        ]

    def _bad_dims(self) -> list[str]:
        bad = self._bad_fixed()
        if isinstance(self.dims, MlaDims) and self.dims.heads not in HEADS:
            bad.append(f"dims.heads={self.dims.heads!r} must be one of {', '.join(map(str, HEADS))} on {self.target}")
        return bad
