"""The environment variables that k3dsl reads: this table, no other.

An empty variable is an unset one. A value that means nothing raises ConfigError with every bad variable in it; an
argument given in Python always wins over the environment, except that K3DSL_CACHE can only take away.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k3dsl.errors import ConfigError

if TYPE_CHECKING:
    import logging

#: K3DSL_CACHE: what the cache may do. Unset: read and write.
MODES: Final = ("off", "ro", "frozen")
LEVELS: Final = ("debug", "info", "warning", "error")
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
#: Bytes that no disk has.
_MOST: Final = 2.0**63
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: A colon that separates two layers: before a path or another URL, not before // or a port.
_BETWEEN: Final = re.compile(r":(?=/(?!/)|~|https?(?:\+rw)?://|$)")


class Option(NamedTuple):
    """One variable: how its text is read, and what people are told of it."""

    name: str
    field: str
    parse: Callable[[str], Any]
    help: str


@dataclass(frozen=True)
class Settings:
    """What the environment says."""

    cache_dir: Path | None = None
    layers: tuple[str, ...] = ()
    max_bytes: int | None = None
    mode: str | None = None
    log: str | None = None


def size(text: str) -> int:
    """Bytes in `text`: a number with an optional K, M, G or T (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    count = float(match[1]) * _UNITS[match[2].upper()] if match else _MOST
    if count >= _MOST:
        raise ValueError("a number of bytes below 2^63, with K, M, G or T if you like: 500M, 20G")
    return int(count)


def age(text: str) -> float:
    """Seconds in `text`: a number with s, m, h, d or w."""
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise ValueError("a number with s, m, h, d or w: 12h, 30d")
    return float(match[1]) * _SECONDS[match[2]]


def split_layers(text: str) -> tuple[str, ...]:
    """The layers of a path list: folders and http(s) URLs, separated by colons."""
    return tuple(part for part in _BETWEEN.split(text) if part)


def redacted(url: str) -> str:
    """A layer as people may see it: without the user and password of a URL."""
    scheme, between, rest = url.partition("://")
    return f"{scheme}{between}{rest.rpartition('@')[2]}"


def _absolute(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("an absolute path: a cache is never looked for in the current folder")
    return path


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text.lower()

    return parse


TABLE: Final = (
    Option("K3DSL_CACHE_DIR", "cache_dir", _absolute, "folder of the compile cache (the user's cache folder)"),
    Option("K3DSL_CACHE_LAYERS", "layers", split_layers, "read-only folders and http(s) URLs below it, first wins"),
    Option("K3DSL_CACHE_MAX_BYTES", "max_bytes", size, "bound of the folder, e.g. 20G (none)"),
    Option("K3DSL_CACHE", "mode", _one_of(MODES), "off: memory only; ro: write nothing; frozen: a miss is an error"),
    Option("K3DSL_LOG", "log", _one_of(LEVELS), "log level on stderr: debug, info, warning or error"),
)


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of `environ` (of the process by default). Raises ConfigError naming every bad variable."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    problems = []
    for option in TABLE:
        text = environ.get(option.name, "").strip()
        if not text:
            continue
        try:
            values[option.field] = option.parse(text)
        except (ValueError, RuntimeError) as error:  # RuntimeError: a home folder that cannot be found
            problems.append(f"{option.name}={text!r} must be {error}")
    if problems:
        raise ConfigError.of("environment", problems)
    return Settings(**values)


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names that look like k3dsl's and are not read: most likely misspelt."""
    environ = os.environ if environ is None else environ
    return sorted({name for name in environ if name.startswith("K3DSL_")} - {option.name for option in TABLE})


def logger() -> "logging.Logger":
    """The package's logger. K3DSL_LOG gives it a level and a handler on stderr; without it the application decides."""
    import logging  # not needed where all goes well

    log = logging.getLogger("k3dsl")
    text = os.environ.get("K3DSL_LOG", "").strip().lower()
    if text in LEVELS and not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("k3dsl %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(text.upper())
        log.propagate = False
    return log


def describe(environ: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """Every variable of the table: its name, its value as text, and where that comes from."""
    environ = os.environ if environ is None else environ
    rows = []
    for option in TABLE:
        text = environ.get(option.name, "").strip()
        if option.field == "layers":
            text = ":".join(map(redacted, split_layers(text)))
        rows.append((option.name, text or "unset", f"environment: {option.help}" if text else option.help))
    return rows
