"""Processes of a group, one a rank: started, called, timed out and ended from one place. For the bench and the tests.

    with Ranks(2) as ranks:
        ranks.call("k3dsl_bench.ranks:join", "nccl", free_port())
        results = ranks.call("module:function", 1, 2, timeout=60)    # function(Me(rank, world), 1, 2) in every process

Nothing here can hang: a call has a deadline, a rank that dies or raises ends the call, and then every process is ended.
Each child runs one call at a time, dies with its parent, and has its standard output and error in a file whose end is
part of every error.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

#: Seconds that the other ranks get to answer once one has failed: their own errors say more than "ended".
GRACE: Final = 3.0
_LOG_TAIL: Final = 1500


class Me(NamedTuple):
    """Which process this is."""

    rank: int
    world: int


class RankError(RuntimeError):
    """A call failed on some rank: raised there, died, or was not done in time. `failures`: rank -> what happened."""

    def __init__(self, what: str, failures: dict[int, str]) -> None:
        super().__init__("\n".join([what, *(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))]))
        self.failures = failures


class Ranks:
    """`world` child processes. `environment` is added to this process's."""

    def __init__(self, world: int, environment: dict[str, str] | None = None) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="k3dsl-ranks-")
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        env = {**os.environ, **(environment or {})}
        # This very process's path: a test's own folder, a checkout that is not installed.
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), *_split(env.get("PYTHONPATH"))]))
        try:
            for rank in range(world):
                self._start(rank, env)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(self._log(rank), "wb") as log:
            command = [
                sys.executable,
                "-u",
                __file__,
                str(rank),
                str(self.world),
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self._children.append(
                subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
                )
            )
        self._links.append(Connection(ours.detach()))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return bool(self._links)

    def call(
        self,
        function: str,
        *args: Any,
        timeout: float = 60.0,
        each: Sequence[Any] | None = None,
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """function(Me, *args) on every rank; the results by rank. Raises RankError, after which all ranks are ended.

        each: one more argument of its own for each rank, in front of the others. dying: ranks that are to end in this
        call; their result is None, and one that answers is a failure.
        """
        if not self._links:
            raise RankError(f"{function}: the ranks have ended", {})
        for rank, link in enumerate(self._links):
            own = () if each is None else (each[rank],)
            with contextlib.suppress(OSError):  # it has died: noticed below
                link.send_bytes(pickle.dumps((function, (*own, *args))))
        results, failures = self._collect(function, timeout, frozenset(dying))
        if failures:
            self.kill()
            raise RankError(f"{function} failed on {len(failures)} of {self.world} ranks", failures)
        return results

    def _collect(self, function: str, timeout: float, dying: frozenset[int]) -> tuple[list[Any], dict[int, str]]:
        results: list[Any] = [None] * self.world
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._links))
        began = time.monotonic()
        deadline = began + timeout
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            for rank in [r for r, link in waiting.items() if link in ready]:
                good, answer = self._answer(rank)
                if good == (rank in dying):
                    failures[rank] = "answered, and should have ended" if good else answer
                    deadline = min(deadline, time.monotonic() + GRACE)
                elif good:
                    results[rank] = answer
                del waiting[rank]
            if not ready:
                text = f"not done after {time.monotonic() - began:.1f} s"
                failures.update((rank, text + self._tail(rank)) for rank in waiting)
                break
        return results, failures

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            good, answer = pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, OSError):
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._children[rank].wait(GRACE)
            return False, f"ended with status {status}" + self._tail(rank)
        return good, answer if good else answer + self._tail(rank)

    def close(self) -> None:
        """Ends the processes: each leaves when its link closes, or is killed."""
        for link in self._links:
            link.close()
        self._links = []
        until = time.monotonic() + GRACE
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends the processes at once."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        for link in self._links:
            link.close()
        self._links = []

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def _tail(self, rank: int) -> str:
        text = self._log(rank).read_text(errors="replace").strip()
        return f"\n  its output ends with:\n{text[-_LOG_TAIL:]}" if text else ""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(me: Me, backend: str, port: int, timeout: float = 60.0) -> str:
    """Makes torch's default process group of all ranks; with nccl, rank r has CUDA device r. The device's name."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {}
    name = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(me.rank)
        options["device_id"] = torch.device("cuda", me.rank)
        name = torch.cuda.get_device_name()
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=me.rank,
        world_size=me.world,
        timeout=timedelta(seconds=timeout),
        **options,
    )
    return name


def _split(path: str | None) -> list[str]:
    return [part for part in (path or "").split(os.pathsep) if part]


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    if module.startswith("k3dsl_bench."):
        from k3dsl.cli.bench import question

        return getattr(question(module.removeprefix("k3dsl_bench.")), function)
    return getattr(import_module(module), function)


def _serve(rank: int, world: int, fd: int, parent: int) -> None:
    """The child: answers calls until the link closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whatever a rank waits for, it goes with its parent
    if os.getppid() != parent:
        return
    link, me = Connection(fd), Me(rank, world)
    while True:
        try:
            function, args = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            answer = True, _function(function)(me, *args)
            data = pickle.dumps(answer)
        except BaseException:
            data = pickle.dumps((False, traceback.format_exc()))
        link.send_bytes(data)


if __name__ == "__main__":
    sys.path.pop(0)  # tools/bench: its names are not modules
    _serve(*map(int, sys.argv[1:5]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without teardown: a process group or a device that hangs must not keep a rank
