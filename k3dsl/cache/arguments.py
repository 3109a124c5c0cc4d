"""What callers hand to a cache, checked at the entry."""

import threading
from collections.abc import Iterable

from k3dsl.cache.key import CompileKey, is_digest
from k3dsl.errors import ConfigError


def kernel_cache_problems(cache: object) -> list[str]:
    """Why kernels cannot come from `cache`; None stands for the user's."""
    if cache is None or hasattr(cache, "get_or_build"):
        return []
    return [f"cache={cache!r} must be a CompileCache"]


def digest_of(key: CompileKey | str) -> str:
    """The digest that `key` is or has. Raises ConfigError for what is neither."""
    digest = key.digest if isinstance(key, CompileKey) else key
    if not isinstance(digest, str) or not is_digest(digest):
        raise ConfigError(f"key={key!r} must be a CompileKey or a full digest (64 hex digits)")
    return digest


def digests_of(keys: Iterable[CompileKey | str]) -> list[str]:
    """The digests of several keys. Raises ConfigError."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ConfigError(f"keys={keys!r} must be several CompileKeys or full digests, [key] for one")
    return [digest_of(key) for key in keys]


def check_key(key: object) -> None:
    """Raises ConfigError for what is no key."""
    if not isinstance(key, CompileKey):
        raise ConfigError(f"key={key!r} must be a CompileKey")


def check_bytes(count: object) -> None:
    """Raises ConfigError for what is no bound."""
    if count is not None and (type(count) is not int or count < 0):
        raise ConfigError(f"max_bytes={count!r} must be an int of at least 0, or None for no bound")


def check_seconds(name: str, seconds: object) -> None:
    """Raises ConfigError for what no clock waits for."""
    if type(seconds) not in (int, float) or not 0 <= seconds <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise ConfigError(f"{name}={seconds!r} must be a number of seconds from 0 to {threading.TIMEOUT_MAX:g}")
