"""A folder that looks like the part of a ROCm toolkit that FlyDSL's compiler needs: a linker, and device bitcode.

The linker is the system's ld.lld, or the one in ziglang; the bitcode is the one that triton ships.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from filelock import FileLock

from .build import cache_folder
from .errors import BuildError

LINKERS = ("ld.lld", "ld.lld-21", "ld.lld-20", "ld.lld-19", "ld.lld-18")


def linker() -> list[str]:
    """The command of an LLD."""
    for name in LINKERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    raise BuildError("no ld.lld: install LLVM's lld or `pip install ziglang`")


def toolkit() -> Path:
    """The folder, made when it is not there. ROCM_PATH wins when it holds a linker."""
    given = os.environ.get("ROCM_PATH")
    if given and Path(given, "llvm/bin/ld.lld").exists():
        return Path(given)
    command = linker()
    root = cache_folder() / "toolkit"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(root / "lock")):
        target = root / "llvm/bin/ld.lld"
        target.parent.mkdir(parents=True, exist_ok=True)
        script = "#!/bin/sh\nexec " + " ".join(f"'{c}'" for c in command) + ' "$@"\n'
        if not target.exists() or target.read_text() != script:
            target.write_text(script)
            target.chmod(0o755)
        bitcode = root / "amdgcn/bitcode"
        bitcode.mkdir(parents=True, exist_ok=True)
        spec = importlib.util.find_spec("triton")
        if spec and spec.submodule_search_locations:
            for name in ("ocml.bc", "ockl.bc"):
                source = Path(spec.submodule_search_locations[0]) / "backends/amd/lib" / name
                if source.exists() and not (bitcode / name).exists():
                    shutil.copy(source, bitcode / name)
    return root
