"""Kernel arguments from a JSON file, for the command line.

A list with one entry for each explicit argument of the kernel, in order:

    5                                              a number, as wide as the argument
    1.5                                            a float
    {"file": "x.npy"}                              an array; the kernel gets its address
    {"zeros": [64, 64], "dtype": "float32"}        a fresh array; also "ones", "random" (normal) and "range"
    {..., "save": "y.npy"}                         written to a file after the run
    {..., "uninitialised": true}                   reads of bytes that no kernel wrote are reported
    null                                           a null pointer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .memory import Memory

MAKERS = ("zeros", "ones", "random", "range")


def _array(entry: dict[str, Any], folder: Path, seed: int) -> np.ndarray:
    if "file" in entry:
        return np.ascontiguousarray(np.load(folder / entry["file"]))
    maker = next((m for m in MAKERS if m in entry), None)
    if maker is None:
        raise ValueError(f"needs one of file, {', '.join(MAKERS)}")
    shape, dtype = entry[maker], np.dtype(entry.get("dtype", "float32"))
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} holds addresses of Python, must be one of numbers")
    if maker == "random":
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    if maker == "range":
        return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    return np.full(shape, maker == "ones", dtype)


def load(path: Path) -> tuple[list[Any], Memory, list[tuple[Path, np.ndarray]]]:
    """The arguments, the memory that they need, and what to save afterwards."""
    args: list[Any] = []
    memory, saves = Memory(), []
    entries = json.loads(path.read_text())
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds a {type(entries).__name__}, must hold a list with an entry for each argument")
    for k, entry in enumerate(entries):
        if not isinstance(entry, dict):
            args.append(entry)
            continue
        try:
            array = _array(entry, path.parent, k)
        except (TypeError, ValueError, OverflowError, MemoryError, EOFError) as error:  # as numpy has them
            raise ValueError(f"argument {k}, {entry}: {error}") from None
        memory.add(array, name=f"argument {k}", uninitialised=bool(entry.get("uninitialised")))
        args.append(array)
        if "save" in entry:
            saves.append((path.parent / entry["save"], array))
    return args, memory, saves
