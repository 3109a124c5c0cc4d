"""`k3dsl cache`: what is there, why something is not, and what to do with it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cache.key import short
from k3dsl.cli import planargs as args
from k3dsl.cli.console import FINDING, Json, emit, err, out, table
from k3dsl.cli.entries import complete, disassemble, find, key_of, open_cache, other_flavour, params, pin_of, row
from k3dsl.env import age, size
from k3dsl.errors import ConfigError, K3Error

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache, CompileKey

app = typer.Typer(
    help="The compile cache: list, explain, check, bound, ship.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PREFIX_HELP = "First digits of a digest, enough to be unique."


Key = Annotated[str, typer.Argument(metavar="KEY", help=_PREFIX_HELP, autocompletion=complete)]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help=_PREFIX_HELP, autocompletion=complete)]
TargetOption = Annotated[str | None, typer.Option("--target", help="Only entries of these targets, e.g. sm_90a.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, do nothing.")]


@app.command("path")
def path(json: Json = False) -> None:
    """Prints the cache folder.

    Example: du -sh $(k3dsl cache path)
    """
    cache = open_cache()
    if json:
        emit({"path": _text(cache.root), "layers": [layer.name for layer in cache.layers], "degraded": cache.degraded})
    elif cache.root is not None:
        print(cache.root)
    if cache.root is None:
        raise OSError("no home folder was found: set K3DSL_CACHE_DIR")


@app.command("ls")
def ls(
    target: TargetOption = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only entries of this kernel.")] = None,
    json: Json = False,
) -> None:
    """Lists the entries of the folder and of its folder layers.

    Example: k3dsl cache ls --target sm_90a --kernel mla_value
    """
    cache = open_cache()
    _must_read(cache, "no_folder")
    wanted = _known(target, cache)
    entries = [
        entry
        for entry in cache.entries()
        if (wanted is None or entry.key.target in wanted) and kernel in (None, entry.key.kernel)
    ]
    if json:
        emit({"entries": [row(entry) for entry in entries]})
        return
    view = table("Entries", "key", "kernel", "target", "params", "bytes", "registers", "build s", "created", "in",
                 right=("bytes", "registers", "build s"))  # fmt: skip
    for entry in entries:
        manifest = entry.manifest
        view.add_row(
            entry.key.short,
            entry.key.kernel,
            entry.key.target,
            params(entry.key),
            str(manifest.size),
            str(manifest.resources.get("registers", "")),
            f"{manifest.build_seconds:.1f}",
            manifest.created[:16].replace("T", " "),
            entry.source,
        )
    out().print(view)
    out().print(f"{len(entries)} entries, {sum(entry.manifest.size for entry in entries)} bytes of payload")


@app.command("show")
def show(key: Key, json: Json = False) -> None:
    """Prints all that is known of one entry: key, sizes, resource use, who built it and when, how to disassemble it.

    Exit 1 if no entry has that key or if the entry is damaged.

    Example: k3dsl cache show 3fa9
    """
    entry = find(open_cache(), key)
    problem = None
    try:
        entry.payload  # noqa: B018 - reads and checks it
    except (K3Error, OSError) as error:
        problem = str(error)
    manifest = entry.manifest
    file = f"{entry.path}/{manifest.payload}" if entry.path else None
    if json:
        emit(
            {
                **row(entry),
                "key": entry.key.to_json(),
                "resources": manifest.resources,
                "sha256": manifest.sha256,
                "file": file,
                "host": manifest.host,
                "user": manifest.user,
                "version": manifest.version,
                "log": manifest.log,
                "disassemble": disassemble(file, entry.key.target),
                "sound": problem is None,
                "problem": problem,
            }
        )
    else:
        view = table(f"{entry.key.kernel} {entry.key.short}", "", "")
        rows: list[tuple[str, Any]] = [
            ("digest", entry.digest),
            ("kernel", entry.key.kernel),
            ("target", entry.key.target),
            *((f"params.{name}", repr(value)) for name, value in sorted(entry.key.params.items())),
            *((f"toolchain.{name}", value) for name, value in sorted(entry.key.toolchain.items())),
            ("sources", entry.key.sources),
            ("payload", f"{manifest.payload}, {manifest.size} bytes, sha256 {manifest.sha256}"),
            *((name, value) for name, value in sorted(manifest.resources.items())),
            ("built", f"{manifest.created} by {manifest.user} on {manifest.host} in {manifest.build_seconds:.1f} s"),
            ("with", f"k3dsl {manifest.version}"),
            ("in", entry.path or entry.source),
            ("disassemble", disassemble(file, entry.key.target)),
            ("log", manifest.log.strip() or "(empty)"),
            ("sound", "yes" if problem is None else problem),
        ]
        for name, value in rows:
            view.add_row(name, str(value))
        out().print(view)
    if problem is not None:
        raise typer.Exit(FINDING)


@app.command("why")
@args.takes_plan
def why(
    given: args.PlanArguments,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help=_PREFIX_HELP, autocompletion=complete)] = None,
    json: Json = False,
) -> None:
    """Says for a key, or for every key of a deployment, whether it is there; if not, what the nearest entry has other.

    Exit 1 if any is not there.

    Example: k3dsl cache why --target sm_90a --batches 1-8 --queries 1,4
    """
    cache = open_cache()
    if key is not None:
        if given != args.PlanArguments():
            raise ConfigError(f"key={key!r} and plan arguments: give one or the other")
        keys: Iterable[CompileKey] = [key_of(cache, key)]
    else:
        keys = dict.fromkeys(key for one in given.deployments() for key in one.keys())  # noqa: SIM118 - a method
    found = [cache.explain(key) for key in keys]
    missing = [item for item in found if not item.present]
    if json:
        emit(
            {"present": len(found) - len(missing), "missing": len(missing), "keys": [item.to_json() for item in found]}
        )
    else:
        for item in found if key is not None else missing:
            out().print(str(item), markup=False)
        out().print(f"{len(found) - len(missing)} of {len(found)} keys present")
    if missing:
        raise typer.Exit(FINDING)


@app.command("stats")
def stats(json: Json = False) -> None:
    """Prints what the caches of all processes did, by reason, and what is stored.

    Example: k3dsl cache stats --json
    """
    from k3dsl.cache import COUNTERS

    cache = open_cache()
    _must_read(cache, "no_folder")
    found = cache.stats()
    if json:
        emit(dict(found))
        return
    view = table("Counters", "counter", "count", "what it counts", right=("count",))
    for name, meaning in COUNTERS.items():
        view.add_row(name, str(found[name]), meaning)
    out().print(view)
    view = table("Stored", "", "", right=())
    for name in ("root", "entries", "bytes", "max_bytes", "quarantined", "quarantined_bytes", "pinned"):
        view.add_row(name, "none" if found[name] is None else str(found[name]))
    for layer in found["layers"]:
        view.add_row("layer", layer)
    out().print(view)
    for message in found["degraded"].values():
        err().print(f"note: {message}", markup=False)


@app.command("verify")
def verify(
    recompile: Annotated[bool, typer.Option("--recompile", help="Also build each again and compare bytes.")] = False,
    json: Json = False,
) -> None:
    """Reads and checks every entry. Corrupt ones are moved to quarantine; the next use builds them again.

    Exit 1 if one was corrupt, or if a build gives other bytes.

    Example: k3dsl cache verify --recompile
    """
    import msgspec

    cache = open_cache()
    _must_read(cache, "no_folder", "untrusted")
    report = cache.verify(recompile=recompile)
    if json:
        emit(msgspec.to_builtins(report))
    else:
        view = table("Findings", "key", "target", "what", "in", "reason")
        for what, findings in (("corrupt", report.corrupt), ("differs", report.differs), ("skipped", report.skipped)):
            for item in findings:
                view.add_row(short(item.digest), item.target, what, item.where, item.reason)
        if view.row_count:
            out().print(view)
        again = f", {report.recompiled} built again, {len(report.differs)} differ" if recompile else ""
        out().print(f"{report.sound} of {report.checked} entries are sound{again}")
    if not report.clean:
        raise typer.Exit(FINDING)


@app.command("prune")
def prune(
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", help="Keep at most this much, e.g. 2G.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Drop what was unused so long, e.g. 30d.")
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Evicts the entries that were not used for longest. Pinned ones and those in use stay.

    Exit 1 if an entry that should go could not be removed.

    Example: k3dsl cache prune --max-bytes 500M --dry-run
    """
    import msgspec

    limit, seconds = _parsed("--max-bytes", max_bytes, size), _parsed("--older-than", older_than, age)
    cache = open_cache()
    if limit is None and seconds is None and cache.max_bytes is None:
        raise ConfigError("give --max-bytes or --older-than, or set K3DSL_CACHE_MAX_BYTES")
    _must_write(cache, dry_run)
    report = cache.prune(None if limit is None else int(limit), older_than=seconds, dry_run=dry_run)
    if json:
        emit(msgspec.to_builtins(report))
    else:
        view = table("Evicted" if not dry_run else "Would be evicted", "key", "target", "bytes", "unused for s",
                     right=("bytes", "unused for s"))  # fmt: skip
        for item in report.removed:
            view.add_row(short(item.digest), item.target, str(item.bytes), f"{item.idle_seconds:.0f}")
        if view.row_count:
            out().print(view)
        verb = "would be freed" if dry_run else "freed"
        out().print(
            f"{report.freed_bytes} bytes {verb}; {report.kept} entries stay, {report.kept_bytes} bytes"
            + (f" ({report.exempt} are pinned or in use)" if report.exempt else "")
        )
        for failure in report.failed:
            err().print(f"{short(failure.digest)} could not be removed: {failure.reason}", markup=False)
    if report.failed:
        raise typer.Exit(FINDING)


@app.command("rm")
def rm(keys: Keys, json: Json = False) -> None:
    """Removes entries from the folder.

    Exit 1 if one is not there or could not be removed.

    Example: k3dsl cache rm 3fa9 81c0
    """
    cache = open_cache()
    _must_write(cache, False)
    _remove(cache, [find(cache, prefix).key for prefix in keys], json)


@app.command("clear")
def clear(
    target: TargetOption = None,
    json: Json = False,
) -> None:
    """Removes every entry of the folder, and what is in quarantine. Layers are left alone.

    Exit 1 if anything could not be removed.

    Example: k3dsl cache clear --target sm_100a
    """
    cache = open_cache()
    _must_write(cache, False)
    folder = cache.folder
    assert folder is not None
    wanted = _known(target, cache)
    places = [place for place in folder.places() if wanted is None or place.target in wanted]
    if wanted is None:
        folder.sweep()
        folder.empty_quarantine()
    _remove(cache, [place.digest for place in places], json)


@app.command("pin")
def pin(
    keys: Keys,
    off: Annotated[bool, typer.Option("--off", help="Take the pins away.")] = False,
    json: Json = False,
) -> None:
    """Keeps entries from eviction. Pins stay when their entries are removed: --off takes those away, too.

    Example: k3dsl cache pin 3fa9
    """
    cache = open_cache()
    _must_write(cache, False)
    digests = [pin_of(cache, prefix) if off else find(cache, prefix).digest for prefix in keys]
    (cache.unpin if off else cache.pin)(digests)
    if cache.degraded:
        raise OSError("; ".join(cache.degraded.values()))
    if json:
        emit({"pinned": [] if off else digests, "unpinned": digests if off else []})
    else:
        out().print(f"{len(digests)} {'no longer ' if off else ''}pinned")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write.")],
    target: TargetOption = None,
    json: Json = False,
) -> None:
    """Writes entries to one file, for `import` elsewhere. Each is checked first.

    Exit 1 if there is nothing to write.

    Example: k3dsl cache export kernels.k3b --target sm_90a
    """
    import msgspec

    cache = open_cache()
    report = cache.export(file, target=_known(target, cache))
    if json:
        emit(msgspec.to_builtins(report))
    else:
        out().print(f"{report.path}: {report.entries} entries of {', '.join(report.targets)}, {report.bytes} bytes")
        out().print(f"sha256 {report.sha256}")


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A bundle that `export` wrote.", exists=True, dir_okay=False)
    ],
    target: TargetOption = None,
    sha256: Annotated[str | None, typer.Option("--sha256", help="What the whole file must have.")] = None,
    json: Json = False,
) -> None:
    """Takes the entries of a bundle after all of it was checked; what cannot run here is skipped, with a reason.

    On a machine with a GPU only its target is taken, unless --target says otherwise. Exit 1 if the bundle is forged,
    damaged or truncated: then nothing of it is kept; and if K3DSL_CACHE_MAX_BYTES is too small for all of it to stay.

    Example: k3dsl cache import kernels.k3b
    """
    import msgspec

    from k3dsl.preparing import detect_target

    cache = open_cache()
    wanted = _known(target, cache)
    _must_write(cache, False)
    if cache.writable_folder() is None:
        raise OSError("; ".join(cache.degraded.values()))
    present = detect_target() if wanted is None else None
    chosen = wanted if present is None else str(present)
    report = cache.import_bundle(file, target=chosen, sha256=sha256, accept=other_flavour)
    if json:
        emit(msgspec.to_builtins(report))
    else:
        view = table("Skipped", "entries", "target", "reason", right=("entries",))  # each by its key: --json
        for (skipped, reason), count in Counter((item.target, item.reason) for item in report.skipped).items():
            view.add_row(str(count), skipped, reason)
        if view.row_count:
            out().print(view)
        out().print(
            f"{len(report.imported)} imported, {len(report.present)} were there, {len(report.skipped)} skipped; "
            f"sha256 {report.sha256}"
        )
    if report.evicted:
        why = "another process removed them"
        if cache.max_bytes is not None:
            why = f"the bound of the folder is {cache.max_bytes} bytes"
        err().print(f"{len(report.evicted)} did not stay: {why}")
        raise typer.Exit(FINDING)


def _remove(cache: "CompileCache", keys: "Iterable[CompileKey | str]", json: bool) -> None:
    removed: list[str] = []
    failed: list[dict[str, str]] = []
    for digest in dict.fromkeys(key if isinstance(key, str) else key.digest for key in keys):
        try:
            if not cache.remove(digest) and any(folder.paths_of(digest) for folder in cache.folders()):
                failed.append({"digest": digest, "reason": "it is in a layer, which is only read"})
            else:  # gone, perhaps by another process
                removed.append(digest)
        except OSError as error:
            failed.append({"digest": digest, "reason": str(error)})
    if json:
        emit({"removed": removed, "failed": failed})
    else:
        out().print(f"{len(removed)} removed")
        for item in failed:
            err().print(f"{short(item['digest'])} was not removed: {item['reason']}", markup=False)
    if failed:
        raise typer.Exit(FINDING)


def _must_write(cache: "CompileCache", dry_run: bool) -> None:
    """A command that changes the folder must not end with 0 where it cannot."""
    if not dry_run and cache.read_only:
        raise OSError("the cache is read only here: K3DSL_CACHE says so")
    if cache.folder is None:
        raise OSError("; ".join(cache.degraded.values()) or "there is no cache folder")


def _must_read(cache: "CompileCache", *states: str) -> None:
    """A folder that cannot be looked into must not look like an empty one."""
    if why := [cache.degraded[state] for state in states if state in cache.degraded]:
        raise OSError("; ".join(why))


def _known(text: str | None, cache: "CompileCache") -> list[str] | None:
    """The targets named. Each must be one of ours or have entries: a typing error must not look like an empty cache."""
    from k3dsl.amd.keys import TARGET
    from k3dsl.nvidia.core import SERVED

    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = {*SERVED, TARGET}
    if not known.issuperset(names):
        known |= {place.target for folder in cache.folders() for place in folder.places()}
    for name in names or [text]:
        if name not in known:
            raise ConfigError(f"target={name!r} must be one of {', '.join(sorted(known))}")
    return names


def _text(path: Any) -> str | None:
    return None if path is None else str(path)


def _parsed(name: str, text: str | None, parse: Any) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text!r} must be {error}") from None
