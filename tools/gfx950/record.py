"""The flat form of an instruction that the native core runs; the fields are those of `Record` in native/core.h."""

from __future__ import annotations

import numpy as np

VECTOR = 0x1000
ACCUMULATION = 0x2000  # before placement: becomes VECTOR + accumulation base
FIRST_LITERAL = 256

SCALARS = (
    "op",
    "dst",
    "dst2",
    "a",
    "b",
    "c",
    "neg",
    "abs",
    "opsel",
    "opsel_hi",
    "neg_hi",
    "clamp",
    "omod",
    "imm",
    "imm2",
    "target",
    "dpp",
    "dpp_mask",
    "sdwa",
    "flags",
    "pc",
    "count",
    "x0",
    "x1",
)
SETS = (("vread", 16), ("vwrite", 16), ("sread", 4), ("swrite", 4))
RECORD = np.dtype([(n, "<i4") for n in SCALARS] + [(n, "<u4", (k,)) for n, k in SETS])

F_DPP, F_SDWA, F_LDS, F_OFFEN, F_IDXEN, F_SADDR, F_RETURN = 1, 2, 4, 8, 16, 32, 64
F_SC0, F_SC1, F_NT, F_VMEM, F_DS, F_SMEM, F_FLAT, F_SDWA_SDST = 128, 256, 512, 1024, 2048, 4096, 8192, 16384
