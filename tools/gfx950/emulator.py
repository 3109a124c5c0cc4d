"""Runs kernels of a code object on the CPU, one launch or several devices' launches at the same time."""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from . import abi, build
from .codeobject import Argument, CodeObject, Kernel
from .disassembly import around, text_of
from .errors import CodeObjectError, ExecutionError, UnsupportedInstructionError
from .lower import Lowering, Program
from .memory import Memory
from .profile import Profile

COMPUTE_UNITS = 256
XCDS = 8
MAX_DEVICES = 8
Triple = tuple[int, int, int]


def integer(what: str, value: Any, low: int, high: int) -> int:
    """`value` from `low` to `high` as an int: the native core would take what is left of it in its own width."""
    try:
        found = operator.index(value)
    except TypeError:
        found = low - 1
    if not low <= found <= high:
        raise ValueError(f"{what}={value!r} must be an int from {low} to {high}")
    return found


def triple(what: str, value: Any) -> Triple:
    """A grid or block of one to three dimensions, filled up with ones."""
    try:
        parts = [operator.index(p) for p in (value if isinstance(value, Iterable) else (value,))]
    except TypeError:
        parts = []
    # the core numbers workgroups with 32 bits
    if not 1 <= len(parts) <= 3 or min(parts) < 1 or math.prod(parts) >= 1 << 31:
        raise ValueError(f"{what}={value!r} must be one to three positive sizes with a product below 2^31")
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class Options:
    """How to run. Every seed gives one reproducible schedule.

    model: 'flat' (every store is seen at once) or 'weak' (caches, scopes and unfinished operations are modelled).
    seed: 0 gives each wave `quantum` instructions in turn; others vary order and length at random.
    resident: workgroups at a time; None: what the registers, LDS and waves of 256 compute units allow.
    """

    model: Literal["flat", "weak"] = "flat"
    seed: int = 0
    quantum: int = 1000
    resident: int | None = None
    budget: int = 20_000_000_000
    uninitialised: bool = False
    hazards: bool = True
    misaligned: bool = True
    profile: bool = False
    deadlock_after: int = 2_000_000
    ticks_per_round: int = 100
    clock_start: int = 1_000_000
    lds_fill: int = 0xDEADBEEF
    vector_fill: int = 0xFFF7F00D  # a NaN in single and half precision

    def __post_init__(self) -> None:
        if self.model not in ("flat", "weak"):
            raise ValueError(f"model={self.model!r} must be flat or weak")
        most = 2**64 - 1
        for what, low, high in (
            ("seed", 0, most),
            ("quantum", 1, most),
            ("resident", 1, 2**31 - 1),
            ("budget", 0, most),
            ("deadlock_after", 0, most),
            ("ticks_per_round", 0, most),
            ("clock_start", 0, most),
            ("lds_fill", 0, 2**32 - 1),
            ("vector_fill", 0, 2**32 - 1),
        ):
            value = getattr(self, what)
            if not (what == "resident" and value is None):
                object.__setattr__(self, what, integer(what, value, low, high))


@dataclass
class Launch:
    """One kernel launch: what `Emulator.launch` takes, for `Emulator.run`."""

    code_object: CodeObject
    kernel: str | None
    grid: int | Sequence[int]
    block: int | Sequence[int]
    args: Sequence[Any] | bytes
    dynamic_lds: int = 0
    device: int = 0


@dataclass(frozen=True)
class Report:
    """Something suspicious that did not stop the run: `count` times at one instruction; the first one is shown."""

    kind: str
    kernel: str
    pc: int
    instruction: str
    workgroup: int
    wave: int
    lane: int
    address: int
    count: int

    def __str__(self) -> str:
        lane = f", lane {self.lane}" if self.lane >= 0 else ""
        return (
            f"{self.kind} at {self.kernel}+0x{self.pc:x} ({self.instruction}), workgroup {self.workgroup}, "
            f"wave {self.wave}"
            f"{lane}, address 0x{self.address:x}, {self.count} times"
        )


@dataclass
class Result:
    """What a run did."""

    instructions: int
    waves: int
    rounds: int
    longest_wave: int
    clock: int
    reports: list[Report]
    profiles: list[Profile] = field(default_factory=list)


class Emulator:
    """Executes gfx950 code objects over `memory`. Keyword options are those of `Options`."""

    def __init__(self, memory: Memory | None = None, **options: Any) -> None:
        self.memory = memory if memory is not None else Memory(strict=False)
        self.options = Options(**options)

    # ---- programs ----

    @staticmethod
    def program(code_object: CodeObject, kernel: Kernel) -> Program:
        """The lowered kernel, kept for the next launch."""
        if kernel.name not in code_object.lowered:
            code_object.lowered[kernel.name] = Lowering(build.operations()).run(code_object, kernel)
        program: Program = code_object.lowered[kernel.name]
        return program

    def launch(
        self,
        code_object: CodeObject | bytes | str,
        kernel: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] | bytes = (),
        *,
        dynamic_lds: int = 0,
    ) -> Result:
        """Runs one kernel to its end. `grid` counts workgroups, `block` threads; `args` are the explicit arguments in
        order (tensors, arrays, numbers, bytes) or the whole argument block as bytes."""
        if not isinstance(code_object, CodeObject):
            code_object = CodeObject(code_object)
        return self.run([Launch(code_object, kernel, grid, block, args, dynamic_lds)])

    def run(self, launches: Iterable[Launch], trace: Trace | None = None) -> Result:
        """Runs launches together, their workgroups interleaved; each on the device that it names."""
        prepared = [_Prepared(self, launch) for launch in launches]
        if not prepared:
            raise ValueError("no launch was given: there is nothing to run")
        if trace:
            trace.check(prepared)
        keep: list[Any] = []
        regions = self._regions(prepared)
        o = self.options
        lib = build.library()
        abi.check(lib)
        specs = (abi.LaunchC * len(prepared))(*(p.spec for p in prepared))
        checks = (
            abi.CHECK_UNINITIALISED * o.uninitialised
            | abi.CHECK_HAZARDS * o.hazards
            | abi.CHECK_PROFILE * o.profile
            | abi.CHECK_MISALIGNED * o.misaligned
        )
        spec = abi.RunC(
            launches=specs,
            regions=regions,
            launch_count=len(prepared),
            region_count=len(regions),
            device_count=1 + max(p.device for p in prepared),
            weak=o.model == "weak",
            seed=o.seed,
            quantum=o.quantum,
            budget=o.budget,
            clock_start=o.clock_start,
            ticks_per_round=o.ticks_per_round,
            checks=checks,
            lds_fill=o.lds_fill,
            vector_fill=o.vector_fill,
            trace_group=0xFFFFFFFF,
            trace_wave=0,
            trace_launch=-1,
            trace=abi.TRACE(),
            deadlock_after=o.deadlock_after,
        )
        if trace:
            spec.trace_group, spec.trace_wave, spec.trace_launch = trace.workgroup, trace.wave, trace.launch
            spec.trace = trace.callback(prepared[trace.launch].program)
            keep.append(spec.trace)
        out = abi.ResultC()
        status = lib.gfx950_run(ctypes.byref(spec), ctypes.byref(out))
        reports = [self._report(prepared, r) for r in out.reports[: out.report_count]]
        if status:
            self._raise(prepared, out)
        profiles = [p.profile(out) for p in prepared]
        return Result(out.executed, out.waves, out.rounds, out.longest_wave, out.clock, reports, profiles)

    def _regions(self, prepared: list[_Prepared]) -> Any:
        found = [
            abi.RegionC(
                r.low,
                r.high,
                -1 if r.device is None else r.device,
                abi.REGION_READ_ONLY * r.read_only | abi.REGION_PEER * r.peer,
                None if r.known is None else r.known.ctypes.data,
                None,
            )
            for r in self.memory.regions
        ]
        if not self.memory.strict:
            found = [abi.RegionC(4096, (1 << 47) - 4096, -1, 0, None, None)]
            if self.options.model == "weak":
                raise ValueError("the weak memory model needs registered buffers: Memory(strict=True)")
        else:
            for p in prepared:
                for array in (p.kernarg, p.image):
                    found.append(
                        abi.RegionC(
                            array.ctypes.data, array.ctypes.data + array.nbytes, -1, abi.REGION_READ_ONLY, None, None
                        )
                    )
        return (abi.RegionC * len(found))(*found)

    # ---- what to say ----

    @staticmethod
    def _report(prepared: list[_Prepared], r: abi.ReportC) -> Report:
        p = prepared[r.launch]
        ins = p.program.instructions[p.program.at(r.pc)]
        return Report(
            abi.REPORTS[r.kind], p.kernel.name, r.pc, text_of(ins), r.group, r.wave, r.lane, r.address, r.count
        )

    def _raise(self, prepared: list[_Prepared], out: abi.ResultC) -> None:
        kind, text = out.kind.decode(), out.text.decode()
        p = prepared[out.launch]
        where = (
            f"{p.kernel.name}+0x{out.pc:x}, workgroup {tuple(out.group)}, wave {out.wave}"
            + (f", lane {out.lane}" if out.lane >= 0 else "")
            + (f", device {p.device}" if p.device else "")
        )
        lines = [f"{kind}: {text}"]
        if kind in ("deadlock", "budget"):
            lines += self._waits(prepared, out)
        else:
            if kind in ("out of bounds", "misaligned") and not text.startswith("LDS"):
                lines.append(f"  address 0x{out.address:x}: {self.memory.describe(out.address)}")
            lines.append(f"  at {where}")
            lines += ["    " + line for line in around(p.program, out.pc)]
        raise ExecutionError(kind, "\n".join(lines), out.pc, out.wave, out.lane, out.address)

    def _waits(self, prepared: list[_Prepared], out: abi.ResultC) -> list[str]:
        lines = []
        for x in out.waits[: out.wait_count]:
            p = prepared[x.launch]
            line = f"  {p.kernel.name} workgroup {x.group} wave {x.wave}: {abi.STATES[x.state]} at 0x{x.pc:x}"
            if x.state == 0 and x.load_pc >= 0:
                line += (
                    f", reads 0x{x.address:x} ({self.memory.describe(x.address)}) = 0x{x.value:x} at 0x{x.load_pc:x}"
                )
            lines.append(line)
            if x.note:
                lines.append(f"    {x.note.decode()}")
        return lines


@dataclass
class Trace:
    """One wave, one instruction a line, given to `sink`."""

    sink: Callable[[str], None]
    workgroup: int = 0
    wave: int = 0
    launch: int = 0

    def check(self, prepared: Sequence[_Prepared]) -> None:
        """ValueError where there is no such wave."""
        p = prepared[integer("launch", self.launch, 0, len(prepared) - 1)]
        integer("workgroup", self.workgroup, 0, math.prod(p.grid) - 1)
        integer("wave", self.wave, 0, p.waves - 1)

    def callback(self, program: Program) -> Any:
        def show(pc: int, scalars: Any, vectors: Any, exec_mask: int, scc: int) -> None:
            k = program.at(pc)
            dst = int(program.records["dst"][k])
            value = ""
            if program.records["vwrite"][k].any() and dst >= 0x1000:
                lane = (exec_mask & -exec_mask).bit_length() - 1 if exec_mask else 0
                value = f"lane {lane}: 0x{vectors[(dst - 0x1000) * 64 + lane]:08x}"
            elif program.records["swrite"][k].any():
                value = f"0x{scalars[dst]:08x}"
            self.sink(f"{pc:6x}  {text_of(program.instructions[k]):60} exec {exec_mask:016x} scc {scc}  {value}")

        return abi.TRACE(show)


class _Prepared:
    """A launch, checked, lowered and packed."""

    def __init__(self, emulator: Emulator, launch: Launch) -> None:
        self.launch = launch
        code_object = launch.code_object
        self.kernel = code_object.kernel(launch.kernel)
        self.grid, self.block = triple("grid", launch.grid), triple("block", launch.block)
        self.device = integer("device", launch.device, 0, MAX_DEVICES - 1)
        threads = math.prod(self.block)
        dynamic_lds = integer("dynamic_lds", launch.dynamic_lds, 0, 2**32 - 1)
        lds = self.kernel.lds_bytes + dynamic_lds
        if reasons := self.kernel.refusals(lds, threads):
            raise CodeObjectError(f"kernel {self.kernel.name} cannot run: " + "; ".join(reasons))
        self.program = emulator.program(code_object, self.kernel)
        if self.program.unknown:
            lines = [f"0x{i.pc:x}: {text_of(i)} [{i.encoding.hex()}]" for i in self.program.unknown[:10]]
            raise UnsupportedInstructionError(
                f"kernel {self.kernel.name} uses {len(self.program.unknown)} instructions that the emulator "
                "does not have:\n  " + "\n  ".join(lines)
            )
        self.waves = (threads + 63) // 64
        self.kernarg = pack(self.kernel, launch.args, self.grid, self.block, dynamic_lds)
        self.image = np.frombuffer(code_object.image, np.uint8)
        self.hits = np.zeros(len(self.program.records), np.uint64)
        self.traffic = np.zeros(abi.TRAFFIC, np.uint64)
        resident = emulator.options.resident or COMPUTE_UNITS * self.occupancy(lds)
        k = self.kernel
        self.spec = abi.LaunchC(
            records=self.program.records.ctypes.data,
            record_count=len(self.program.records),
            literals=self.program.literals.ctypes.data,
            literal_count=len(self.program.literals),
            vector_rows=k.rows,
            grid=self.grid,
            block=self.block,
            lds_bytes=lds,
            user_sgprs=k.user_registers,
            rsrc1=k.rsrc1,
            rsrc2=k.rsrc2,
            kernarg=self.kernarg.ctypes.data,
            code_base=self.image.ctypes.data + k.entry,
            device=self.device,
            resident=resident,
            hits=self.hits.ctypes.data,
            traffic=self.traffic.ctypes.data,
            kernarg_at=k.kernarg_register,
        )

    def occupancy(self, lds: int) -> int:
        """Workgroups that a compute unit holds: by its 4 x 512 register rows, 160 KiB of LDS and 8 waves a SIMD."""
        by_registers = 4 * min(8, 512 // max(1, (self.kernel.rows + 7) // 8 * 8)) // self.waves
        by_lds = 160 * 1024 // lds if lds else 16
        return max(1, min(by_registers, by_lds))

    def profile(self, out: abi.ResultC) -> Profile:
        return Profile.of(self.program, self.hits[:-1], self.traffic, out.longest_wave)


def value_bytes(value: Any, argument: Argument) -> bytes:
    """An argument's bytes. ValueError for what does not fill them exactly; the caller knows which argument it is."""
    size = argument.size
    try:
        if isinstance(value, bytes):
            data = value
        elif value is None:
            data = bytes(size)
        elif hasattr(value, "data_ptr"):
            data = struct.pack("<Q", value.data_ptr())
        elif isinstance(value, np.ndarray):
            data = struct.pack("<Q", value.ctypes.data)
        elif isinstance(value, float):
            data = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        elif isinstance(value, np.inexact):
            data = value.tobytes()
        else:  # integers and booleans of any type are as wide as the argument
            number = operator.index(value.item() if isinstance(value, np.bool_) else value)
            data = number.to_bytes(size, "little", signed=number < 0)
    except (KeyError, OverflowError, TypeError):
        raise ValueError(f"{value!r} is no address, array, number or bytes that fits {size} bytes") from None
    if len(data) != size:
        raise ValueError(f"{type(value).__name__} gives {len(data)} bytes, it takes {size}")
    return data


def pack(kernel: Kernel, args: Sequence[Any] | bytes, grid: Triple, block: Triple, dynamic_lds: int = 0) -> np.ndarray:
    """The argument block, 64-byte aligned, hidden arguments filled in."""
    size = (kernel.kernarg_bytes + 63) // 64 * 64 + 64  # compilers load past the last argument, up to the alignment
    raw = np.zeros(size + 64, np.uint8)
    block_at = (-raw.ctypes.data) % 64
    out = raw[block_at : block_at + size]
    if isinstance(args, bytes):
        if len(args) > size:
            raise ValueError(f"kernel {kernel.name} takes {kernel.kernarg_bytes} bytes, {len(args)} were given")
        out[: len(args)] = np.frombuffer(args, np.uint8)
    else:
        explicit = [a for a in kernel.arguments if not a.hidden]
        if len(explicit) != len(args):
            raise ValueError(f"kernel {kernel.name} takes {len(explicit)} arguments, {len(args)} were given")
        for k, (a, value) in enumerate(zip(explicit, args, strict=True)):
            try:
                data = value_bytes(value, a)
            except ValueError as error:
                name = f" ({a.name})" if a.name else ""
                raise ValueError(f"argument {k}{name} of kernel {kernel.name}: {error}") from None
            out[a.offset : a.offset + a.size] = np.frombuffer(data, np.uint8)
    dimensions = 3 if grid[2] * block[2] > 1 else 2 if grid[1] * block[1] > 1 else 1
    hidden = {"hidden_grid_dims": dimensions, "hidden_dynamic_lds_size": dynamic_lds}
    for axis, name in enumerate("xyz"):
        hidden |= {
            f"hidden_block_count_{name}": grid[axis],
            f"hidden_group_size_{name}": block[axis],
            f"hidden_remainder_{name}": 0,
        }
    for a in kernel.arguments:
        if a.hidden:
            out[a.offset : a.offset + a.size] = np.frombuffer(
                hidden.get(a.kind, 0).to_bytes(a.size, "little"), np.uint8
            )
    return out
