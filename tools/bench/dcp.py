"""Context parallelism: us a layer on N GPUs against the same kernels with NCCL, its parts, and that it is right.

    python tools/bench/dcp.py --ranks N --build              where the compiler is: the objects, into the user's cache
    python tools/bench/dcp.py --ranks N [--json FILE]        N GPUs of this host, a process each, started from here
    python tools/bench/dcp.py --virtual D                    D ranks in turns on one GPU: right or not, and a rough time
    python tools/bench/dcp.py --ranks 2 --dry-run            no GPU: processes, collectives and arithmetic, no kernels

One call checks (against one device, by the reference), measures, kills a rank and sees that the others are told, and
ends with 0 only if all of it was as it must be. It needs nobody: every step has a deadline, a rank that dies ends all,
and what was measured until then is in the JSON. Lengths are equal within a step; every layer of a timed graph has
weights and a cache of its own, 320 MB or more in all, so nothing is found in L2.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":  # a checkout needs no installation; and this folder's names are not modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from k3dsl.cli.bench import question

harness, ranks, work = question("harness"), question("ranks"), question("dcp_rank")

RESULTS: Final = Path(__file__).resolve().parent / "results" / "dcp.json"
BATCHES: Final = (1, 4, 16, 64)
CONTEXTS: Final = (32768, 131072)
QUERIES: Final = (1, 4)
#: Relative error of a row: against the reference on one device (fp8 queries may round apart), and between the two ways.
AGREE: Final = {"reference": 3e-2, "nccl": 2e-2}
#: Seconds that a wait in a kernel may last, and that a rank may take to notice a dead one in the last check.
TIMEOUT: Final = 20.0
LOST: Final = 1.0
#: NVLink multicast is not used, by nothing here: where it is shared it can take the host's other GPUs down.
ENVIRONMENT: Final = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "4",
}


class Bench:
    """One call: the document grows step by step and is written after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dcp = options.virtual or options.ranks
        self.began = time.monotonic()
        method = (
            f"{self.dcp} ranks of {options.heads} heads, interleave {options.interleave}, page 64, fp8; graph of "
            "layers with weights and caches of their own (320 MB or more a rank), replays begin together on all ranks, "
            "median of 7, the slowest rank's; nccl: the same kernels with all-gather of queries and LSE, "
            "reduce-scatter of partials; parts are timed alone, so they do not add up to the layer"
        )
        if options.virtual:
            method = (
                f"{self.dcp} virtual ranks of {options.heads} heads, interleave {options.interleave}, page 64, fp8, in "
                "turns on one GPU; graph of 4 layers, median of 7 replays; us of a layer of all ranks together"
            )
        self.document: dict[str, Any] = {
            "conditions": harness.conditions(options.commit, method),
            "ranks": self.dcp,
            "virtual": bool(options.virtual),
            "dry": options.dry_run,
            "heads": options.heads,
            "interleave": options.interleave,
            "check": [],
            "rows": [],
            "skipped": [],
            "lost": None,
            "problems": [],
            "ok": False,
        }

    def run(self) -> dict[str, Any]:
        """All steps. A step that fails is a problem in the document, and the last one."""
        o = self.options
        try:
            with ranks.Ranks(1 if o.virtual else o.ranks, ENVIRONMENT) as group:
                self._steps(group)
        except ranks.RankError as error:
            self._problem(str(error))
        self.document["seconds"] = round(time.monotonic() - self.began, 1)
        self.document["ok"] = not self.document["problems"] and not self.document["skipped"]
        self._write()
        return self.document

    def _steps(self, group: Any) -> None:
        o = self.options
        virtual = bool(o.virtual)
        checks, times = ("dcp_virtual", "dcp_virtual") if virtual else ("dcp_check", "dcp_rank")
        if not virtual:
            backend = "gloo" if o.dry_run else "nccl"
            self.document["devices"] = group.call(
                "k3dsl_bench.ranks:join", backend, ranks.free_port(), 60.0, timeout=120
            )
        say(f"checking {self.dcp} ranks against one device")
        self._checked(group.call(f"k3dsl_bench.{checks}:check", self.dcp, o.heads, o.dry_run, TIMEOUT, timeout=o.step))
        for shape in self.shapes():
            if time.monotonic() - self.began > o.budget:
                self.document["skipped"].append(f"rows {shape.rows}, q {shape.q}, context {shape.context}: out of time")
                continue
            say(f"rows {shape.rows}, q {shape.q}, context {shape.context}")
            self._measured(shape, group.call(f"k3dsl_bench.{times}:measure", shape, TIMEOUT, timeout=o.step))
            self.document["conditions"]["gpu"] = harness.smi()  # the clocks just after the work
            self._write()
        if not virtual:
            say("killing the last rank")
            shape = self._shape(1, 1, 64 * self.dcp)
            dead = self.dcp - 1
            self._lost(group.call(f"k3dsl_bench.{checks}:lose", shape, dead, LOST, timeout=60, dying=(dead,)), dead)

    def shapes(self) -> list[Any]:
        """What is measured."""
        o = self.options
        batches, contexts = (BATCHES[:2], (1024,)) if o.quick or o.dry_run else (BATCHES, CONTEXTS)
        if o.dry_run:
            contexts = (40,)
        return [self._shape(b, q, c) for c in contexts for q in QUERIES for b in batches if b % q == 0]

    def _shape(self, rows: int, q: int, context: int) -> Any:
        o = self.options
        return work.Shape(rows, q, context, self.dcp, o.heads, o.interleave, o.dry_run)

    def _checked(self, found: list[list[dict[str, Any]]]) -> None:
        for cases in zip(*found, strict=True):
            row = {
                "case": cases[0]["case"],
                "error": max(c["error"] for c in cases),
                "zeros": all(c["zeros"] for c in cases),
                "armed": all(c["armed"] for c in cases),
            }
            self.document["check"].append(row)
            if not (all(c["error"] <= AGREE["reference"] for c in cases) and row["zeros"] and row["armed"]):
                self._problem(f"check {row}")

    def _measured(self, shape: Any, found: list[dict[str, Any]]) -> None:
        both = set.intersection(*({name for name in one if name.endswith("us")} for one in found))
        times = {name: max(one[name] for one in found) for name in found[0] if name in both}
        row: dict[str, Any] = {
            "rows": shape.rows,
            "q": shape.q,
            "context": shape.context,
            "layers": shape.layers,
            **times,
        }
        row["armed"] = all(one["armed"] for one in found)
        if "nccl_us" in both:
            row["speedup"] = times["nccl_us"] / times["us"]
            row["error_against_nccl"] = max(one["error_against_nccl"] for one in found)
            if not all(one["error_against_nccl"] <= AGREE["nccl"] for one in found):
                self._problem(f"the two ways differ: {row}")
        for rank, one in enumerate(found):
            if "nccl_error" in one:
                self._problem(f"rank {rank}, rows {shape.rows}: the way with collectives failed: {one['nccl_error']}")
        if not row["armed"]:
            self._problem(f"a mailbox is not armed after the step: {row}")
        self.document["rows"].append(row)

    def _lost(self, found: list[dict[str, Any] | None], dead: int) -> None:
        self.document["lost"] = {"rank": dead, "bound": LOST, "found": found}
        for rank, one in enumerate(found):
            if rank != dead and (one is None or one["peer"] != dead or one["seconds"] > 2 * LOST + 2):
                self._problem(f"rank {rank} was not told that rank {dead} is lost: {one}")

    def _problem(self, text: str) -> None:
        say(f"PROBLEM: {text}")
        self.document["problems"].append(text)

    def _write(self) -> None:
        """Into the file's runs, beside those of other numbers of ranks."""
        path: Path | None = self.options.json
        if path is None:
            return
        runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        name = f"{'virtual-' if self.options.virtual else ''}{self.dcp}" + ("-dry" if self.options.dry_run else "")
        runs[name] = self.document
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(runs, indent=2) + "\n")


def build(options: argparse.Namespace) -> int:
    """Builds the objects of a call with these options into the user's cache; 0 if all are there."""
    from concurrent.futures import ThreadPoolExecutor

    from k3dsl import CompileCache
    from k3dsl.nvidia.toolchain import Compilers, compile_key

    cache, keys = CompileCache(), work.kernel_keys(Bench(options).shapes())
    with Compilers(2) as compilers, ThreadPoolExecutor(2) as pool:
        jobs = {key: pool.submit(cache.get_or_build, compile_key(key, work.TARGET), compilers.build) for key in keys}
    failed = {key: job.exception() for key, job in jobs.items() if job.exception() is not None}
    for key, error in failed.items():
        say(f"{key}: {error}")
    print(f"{len(keys)} objects, {len(failed)} failed, in {cache.root}")
    return 1 if failed else 0


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def table(document: dict[str, Any]) -> str:
    """The rows for people."""
    kind = "virtual ranks" if document["virtual"] else "ranks"
    gpu = document["conditions"]["gpu"].get("name", "no GPU")
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("context", "context", str),
        ("q", "q", str),
        ("rows", "rows", str),
        ("us", "us", lambda x: f"{x:.1f}"),
        ("nccl us", "nccl_us", lambda x: f"{x:.1f}"),
        ("speedup", "speedup", lambda x: f"{x:.2f}x"),
        ("publish", "publish_us", lambda x: f"{x:.1f}"),
        ("core", "core_us", lambda x: f"{x:.1f}"),
        ("merge", "merge_us", lambda x: f"{x:.1f}"),
        ("nccl publish", "nccl_publish_us", lambda x: f"{x:.1f}"),
        ("nccl merge", "nccl_merge_us", lambda x: f"{x:.1f}"),
        ("error", "error_against_nccl", lambda x: f"{x:.1e}"),
    ]
    used = [c for c in columns if any(c[1] in row for row in document["rows"])]
    lines = [
        [c[0] for c in used],
        *([c[2](row[c[1]]) if c[1] in row else "" for c in used] for row in document["rows"]),
    ]
    width = [max(len(line[i]) for line in lines) for i in range(len(used))]
    head = f"{document['ranks']} {kind} of {document['heads']} heads on {gpu}: us a layer"
    body = ["  ".join(cell.rjust(w) for cell, w in zip(line, width, strict=True)) for line in lines]
    worst = max((c["error"] for c in document["check"]), default=float("nan"))
    tail = [f"{len(document['check'])} cases against one device, largest error {worst:.1e}"]
    if document["lost"] is not None:
        tail += [f"rank {r} of a killed one: {one['text']} ({one['seconds']:.2f} s)"
                 for r, one in enumerate(document["lost"]["found"]) if one]  # fmt: skip
    tail += [f"skipped: {text}" for text in document["skipped"]] + [f"PROBLEM: {text}" for text in document["problems"]]
    return "\n".join([head, *body, *tail, f"{'ok' if document['ok'] else 'NOT ok'} in {document['seconds']:.0f} s"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if everything was measured and as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--ranks", type=int, choices=(2, 4, 8), default=0, help="GPUs of this host, one rank each")
    which.add_argument("--virtual", type=int, choices=(2, 4, 8), default=0, help="ranks that take turns on one GPU")
    parser.add_argument("--heads", type=int, choices=(6, 12), default=12, help="heads of a rank")
    parser.add_argument("--interleave", type=int, choices=(1, 16, 64), default=1)
    parser.add_argument(
        "--json",
        type=Path,
        help=f"results, beside those of other numbers of ranks; by default {RESULTS.name}, of a dry run none",
    )
    parser.add_argument("--commit", help="the commit to record, where there is no git history")
    parser.add_argument("--build", action="store_true", help="build the objects that the same call needs, no more")
    parser.add_argument("--quick", action="store_true", help="two small batches, short contexts")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs: the reference in place of the kernels")
    parser.add_argument("--budget", type=float, default=360.0, help="seconds after which no further shape is begun")
    parser.add_argument("--step", type=float, default=90.0, help="seconds that one shape or the checks may take")
    options = parser.parse_args(arguments)
    if options.virtual and options.dry_run:
        parser.error("--dry-run is for --ranks: the tests run virtual ranks on the CPU")
    if options.build:
        return build(options)
    if options.dry_run:
        options.heads = 1
    else:
        harness.require_gpu()
        options.json = options.json or RESULTS
    document = Bench(options).run()
    print(table(document))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
