"""The table of supported instructions in docs/gfx950.md, made from the core's own registry."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tinygrad.runtime.autogen.amd.cdna import enum as encodings

from .build import operations

BEGIN, END = "<!-- table: python -m tools.gfx950 table --write docs/gfx950.md -->", "<!-- end of table -->"
FORMATS = {
    "SOP1": "SOP1Op",
    "SOP2": "SOP2Op",
    "SOPC": "SOPCOp",
    "SOPK": "SOPKOp",
    "SOPP": "SOPPOp",
    "SMEM": "SMEMOp",
    "VOP1": "VOP1Op",
    "VOP2": "VOP2Op",
    "VOPC": "VOPCOp",
    "VOP3": "VOP3Op",
    "VOP3 with a scalar result": "VOP3SDOp",
    "VOP3P": "VOP3POp",
    "VOP3P with scales": "VOP3PX2Op",
    "DS": "DSOp",
    "GLOBAL": "GLOBALOp",
    "FLAT": "FLATOp",
    "MUBUF": "MUBUFOp",
    "MTBUF": "MTBUFOp",
    "SCRATCH": "SCRATCHOp",
}
RENAMED = {"V_ACCVGPR_READ": "V_MOV_B32", "V_ACCVGPR_WRITE": "V_MOV_B32", "V_ACCVGPR_MOV_B32": "V_MOV_B32"}


def operation(name: str) -> str:
    """The core's name of an instruction; the same rules as lower.py."""
    if name in RENAMED:
        return RENAMED[name]
    if match := re.fullmatch(r"S_(BUFFER_)?LOAD_DWORD(X\d+)?", name):
        return "S_BUFFER_LOAD" if match[1] else "S_LOAD"
    name = name.replace("LOAD_LDS", "LOAD") if name.startswith("GLOBAL") else name
    name = re.sub(r"^FLAT_", "GLOBAL_", name)
    return re.sub(r"_DWORDX\d$", "_DWORD", name) if name.startswith(("GLOBAL", "BUFFER")) else name


def supported() -> dict[str, tuple[list[str], list[str]]]:
    """For each format: the instructions that run, and those that stop with their name."""
    have = operations()
    out: dict[str, tuple[list[str], list[str]]] = {}
    for label, enum_name in FORMATS.items():
        groups: tuple[list[str], list[str]] = ([], [])
        for member in getattr(encodings, enum_name):
            name = member.name.removesuffix("_E32").removesuffix("_E64")
            groups[0 if operation(name) in have else 1].append(name.lower())
        if label == "VOP3":  # those that VOP1, VOP2 and VOPC list already
            seen = {n for key in ("VOP1", "VOP2", "VOPC") for g in out[key] for n in g}
            groups = ([n for n in groups[0] if n not in seen], [n for n in groups[1] if n not in seen])
        out[label] = groups
    return out


def shortened(names: list[str]) -> str:
    """Names in code marks; families that differ only in their first comparison word are folded."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = re.fullmatch(r"(v_cmpx?|s_cmpk?)_([a-z]+)_(\w+)", name) or re.fullmatch(
            r"(s_(?:buffer_)?atomic)_([a-z]+)(\w*)", name
        )
        if match and match[2] != "class":
            families[f"{match[1]}_*_{match[3]}".replace("*__", "*_").removesuffix("_")].append(match[2])
        else:
            families[name] = []
    return ", ".join(f"`{k}`" + (f" ({' '.join(v)})" if v else "") for k, v in families.items())


def markdown() -> str:
    lines = [BEGIN, ""]
    for label, (runs, stops) in supported().items():
        lines.append(f"**{label}**: {len(runs)} run, {len(stops)} stop.")
        if runs:
            lines.append("Run: " + shortened(runs) + ".")
        if stops:
            lines.append("Stop: " + shortened(stops) + ".")
        lines.append("")
    return "\n".join([*lines, END])


def write(page: Path) -> None:
    """Replaces the table in a page."""
    text = page.read_text()
    before, rest = text.split(BEGIN, 1)
    page.write_text(before + markdown() + rest.split(END, 1)[1])
