"""What a launch executed: the dynamic instruction mix and the bytes that it moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from . import abi
from .lower import Program


@dataclass(frozen=True)
class Profile:
    """Counts over all waves. `bytes` is keyed by (space, scope, 'read' | 'write')."""

    kernel: str
    instructions: int
    mix: Counter[str]
    formats: Counter[str]
    bytes: dict[tuple[str, str, str], int]
    bank_conflicts: int  # extra passes over the LDS banks; counted only when profiling was asked for
    matrix: int
    longest_wave: int
    hits: np.ndarray

    @classmethod
    def of(cls, program: Program, hits: np.ndarray, traffic: np.ndarray, longest: int) -> Profile:
        mix: Counter[str] = Counter()
        formats: Counter[str] = Counter()
        for ins, n in zip(program.instructions, hits.tolist(), strict=True):
            if n:
                mix[ins.name.lower()] += n
                formats[ins.format] += n
        moved = {}
        for s, space in enumerate(abi.SPACES):
            for c, scope in enumerate(abi.SCOPES):
                for d, direction in enumerate(("read", "write")):
                    if n := int(traffic[(s * 4 + c) * 2 + d]):
                        moved[space, scope, direction] = n
        matrix = sum(n for name, n in mix.items() if "mfma" in name)
        return cls(program.kernel.name, int(hits.sum()), mix, formats, moved, int(traffic[-1]), matrix, longest, hits)

    def lines(self, top: int = 25) -> list[str]:
        """A table for people."""
        out = [
            f"kernel {self.kernel}: {self.instructions} wave instructions, longest wave {self.longest_wave}, "
            f"{self.matrix} MFMA"
        ]
        out += [f"  {space:7} {scope:10} {way:5} {n:14} bytes" for (space, scope, way), n in sorted(self.bytes.items())]
        out.append(f"  LDS bank conflicts: {self.bank_conflicts} extra passes")
        out += [
            f"  {n:12} {100 * n / max(1, self.instructions):5.1f} %  {name}" for name, n in self.mix.most_common(top)
        ]
        return out
