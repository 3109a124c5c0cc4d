"""Which host code this machine's CPU can run: for objects that hold some. GPU objects alone hold none."""

import platform
from functools import cache
from typing import Final

#: Flags of /proc/cpuinfo that each x86-64 level adds (the psABI's levels).
_LEVELS: Final = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})),
    ("x86-64-v3", frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
)
_X86: Final = ("x86-64", *(name for name, _ in _LEVELS))


@cache
def host_isa() -> str:
    """The best baseline that this CPU runs: "x86-64" to "x86-64-v4", or the machine's name elsewhere."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        flags = set()
    best = _X86[0]
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        best = name
    return best


def cannot_run(isa: object, here: str | None = None) -> str | None:
    """Why a CPU of baseline `here` (this machine's by default) cannot run host code built for `isa`; None if it can."""
    here = host_isa() if here is None else here
    if isa is None or isa == here:
        return None
    if isa in _X86 and here in _X86 and _X86.index(here) >= _X86.index(isa):
        return None
    return f"its host code is for {isa}, this machine runs {here}"
