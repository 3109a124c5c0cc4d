"""The only file that drives FlyDSL's compiler: a key in, a checked code object out.

A kernel key is a frozen dataclass of scalars with `name`, `device_module` and `params` (k3dsl/amd/sparse_mla/key.py);
its CompileKey is what the cache knows the object by. Compiling happens in a child process that sees no GPU and may die:
FlyDSL is not thread-safe, LLVM aborts, and LLVM's diagnostics do not fail a compile, so all that is printed is read.
What is kept is the code object alone, as llvm-objdump reads it: no host code, no FlyDSL cache, no pickles.

Private to FlyDSL, seen in 0.5.0 and held by tests/amd/test_amd_toolchain.py:
- `_keepalive` of a compiled function, and its `ir`: the module with the code object in a `gpu.binary`
- `_create_mlir_context`, in which that module can be read
- ARCH and FLYDSL_GPU_ARCH name the target, FLYDSL_RUNTIME_ENABLE_CACHE=0 turns its own cache off
- ROCM_PATH/llvm/bin/ld.lld is run to link; without device bitcode the functions that need it fail to compile
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from k3dsl.amd.codeobject import CodeObject, parse
from k3dsl.amd.device import Target, check_target
from k3dsl.amd.launch import param_problems
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

#: What the kernels are written for and, where no compiler is installed, what their objects were built with.
PINNED: Final = {"flydsl": "0.5.0"}
PAYLOAD: Final = "kernel.hsaco"
#: CompileKey.kernel -> class of the kernel key. `compile_key` adds those of kernels that live elsewhere.
KERNELS: Final = {
    "mla_pre": "k3dsl.amd.mla_pre.key:MlaPreBuild",
    "sparse_mla": "k3dsl.amd.sparse_mla.key:SparseMlaKey",
}
#: Names of LLVM's linker, the one that is run first; then the one that ziglang brings.
LINKERS: Final = ("ld.lld", "ld.lld-22", "ld.lld-21", "ld.lld-20", "ld.lld-19", "ld.lld-18")
_INSTALL: Final = "pip install 'k3dsl[amd]'"
_ERROR: Final = re.compile(r"^\s*(?:\S+:\s+)?(?:error|fatal error|LLVM ERROR)\s*:", re.IGNORECASE | re.MULTILINE)
#: What of the environment would reach FlyDSL or LLVM.
_STEERS: Final = ("FLYDSL_", "ROCM_", "HIP_", "HSA_", "AITER_", "AUTOTUNE_")
_STEER: Final = ("ARCH", "COMPILE_ONLY")


class _Request(msgspec.Struct, frozen=True, array_like=True):
    maker: str  # module:class of the kernel key
    params: dict[str, Any]
    target: str
    digest: str  # of the CompileKey


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    payload: bytes = b""
    linker: str = ""
    error: str = ""
    missing: bool = False  # the compiler or the linker itself is not there


def installed() -> str | None:
    """The version of the installed FlyDSL, None without one. Imports nothing."""
    try:
        return metadata.version("flydsl")
    except metadata.PackageNotFoundError:
        return None


def linker() -> list[str] | None:
    """The command of the LLD that would link, None without one."""
    for name in LINKERS:
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "ld.lld"] if find_spec("ziglang") else None


def facts(target: str) -> dict[str, str]:
    """What reaches codegen beside the kernel, for CompileKey.toolchain.

    The same with and without a GPU, and with and without FlyDSL as long as it is the pinned one. The linker is no part
    of it: it copies code (identical from LLD 19 to 22) and is named in the manifest. Raises ConfigError for a target
    that there is not.
    """
    check_target(target)
    return {"flydsl": _version()}


@cache
def _version() -> str:
    return installed() or PINNED["flydsl"]


def compile_key(key: Any, target: str) -> CompileKey:
    """The CompileKey of a kernel key on a target. Raises ConfigError for a target that there is not."""
    toolchain = facts(target)
    package = key.device_module.partition(".")[0]
    sources = source_digest(key.device_module, *([] if package == "k3dsl" else [package_folder(package)]))
    KERNELS.setdefault(key.name, f"{type(key).__module__}:{type(key).__qualname__}")
    return CompileKey(kernel=key.name, params=asdict(key), target=target, toolchain=toolchain, sources=sources)


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

    module = "k3dsl.amd.toolchain"

    def environment(self) -> dict[str, str]:
        """Nothing of the environment that FlyDSL reads may reach codegen; nor may the child see a GPU."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(_STEERS) and k not in _STEER}
        return plain | {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "NO_COLOR": "1"}

    def build(self, key: CompileKey) -> Built:
        """The object of `key`, checked against what was asked for and the target's limits.

        Raises CompileError, naming the key, where it does not compile, where the compiler dies, hangs or reports an
        error, and where the object spills or is not the one asked for; ToolchainError without the compiler that the
        key names or without a linker; ConfigError for a kernel or target that there is not.
        """
        limits = check_target(key.target)
        kernel = kernel_key(key.kernel, key.params)
        title = f"{key.kernel} {kernel} for {key.target} ({key.short})"
        if installed() is None:
            raise ToolchainError(f"{title} must be built, and no compiler is installed: {_INSTALL}, or import a bundle")
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
            raise ToolchainError(f"{title}: {reply.error}{tail(log)}")
        if reply.error:
            raise CompileError(f"{title} does not compile: {COLOUR.sub('', reply.error)}{tail(log)}")
        try:
            found = parse(reply.payload)
        except CompileError as error:
            raise CompileError(f"{title} compiles to what is {error}{tail(log)}") from error
        problems = check(found, log, kernel.params, limits)
        if problems:
            raise CompileError(
                "\n  - ".join([f"{title} compiles to an object that is refused:", *problems]) + tail(log)
            )
        resources = {**found.resources(), "linker": reply.linker}
        resources["build_seconds"] = round(time.monotonic() - started, 3)
        return Built(payload=reply.payload, filename=PAYLOAD, resources=resources, log=log)


def check(found: CodeObject, log: str, params: Any, limits: Target) -> list[str]:
    """Why an object is refused: not what was asked for, or nothing that the target runs well. [] if it is not."""
    bad = []
    if found.arch != limits.name:
        bad.append(f"it is for {found.arch}, not {limits.name}")
    bad += param_problems(found, params)
    error = _ERROR.search(log)
    if error:
        line = log[error.start() :].strip().splitlines()[0]
        bad.append(f"the compiler reported: {line.strip()}")
    if found.private or found.dynamic_stack or found.vgpr_spills or found.sgpr_spills:
        bad.append(
            f"a lane takes {found.private} bytes of scratch ({found.vgpr_spills} vector and {found.sgpr_spills} scalar "
            f"registers spilled{', a dynamic stack' if found.dynamic_stack else ''}) with {found.vgprs} registers"
        )
    if found.vgprs > limits.registers:
        bad.append(f"a lane takes {found.vgprs} registers of {limits.registers}")
    if found.lds > limits.lds:
        bad.append(f"a workgroup takes {found.lds} bytes of LDS of {limits.lds}")
    x, y, z = found.block or (found.max_threads, 1, 1)
    if x * y * z > 1024:
        bad.append(f"a workgroup has {x * y * z} threads of 1024")
    elif not found.workgroups() and found.lds <= limits.lds:
        bad.append(f"no compute unit holds a workgroup of {x * y * z} threads with {found.vgprs} registers each")
    return bad


# ---- in the child -----------------------------------------------------------------------------------------------


def _answer(data: bytes) -> bytes:
    try:
        reply = _compile(msgspec.msgpack.decode(data, type=_Request))
    except ToolchainError as problem:
        reply = _Reply(error=str(problem), missing=True)
    except Exception as problem:
        reply = _Reply(error=f"{type(problem).__name__}: {problem}")
    return msgspec.msgpack.encode(reply)


def _compile(request: _Request) -> _Reply:
    key = make(request.maker, request.params)
    if compile_key(key, request.target).digest != request.digest:
        raise CompileError("the sources or the toolchain have changed since this process started: start it again")
    name = _toolkit()
    os.environ |= {"ARCH": request.target, "FLYDSL_GPU_ARCH": request.target, "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
    compiler = _compiler()
    function, arguments, *more = import_module(key.device_module).trace(key, request.target)
    compiled = compiler.compile[dict(more[0]) if more else {}](function, *arguments)
    return _Reply(payload=_payload(compiled._keepalive.ir), linker=name)


def _payload(text: str) -> bytes:
    """The one code object in the text of a compiled module."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    with _create_mlir_context():
        module = ir.Module.parse(text)
        binaries = [o.operation for o in module.body.operations if o.operation.name == "gpu.binary"]
        objects = [o for binary in binaries for o in ir.ArrayAttr(binary.attributes["objects"])]
        if len(objects) != 1:
            raise CompileError(f"the module holds {len(objects)} code objects, it must hold one")
        return bytes(gpu.ObjectAttr(objects[0]).object)


@cache
def _toolkit() -> str:
    """Makes a folder with what FlyDSL asks of ROCm, the linker alone, in the child's own. The linker's version."""
    command = linker()
    if command is None:
        raise ToolchainError(f"no ld.lld, which links code objects: install LLVM's lld, or {_INSTALL}")
    target = Path(os.getcwd(), "rocm", "llvm", "bin", "ld.lld")
    target.parent.mkdir(parents=True)
    target.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command) + ' "$@"\n')
    target.chmod(0o755)
    os.environ["ROCM_PATH"] = str(target.parents[2])
    import subprocess

    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if said.returncode:
        raise ToolchainError(f"{' '.join(command)} does not start: {said.stderr.strip()[:500]}")
    found = re.search(r"LLD [\d.]+", said.stdout)
    return found[0] if found else said.stdout.strip()[:60]


@cache
def _compiler() -> Any:
    """FlyDSL. Raises ToolchainError where it does not import."""
    try:
        return import_module("flydsl.compiler")
    except Exception as problem:
        raise ToolchainError(f"the compiler does not start: {type(problem).__name__}: {problem}") from problem


if __name__ == "__main__":
    serve(_answer)
