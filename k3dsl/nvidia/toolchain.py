"""The only file that drives CuTe DSL's compiler: a key in, a checked cubin out.

A kernel key is a frozen dataclass of scalars with `name`, `device_module` and `params` (see k3dsl/nvidia/value.py); its
CompileKey is what the cache knows the object by. A key whose `payload` is "host" has kernels of another package, whose
host code is kept beside them (k3dsl/nvidia/core/tokenspeed.py, k3dsl/nvidia/host_object.py).
Compiling happens in a child process that sees no GPU and may die: the DSL is not thread-safe, and LLVM aborts. What is
kept of other compiles is the cubin alone: no host code, so that objects depend on no host ISA, linker or C compiler.

Private to the DSL, seen in nvidia-cutlass-dsl 4.8.1 and held by tests/compile/test_toolchain.py:
- `artifacts.CUBIN` of a compiled function, filled under `--keep-cubin`
- one kernel parameter, in order, for each pointer, scalar and GridConstant tensor map
- `remarks{ptx}`: ptxas' account of registers and spills on stderr; of the cubin only a note changes, not the code
- without a driver it compiles with the newest CUDA flavour installed, so a child finds no driver while it is imported
"""

import os
import queue
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from k3dsl.cache.entry import Built
from k3dsl.cache.key import CompileKey
from k3dsl.cache.sources import source_digest
from k3dsl.errors import CompileError, ConfigError, ToolchainError
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
    "mla_merge": "k3dsl.nvidia.core.hopper:MergeKey",
    "mla_epilogue": "k3dsl.nvidia.epilogue:EpilogueKey",
    "mla_tokenspeed": "k3dsl.nvidia.core.tokenspeed:TokenspeedKey",
}
#: Far above the slowest build seen (6 s on two busy cores): a build that takes longer hangs.
BUILD_SECONDS: Final = 600.0
_INSTALL: Final = "pip install 'k3dsl[nvidia]'"
_ERROR: Final = re.compile(r"\b(error|fatal)\b\s*[:\]]|\bptxas (error|fatal)\b", re.IGNORECASE)
_SPILLS: Final = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


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
        toolchain |= {"host_isa": host_object.host_isa(), "options": key.options}
    package = key.device_module.partition(".")[0]
    sources = source_digest(key.device_module, *([] if package == "k3dsl" else [_folder(package)]))
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
    if kernel not in KERNELS:
        raise ConfigError(f"kernel={kernel!r} must be one of {', '.join(KERNELS)}")
    try:
        return _make(KERNELS[kernel], params)
    except TypeError as error:
        raise ConfigError(f"{kernel} has other params than {dict(params)}: {error}") from None


def _make(maker: str, params: Mapping[str, Any]) -> Any:
    module, _, name = maker.partition(":")
    return getattr(import_module(module), name)(**{field: _tuples(value) for field, value in params.items()})


def _folder(package: str) -> Path:
    """The folder of a top package other than k3dsl that brings kernels of its own."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{package!r} must be a package that can be imported")
    return Path(spec.submodule_search_locations[0]).resolve()


def build(key: CompileKey) -> Built:
    """Compiles `key` in a child process of its own; see `Compiler.build`."""
    with Compiler() as compiler:
        return compiler.build(key)


class Compilers:
    """At most `jobs` child processes, for as many threads: a build takes one that is idle, or waits for one."""

    def __init__(self, jobs: int = 1, *, seconds: float = BUILD_SECONDS) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs={jobs!r} must be at least 1")
        self._all = [Compiler(seconds) for _ in range(jobs)]
        self._closed = False
        self._idle: queue.LifoQueue[Compiler] = queue.LifoQueue()  # the last used again first: it has the DSL imported
        for compiler in self._all:
            self._idle.put(compiler)

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all children, whatever they are doing. Builds that wait for one raise ToolchainError."""
        self._closed = True
        for compiler in self._all:
            compiler.close()

    def build(self, key: CompileKey) -> Built:
        """See `Compiler.build`."""
        compiler = self._idle.get()
        try:
            if self._closed:
                raise ToolchainError(f"{key.kernel} ({key.short}) is not built: the compilers were stopped")
            return compiler.build(key)
        finally:
            self._idle.put(compiler)


class Compiler:
    """A child process that compiles one key after the other, for one thread at a time. One that dies is replaced."""

    def __init__(self, seconds: float = BUILD_SECONDS) -> None:
        self._seconds = seconds
        self._busy = threading.Lock()
        self._child: _Child | None = None

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child, whatever it is doing: a build of another thread raises CompileError."""
        while not self._busy.acquire(timeout=0.05):
            child = self._child  # again and again: a build may be about to start one
            if child is not None:
                child.kill()
        try:
            self._drop()
        finally:
            self._busy.release()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

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
            reply, log = self._ask(request)
        except _DiedError as death:
            raise CompileError(f"{title}: {death}{_tail(death.log)}") from None
        if reply.missing:
            raise ToolchainError(f"{title}: {reply.error}")
        if reply.error:
            raise CompileError(f"{title} does not compile: {_COLOUR.sub('', reply.error)}{_tail(log)}")
        try:
            payload = host_object.link(reply.cubin) if is_host(kernel) else reply.cubin
            found = _kernels(kernel, payload)
        except CompileError as error:
            raise CompileError(f"{title} compiles to what is {error}{_tail(log)}") from error
        if is_host(kernel):
            problems = host_object.problems(payload, key.target)
            problems += [p for one in found for p in check(one, "", None, limits)]
        else:
            problems = check(found[0], log, kernel.params, limits, getattr(kernel, "smem", 0))
        if problems:
            raise CompileError(
                "\n  - ".join([f"{title} compiles to an object that is refused:", *problems]) + _tail(log)
            )
        stores, loads = _spills(log)
        resources = {**found[0].resources(), "spill_stores": stores, "spill_loads": loads}
        if is_host(kernel):
            resources["kernels"] = [one.resources() for one in found]
            resources["registers"] = max(one.registers for one in found)
        resources["build_seconds"] = round(time.monotonic() - started, 3)
        filename = host_object.PAYLOAD if is_host(kernel) else PAYLOAD
        return Built(payload=payload, filename=filename, resources=resources, log=log)

    def _ask(self, request: _Request) -> tuple[_Reply, str]:
        with self._busy:
            if self._child is None:
                self._child = _Child()
            try:
                return self._child.ask(request, time.monotonic() + self._seconds)
            except BaseException:  # dead, late, or Ctrl-C in the middle of something: the next build gets another child
                self._drop()
                raise


def _kernels(kernel: Any, payload: bytes) -> tuple[Cubin, ...]:
    return host_object.facts(payload) if is_host(kernel) else (parse(payload),)


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


def _tail(log: str) -> str:
    return f"\n{log[-3000:].strip()}" if log.strip() else ""


class _DiedError(Exception):
    """The child ended or did not answer."""

    def __init__(self, why: str, log: str) -> None:
        super().__init__(why)
        self.log = log


class _Child:
    """The process, its pipes, the file that takes all it prints, and the folder that it lives in."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="k3dsl-compile-")
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as long as the child
        # Nothing of the environment that the DSL reads may reach codegen; nor may the child see a GPU.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUTE_DSL_", "CUTLASS_"))}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "NO_COLOR": "1"}
        # The child's own folder is its current one, so what this process imports from must be said in full.
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "k3dsl.nvidia.toolchain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
        )

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, request: _Request, deadline: float) -> tuple[_Reply, str]:
        """The reply, and what was printed on the way to it. Raises _DiedError if there is none by the deadline."""
        self._log.seek(0)  # the child writes where its copy of this file stands: the place is shared
        self._log.truncate()
        data = msgspec.msgpack.encode(request)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        except BrokenPipeError:
            pass  # it is dead: reading says so
        size = int.from_bytes(self._read(8, deadline), "little")
        reply = msgspec.msgpack.decode(self._read(size, deadline), type=_Reply)
        return reply, self._printed()

    def _read(self, size: int, deadline: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        ready = select.poll()  # not select(): a process may have more than 1024 files open
        ready.register(pipe, select.POLLIN)
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                raise _DiedError("the compiler gave no answer in time and was stopped", self._printed())
            chunk = os.read(pipe.fileno(), size - len(data))
            if not chunk:
                status = self._process.wait()
                how = f"signal {-status}" if status < 0 else f"status {status}"
                raise _DiedError(f"the compiler process died with {how}", self._printed())
            data += chunk
        return data

    def _printed(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return _COLOUR.sub("", os.pread(self._log.fileno(), size, 0).decode(errors="replace"))


# ---- in the child -----------------------------------------------------------------------------------------------


def _serve() -> None:
    """Requests from stdin, replies to what was stdout; whatever anything prints goes to stderr, the parent's file."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(head, "little"))
        try:
            reply = _Reply(cubin=_compile(msgspec.msgpack.decode(data, type=_Request)))
        except ToolchainError as problem:
            reply = _Reply(error=str(problem), missing=True)
        except Exception as problem:
            reply = _Reply(error=f"{type(problem).__name__}: {problem}")
        sys.stdout.flush()
        sys.stderr.flush()
        encoded = msgspec.msgpack.encode(reply)
        replies.write(len(encoded).to_bytes(8, "little") + encoded)
        replies.flush()


def _compile(request: _Request) -> bytes:
    key = _make(request.maker, request.params)
    if compile_key(key, request.target).digest != request.digest:
        raise CompileError("the sources or the toolchain have changed since this process started: start it again")
    cute = _compiler()
    if is_host(key):
        options = f"{key.options} --host-target '{host_object.host_target()}'"
        compile_object = import_module(key.device_module).compile_object
        data: bytes = compile_object(key, request.target, options, host_object.PREFIX)
        return data
    function, arguments = import_module(key.device_module).trace(key, request.target)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as dump:
        options = f"--gpu-arch {request.target} {OPTIONS} --keep-cubin --dump-dir {dump} remarks{{ptx}}"
        cubin = cute.compile(function, *arguments, options=options).artifacts.CUBIN
    return cubin if isinstance(cubin, bytes) else b""  # without a kernel it is no bytes


def _tuples(value: Any) -> Any:
    """Arrays of a message as the tuples that they were."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, Mapping) else value


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
    _serve()
