"""What the layers of one rank share: scratch, epoch, health, alarm words, peer buffers, query and gate."""

from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from k3dsl.amd.checks import each
from k3dsl.amd.health import Health, decode_health
from k3dsl.amd.layer import builds
from k3dsl.amd.mla_pre.key import ENTRY, GATE, HEALTH_WORDS, PEER_HEAD, TAG_SLOTS, scratch_bytes
from k3dsl.amd.peers import Layout, Memory, PeerGroup
from k3dsl.capture import guard
from k3dsl.errors import ConfigError, PeerError

_ALIGN: Final = 256


class MlaPreRank:
    """A rank's part of the protocol. Its layers' runs must be ordered, as on one stream.

    widths    rows of every step to serve
    ranks     ranks that share a context (and gather their queries), 1, 2, 4 or 8
    rank      which one this is
    device    where everything lies
    peers     the group's buffers; needed from two ranks on, see `MlaPreRank.of_group`
    per_run   True: every run bumps the epoch, one tiny launch each. False: the engine calls `begin_step()` once before
              a step's first layer, and every layer of a step needs a tag slot of its own

    Nothing is cleared between steps: a hand-off is told from an older one by its tag. Tags hold the epoch and the
    layer's slot, so ranks of a group must prepare their layers in the same order (or name the slots) and run the same.
    """

    def __init__(
        self,
        widths: Iterable[int],
        *,
        ranks: int = 1,
        rank: int = 0,
        device: "torch.device | str" = "cpu",
        peers: PeerGroup | None = None,
        w_uk: str = "mxfp4",
        per_run: bool = True,
    ) -> None:
        guard("allocating a rank's buffers")
        (widths,) = each(widths=widths)
        self.widths = tuple(sorted(set(widths)))
        keys = builds(self.widths, ranks=ranks, w_uk=w_uk, deltas=(True, False))
        bad = [] if keys else ["widths is empty"]
        if type(rank) is not int or not 0 <= rank < ranks:
            bad.append(f"rank={rank!r} must be an int from 0 to {ranks - 1}")
        if ranks > 1 and (peers is None or peers.size != ranks or peers.rank != rank):
            have = "none" if peers is None else f"those of rank {peers.rank} of {peers.size}"
            bad.append(f"peers are {have}, must be those of rank {rank} of {ranks}")
        if bad:
            raise ConfigError.of("MlaPreRank", bad)
        self.ranks, self.rank, self.w_uk, self.per_run = ranks, rank, w_uk, per_run
        self.device = torch.device(device)
        self.layout = Layout.of(self.widths, ranks)
        self.q_heads = keys[0].q_heads
        self.scratch = _zeros(max(map(scratch_bytes, keys)), torch.uint8, self.device)
        self.epoch = _zeros(1, torch.int32, self.device)
        self.health = _zeros(HEALTH_WORDS, torch.int32, self.device)
        self._flags = _zeros(PEER_HEAD // 4, torch.int32, self.device)  # the alarm words of a rank without peers
        self._peers = peers
        most = self.widths[-1]
        self._query = _zeros(most * self.q_heads * ENTRY, torch.uint8, self.device)
        self._gate = _zeros(most * GATE, torch.bfloat16, self.device)
        self._empty = _zeros(most, torch.bool, self.device)
        bases = [] if peers is None or ranks == 1 else peers.bases
        self._tables = {
            rows: torch.tensor([base + self.layout.offsets[rows] for base in bases], device=self.device)
            for rows in (self.widths if bases else ())
        }
        self._slots = 0
        self._owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._planned: set[tuple[int, int, int]] = set()
        #: Decodes that layers share, by what they depend on.
        self.decodes: dict[Any, Any] = {}
        self._seen = False
        self._host: Tensor | None = None
        self._copied: Any = None

    @classmethod
    def of_group(
        cls,
        widths: Iterable[int],
        group: Any = None,
        *,
        device: "torch.device | str",
        memory: Memory | None = None,
        w_uk: str = "mxfp4",
        per_run: bool = True,
    ) -> "MlaPreRank":
        """This process's rank of a torch.distributed group (None: the default one). Collective.

        memory: by default HIP's on `device`. The exchange of handles goes over the group as pickled objects, so a CPU
        (gloo) group is what it should be. Raises PeerError on every rank if one of them fails.
        """
        import torch.distributed as dist

        from k3dsl.amd.peers import HipMemory

        if not dist.is_initialized():
            raise ConfigError("of_group: torch.distributed is not initialized")
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        widths = tuple(widths)
        where = torch.device(device)

        def exchange(value: Any) -> "list[Any]":
            found: list[Any] = [None] * ranks
            dist.all_gather_object(found, value, group=group)
            return found

        facts = exchange((tuple(sorted(set(widths))), w_uk, per_run))
        if len(set(facts)) > 1:
            lines = [f"rank {r}: widths={f[0]}, w_uk={f[1]!r}, per_run={f[2]}" for r, f in enumerate(facts)]
            raise ConfigError.of("of_group: ranks disagree", lines)
        peers = None
        if ranks > 1:
            device_index = where.index or 0
            size = Layout.of(widths, ranks).size
            peers = PeerGroup.open(size, exchange, rank, memory if memory is not None else HipMemory(device_index))
        return cls(widths, ranks=ranks, rank=rank, device=where, peers=peers, w_uk=w_uk, per_run=per_run)

    def begin_step(self) -> None:
        """Bumps the epoch on the current stream, capturable. For `per_run=False`: once before a step's first layer."""
        self.epoch.add_(1)
        self._planned = set()

    def needs_plan(self, decode: Any, rows: int, q: int) -> bool:
        """Whether `decode` has still to plan (rows, q) in this step: each time with `per_run`, else once a step."""
        first = (id(decode), rows, q) not in self._planned
        self._planned.add((id(decode), rows, q))
        return first or self.per_run

    def take_slot(self, owner: Any, slot: int | None = None) -> int:
        """A tag slot for the layer `owner`: `slot`, or the next one. Raises ConfigError for one that a step cannot tell
        apart: with per_run=False a layer that lives and has it, or no slot below 256.
        """
        slot = self._slots if slot is None else slot
        if type(slot) is not int or slot < 0 or (slot >= TAG_SLOTS and not self.per_run):
            raise ConfigError(
                f"slot={slot!r} must be an int from 0 to {TAG_SLOTS - 1}: it tells the layers of a step apart"
            )
        if not self.per_run:
            if slot in self._owners:
                raise ConfigError(f"slot={slot!r} is another layer's: with per_run=False each needs one of its own")
            self._owners[slot] = owner
        self._slots = max(self._slots, slot + 1)
        return slot % TAG_SLOTS

    def query(self, rows: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The query of the last run of `rows` rows: [rows, q_heads, 576] of bytes, contiguous."""
        return self._query[: rows * self.q_heads * ENTRY].view(rows, self.q_heads, ENTRY).view(dtype)

    def gate(self, rows: int) -> Tensor:
        """The gate of the last run: bf16 [rows, 1536], already a sigmoid."""
        return self._gate[: rows * GATE].view(rows, GATE)

    def empty(self, rows: int) -> Tensor:
        """bool [rows]: which rows of the step belong to requests of no key; written with the decode's plan."""
        return self._empty[:rows]

    def table(self, rows: int) -> Tensor | None:
        """int64 [ranks]: the addresses of every rank's hand-offs of `rows` rows; None on one rank."""
        return self._tables.get(rows)

    def memory(self) -> "list[Tensor]":
        """The rank's own tensors; peers' buffers are not among them."""
        own = (self.scratch, self.epoch, self.health, self._flags, self._query, self._gate)
        return [*own, *self._tables.values()]

    @property
    def alarm(self) -> int:
        """Address of this rank's alarm word, on rank 0."""
        return self._flags.data_ptr() if self._peers is None else self._peers.alarm

    def alarms(self) -> "list[int]":
        """Ranks whose alarm is raised, as rank 0 sees them. Waits for the device."""
        if self._peers is not None:
            return self._peers.alarms()
        return [0] if int(self._flags[0]) else []

    def read_health(self) -> Health:
        """Decoded health of this rank. Waits for the device."""
        return decode_health(self.health)

    def check(self) -> None:
        """Raises PeerError if a wait of this rank was given up, or on rank 0 if any rank raised its alarm.

        Waits for the device. The failure is sticky: what was written since is garbage, and every later wait gives up
        at once, until `reset()`.
        """
        guard("reading a rank's health")
        health = self.read_health()
        alarms = self.alarms() if self.rank == 0 else []
        if health and not alarms:
            return
        lines = [] if health else [f"rank {self.rank} {line}" for line in health.lines()[:12]]
        if alarms:
            lines.append(f"alarms of ranks {alarms}")
        raise PeerError("\n  - ".join(["mla_pre gave up waiting", *lines]))

    def check_group(self, group: Any = None) -> None:
        """`check` of every rank at once: raises PeerError on all of them, naming those that failed. Collective.

        A rank that stalls may be the first to give up; what it passes on then has right tags, and the others see
        nothing wrong. So a failure is the group's, and only a vote tells everybody in the same step. The vote goes
        over torch.distributed as pickled objects: give a CPU (gloo) group, and call it every few steps.
        """
        import torch.distributed as dist

        guard("reading a rank's health")
        health = self.read_health()
        votes: list[Any] = [None] * self.ranks
        mine = ([] if health else health.lines()[:12], self.alarms() if self.rank == 0 else [])
        dist.all_gather_object(votes, mine, group=group)
        lines = [f"rank {r} {line}" for r, (found, _) in enumerate(votes) for line in found]
        if votes[0][1]:
            lines.append(f"alarms of ranks {votes[0][1]}")
        if lines:
            raise PeerError("\n  - ".join(["mla_pre gave up waiting", *lines]))

    def poll(self) -> bool:
        """Whether nothing is known to have failed. Never waits: it looks at the last copy of the failure word that
        has landed and queues the next; a failure shows one or two calls later. During a capture it only looks."""
        if self.device.type == "cpu":
            self._seen = self._seen or bool(self.health[0])
            return not self._seen
        if torch.cuda.is_current_stream_capturing():
            return not self._seen
        if self._host is None:
            self._host, self._copied = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Event()
        elif not self._copied.query():
            return not self._seen
        self._seen = self._seen or bool(self._host[0])
        self._host.copy_(self.health[:1], non_blocking=True)
        self._copied.record()
        return not self._seen

    def reset(self) -> None:
        """Forgets a failure: health and alarm words are cleared. Collective, with no launch on its way on any rank.

        The epoch moves on by two, past every tag that a launch which gave up may have left half written.
        """
        guard("resetting a rank")
        self.health.zero_()
        self._flags.zero_()
        if self._peers is not None and self.rank == 0:
            self._peers.clear_alarms()
        self.epoch.add_(2)
        self._seen = False
        if self._host is not None:
            self._host.zero_()


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory that starts at a multiple of 256 bytes, as a GPU allocator's does and a host's need not."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.zeros(count * size + _ALIGN, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % _ALIGN
    return raw[start : start + count * size].view(dtype)
