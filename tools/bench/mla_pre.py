"""What one launch of the AMD mla_pre executes, counted in the gfx950 emulator: no time, for no MI355X has run it.

    python -m tools.bench.mla_pre [--tokens 1,8] [--blocks 8] [--ranks 1] [--json FILE]

Counted: wave instructions of each stage, bytes of weights that the kernel asks for against the weights' size, bytes by
scope, and what waiting adds. Stages are told apart by the timeline's stamps in the machine code. Waiting depends on the
schedule, here the emulator's plain one: every wave 1000 instructions in turn.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from k3dsl.amd import toolchain
from k3dsl.amd.mla_pre.key import (
    GATE,
    GRID,
    HEADS,
    HEALTH_WORDS,
    HIDDEN,
    KV_LORA,
    NOPE,
    PARAMS,
    PEER_HEAD,
    POINTS,
    Q_LORA,
    QKV_A,
    THREADS,
    MlaPreBuild,
    peer_bytes,
    scratch_bytes,
)
from k3dsl.amd.mla_pre.layout import lds, regions
from k3dsl.reference.mla_pre import PreWeights
from tools.gfx950 import Emulator, Memory
from tools.gfx950.codeobject import CodeObject
from tools.gfx950.emulator import Launch
from tools.gfx950.lower import Program
from tools.gfx950.profile import Profile

#: Timeline points by the stage that ends there.
ENDS: Final = {0: "start", 1: "slice", 2: "gate", 3: "mix", 4: "gemv", 6: "norm", 7: "q_b", 8: "w_uk", 9: "unpack"}
WEIGHTS: Final = {
    "qkv_a": QKV_A * HIDDEN * 2,
    "gate": GATE * HIDDEN * 2,
    "q_b": HEADS * (NOPE + 64) * Q_LORA * 2,
    "w_uk": HEADS * KV_LORA * NOPE // 2,
}


@dataclass
class Step:
    """The tensors of one rank."""

    key: MlaPreBuild
    weights: PreWeights
    rank: int

    def __post_init__(self) -> None:
        s, heads = self.key.tokens, self.key.q_heads
        g = torch.Generator().manual_seed(1)
        normal = lambda *shape: (torch.randn(shape, generator=g) * 2).bfloat16()  # noqa: E731
        self.own: dict[str, Tensor] = {
            "prefix": normal(s, HIDDEN),
            "delta": normal(s, HIDDEN),
            "blocks": normal(s, self.key.nblocks, HIDDEN),
            "kv_cache": torch.zeros(2, 16, 576, dtype=torch.uint8),
            "slots": torch.arange(s),
            "gate_out": torch.zeros(s, GATE, dtype=torch.bfloat16),
            "q_out": torch.zeros(s, heads, 576, dtype=torch.uint8),
            "scratch": torch.zeros(scratch_bytes(self.key), dtype=torch.uint8),
            "epoch": torch.ones(1, dtype=torch.int32),
            "health": torch.zeros(HEALTH_WORDS, dtype=torch.int32),
            "alarm": torch.zeros(1, dtype=torch.int32),
            "tl": torch.zeros(GRID, POINTS, dtype=torch.int64),
        }
        self.peer = torch.zeros(max(PEER_HEAD, peer_bytes(self.key)), dtype=torch.uint8)

    def launch(self, code_object: CodeObject, memory: Memory, peers: Tensor) -> Launch:
        """Opens the tensors to the kernel and packs its arguments."""
        w, values = self.weights, {"peers": peers.data_ptr()}
        for name, tensor in self.own.items():
            memory.add(tensor, f"{name} of {self.rank}", device=self.rank)
            values[name] = tensor.data_ptr()
        memory.add(self.peer, f"peers of {self.rank}", device=self.rank, peer=True)
        for name, kind in PARAMS:
            if kind == "ptr" and name not in values:
                values[name] = memory.add(getattr(w, name), name, read_only=True).data_ptr()
        if self.key.w_uk == "bf16":
            values["w_k"] = memory.add(w.w_uk_t, "w_uk_t", read_only=True).data_ptr()
        values |= {"blocks_token_stride": self.key.nblocks * HIDDEN, "blocks_block_stride": HIDDEN}
        w_k = w.w_k if self.key.w_uk == "mxfp4" else w.w_uk_t
        values |= {f"w_k_stride{i}": w_k.stride(i) * w_k.element_size() for i in range(2)}
        values |= {f"w_k_scale_stride{i}": w.w_k_scale.stride(i) for i in range(3)}
        values |= {"kv_block_stride": 16 * 576, "kv_slot_stride": 576, "block_size": 16, "rank": self.rank, "layer": 3}
        args = [values[name] for name, _ in PARAMS]
        return Launch(code_object, self.key.symbol, GRID, THREADS, args, device=self.rank)


def measure(key: MlaPreBuild, weights: PreWeights) -> dict[str, Any]:
    """The counts of rank 0."""
    built = toolchain.build(toolchain.compile_key(key, "gfx950"))
    code_object, memory = CodeObject(built.payload), Memory()
    steps = [Step(key, weights, r) for r in range(key.ranks)]
    peers = memory.add(torch.tensor([s.peer.data_ptr() + PEER_HEAD for s in steps]), "peers")
    emulator = Emulator(memory, profile=True)
    result = emulator.run([s.launch(code_object, memory, peers) for s in steps])
    if any(s.own["health"].any() for s in steps):
        raise RuntimeError("a wait was given up: the counts are of a failed launch")
    program = emulator.program(code_object, code_object.kernel(key.symbol))
    profile = result.profiles[0]
    found = regions(key)
    asked = weight_bytes(program, profile)
    return {
        "tokens": key.tokens,
        "blocks": key.nblocks,
        "ranks": key.ranks,
        "resources": {name: built.resources[name] for name in ("vgprs", "sgprs", "lds", "private")},
        "code_bytes": len(program.instructions) and int(program.instructions[-1].pc),
        "weight_bytes": {"asked": asked, "size": sum(WEIGHTS.values())},
        "hand_off_pairs": sum(r.pairs for r in found.values()),
        "bytes": {" ".join(k): n for k, n in sorted(profile.bytes.items())},
        "instructions": profile.instructions,
        "mfma": profile.matrix,
        "longest_wave": profile.longest_wave,
        "stages": stages(key, program, profile),
    }


def weight_bytes(program: Program, profile: Profile) -> int:
    """Bytes of the nontemporal loads, which are those of weights: whole waves of 16 bytes a lane."""
    total = 0
    for ins, hits in zip(program.instructions, profile.hits.tolist(), strict=False):
        if ins.name == "BUFFER_LOAD_DWORDX4" and ins.get("nt"):
            total += hits * 64 * 16
    return total


def stages(key: MlaPreBuild, program: Program, profile: Profile) -> dict[str, dict[str, int]]:
    """Counts between the stamps: the stamp of point i is the store of 8 bytes to its place in LDS."""
    first, current = lds(key).stamps, "start"
    counts: dict[str, dict[str, int]] = {}
    pending: list[tuple[Any, int]] = []
    for ins, hits in zip(program.instructions, profile.hits.tolist(), strict=False):
        pending.append((ins, hits))
        point = (ins.get("offset0") + 256 * ins.get("offset1") - first) // 8 if ins.name == "DS_WRITE_B64" else -1
        if point in ENDS and ins.get("offset0") + 256 * ins.get("offset1") >= first:
            current = ENDS[point]
            _add(counts.setdefault(current, {}), pending)
            pending = []
    _add(counts.setdefault("end", {}), pending)
    return counts


def _add(into: dict[str, int], part: list[tuple[Any, int]]) -> None:
    for ins, hits in part:
        name = ins.name
        for what, holds in (
            ("instructions", True),
            ("mfma", "MFMA" in name),
            ("weight_bytes", name == "BUFFER_LOAD_DWORDX4" and bool(ins.get("nt"))),
            ("waits_repeated", name == "S_SLEEP"),
            ("barriers", name == "S_BARRIER"),
            ("lds", name.startswith("DS_")),
            ("memory", name.startswith(("BUFFER_", "GLOBAL_"))),
        ):
            if holds:
                into[what] = into.get(what, 0) + hits * (1024 if what == "weight_bytes" else 1)


def main() -> None:
    """Prints a table for each build; --json keeps all counts."""
    parser = argparse.ArgumentParser(description="counts of one mla_pre launch in the gfx950 emulator")
    parser.add_argument("--tokens", default="1,8", help="rows of the step, a list")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    weights, rows = PreWeights.random(0), []
    for tokens in map(int, args.tokens.split(",")):
        key = MlaPreBuild(tokens=tokens, nblocks=args.blocks, ranks=args.ranks, timeline=True)
        rows.append(measure(key, weights))
        row = rows[-1]
        print(f"\n{key.symbol}: {row['instructions']:,} wave instructions, {row['mfma']:,} MFMA, {row['resources']}")
        print(f"weights asked {row['weight_bytes']['asked']:,} of {row['weight_bytes']['size']:,} bytes")
        for name, count in row["bytes"].items():
            print(f"  {name:24} {count:14,}")
        for name, counts in row["stages"].items():
            print(f"  {name:8} " + "  ".join(f"{k} {v:,}" for k, v in counts.items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
