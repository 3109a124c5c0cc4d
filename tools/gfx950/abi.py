"""The structures of native/machine.h and native/memory.h, as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from .errors import BuildError
from .record import RECORD

TRACE = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_uint32), POINTER(c_uint32), c_uint64, c_uint32)
CHECK_UNINITIALISED, CHECK_HAZARDS, CHECK_PROFILE, CHECK_MISALIGNED = 1, 2, 4, 8
REGION_READ_ONLY, REGION_PEER = 1, 2
SPACES, SCOPES = ("global", "lds", "scalar"), ("wave", "workgroup", "device", "system")
TRAFFIC = len(SPACES) * len(SCOPES) * 2 + 1  # and the bank conflicts
REPORTS = ("misaligned", "uninitialised register", "uninitialised LDS", "uninitialised memory")
STATES = ("running", "at a barrier", "done")


class RegionC(ctypes.Structure):
    _fields_ = [
        ("low", c_uint64),
        ("high", c_uint64),
        ("device", c_int32),
        ("flags", c_uint32),
        ("known", c_void_p),
        ("lines", c_void_p),
    ]


class LaunchC(ctypes.Structure):
    _fields_ = [
        ("records", c_void_p),
        ("record_count", c_int64),
        ("literals", c_void_p),
        ("literal_count", c_int32),
        ("vector_rows", c_int32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("lds_bytes", c_uint32),
        ("user_sgprs", c_uint32),
        ("rsrc1", c_uint32),
        ("rsrc2", c_uint32),
        ("kernarg", c_uint64),
        ("code_base", c_uint64),
        ("device", c_int32),
        ("resident", c_int32),
        ("hits", c_void_p),
        ("traffic", c_void_p),
        ("kernarg_at", c_int32),
    ]


class RunC(ctypes.Structure):
    _fields_ = [
        ("launches", POINTER(LaunchC)),
        ("regions", POINTER(RegionC)),
        ("launch_count", c_int32),
        ("region_count", c_int32),
        ("device_count", c_int32),
        ("weak", c_int32),
        ("seed", c_uint64),
        ("quantum", c_uint64),
        ("budget", c_uint64),
        ("clock_start", c_uint64),
        ("ticks_per_round", c_uint64),
        ("checks", c_uint32),
        ("lds_fill", c_uint32),
        ("vector_fill", c_uint32),
        ("trace_group", c_uint32),
        ("trace_wave", c_uint32),
        ("trace_launch", c_int32),
        ("trace", TRACE),
        ("deadlock_after", c_uint64),
    ]


class ReportC(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("pc", c_int32),
        ("launch", c_int32),
        ("group", c_int32),
        ("wave", c_int32),
        ("lane", c_int32),
        ("address", c_uint64),
        ("count", c_uint64),
    ]


class WaitingC(ctypes.Structure):
    _fields_ = [
        ("launch", c_int32),
        ("group", c_int32),
        ("wave", c_int32),
        ("pc", c_int32),
        ("load_pc", c_int32),
        ("state", c_int32),
        ("address", c_uint64),
        ("value", c_uint32),
        ("pad", c_uint32),
        ("note", c_char * 256),
    ]


class ResultC(ctypes.Structure):
    _fields_ = [
        ("executed", c_uint64),
        ("waves", c_uint64),
        ("rounds", c_uint64),
        ("longest_wave", c_uint64),
        ("clock", c_uint64),
        ("status", c_int32),
        ("report_count", c_int32),
        ("wait_count", c_int32),
        ("kind", c_char * 32),
        ("text", c_char * 2048),
        ("launch", c_int32),
        ("group", c_int32 * 3),
        ("wave", c_int32),
        ("lane", c_int32),
        ("pc", c_int32),
        ("address", c_uint64),
        ("reports", ReportC * 64),
        ("waits", WaitingC * 32),
    ]


def check(lib: ctypes.CDLL) -> None:
    """The two sides agree on every size."""
    mine = [RECORD.itemsize, *map(ctypes.sizeof, (RegionC, LaunchC, RunC, ResultC))]
    theirs = [lib.gfx950_sizes(k) for k in range(len(mine))]
    if mine != theirs:
        raise BuildError(f"the native core's structures have sizes {theirs}, the package's {mine}")
