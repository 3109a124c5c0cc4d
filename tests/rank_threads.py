"""Ranks of one process that wait for each other: a thread each, one store."""

import threading

import torch

from k3dsl.nvidia.exchange import StoreExchange


def ranks_of(size: int, seconds: float = 5.0) -> list[StoreExchange]:
    store = torch.distributed.HashStore()
    return [StoreExchange(store, r, size, seconds) for r in range(size)]


def together(*work):
    """Calls, each in a thread; their errors."""
    errors: list[BaseException | None] = [None] * len(work)

    def one(i):
        try:
            work[i]()
        except BaseException as error:
            errors[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(work))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return errors
