"""The attention cores and the choice between them. Imports no core: a choice needs none of their packages."""

from dataclasses import dataclass
from typing import Final

from k3dsl.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """What a target's cores take. Formats and pages are those that every core of the target serves."""

    cores: tuple[str, ...]
    kv_formats: tuple[str, ...]
    pages: tuple[int, ...]


#: tokenspeed_mla and trtllm-gen read e4m3 caches here, with pages that divide their 128-key tiles.
SERVED: Final = {
    "sm_90a": Served(("hopper",), ("fp8", "bf16"), (32, 64, 128)),
    "sm_100a": Served(("tokenspeed", "trtllm"), ("fp8",), (32, 64)),
    "sm_103a": Served(("tokenspeed", "trtllm"), ("fp8",), (32, 64)),
}
#: ISAs of machines with GPUs, for cores that have host code.
HOSTS: Final = ("x86-64", "aarch64")
#: Rows from which trtllm is the automatic choice on sm_10x, at q = 1.
TRTLLM_FROM: Final = 16
_ALL: Final = tuple(dict.fromkeys(core for served in SERVED.values() for core in served.cores))


@dataclass(frozen=True)
class Choice:
    """The core of one (rows, q), and why it is that one."""

    core: str
    reason: str


def lse_problems(core: str, dcp: int) -> list[str]:
    """Why ranks cannot share contexts on that core."""
    if core != "trtllm" or dcp == 1:
        return []
    return [f"core='trtllm' gives no LSE, which dcp={dcp} needs: it must be auto or tokenspeed"]


def choose(target: str, rows: int, q: int = 1, core: str = "auto", dcp: int = 1) -> Choice:
    """The core for `rows` rows of q per request. Raises ConfigError for a core that `target` cannot run."""
    if target not in SERVED:
        raise ConfigError(f"target={target!r} must be one of {', '.join(SERVED)}")
    for what, number in (("rows", rows), ("q", q), ("dcp", dcp)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{what}={number!r} must be a positive int")
    cores = SERVED[target].cores
    if core not in ("auto", *cores):
        why = f"{target} cannot run it" if core in _ALL else "unknown"
        raise ConfigError(f"core={core!r} ({why}) must be auto or one of {', '.join(cores)} on {target}")
    if dcp > 1 and "tokenspeed" in cores:
        if bad := lse_problems(core, dcp):
            raise ConfigError(bad[0])
        return Choice("tokenspeed", f"dcp={dcp}: the only core of {target} that gives an LSE")
    if core != "auto":
        return Choice(core, f"core={core!r} was asked for")
    if len(cores) == 1:
        return Choice(cores[0], f"the core of {target}")
    if rows >= TRTLLM_FROM and q == 1:
        return Choice("trtllm", f"rows={rows} is {TRTLLM_FROM} or more and q is 1")
    return Choice("tokenspeed", f"rows={rows} is below {TRTLLM_FROM}" if q == 1 else f"q={q} is above 1")


def core_for(batch: int, core: str = "auto", q: int = 1, *, target: str | None = None, dcp: int = 1) -> str:
    """The core for `batch` rows of q per request, on `target` or on the present device.

    With neither, the rule of sm_100a. Raises ConfigError (a ValueError) for a core that is unknown or that the target
    cannot run, naming those that it can.
    """
    if target is None:
        from k3dsl.preparing import detect_target

        target = detect_target() or "sm_100a"
    return choose(target, batch, q, core, dcp).core
