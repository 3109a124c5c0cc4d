"""Keys, a builder that counts, and what lies in a folder: for the cache tests."""

from pathlib import Path
from typing import Any

from k3dsl.cache import Built, CompileKey


def make_key(n: Any = 1, **changes: Any) -> CompileKey:
    """A key like those of kernels; `n` tells keys apart."""
    facts: dict[str, Any] = {
        "kernel": "mla_value",
        "params": {"heads": 12, "n": n, "eps": 1e-5, "layout": ("k", (1, 512))},
        "target": "sm_90a",
        "toolchain": {"dsl": "4.8.1", "flavour": "cu13"},
        "sources": "ab" * 32,
    }
    return CompileKey(**(facts | changes))


class Builder:
    """A `build` that counts its calls and makes payloads that tell their key."""

    def __init__(self, size: int = 30_000) -> None:
        self.size = size
        self.keys: list[CompileKey] = []

    def __call__(self, key: CompileKey) -> Built:
        self.keys.append(key)
        return Built(payload_of(key, self.size), "kernel.cubin", {"registers": 64, "spills": 0}, "ptxas: fine\n")

    @property
    def calls(self) -> int:
        return len(self.keys)


def payload_of(key: CompileKey, size: int = 30_000) -> bytes:
    """What `Builder` makes of a key."""
    return (key.encoding * (size // len(key.encoding) + 1))[:size]


def files_under(path: Path) -> list[str]:
    """Every file and folder beneath `path`, relative, but for what sessions and locks leave."""
    return sorted(
        str(item.relative_to(path))
        for item in path.rglob("*")
        if item.relative_to(path).parts[0] not in ("sessions", "locks")
    )
