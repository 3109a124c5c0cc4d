"""What the ranks of a group tell each other before they share memory: facts that must agree, and "I am here".

Everything goes through a key-value store (torch.distributed's) and is bounded: a rank that does not come is named, and
one that failed says so to those who wait for it.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from k3dsl.errors import ConfigError, PeerError

_FAILED = "failed"


class Exchange(Protocol):
    """`share` in the same order on every rank."""

    def share(self, what: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The facts of every rank, by rank. Values: what JSON has."""

    def fail(self, what: str, error: BaseException) -> None:
        """Tells the others that this rank will not come."""

    def retract(self) -> None:
        """The ranks did not agree: the round is over, for all of them or, where they come in turn, for none."""


class StoreExchange:
    """One rank of a group of processes. store: a torch.distributed Store of this group alone; seconds: the bound."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self._store, self.rank, self.size, self.seconds = store, rank, size, seconds
        self._round = 0

    def share(self, what: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Waits for every rank. Raises PeerError for one that does not come in time, ConfigError where one failed."""
        self._put(what, dict(facts))
        end = time.monotonic() + self.seconds
        found = []
        for rank in range(self.size):
            key = f"{self._round}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError:  # DistStoreError, or what older stores raise
                # The round has not been: one who comes late must not find us in it, and meets us when we come again.
                self._store.delete_key(f"{self._round}/{self.rank}")
                self._round -= 1
                raise PeerError(
                    f"rank {self.rank} waited {self.seconds:g} s in {what} for rank {rank}, which did not come",
                    rank=self.rank, peer=rank, region=what, seconds=self.seconds,
                ) from None  # fmt: skip
            told, theirs = json.loads(self._store.get(key))
            if told != what:
                raise ConfigError(f"rank {self.rank} is in {what}, rank {rank} in {told}: all ranks must do the same")
            if _FAILED in theirs:
                raise ConfigError(f"{what}: rank {rank} failed: {theirs[_FAILED]}")
            found.append(theirs)
        return found

    def fail(self, what: str, error: BaseException) -> None:
        """Ends the round on which the others wait, or would."""
        self._put(what, {_FAILED: f"{type(error).__name__}: {error}"})

    def retract(self) -> None:
        """Every rank has seen the same, and every rank goes on to the next round."""

    def _put(self, what: str, facts: Mapping[str, Any]) -> None:
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", json.dumps([what, facts]))


class LocalExchange:
    """One rank of several in this process. They come one after the other, so each sees those before it.

    A rank need not come where another had to: the n-th time that it is here for something is compared with the n-th of
    the others.
    """

    def __init__(self, rounds: dict[tuple[str, int], dict[int, dict[str, Any]]], rank: int) -> None:
        self._rounds, self.rank, self._what = rounds, rank, ""
        self._times: Counter[str] = Counter()

    def share(self, what: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The facts of the ranks that have been here, and this one's."""
        self._times[what] += 1
        self._what = what
        told = self._rounds.setdefault((what, self._times[what]), {})
        told[self.rank] = json.loads(json.dumps(dict(facts)))
        return [told[rank] for rank in sorted(told)]

    def fail(self, what: str, error: BaseException) -> None:
        """Nobody waits. One that had agreed and fails before it is ready may come again."""
        if what == f"{self._what} ready":
            self.retract()

    def retract(self) -> None:
        """Those before have passed; this rank may come again."""
        del self._rounds[self._what, self._times[self._what]][self.rank]
        self._times[self._what] -= 1


def agree(exchange: Exchange, what: str, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank, naming each fact that differs and every rank's value of it."""
    every = exchange.share(what, facts)
    bad = []
    for name in facts:
        values = [theirs.get(name) for theirs in every]
        if any(value != values[0] for value in values):
            bad.append(f"{name} differs: " + ", ".join(f"rank {r} has {v!r}" for r, v in enumerate(values)))
    if bad:
        exchange.retract()
        raise ConfigError.of(f"{what}: the ranks", bad)
