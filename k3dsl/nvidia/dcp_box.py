"""DcpBox: the mailboxes of one rank of a context-parallel group, and the addresses of the others'. One for a model."""

from ctypes import c_uint64
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.capture import guard
from k3dsl.errors import ConfigError
from k3dsl.nvidia import dcp
from k3dsl.nvidia.exchange import Exchange, LocalExchange, agree
from k3dsl.nvidia.query import ELEMENT, ENTRY, LATENT
from k3dsl.nvidia.symmetric import allocate, exchange_of

_ALIGN: Final = 256
MOST_SECONDS: Final = 3600.0
#: Seconds in which all ranks must have come to a collective call: a cold cache compiles before it.
PREPARE_SECONDS: Final = 600.0
MOST_PREPARE_SECONDS: Final = 7 * 86400.0


class DcpBox:
    """Collective over `group` (a torch.distributed group; None: all processes), with the same arguments on every rank.

    heads       heads of a rank
    interleave  consecutive positions of a context that lie on one rank
    kv_format   "fp8" or "bf16": what queries are published in
    timeout     seconds that a wait inside a kernel may last before it gives up
    multicast   one store reaches all ranks; only where the group's symmetric memory has a multicast address

    Tensors: q uint8 [2, 64, D * heads, bytes of an entry], partial bf16 [2, D, 64, heads, 512] and lse f32
    [2, D, 64, heads] are written by the other ranks; rows bf16 [64, 1, D * heads, 512] and rows_lse f32 [64, 1,
    D * heads] by the local core; q_peers, peers and lse_peers int64 [D] are the addresses of every rank's q, partial
    and lse. Between steps every word of the first three is armed: see docs/dcp.md.

    A wait that was given up poisons the box: `check` (which `run` calls first) raises PeerError from then on, and
    later waits give up at once, until every rank has called `reset`. Raises ConfigError for arguments that cannot be
    served or that differ between ranks, PeerError for a rank that does not come, CaptureError.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        heads: int,
        interleave: int = 1,
        kv_format: str = "fp8",
        device: "torch.device | str | int | None" = None,
        timeout: float = 10.0,
        multicast: bool = False,
        prepare_timeout: float = PREPARE_SECONDS,
    ) -> None:
        guard("DcpBox()")
        bad = []
        if type(prepare_timeout) not in (int, float) or not 0 < prepare_timeout <= MOST_PREPARE_SECONDS:
            bad.append(
                f"prepare_timeout={prepare_timeout!r} must be a positive number of seconds, at most "
                f"{MOST_PREPARE_SECONDS:g}"
            )
        if type(multicast) is not bool:
            bad.append(f"multicast={multicast!r} must be a bool")
        if bad:
            raise ConfigError.of("DcpBox", bad)
        exchange = exchange_of(group, float(prepare_timeout))
        where = _device(device)
        self._facts(exchange.rank, exchange.size, heads, interleave, kv_format, timeout)
        agree(exchange, "DcpBox", {**self._arguments(), "multicast": multicast})
        shared = allocate(group, sum(self._sizes()), where, exchange, multicast)
        self._place(shared.own, shared.addresses, shared.multicast)
        self._exchange: Exchange = exchange
        self._handle = shared.handle
        self.is_virtual = False
        self.arm()
        self._barrier("DcpBox ready")

    @classmethod
    def virtual(
        cls,
        ranks: int,
        *,
        heads: int,
        interleave: int = 1,
        kv_format: str = "fp8",
        device: "torch.device | str | int | None" = None,
        timeout: float = 10.0,
    ) -> "list[DcpBox]":
        """`ranks` ranks on one device, for tests and for people with one GPU; their layers run by `virtual_step`."""
        guard("DcpBox.virtual()")
        where = _device(device)
        boxes = [cls.__new__(cls) for _ in range(ranks if type(ranks) is int and ranks > 0 else 1)]
        rounds: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        memory = []
        for rank, box in enumerate(boxes):
            box._facts(rank, ranks, heads, interleave, kv_format, timeout)
            memory.append(torch.empty(sum(box._sizes()), dtype=torch.uint8, device=where))
        for rank, box in enumerate(boxes):
            box._place(memory[rank], [m.data_ptr() for m in memory], 0)
            box._exchange, box._handle, box.is_virtual = LocalExchange(rounds, rank), memory, True
            box.arm()
        return boxes

    def _facts(self, rank: int, size: int, heads: int, interleave: int, kv_format: str, timeout: float) -> None:
        bad = dcp.rank_problems(size, heads)
        bad += dcp.interleave_problems(interleave)
        if kv_format not in tuple(ELEMENT):
            bad.append(f"kv_format={kv_format!r} must be one of {', '.join(ELEMENT)}")
        if type(timeout) not in (int, float) or not 0 < timeout <= MOST_SECONDS:
            bad.append(f"timeout={timeout!r} must be a number of seconds above 0, at most {MOST_SECONDS:g}")
        if bad:
            raise ConfigError.of("DcpBox", bad)
        self.rank, self.size, self.heads, self.interleave = rank, size, heads, interleave
        self.kv_format, self.timeout, self.cap = kv_format, float(timeout), dcp.CAP

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("size", "heads", "interleave", "kv_format", "timeout")}

    def _sizes(self) -> list[int]:
        """Bytes of q, partial and lse, each a multiple of 256."""
        every = self.size * self.heads
        sizes = (2 * self.cap * every * self.entry, 2 * self.cap * every * LATENT * 2, 2 * self.cap * every * 4)
        return [-(-n // _ALIGN) * _ALIGN for n in sizes]

    @property
    def entry(self) -> int:
        """Bytes of a head's query."""
        return ENTRY * ELEMENT[self.kv_format]

    def _place(self, own: Tensor, addresses: list[int], multicast: int) -> None:
        """The tensors of the box in `own`; addresses: of every rank's memory."""
        d, h, cap = self.size, self.heads, self.cap
        self.device = own.device
        shapes = (
            ((2, cap, d * h, self.entry), torch.uint8),
            ((2, d, cap, h, LATENT), torch.bfloat16),
            ((2, d, cap, h), torch.float32),
        )
        starts = [0, *self._sizes()[:1], sum(self._sizes()[:2])]
        views = []
        for start, (shape, dtype) in zip(starts, shapes, strict=True):
            count = torch.Size(shape).numel() * dtype.itemsize
            views.append(own[start : start + count].view(dtype).view(shape))
        self.q, self.partial, self.lse = views
        tables = [[at + start for at in addresses] for start in starts]
        self.q_peers, self.peers, self.lse_peers = (
            torch.tensor(table, dtype=torch.int64, device=self.device) for table in tables
        )
        #: Stores by these stay on this rank: for launches that only load what later ones need.
        self.alone = tuple(torch.full_like(self.q_peers, table[self.rank]) for table in tables)
        self.multicast = multicast
        self.rows = torch.zeros(cap, 1, d * h, LATENT, dtype=torch.bfloat16, device=self.device)
        self.rows_lse = torch.zeros(cap, 1, d * h, dtype=torch.float32, device=self.device)
        self.poison = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.alarm = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._alarm = c_uint64.from_address(self.alarm.data_ptr())

    def same_group(self, other: Any) -> bool:
        """Whether both are boxes of one DcpBox.virtual."""
        return isinstance(other, DcpBox) and self.is_virtual and self._handle is other._handle

    @property
    def limit(self) -> int:
        """The bound of a wait in nanoseconds, as kernels take it."""
        return max(1, round(self.timeout * 1e9))

    def check(self) -> None:
        """Raises PeerError if a wait has been given up. One read of host memory: it sees what the device has done."""
        word = self._alarm.value
        if word:
            raise dcp.peer_error(word, self.timeout)

    def arm(self) -> None:
        """Every word of this rank's mailboxes as it is between steps, after what the device is doing."""
        self.q.fill_(0xFF)
        self.partial.view(torch.int32).fill_(dcp.ARMED_PARTIAL)
        self.lse.view(torch.int32).fill_(dcp.ARMED)

    def armed(self) -> bool:
        """Whether all are. Waits for the device; between steps alone does it mean anything."""
        words = (
            (self.q.view(torch.int32), dcp.ARMED),
            (self.partial.view(torch.int32), dcp.ARMED_PARTIAL),
            (self.lse.view(torch.int32), dcp.ARMED),
        )
        return all(bool((tensor == word).all()) for tensor, word in words)

    def reset(self) -> None:
        """Makes a poisoned box usable again; every rank calls it, with no step under way. Raises PeerError for one that
        does not come within prepare_timeout."""
        guard("DcpBox.reset()")
        self._synchronize()
        self._barrier("DcpBox.reset")  # from here on nobody's stores are under way
        self.arm()
        self.poison.zero_()
        self._synchronize()
        self._alarm.value = 0
        self._barrier("DcpBox.reset done")

    def agree(self, what: str, facts: dict[str, Any]) -> None:
        """Collective: raises ConfigError on every rank if facts differ, naming them and every rank's value."""
        agree(self._exchange, what, facts)

    def every(self, what: str, true: bool) -> bool:
        """Collective: whether it is true on every rank. Ranks of one device come one by one: on this one."""
        if self.is_virtual:
            return true
        return all(theirs["true"] for theirs in self._exchange.share(what, {"true": true}))

    def fail(self, what: str, error: BaseException) -> None:
        """This rank does not come to `agree`: those who wait there get a ConfigError that says why."""
        self._exchange.fail(what, error)

    def ready(self, what: str) -> None:
        """Collective: this rank's device is done, and so is every other's when this returns."""
        self._barrier(what)

    def _barrier(self, what: str) -> None:
        self._synchronize()
        self._exchange.share(what, {})

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device(device: "torch.device | str | int | None") -> torch.device:
    """The device meant; None: torch's current GPU. Raises ConfigError."""
    try:
        found = torch.device("cuda" if device is None else device)
        if found.type == "cuda" and found.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", device) if type(device) is int else found
    except (RuntimeError, TypeError, AssertionError) as error:  # the last from a torch without CUDA
        raise ConfigError(
            f"device={device!r} must be a GPU of torch, its number, or None for the current one: {error}"
        ) from None


def local_lengths(totals: Tensor, *, ranks: int, rank: int, interleave: int = 1) -> Tensor:
    """int32: how many of the first `totals` positions (int, any shape) of a context lie on `rank`. A torch op, for
    outside of `run`, which takes the result as `lengths`.

    floor(t / (D I)) I + clamp(t mod (D I) - rank I, 0, I), D ranks, I consecutive positions a rank.
    """
    numbers = all(type(x) is int for x in (ranks, rank, interleave))
    if not numbers or not 0 <= rank < ranks or interleave < 1:
        raise ConfigError(
            f"rank={rank!r} must be an int from 0 and below ranks={ranks!r}, interleave={interleave!r} a positive int"
        )
    if not isinstance(totals, Tensor) or totals.is_floating_point() or totals.dtype == torch.bool:
        what = totals.dtype if isinstance(totals, Tensor) else type(totals).__name__
        raise ConfigError(f"totals is {what}, must be a tensor of ints")
    turn, totals = ranks * interleave, totals.to(torch.int64)
    rest = (totals % turn - rank * interleave).clamp(0, interleave)
    return (totals.div(turn, rounding_mode="floor") * interleave + rest).to(torch.int32)
