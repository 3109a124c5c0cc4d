"""The only file that drives CuTe DSL's compiler: a key in, a checked cubin out.

A kernel key is a frozen dataclass of scalars with `name`, `device_module` and `params` (see k3dsl/nvidia/value.py); its
CompileKey is what the cache knows the object by. A key whose `payload` is "host" has another package's kernels, and its
object their launcher too (k3dsl/nvidia/host_object.py).
Compiling happens in a child process that sees no GPU and may die: the DSL is not thread-safe, and LLVM aborts. What is
kept of other compiles is the cubin alone: no host code, so that objects depend on no host ISA, linker or C compiler.

Private to the DSL, seen in nvidia-cutlass-dsl 4.8.1 and held by tests/compile/test_toolchain.py:
- `artifacts.CUBIN` of a compiled function, filled under `--keep-cubin`
- one kernel parameter, in order, for each pointer, scalar and GridConstant tensor map
- `remarks{ptx}`: ptxas' account of registers and spills on stderr; of the cubin only a note changes, not the code
- without a driver it compiles with the newest CUDA flavour installed, so a child finds no driver while it is imported
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import import_module, metadata
from typing import Any, Final

import msgspec

from k3dsl.cache.entry import Built
from k3dsl.cache.key import CompileKey
from k3dsl.cache.sources import source_digest
from k3dsl.compiling import (
    BUILD_SECONDS,
    COLOUR,
    ChildCompiler,
    DiedError,
    Pool,
    kernel_key_of,
    make,
    package_folder,
    serve,
    tail,
)
from k3dsl.errors import CompileError, ToolchainError
from k3dsl.nvidia import host_object
from k3dsl.nvidia.cubin import Cubin, parse
from k3dsl.nvidia.device import Target, check_target
from k3dsl.nvidia.driver import param_problems

#: What the kernels are written for and, where no compiler is installed, what their objects were built with.
PINNED: Final = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
}
#: CUDA major that objects are built with, whatever driver there is. 12 would need another key.
CUDA: Final = "13"
OPTIONS: Final = "--opt-level 3"
PAYLOAD: Final = "kernel.cubin"
#: CompileKey.kernel -> class of the kernel key. `compile_key` adds those of kernels that live elsewhere.
KERNELS: Final = {
    "mla_query": "k3dsl.nvidia.query:QueryKey",
    "mla_value": "k3dsl.nvidia.value:ValueKey",
    "mla_hopper": "k3dsl.nvidia.core.hopper:HopperKey",
    "mla_hopper_dcp": "k3dsl.nvidia.core.hopper_dcp:HopperDcpKey",
    "mla_merge": "k3dsl.nvidia.core.hopper:MergeKey",
    "mla_query_dcp": "k3dsl.nvidia.dcp:DcpQueryKey",
    "mla_value_dcp": "k3dsl.nvidia.dcp:DcpValueKey",
    "mla_epilogue": "k3dsl.nvidia.epilogue:EpilogueKey",
    "mla_tokenspeed": "k3dsl.nvidia.core.tokenspeed:TokenspeedKey",
}
_INSTALL: Final = "pip install 'k3dsl[nvidia]'"
_ERROR: Final = re.compile(r"\b(error|fatal)\b\s*[:\]]|\bptxas (error|fatal)\b", re.IGNORECASE)
#: ptxas waits after every wgmma of a kernel of which it says so: a build that is right and half as fast.
_SERIALIZED: Final = re.compile(r"\(C75\d\d\) Potential Performance Loss: wgmma[^\n']*")
_SPILLS: Final = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class _Request(msgspec.Struct, frozen=True, array_like=True):
    maker: str  # module:class of the kernel key
    params: dict[str, Any]
    target: str
    digest: str  # of the CompileKey


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    cubin: bytes = b""
    error: str = ""
    missing: bool = False  # the compiler itself is not there


def installed() -> str | None:
    """The version of the installed DSL, None without one. Imports nothing."""
    return _versions()["nvidia-cutlass-dsl"]


def _versions() -> dict[str, str | None]:
    return {name: package_version(name) for name in PINNED}


@cache
def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def facts(target: str) -> dict[str, str]:
    """What reaches codegen beside the kernel, for CompileKey.toolchain: versions, CUDA flavour and options.

    The same with and without a GPU, and with and without the compiler as long as it is the pinned one: a node that only
    loads objects makes the keys of the machine that built them. Raises ConfigError for a target that there is not.
    """
    check_target(target)
    versions = {name: version or PINNED[name] for name, version in _versions().items()}
    return {**versions, "cuda": CUDA, "options": OPTIONS}


def compile_key(key: Any, target: str) -> CompileKey:
    """The CompileKey of a kernel key on a target. Raises ConfigError for a target that there is not."""
    toolchain = facts(target)
    if is_host(key):
        toolchain |= key.packages
        toolchain |= {"host_isa": key.host, "options": key.options}
    package = key.device_module.partition(".")[0]
    sources = source_digest(key.device_module, *([] if package == "k3dsl" else [package_folder(package)]))
    KERNELS.setdefault(key.name, f"{type(key).__module__}:{type(key).__qualname__}")
    return CompileKey(kernel=key.name, params=asdict(key), target=target, toolchain=toolchain, sources=sources)


def is_host(key: Any) -> bool:
    """Whether the object of a kernel key has host code beside its cubin."""
    return getattr(key, "payload", "") == "host"


def lacks(key: Any) -> str:
    """Which package beside the compiler must be installed to build a kernel key, and how; "" if none."""
    wrong = {name: package_version(name) for name, pinned in getattr(key, "packages", {}).items()
             if package_version(name) != pinned}  # fmt: skip
    if not wrong:
        return ""
    there = ", ".join(f"{name} is {version or 'not installed'}" for name, version in wrong.items())
    # Its other dependencies are for what it does at run time, and some Pythons have no release of them.
    return f"{there}: pip install --no-deps {' '.join(f'{name}=={key.packages[name]}' for name in wrong)}"


def kernel_key(kernel: str, params: Mapping[str, Any]) -> Any:
    """The kernel key that a CompileKey was made of. Raises ConfigError where there is none such."""
    return kernel_key_of(KERNELS, kernel, params)


def build(key: CompileKey) -> Built:
    """Compiles `key` in a child process of its own; see `Compiler.build`."""
    with Compiler() as compiler:
        return compiler.build(key)


class Compilers(Pool):
    """At most `jobs` child processes, for as many threads."""

    def __init__(self, jobs: int = 1, *, seconds: float = BUILD_SECONDS) -> None:
        super().__init__(Compiler, jobs, seconds=seconds)


class Compiler(ChildCompiler):
    """A child process that compiles one key after the other, for one thread at a time. One that dies is replaced."""

    module = "k3dsl.nvidia.toolchain"

    def environment(self) -> dict[str, str]:
        """Nothing of the environment that the DSL reads may reach codegen; nor may the child see a GPU."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("CUTE_DSL_", "CUTLASS_"))}
        return plain | {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "NO_COLOR": "1"}

    def build(self, key: CompileKey) -> Built:
        """The object of `key`, checked against what was asked for and the target's limits.

        Raises CompileError, naming the key, where it does not compile, where the compiler dies, hangs or reports an
        error, and where the object spills or is not the one asked for; ToolchainError without the compiler that the
        key names; ConfigError for a kernel or target that there is not.
        """
        limits = check_target(key.target)
        kernel = kernel_key(key.kernel, key.params)
        title = f"{key.kernel} {kernel} for {key.target} ({key.short})"
        if installed() is None:
            raise ToolchainError(f"{title} must be built, and no compiler is installed: {_INSTALL}, or import a bundle")
        lacking = lacks(kernel)
        if lacking:
            raise ToolchainError(f"{title} cannot be built: {lacking}")
        differ = compile_key(kernel, key.target).diff(key)
        if differ:
            raise ToolchainError("\n  - ".join([f"{title} is not a key of this installation:", *map(str, differ)]))
        started = time.monotonic()
        request = _Request(KERNELS[key.kernel], asdict(kernel), key.target, key.digest)
        try:
            answer, log = self.ask(msgspec.msgpack.encode(request))
        except DiedError as death:
            raise CompileError(f"{title}: {death}{tail(death.log)}") from None
        reply = msgspec.msgpack.decode(answer, type=_Reply)
        if reply.missing:
            raise ToolchainError(f"{title}: {reply.error}")
        if reply.error:
            raise CompileError(f"{title} does not compile: {COLOUR.sub('', reply.error)}{tail(log)}")
        host = is_host(kernel)
        try:
            found = host_object.facts(reply.cubin) if host else (parse(reply.cubin),)
        except CompileError as error:
            raise CompileError(f"{title} compiles to what is {error}{tail(log)}") from error
        params, smem = None if host else kernel.params, getattr(kernel, "smem", 0)
        problems = [problem for one in found for problem in check(one, log, params, limits, smem)]
        problems += host_object.problems(reply.cubin, key.target, kernel.host) if host else []
        if problems:
            raise CompileError(
                "\n  - ".join([f"{title} compiles to an object that is refused:", *problems]) + tail(log)
            )
        stores, loads = _spills(log)
        resources = {**found[0].resources(), "spill_stores": stores, "spill_loads": loads}
        if host:
            resources["kernels"] = [one.resources() for one in found]
            resources["registers"] = max(one.registers for one in found)
        resources["build_seconds"] = round(time.monotonic() - started, 3)
        filename = host_object.PAYLOAD if host else PAYLOAD
        return Built(payload=reply.cubin, filename=filename, resources=resources, log=log)


def check(found: Cubin, log: str, params: Any, limits: Target, smem: int = 0) -> list[str]:
    """Why an object is refused: not what was asked for, or nothing that the target runs well. [] if it is not.

    smem: dynamic shared memory that every launch takes at least, bytes. params: None for a kernel of another package,
    whose parameters are not ours to know, nor its spills ours to refuse: they are in the manifest.
    """
    bad = []
    if found.arch != limits.name:
        bad.append(f"it is for {found.arch}, not {limits.name}")
    if found.tool.partition(".")[0] != CUDA:
        bad.append(f"it was built by CUDA {found.tool}, not {CUDA}: {_INSTALL} brings the right libraries")
    if params is not None:
        bad += param_problems(found, params)
    error = next((line for line in log.splitlines() if _ERROR.search(line)), None)
    if error:
        bad.append(f"the compiler reported: {error.strip()}")
    serialized = _SERIALIZED.search(log)
    if params is not None and serialized:
        bad.append(f"its wgmmas run one at a time: {serialized[0]}")
    stores, loads = _spills(log)
    if params is not None and (found.frame or found.stack or stores or loads):
        bad.append(
            f"a thread takes {max(found.frame, found.stack)} bytes of local memory ({stores} bytes of spill stores, "
            f"{loads} of spill loads) with {found.registers} registers"
        )
    if found.registers > limits.thread_registers:
        bad.append(f"a thread takes {found.registers} registers of {limits.thread_registers}")
    if found.block is not None:
        x, y, z = found.block
        # registers are given out to warps, 8 a thread at a time
        block = -(-x * y * z // 32) * 32 * (-(-found.registers // 8) * 8)
        if x * y * z > limits.block_threads:
            bad.append(f"a CTA has {x * y * z} threads of {limits.block_threads}")
        if block > limits.sm_registers:
            bad.append(f"a CTA of {x * y * z} threads takes {block} registers of {limits.sm_registers}")
    if found.static_smem + smem > limits.smem:
        bad.append(f"a CTA takes {found.static_smem} + {smem} bytes of shared memory of {limits.smem}")
    return bad


def _spills(log: str) -> tuple[int, int]:
    found = _SPILLS.findall(log)
    return sum(int(s) for s, _ in found), sum(int(load) for _, load in found)


# ---- in the child -----------------------------------------------------------------------------------------------


def _answer(data: bytes) -> bytes:
    try:
        reply = _Reply(cubin=_compile(msgspec.msgpack.decode(data, type=_Request)))
    except ToolchainError as problem:
        reply = _Reply(error=str(problem), missing=True)
    except Exception as problem:
        reply = _Reply(error=f"{type(problem).__name__}: {problem}")
    return msgspec.msgpack.encode(reply)


def _compile(request: _Request) -> bytes:
    key = make(request.maker, request.params)
    if compile_key(key, request.target).digest != request.digest:
        raise CompileError("the sources or the toolchain have changed since this process started: start it again")
    cute = _compiler()
    if is_host(key):
        options = f"{key.options} --host-target '{host_object.TARGETS[key.host]}'"
        compile_object = import_module(key.device_module).compile_object
        data: bytes = compile_object(key, request.target, options, host_object.PREFIX)
        return data
    function, arguments = import_module(key.device_module).trace(key, request.target)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as dump:
        options = f"--gpu-arch {request.target} {OPTIONS} --keep-cubin --dump-dir {dump} remarks{{ptx}}"
        cubin = cute.compile(function, *arguments, options=options).artifacts.CUBIN
    return cubin if isinstance(cubin, bytes) else b""  # without a kernel it is no bytes


@cache
def _compiler() -> Any:
    """The DSL. Raises ToolchainError where it does not import."""
    try:
        with _no_driver():
            return import_module("cutlass.cute")
    except Exception as problem:  # a part is missing, or does not go with another
        raise ToolchainError(f"the compiler does not start: {type(problem).__name__}: {problem}") from problem


@contextmanager
def _no_driver() -> Iterator[None]:
    """The DSL asks the driver, through ctypes, which CUDA flavour to load: it finds none, and loads the newest."""
    import ctypes

    real = ctypes.CDLL

    class Blind(real):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
            if name is not None and os.path.basename(str(name)).startswith("libcuda.so"):
                raise OSError("hidden while the compiler is imported")
            super().__init__(name, *arguments, **options)

    ctypes.CDLL = Blind  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL = real  # type: ignore[misc]


if __name__ == "__main__":
    serve(_answer)
