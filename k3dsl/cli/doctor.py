"""`k3dsl doctor`: one line for everything that a layer needs, what is wrong with it and what to do."""

import os
import platform
import pwd
import stat
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from k3dsl import __version__
from k3dsl.cli.console import FINDING, Json, emit, out
from k3dsl.errors import K3Error

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache

_MARKS: Final = {
    "ok": "[green]ok[/green]  ",
    "info": "[blue]info[/blue]",
    "warn": "[yellow]warn[/yellow]",
    "bad": "[red]bad[/red] ",
}
#: GiB below which the cache folder is nearly full.
_LEAST_GIB: Final = 0.5


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it stands (ok, info, warn, bad), what was found, what to do about it."""

    name: str
    status: str
    found: str
    todo: str = ""


def doctor(json: Json = False) -> None:
    """Looks at GPU, driver, toolchains, cache folder, layers and environment; says what is wrong and what to do.

    Exit 1 if something is wrong. A machine without a GPU or a compiler is not wrong: it cannot do some things.

    Example: k3dsl doctor --json
    """
    checks = [*python(), *gpu(), *toolchain(), *caches(), *environment()]
    ok = all(check.status != "bad" for check in checks)
    if json:
        emit({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        console = out()
        width = max(len(check.name) for check in checks)
        for check in checks:
            console.print(f"{_MARKS[check.status]} {check.name:<{width}}  ", end="")
            console.print(check.found, markup=False)
            if check.todo:
                console.print(f"     {'':<{width}}  -> {check.todo}", markup=False)
    if not ok:
        raise typer.Exit(FINDING)


def python() -> list[Check]:
    """Interpreter and packages."""
    found = [Check("k3dsl", "ok", f"{__version__}, Python {platform.python_version()} on {platform.machine()}")]
    version = _version("torch")
    if version is None:
        found.append(Check("torch", "bad", "not installed", "pip install torch"))
    else:
        found.append(Check("torch", "ok", version))
    return found


def gpu() -> list[Check]:
    """Driver and devices."""
    from k3dsl.nvidia.device import device
    from k3dsl.nvidia.driver import driver

    try:
        library = driver()
        version, count = library.version(), library.device_count()
    except K3Error as error:
        return [
            Check(
                "GPU", "info", f"none: {str(error).splitlines()[0]}", "target reference runs here; warmup needs no GPU"
            )
        ]
    served = f"{version // 1000}.{version % 1000 // 10}"
    checks = [Check("CUDA driver", "ok", f"serves CUDA {served}")]
    for index in range(count):
        facts = device(index)
        text = f"{facts.name}, sm_{facts.capability[0]}{facts.capability[1]}, {facts.sm_count} SMs"
        if facts.target is None:
            checks.append(Check(f"GPU {index}", "warn", text, "no kernels for it: target reference runs on it"))
        else:
            checks.append(Check(f"GPU {index}", "ok", f"{text}, target {facts.target}"))
    if not count:
        checks.append(Check("GPU", "info", "none"))
    return [*checks, *_torch_sees(count)]


def _torch_sees(count: int) -> list[Check]:
    """torch must see what the driver sees: tensors come from it."""
    if not count or _version("torch") is None:
        return []
    import torch

    if torch.cuda.is_available():
        return [Check("torch CUDA", "ok", f"{torch.version.cuda}, {torch.cuda.device_count()} devices")]
    return [Check("torch CUDA", "bad", "torch sees no GPU, the driver does", "install a CUDA build of torch")]


def toolchain() -> list[Check]:
    """Compilers. Objects are plain cubins: no linker and no C compiler takes part."""
    from k3dsl.nvidia.toolchain import CUDA, PINNED, installed

    version, wanted = installed(), PINNED["nvidia-cutlass-dsl"]
    if version is None:
        text = f"CuTe DSL is not installed: objects built with {wanted} can be loaded, none can be built"
        check = Check("NVIDIA compiler", "info", text, "pip install 'k3dsl[nvidia]' to build here")
    elif version != wanted:
        text = f"CuTe DSL {version}, kernels were written for {wanted}"
        check = Check("NVIDIA compiler", "warn", text, f"pip install 'nvidia-cutlass-dsl[cu{CUDA}]=={wanted}'")
    else:
        check = Check("NVIDIA compiler", "ok", f"CuTe DSL {version}, CUDA {CUDA}")
    return [check, Check("linker", "ok", "none is needed: objects are cubins, launched through the driver")]


def caches() -> list[Check]:
    """The cache folder and its layers."""
    from k3dsl.cache import CompileCache

    try:
        cache = CompileCache()
    except K3Error as error:
        return [Check("cache", "bad", str(error), "mend the variable that is named")]
    if cache.folder is None and not cache.degraded:
        return [Check("cache", "info", "off: kernels stay in memory", "unset K3DSL_CACHE to keep them")]
    if cache.root is None:
        return [Check("cache folder", "bad", *_degraded(cache))]
    checks = [_folder(Path(cache.root), cache.read_only), *_lock(cache)]
    checks += [Check("cache", "bad", text) for code, text in cache.degraded.items() if code != "lock_unsupported"]
    stats = cache.stats()
    if stats.quarantined:
        todo = "`k3dsl cache verify` says what is wrong, `k3dsl cache prune` removes them"
        checks.append(Check("quarantine", "warn", f"{stats.quarantined} entries were not what was stored", todo))
    checks.append(Check("entries", "ok", f"{stats.entries} in {stats.bytes / 2**20:.1f} MiB"))
    for layer in cache.layers:
        there = layer.remote or Path(layer.name).is_dir()
        todo = "" if there else "mount it, or take it out of K3DSL_CACHE_LAYERS"
        checks.append(
            Check("layer", "ok" if there else "warn", layer.name if there else f"{layer.name} is missing", todo)
        )
    return checks


def _degraded(cache: "CompileCache") -> tuple[str, str]:
    return "; ".join(cache.degraded.values()) or "none", "set K3DSL_CACHE_DIR to a folder that can be written"


def _folder(root: Path, read_only: bool) -> Check:
    """Place, owner, mode, filesystem, space; and a file written there."""
    todo = "set K3DSL_CACHE_DIR to a folder that can be written"
    place = next((p for p in (root, *root.parents) if p.exists()), root)
    try:
        status, space = place.stat(), os.statvfs(place)
        free = space.f_bavail * space.f_frsize / 2**30
        text = f"{root} ({_filesystem(place)}, owner {_owner(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):o}, "
        text += f"{free:.1f} GiB free)" if place == root else f"{free:.1f} GiB free, not made yet)"
        if read_only:
            return Check("cache folder", "info", f"{text}, read only as asked")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("cache folder", "bad", f"{root}: {error.strerror}", todo)
    return Check("cache folder", "ok" if free > _LEAST_GIB else "warn", text, "" if free > _LEAST_GIB else "free space")


def _lock(cache: "CompileCache") -> list[Check]:
    """Whether a lock can be taken there."""
    from k3dsl.cache.lock import Lock

    if cache.read_only or cache.root is None or not Path(cache.root).is_dir():
        return []
    lock = Lock(str(cache.root))
    try:
        lock.take()
    except OSError as error:
        text = f"none ({error.strerror}): processes may build one kernel twice"
        return [Check("cache lock", "warn", text, "set K3DSL_CACHE_DIR to a local folder")]
    finally:
        lock.release()
    return [Check("cache lock", "ok", "works")]


def _filesystem(place: Path) -> str:
    """The type of the filesystem that `place` is on."""
    best, kind = "", "unknown filesystem"
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, name, *_ = line.split(" ")
        if len(mount) >= len(best) and place.resolve().is_relative_to(mount):
            best, kind = mount, name
    return kind


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def environment() -> list[Check]:
    """Every variable that k3dsl reads, and those that look like one."""
    from k3dsl import env

    found = []
    try:
        settings = env.settings()
    except K3Error as error:
        return [Check("environment", "bad", str(error), "mend or unset the variable")]
    for option in env.TABLE:
        text = os.environ.get(option.name, "")
        value = getattr(settings, option.field)
        found.append(
            Check(option.name, "ok", f"{text} (environment)" if text.strip() else f"{_default(value)} (default)")
        )
    found += [Check(name, "warn", "is not read", "unset it, or mend its name") for name in env.unknown()]
    return found


def _default(value: object) -> str:
    return "unset" if value is None or value == () else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
