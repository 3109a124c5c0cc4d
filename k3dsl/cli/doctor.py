"""`k3dsl doctor`: one line for everything that a layer needs, what is wrong with it and what to do."""

import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from k3dsl import __version__
from k3dsl.cache.doctor import Finding, findings
from k3dsl.cli import planargs as args
from k3dsl.cli.console import FINDING, Json, emit, out
from k3dsl.errors import K3Error

if TYPE_CHECKING:
    from k3dsl.nvidia.device import Device

_MARKS: Final = {
    "ok": "[green]ok[/green]  ",
    "info": "[blue]info[/blue]",
    "warn": "[yellow]warn[/yellow]",
    "bad": "[red]bad[/red] ",
}
_UNSERVED: Final = "no kernels for it: target reference runs on it"


def doctor(plan: args.PlanFile = None, json: Json = False) -> None:
    """Looks at GPU, driver, toolchains, cache folder, layers and environment; says what is wrong and what to do.

    Exit 1 if something is wrong. A machine without a GPU or a compiler is not wrong: it cannot do some things. With
    --plan, kernels of its deployments that are not there are wrong.

    Example: k3dsl doctor --plan plan.toml
    """
    checks = [*python(), *gpu(), *toolchain(), *caches(), *kernels(plan), *environment()]
    ok = all(check.status != "bad" for check in checks)
    if json:
        emit({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        console = out()
        width = max(len(check.name) for check in checks)
        for check in checks:
            console.print(f"{_MARKS[check.status]} {check.name:<{width}}  ", end="", markup=True)
            console.print(check.found, markup=False)
            if check.todo:
                console.print(f"     {'':<{width}}  -> {check.todo}", markup=False)
    if not ok:
        raise typer.Exit(FINDING)


def python() -> list[Finding]:
    """Interpreter and packages."""
    found = [Finding("k3dsl", "ok", f"{__version__}, Python {platform.python_version()} on {platform.machine()}")]
    version = _version("torch")
    if version is None:
        found.append(Finding("torch", "bad", "not installed", "pip install torch"))
    else:
        found.append(Finding("torch", "ok", version))
    return found


def gpu() -> list[Finding]:
    """Driver and devices."""
    from k3dsl.amd.detect import architectures
    from k3dsl.nvidia.device import device
    from k3dsl.nvidia.driver import driver

    if amd := architectures():
        return [_amd_gpu(index, arch) for index, arch in enumerate(amd)]
    try:
        library = driver()
        version, count = library.version(), library.device_count()
    except K3Error as error:
        return [
            Finding(
                "GPU", "info", f"none: {str(error).splitlines()[0]}", "target reference runs here; warmup needs no GPU"
            )
        ]
    served = f"{version // 1000}.{version % 1000 // 10}"
    checks = [Finding("CUDA driver", "ok", f"serves CUDA {served}")]
    for index in range(count):
        facts = device(index)
        text = f"{facts.name}, sm_{facts.capability[0]}{facts.capability[1]}, {facts.sm_count} SMs"
        if facts.target is None:
            checks.append(Finding(f"GPU {index}", "warn", text, _UNSERVED))
        else:
            checks.append(Finding(f"GPU {index}", "ok", f"{text}, target {facts.target}", _unusual(facts)))
    if not count:
        checks.append(Finding("GPU", "info", "none"))
    return [*checks, *_torch_sees(count)]


def _amd_gpu(index: int, arch: str) -> Finding:
    from k3dsl.amd.device import TARGETS

    if arch in TARGETS:
        return Finding(f"GPU {index}", "ok", f"AMD, target {arch}")
    return Finding(f"GPU {index}", "warn", f"AMD {arch}", _UNSERVED)


def _unusual(facts: "Device") -> str:
    """What to do about a Blackwell with another number of SMs than is sold: objects of its core depend on it."""
    from k3dsl.nvidia.core.tokenspeed import SM_COUNTS, TARGETS
    from k3dsl.nvidia.host_object import host_isa

    sold = SM_COUNTS.get(host_isa(), ())
    if facts.target not in TARGETS or facts.sm_count in sold:
        return ""
    return (
        f"a warm-up lists cores for {' or '.join(map(str, sold))} SMs: those for {facts.sm_count} are built when a "
        "layer is prepared"
    )


def _torch_sees(count: int) -> list[Finding]:
    """torch must see what the driver sees: tensors come from it."""
    if not count or _version("torch") is None:
        return []
    import torch

    if torch.cuda.is_available():
        return [Finding("torch CUDA", "ok", f"{torch.version.cuda}, {torch.cuda.device_count()} devices")]
    return [Finding("torch CUDA", "bad", "torch sees no GPU, the driver does", "install a CUDA build of torch")]


def toolchain() -> list[Finding]:
    """Compilers, what the tokenspeed core of sm_100a and sm_103a is built with, and the linker of gfx950."""
    from k3dsl.nvidia.toolchain import CUDA, PINNED, installed

    version, wanted = installed(), PINNED["nvidia-cutlass-dsl"]
    if version is None:
        text = f"CuTe DSL is not installed: objects built with {wanted} can be loaded, none can be built"
        check = Finding("NVIDIA compiler", "info", text, "pip install 'k3dsl[nvidia]' to build here")
    elif version != wanted:
        text = f"CuTe DSL {version}, kernels were written for {wanted}"
        check = Finding("NVIDIA compiler", "warn", text, f"pip install 'nvidia-cutlass-dsl[cu{CUDA}]=={wanted}'")
    else:
        check = Finding("NVIDIA compiler", "ok", f"CuTe DSL {version}, CUDA {CUDA}")
    return [check, blackwell(), *flydsl()]


def blackwell() -> Finding:
    """The package that the tokenspeed core is built from. All that is built needs neither linker nor C compiler."""
    from k3dsl.nvidia.core.tokenspeed import TokenspeedKey
    from k3dsl.nvidia.toolchain import lacks

    [(name, version)] = TokenspeedKey.packages.items()
    what, _, todo = lacks(TokenspeedKey(12)).partition(": ")
    if what:
        text = f"{what}: cores of sm_100a and sm_103a can be loaded, none can be built"
        return Finding("Blackwell core", "info", text, f"{todo} to build them here")
    return Finding("Blackwell core", "ok", f"{name} {version}")


def flydsl() -> list[Finding]:
    """The compiler of gfx950, and the LLD that links what it compiles."""
    from k3dsl.amd.toolchain import PINNED, installed, linker

    version, wanted, command = installed(), PINNED["flydsl"], linker()
    if version is None:
        text = f"FlyDSL is not installed: objects built with {wanted} can be loaded, none can be built"
        return [Finding("AMD compiler", "info", text, "pip install 'k3dsl[amd]' to build here")]
    if version != wanted:
        text = f"FlyDSL {version}, kernels were written for {wanted}"
        check = Finding("AMD compiler", "warn", text, f"pip install 'flydsl=={wanted}'")
    else:
        check = Finding("AMD compiler", "ok", f"FlyDSL {version}")
    if command is None:
        todo = "install LLVM's lld, or pip install ziglang"
        return [check, Finding("AMD linker", "bad", "no ld.lld: nothing can be built for gfx950", todo)]
    return [check, Finding("AMD linker", "ok", f"{' '.join(command)} links objects of gfx950")]


def caches() -> list[Finding]:
    """The cache folder and its layers, each thing tried."""
    return findings()


def kernels(plan: Path | None) -> list[Finding]:
    """Whether every kernel is there: of a plan file's deployments, or of the usual ones for the GPUs that are here."""
    from k3dsl.amd.keys import TARGET as AMD
    from k3dsl.cache import CompileCache
    from k3dsl.deployment import Deployment
    from k3dsl.dims import MlaDims

    try:
        cache = CompileCache()
        if plan is not None:
            here = _targets()
            plans = {
                one.target: {str(plan): one}
                for one in args.PlanArguments(plan=plan).deployments()
                if not here or one.target in here
            }
        else:
            ranks = {t: (8,) if t == AMD else (8, 16) for t in _targets()}  # mla_pre is for 12 heads
            plans = {t: {f"tp {tp}": Deployment(MlaDims.kimi_k3(tp), t) for tp in tps} for t, tps in ranks.items()}
        checks = []
        for target, named in plans.items():
            counts = {}
            for name, one in named.items():
                keys = one.keys()
                counts[name] = (sum(key in cache for key in keys), len(keys))
            ready = [name for name, (there, all_) in counts.items() if there == all_]
            text = ", ".join(f"{name}: {there} of {all_} keys" for name, (there, all_) in counts.items())
            if ready:
                checks.append(Finding(f"kernels {target}", "ok", f"ready for {' and '.join(ready)} ({text})"))
            else:
                todo = "k3dsl warmup here, or elsewhere and k3dsl cache import; k3dsl cache why says what is missing"
                status = "info" if plan is None else "bad"
                checks.append(Finding(f"kernels {target}", status, f"not ready: {text}", todo))
        return checks
    except K3Error as error:
        return [Finding("kernels", "warn" if plan is None else "bad", str(error).replace("\n", ""))]


def _targets() -> list[str]:
    """The targets of the GPUs that are here."""
    from k3dsl.amd.detect import architectures, present
    from k3dsl.nvidia.device import device
    from k3dsl.nvidia.driver import driver

    if amd := architectures():
        found = [present(index) for index in range(len(amd))]
    else:
        try:
            found = [device(index).target for index in range(driver().device_count())]
        except K3Error:
            return []
    return list(dict.fromkeys(target for target in found if target is not None))


def environment() -> list[Finding]:
    """Every variable that k3dsl reads, its value and where that comes from."""
    from k3dsl.env import describe

    return [Finding(name, "ok", f"{value} ({origin})") for name, value, origin in describe()]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
