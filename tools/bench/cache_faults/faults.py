"""The same faults for several caches: what does each do? Every observation is of real processes on real folders."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
SECONDS: Final = 120.0
#: What is good: the right kernel, at most one more build. Everything else is a red cell.
GOOD: Final = ("hit", "rebuilt", "built")


@dataclass(frozen=True)
class Subject:
    """A cache under test: how a process uses it, and which file of its folder is the object."""

    name: str
    python: str
    script: str
    object: str

    def command(self, folder: Path, *options: str) -> list[str]:
        return [self.python, str(HERE / self.script), str(folder), *options]

    def objects(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob(self.object))


OURS: Final = Subject("k3dsl", sys.executable, "use_ours.py", "kernel.cubin")


def rivals(python: str) -> list[Subject]:
    """Triton's and quack's caches, as installed for the interpreter `python`."""
    return [
        Subject("triton", python, "use_triton.py", "kernel.cubin"),
        Subject("quack", python, "use_quack.py", "*.o"),
    ]


class Outcome:
    """What became of one process that wanted a kernel."""

    def __init__(self, code: int | None, out: str, err: str) -> None:
        self.err = err.strip().splitlines()[-1][:100] if err.strip() else ""
        self.facts: dict[str, Any] = {}
        if code is None:
            self.word = "hangs"
        elif code < 0:
            self.word = "crashes"
        elif code:
            self.word = "fails"
        else:
            self.facts = json.loads(out.strip().splitlines()[-1])
            self.word = self.facts["bad"] if not self.facts["good"] else "rebuilt" if self.facts["builds"] else "hit"


class Bench:
    """Runs one subject through the faults, each on a copy of one warm folder."""

    def __init__(self, subject: Subject, place: Path, quick: bool) -> None:
        self.subject = subject
        self.place = place
        self.quick = quick
        self.expect: list[str] = []
        self.warm = place / "warm"
        self.random = random.Random(0)
        first = self.use(self.warm)
        if first.word != "rebuilt":
            raise RuntimeError(f"{subject.name} does not work here: {first.word} {first.err}")
        if "sha" in first.facts:
            self.expect = ["--expect", first.facts["sha"]]
        if self.use(self.warm).word != "hit":
            raise RuntimeError(f"{subject.name} does not hit its own entry")

    def use(self, folder: Path, *options: str) -> Outcome:
        return self.wait(self.start(folder, *options))

    def start(self, folder: Path, *options: str) -> "subprocess.Popen[str]":
        environ = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(
            self.subject.command(folder, *self.expect, *options), env=environ, cwd=self.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait(self, process: "subprocess.Popen[str]") -> Outcome:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome(None, "", "")
        return Outcome(process.returncode, out, err)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """The warm folder again; at the same path, since one cache writes absolute paths into its files."""
        kept = self.place / "kept"
        if not kept.exists():
            shutil.copytree(self.warm, kept)
        shutil.rmtree(self.warm)
        shutil.copytree(kept, self.warm)
        yield self.warm

    def twice(self, folder: Path) -> str:
        """What the next process gets, and what the one after it: has it healed?"""
        first, second = self.use(folder), self.use(folder)
        return first.word if first.word == second.word or second.word == "hit" else f"{first.word}, then {second.word}"

    def truncate(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for part in (0.0, 0.5, 0.99):
            with self.copy() as folder:
                for file in self.subject.objects(folder):
                    os.truncate(file, int(part * file.stat().st_size))
                found[self.twice(folder)] += 1
        return found

    def flip(self) -> Counter[str]:
        found: Counter[str] = Counter()
        places = 4 if self.quick else 12
        for at in range(places):
            with self.copy() as folder:
                for file in self.subject.objects(folder):
                    content = bytearray(file.read_bytes())
                    content[(at * len(content)) // places + len(content) // (2 * places)] ^= 0x20
                    file.write_bytes(content)
                found[self.twice(folder)] += 1
        return found

    def kill(self) -> Counter[str]:
        """kill -9 at a random point of a cold run, builds made to last; then what the next process gets."""
        found: Counter[str] = Counter()
        began = time.monotonic()
        self.use(self.place / "timed", "--slow", "0.3")
        lasts = time.monotonic() - began
        for n in range(3 if self.quick else 10):
            folder = self.place / f"kill{n}"
            process = self.start(folder, "--slow", "0.3")
            time.sleep(self.random.uniform(0.4, 1.0) * lasts)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            found[self.twice(folder)] += 1
        return found

    def read_only(self) -> Counter[str]:
        """A cold and a warm folder on a filesystem that is mounted read-only."""
        found: Counter[str] = Counter()
        for state in ("cold", "warm"):
            with self.copy() as folder:
                if state == "cold":
                    shutil.rmtree(folder)
                    folder.mkdir()
                subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
                try:
                    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
                    found[f"{state}: {self.use(folder).word}"] += 1
                finally:
                    subprocess.run(["umount", str(folder)], check=True)
        return found

    def two_writers(self) -> Counter[str]:
        """Four cold processes at once, builds made to last: how many builds?"""
        found: Counter[str] = Counter()
        for n in range(1 if self.quick else 3):
            folder = self.place / f"writers{n}"
            running = [self.start(folder, "--slow", "2") for _ in range(4)]
            outcomes = [self.wait(process) for process in running]
            bad = [outcome.word for outcome in outcomes if outcome.word not in GOOD]
            builds = sum(outcome.facts.get("builds", 0) for outcome in outcomes)
            found[", ".join(bad) if bad else f"{builds} build{'s' if builds > 1 else ''} for 4 processes"] += 1
        return found

    def changed(self, what: str) -> Counter[str]:
        """The toolchain is another one now: an old object must not be used."""
        with self.copy() as folder:
            # Another toolchain makes other bytes: the old ones are not what is expected now.
            expect, self.expect = self.expect, []
            word = self.use(folder, "--change", what).word
            self.expect = expect
        return Counter({"stale hit" if word == "hit" else word: 1})

    def all(self) -> dict[str, dict[str, int]]:
        """Every fault: what was observed, and how often."""
        found = {
            "truncated": self.truncate(),
            "a byte flipped": self.flip(),
            "kill -9 of the writer": self.kill(),
            "read-only folder": self.read_only(),
            "four writers at once": self.two_writers(),
            "toolchain: other version": self.changed("version"),
            "toolchain: other flavour": self.changed("flavour"),
        }
        return {fault: dict(counts) for fault, counts in found.items()}


def is_red(word: str) -> bool:
    """Whether an observation is one that a user would call a fault of the cache."""
    if " for 4 processes" in word:
        return not word.startswith("1 build ")
    return not all(part in GOOD for part in word.removeprefix("cold: ").removeprefix("warm: ").split(", then "))


def observe(subjects: list[Subject], quick: bool) -> dict[str, dict[str, dict[str, int]]]:
    """For each subject and fault what was observed, and how often."""
    found = {}
    for subject in subjects:
        place = Path(tempfile.mkdtemp(prefix=f"k3dsl-faults-{subject.name}-"))
        try:
            found[subject.name] = Bench(subject, place, quick).all()
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return found


def versions(python: str) -> dict[str, str]:
    """Versions of what is compared."""
    program = (
        "import json\nfrom importlib.metadata import version\n"
        "print(json.dumps({n: version(n) for n in ('triton', 'quack-kernels', 'nvidia-cutlass-dsl')}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))
