"""Peer buffers between real processes: POSIX shared memory stands in for device memory, gloo carries the handles."""

import ctypes
import multiprocessing
import socket
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch

from k3dsl.amd.decode import GroupCombine
from k3dsl.amd.mla_pre.key import PEER_HEAD, MlaPreBuild, peer_bytes, peer_pairs
from k3dsl.amd.peers import HANDLE, HipMemory, Layout, PeerGroup
from k3dsl.amd.rank import MlaPreRank
from k3dsl.errors import ConfigError, LaunchError, PeerError


class HostMemory:
    """`Memory` over POSIX shared memory. fail: the operation that refuses."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.blocks: dict[int, SharedMemory] = {}
        self.closed: list[int] = []

    def _keep(self, block: SharedMemory) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(block.buf))
        self.blocks[address] = block
        return address

    def allocate(self, size: int) -> int:
        if self.fail == "allocate":
            raise LaunchError("hipExtMallocWithFlags returned 2")
        return self._keep(SharedMemory(create=True, size=size))

    def handle(self, address: int) -> bytes:
        return self.blocks[address].name.encode().ljust(HANDLE, b"\0")

    def open(self, handle: bytes) -> int:
        if self.fail == "open":
            raise LaunchError("hipIpcOpenMemHandle returned 17")
        assert len(handle) == HANDLE
        return self._keep(SharedMemory(handle.rstrip(b"\0").decode()))

    def close(self, address: int) -> None:
        self.closed.append(address)

    def free(self, address: int) -> None:
        self.closed.append(address)
        self.blocks[address].unlink()

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)


def _child(body: Callable[[int, int], Any], rank: int, ranks: int, port: int, results: Any) -> None:
    import os

    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        results.put((rank, body(rank, ranks)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))
    # The views of shared memory are still exported: Python would complain while it winds down.
    results.close()
    results.join_thread()
    os._exit(0)


def together(body: Callable[[int, int], Any], ranks: int = 2) -> list[Any]:
    """What each rank's `body(rank, ranks)` returns, in a process of its own."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = context.Queue()
    children = [context.Process(target=_child, args=(body, r, ranks, port, results)) for r in range(ranks)]
    for child in children:
        child.start()
    found = dict(results.get(timeout=60) for _ in children)
    for child in children:
        child.join(30)
    return [found[r] for r in range(ranks)]


def _shares(rank: int, ranks: int) -> tuple[Any, ...]:
    import torch.distributed as dist

    memory = HostMemory()
    mine = MlaPreRank.of_group((2, 4), device="cpu", memory=memory)
    peers = mine._peers
    assert peers is not None
    for r, base in enumerate(peers.bases):  # every rank marks every buffer, as puts do
        ctypes.c_int32.from_address(base + PEER_HEAD + 4 * rank).value = 10 * rank + r + 1
    if rank == 1:
        ctypes.c_int32.from_address(peers.alarm).value = 1
    dist.barrier()
    own = [ctypes.c_int32.from_address(peers.bases[rank] + PEER_HEAD + 4 * r).value for r in range(ranks)]
    raised = mine.alarms() if rank == 0 else []
    said = ""
    if rank == 0:
        try:
            mine.check()
        except PeerError as error:
            said = str(error)
        mine.reset()
        assert mine.alarms() == []
    dist.barrier()
    votes = []
    for failed in (None, 1):  # nobody, then rank 1 alone: both are told
        if rank == failed:
            mine.health[0] = 1
        try:
            mine.check_group()
            votes.append("")
        except PeerError as error:
            votes.append(str(error))
    tables = [mine.table(rows) for rows in (2, 4)]
    offsets = [(t - torch.tensor(peers.bases)).tolist() for t in tables if t is not None]
    peers.close(dist.barrier)
    return own, raised, said, offsets, len(memory.closed), votes


def test_two_processes_write_each_others_buffers() -> None:
    first, second = together(_shares)
    assert first[0] == [1, 11], first
    assert second[0] == [2, 12], second
    assert first[1] == [1]
    assert "alarms of ranks [1]" in first[2]
    width = 2 * 8 * peer_pairs(2, 2)
    assert first[3] == second[3] == [[PEER_HEAD] * 2, [PEER_HEAD + width] * 2]
    assert first[4] == second[4] == 2
    assert first[5] == second[5]
    assert first[5][0] == ""
    assert "rank 1 FAILED; 0 of 256 workgroups gave up" in first[5][1]


def _fails(rank: int, ranks: int, what: str) -> tuple[str, int]:
    memory = HostMemory(what if rank == 1 else "")
    try:
        MlaPreRank.of_group((2,), device="cpu", memory=memory)
    except PeerError as error:
        return str(error), len(memory.closed)
    return "nothing", 0


@pytest.mark.parametrize(("what", "says"), [("allocate", "could not allocate"), ("open", "could not open")])
def test_one_ranks_failure_is_every_ranks(what: str, says: str) -> None:
    found = together(lambda rank, ranks: _fails(rank, ranks, what))
    for text, _ in found:
        assert says in text, text
        assert "rank 1: hip" in text
    assert found[0][1] >= 1  # what was there is given back


def _disagrees(rank: int, ranks: int) -> str:
    try:
        MlaPreRank.of_group((2,) if rank else (4,), device="cpu", memory=HostMemory())
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_ranks_that_disagree_are_all_told() -> None:
    for text in together(_disagrees):
        assert "rank 0: widths=(4,)" in text, text
        assert "rank 1: widths=(2,)" in text


def _combines(rank: int, ranks: int) -> float:
    from k3dsl import reference

    heads, rows = 12, 3
    generator = torch.Generator().manual_seed(1)
    every = torch.randn(ranks, rows, 2 * heads + 8, 512, generator=generator).bfloat16()
    lse = torch.randn(ranks, rows, 2 * heads + 8, generator=generator)
    lse[0, 1], every[0, 1] = -torch.inf, torch.nan  # a shard with no key
    combine = GroupCombine(None, heads=heads, rows=4, device="cpu")
    got = combine(every[rank], lse[rank])
    mine = slice(rank * heads, (rank + 1) * heads)
    want, _ = reference.merge(every[:, :, mine], lse[:, :, mine])
    assert got.shape == (rows, heads, 512)
    return float((got.float() - want.float()).abs().max())


def test_the_combination_over_ranks() -> None:
    assert together(_combines) == [0.0, 0.0]


def test_widths_do_not_share_room() -> None:
    """Two copies alternate by parity: a width's odd copy must not lie on another width's even one."""
    layout = Layout.of((8, 4, 4, 1), 8)
    spans = sorted(
        (at, at + peer_bytes(MlaPreBuild(tokens=s, ranks=8)) - PEER_HEAD) for s, at in layout.offsets.items()
    )
    assert list(layout.offsets) == [1, 4, 8]
    assert spans[0][0] == PEER_HEAD
    assert all(one[1] == two[0] for one, two in pairwise(spans))
    assert layout.size % 4096 == 0
    assert layout.size >= spans[-1][1]


class RecordingHip:
    """libamdhip64 as HipMemory calls it: records, and refuses what it is told to."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail = fail

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == self.fail:
                return 2
            if name in ("hipExtMallocWithFlags", "hipIpcOpenMemHandle"):
                arguments[0]._obj.value = 0x7000
            return 0

        return call


def test_hip_memory_asks_for_uncached_zeroed_memory() -> None:
    hip = RecordingHip()
    memory = HipMemory(3, library=hip)
    assert memory.allocate(8192) == 0x7000
    names = [name for name, _ in hip.calls]
    assert names == ["hipSetDevice", "hipExtMallocWithFlags", "hipMemset", "hipDeviceSynchronize"]
    assert hip.calls[0][1][0].value == 3
    assert [a.value for a in hip.calls[1][1][1:]] == [8192, 3]
    assert len(memory.handle(0x7000)) == HANDLE
    assert memory.open(bytes(HANDLE)) == 0x7000
    assert hip.calls[-1][1][2].value == 1
    assert memory.read(0x7000, 4) == bytes(4)
    memory.close(0x7000)
    memory.free(0x7000)
    assert [name for name, _ in hip.calls[-2:]] == ["hipIpcCloseMemHandle", "hipFree"]
    with pytest.raises(LaunchError, match="hipExtMallocWithFlags returned 2 on device 0"):
        HipMemory(library=RecordingHip("hipExtMallocWithFlags")).allocate(16)


def test_alarms_of_a_group_in_one_process() -> None:
    buffers = [torch.zeros(1024, dtype=torch.int32) for _ in range(2)]
    groups = [PeerGroup([b.data_ptr() for b in buffers], r) for r in range(2)]
    assert groups[1].alarm == buffers[0].data_ptr() + 4
    buffers[0][1] = 1
    assert groups[0].alarms() == [1]
    groups[0].clear_alarms()
    assert groups[0].alarms() == []
