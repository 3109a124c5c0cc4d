"""What the processes of test_bench_ranks.py are asked to do. torch where it is needed: a process starts without."""

import os
import signal
import time


def where(me, *args):
    return (me.rank, me.world, os.getpid(), *args)


def total(me, value):
    """All-reduced: only a group that works gives the sum."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value + me.rank])
    dist.all_reduce(tensor)
    return int(tensor)


def fail_on(me, rank):
    if me.rank == rank:
        print("about to fail")
        raise ValueError("no such colour")
    return "well"


def die_on(me, rank):
    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep(me, seconds):
    time.sleep(seconds)


def wait_for_a_dead_peer(me):
    """Rank 0 waits in a collective that rank 1 never enters."""
    import torch.distributed as dist

    if me.rank == 1:
        os._exit(7)
    dist.barrier()


def unpicklable(me):
    return lambda: None
