"""Which host code this machine runs: for objects that hold some. GPU objects alone hold none."""

import platform
from typing import Final

_NAMES: Final = {"x86_64": "x86-64", "AMD64": "x86-64", "arm64": "aarch64"}


def host_isa() -> str:
    """The ISA of this machine, as it stands in keys: x86-64, aarch64, or a name that nothing is built for."""
    machine = platform.machine()
    return _NAMES.get(machine, machine)


def cannot_run(isa: object) -> str | None:
    """Why this machine cannot run host code built for `isa`; None if it can, or where there is none."""
    here = host_isa()
    return None if isa in (None, here) else f"its host code is for {isa}, this machine runs {here}"
