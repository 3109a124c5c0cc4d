"""Entries as commands name, show and find them."""

from typing import TYPE_CHECKING, Any

from k3dsl.errors import ConfigError, K3Error

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache, CompileKey, Entry, Manifest


def open_cache() -> "CompileCache":
    from k3dsl.cache import CompileCache

    return CompileCache()


class Ambiguous(ConfigError):
    """A digest prefix that several entries share; `candidates` are their digests."""

    def __init__(self, prefix: str, candidates: "list[Entry]") -> None:
        lines = [f"key={prefix!r} is the beginning of {len(candidates)} digests; give more digits:"]
        lines += [f"  {entry.digest[:20]}  {entry.key.kernel} {entry.key.target}" for entry in candidates]
        super().__init__("\n".join(lines))
        self.candidates = [entry.digest for entry in candidates]


class Missing(K3Error, KeyError):
    """No entry has that digest."""

    def __str__(self) -> str:
        return str(self.args[0])


def complete(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: digests with what they are."""
    try:
        found = [entry for entry in open_cache().entries() if entry.digest.startswith(incomplete.lower())]
    except (K3Error, OSError):
        return []
    return [(entry.key.short, f"{entry.key.kernel} {entry.key.target}") for entry in found]


def find(cache: "CompileCache", prefix: str) -> "Entry":
    """The one entry whose digest begins with `prefix`. Raises Ambiguous, ConfigError or Missing."""
    text = prefix.lower()
    if not text or set(text) - set("0123456789abcdef") or len(text) > 64:
        raise ConfigError(f"key={prefix!r} must be the first of 64 hex digits")
    found = [entry for entry in cache.entries() if entry.digest.startswith(text)]
    if len(found) > 1:
        raise Ambiguous(prefix, found)
    if not found:
        raise Missing(f"no entry has a digest that begins with {prefix!r}: see `k3dsl cache ls`")
    return found[0]


def key_of(cache: "CompileCache", prefix: str) -> "CompileKey":
    """The key of an entry, also of one in quarantine: of that, too, people ask why."""
    try:
        return find(cache, prefix).key
    except Missing:
        rejected = [key for key in cache.quarantined_keys() if key.digest.startswith(prefix.lower())]
        if not rejected:
            raise
        return rejected[0]


def pin_of(cache: "CompileCache", prefix: str) -> str:
    """The digest of an entry, or of a pin that has outlived its entry."""
    from k3dsl.cache.bound import pinned

    try:
        return find(cache, prefix).digest
    except Missing:
        found = sorted(d for d in (pinned(cache.folder) if cache.folder else ()) if d.startswith(prefix.lower()))
        if len(found) > 1:
            raise ConfigError(f"key={prefix!r} is the beginning of {len(found)} pins: {', '.join(found)}") from None
        if not found:
            raise
        return found[0]


def row(entry: "Entry") -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "digest": entry.digest,
        "kernel": entry.key.kernel,
        "target": entry.key.target,
        "params": entry.key.to_json()["params"],
        "payload": manifest.payload,
        "size": manifest.size,
        "registers": manifest.resources.get("registers"),
        "build_seconds": manifest.build_seconds,
        "created": manifest.created,
        "source": entry.source,
        "path": entry.path,
    }


def params(key: "CompileKey") -> str:
    return " ".join(f"{name}={value!r}" for name, value in sorted(key.params.items()))


def disassemble(file: str | None, target: str) -> str:
    """The vendor's own command, by the target's prefix alone: the cache itself knows no vendor."""
    tool = "llvm-objdump -d" if target.startswith("gfx") else "nvdisasm"
    return f"{tool} {file or '(not in a folder)'}"


def other_flavour(manifest: "Manifest") -> str | None:
    """Why an entry of a bundle is of no use here whatever the GPU: built with a CUDA that no key of ours names."""
    from k3dsl.nvidia.toolchain import facts

    try:
        here = facts(manifest.key["target"])["cuda"]
    except ConfigError:
        return None  # no target of that vendor
    theirs = manifest.key["toolchain"].get("cuda", here)
    return None if theirs == here else f"it was built with CUDA {theirs}, kernels here are built with CUDA {here}"
