"""Compilers as child processes that may die: what the toolchains of all vendors share. Knows no DSL and no cache.

A child is `python -m MODULE`; it answers requests, bytes for bytes, over its standard input and output, and lives in a
folder of its own. Whatever it or its libraries print goes to a file, which the parent reads.
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
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from k3dsl.cache.entry import Built
from k3dsl.cache.key import CompileKey
from k3dsl.errors import ConfigError, ToolchainError

#: Far above the slowest build seen (6 s on two busy cores): a build that takes longer hangs.
BUILD_SECONDS: Final = 600.0
#: What the name of a child's folder begins with.
_FOLDER: Final = "k3dsl-compile-"
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


class DiedError(Exception):
    """The child ended or did not answer. `log`: what it had printed."""

    def __init__(self, why: str, log: str) -> None:
        super().__init__(why)
        self.log = log


def tail(log: str) -> str:
    """The end of what a compiler printed, for the end of a message."""
    return f"\n{log[-3000:].strip()}" if log.strip() else ""


class ChildCompiler:
    """A child that answers one request after the other, for one thread at a time. One that dies is replaced.

    A vendor's compiler derives from this: `module` is what the child runs, `environment()` what it sees.
    """

    module: str

    def __init__(self, seconds: float = BUILD_SECONDS) -> None:
        self._seconds = seconds
        self._busy = threading.Lock()
        self._child: Child | None = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """The environment of a child."""
        raise TypeError(f"{type(self).__name__} has no environment for its child")

    def build(self, key: CompileKey) -> Built:
        """The object of `key`."""
        raise TypeError(f"{type(self).__name__} builds nothing")

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

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """The child's answer and what was printed on the way to it. Raises DiedError without an answer."""
        with self._busy:
            if self._child is None:
                self._child = Child(self.module, self.environment())
            try:
                return self._child.ask(request, time.monotonic() + self._seconds)
            except BaseException:  # dead, late, or Ctrl-C in the middle of something: the next build gets another child
                self._drop()
                raise


class Pool:
    """At most `jobs` compilers, for as many threads: a build takes one that is idle, or waits for one."""

    def __init__(
        self, make: Callable[[float], ChildCompiler], jobs: int = 1, *, seconds: float = BUILD_SECONDS
    ) -> None:
        if jobs < 1:
            raise ConfigError(f"jobs={jobs!r} must be at least 1")
        self._all = [make(seconds) for _ in range(jobs)]
        self._closed = False
        self._idle: queue.LifoQueue[ChildCompiler] = queue.LifoQueue()  # the last used first: it has the DSL imported
        for compiler in self._all:
            self._idle.put(compiler)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all children, whatever they are doing. Builds that wait for one raise ToolchainError."""
        self._closed = True
        for compiler in self._all:
            compiler.close()

    def build(self, key: CompileKey) -> Built:
        """The object of `key`; see the `build` of the compilers."""
        compiler = self._idle.get()
        try:
            if self._closed:
                raise ToolchainError(f"{key.kernel} ({key.short}) is not built: the compilers were stopped")
            return compiler.build(key)
        finally:
            self._idle.put(compiler)


class Child:
    """The process, its pipes, the file that takes all it prints, and the folder that it lives in."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix=_FOLDER)
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as long as the child
        # The child's own folder is its current one, so what this process imports from must be said in full.
        paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            env={**environment, "PYTHONPATH": paths},
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

    def ask(self, request: bytes, deadline: float) -> tuple[bytes, str]:
        """The answer, and what was printed on the way to it. Raises DiedError if there is none by the deadline."""
        self._log.seek(0)  # the child writes where its copy of this file stands: the place is shared
        self._log.truncate()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(len(request).to_bytes(8, "little") + request)
        except BrokenPipeError:
            pass  # it is dead: reading says so
        size = int.from_bytes(self._read(8, deadline), "little")
        return self._read(size, deadline), self._printed()

    def _read(self, size: int, deadline: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        ready = select.poll()  # not select(): a process may have more than 1024 files open
        ready.register(pipe, select.POLLIN)
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                raise DiedError("the compiler gave no answer in time and was stopped", self._printed())
            chunk = os.read(pipe.fileno(), size - len(data))
            if not chunk:
                status = self._process.wait()
                how = f"signal {-status}" if status < 0 else f"status {status}"
                raise DiedError(f"the compiler process died with {how}", self._printed())
            data += chunk
        return data

    def _printed(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return COLOUR.sub("", os.pread(self._log.fileno(), size, 0).decode(errors="replace"))


def serve(answer: Callable[[bytes], bytes]) -> None:
    """In the child: requests from stdin, answers to what was stdout; all that anything prints goes to stderr.

    A parent that was killed removes nothing: then the child removes the folder that it lives in.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder = os.getcwd()
    try:
        while head := sys.stdin.buffer.read(8):
            reply = answer(sys.stdin.buffer.read(int.from_bytes(head, "little")))
            sys.stdout.flush()
            sys.stderr.flush()
            replies.write(len(reply).to_bytes(8, "little") + reply)
            replies.flush()
    finally:
        if os.path.basename(folder).startswith(_FOLDER):
            shutil.rmtree(folder, ignore_errors=True)


def tuples(value: Any) -> Any:
    """Arrays of a message as the tuples that they were."""
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    return {k: tuples(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def make(maker: str, params: Mapping[str, Any]) -> Any:
    """The kernel key that "MODULE:CLASS" makes of these params."""
    module, _, name = maker.partition(":")
    return getattr(import_module(module), name)(**{field: tuples(value) for field, value in params.items()})


def kernel_key_of(makers: Mapping[str, str], kernel: str, params: Mapping[str, Any]) -> Any:
    """The kernel key of a kernel's name and params. Raises ConfigError where there is none such."""
    if kernel not in makers:
        raise ConfigError(f"kernel={kernel!r} must be one of {', '.join(makers)}")
    try:
        return make(makers[kernel], params)
    except TypeError as error:
        raise ConfigError(f"{kernel} has other params than {dict(params)}: {error}") from None


def package_folder(package: str) -> Path:
    """The folder of a top package other than k3dsl that brings kernels of its own."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{package!r} must be a package that can be imported")
    return Path(spec.submodule_search_locations[0]).resolve()
