"""python -m tools.gfx950 run | disasm | profile | trace | table"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from . import table
from .arguments import load
from .build import operations
from .codeobject import CodeObject
from .disassembly import listing
from .emulator import Emulator, Launch, Result, Trace
from .errors import EmulatorError
from .lower import Lowering


def sizes(text: str) -> tuple[int, ...]:
    """'4' or '4,2,1'."""
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.gfx950", description="Runs gfx950 code objects on the CPU.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run a kernel"),
        ("profile", "run a kernel and show what it executed"),
        ("trace", "run a kernel and show one wave, an instruction a line"),
    ):
        p = commands.add_parser(name, help=text)
        p.add_argument("file", type=Path)
        p.add_argument("--kernel")
        p.add_argument("--grid", type=sizes, required=True, help="workgroups, e.g. 8 or 8,4")
        p.add_argument("--block", type=sizes, required=True, help="threads of a workgroup")
        p.add_argument(
            "--args", type=Path, required=True, help="JSON list of arguments (see tools/gfx950/arguments.py)"
        )
        p.add_argument("--dynamic-lds", type=int, default=0)
        p.add_argument("--model", choices=("flat", "weak"), default="flat")
        p.add_argument("--seed", type=int, default=0)
        p.add_argument("--quantum", type=int, default=1000)
        p.add_argument("--uninitialised", action="store_true", help="report reads of what was never written")
        if name == "trace":
            p.add_argument("--workgroup", type=int, default=0)
            p.add_argument("--wave", type=int, default=0)
    p = commands.add_parser("disasm", help="the instructions of a kernel")
    p.add_argument("file", type=Path)
    p.add_argument("--kernel")
    p = commands.add_parser("table", help="the supported instructions, as docs/gfx950.md holds them")
    p.add_argument("--write", type=Path, help="replace the table in this page")
    return top


def execute(args: argparse.Namespace, trace: Trace | None = None) -> Result:
    values, memory, saves = load(args.args)
    emulator = Emulator(
        memory,
        model=args.model,
        seed=args.seed,
        quantum=args.quantum,
        uninitialised=args.uninitialised,
        profile=args.command == "profile",
    )
    launch = Launch(CodeObject(args.file), args.kernel, args.grid, args.block, values, args.dynamic_lds)
    result = emulator.run([launch], trace)
    for path, array in saves:
        np.save(path, array)
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "disasm":
            code_object = CodeObject(args.file)
            for name in [args.kernel] if args.kernel else sorted(code_object.kernels):
                kernel = code_object.kernel(name)
                print(
                    f"{kernel.name}: {kernel.rows} vector registers, {kernel.lds_bytes} bytes of LDS, "
                    f"{kernel.size} bytes of code"
                )
                print("\n".join(listing(Lowering(operations()).run(code_object, kernel))))
        elif args.command == "table":
            if args.write:
                table.write(args.write)
            else:
                print(table.markdown())
        else:
            start = time.perf_counter()
            result = execute(args, Trace(print, args.workgroup, args.wave) if args.command == "trace" else None)
            seconds = time.perf_counter() - start
            if args.command == "profile":
                print("\n".join(result.profiles[0].lines()))
            print(f"{result.instructions} wave instructions in {result.waves} waves, {seconds:.3f} s")
            for report in result.reports:
                print(f"report: {report}")
    except (EmulatorError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
