"""The environment: one table, typed, every bad value named."""

import logging
from pathlib import Path
from typing import Any

import pytest

from k3dsl import env
from k3dsl.cache import CompileCache
from k3dsl.errors import ConfigError


def test_the_table_is_what_is_read() -> None:
    found = env.settings(
        {
            "K3DSL_CACHE_DIR": "/a/b",
            "K3DSL_CACHE_LAYERS": "/x:/y",
            "K3DSL_CACHE_MAX_BYTES": "20G",
            "K3DSL_CACHE": "FROZEN",
            "K3DSL_LOG": "debug",
        }
    )
    assert found == env.Settings(Path("/a/b"), ("/x", "/y"), 20 * 2**30, "frozen", "debug")
    assert {option.name for option in env.TABLE} == {
        "K3DSL_CACHE_DIR", "K3DSL_CACHE_LAYERS", "K3DSL_CACHE_MAX_BYTES", "K3DSL_CACHE", "K3DSL_LOG"
    }  # fmt: skip


def test_an_empty_variable_is_an_unset_one() -> None:
    """Lesson 19."""
    assert env.settings({option.name: "" for option in env.TABLE}) == env.settings({}) == env.Settings()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("/a", ("/a",)),
        ("/a:/b:/c", ("/a", "/b", "/c")),
        ("http://h:80/x:/b", ("http://h:80/x", "/b")),
        ("/a:https+rw://u:p@h/x:http://h", ("/a", "https+rw://u:p@h/x", "http://h")),
        ("~/a:/b:", ("~/a", "/b")),
        ("", ()),
    ],
)
def test_layers_may_be_urls(text: str, parts: tuple[str, ...]) -> None:
    assert env.split_layers(text) == parts


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("123", 123), ("1K", 1024), ("1.5GiB", 3 * 2**29), ("2 mb", 2**21), ("1t", 2**40)]
)
def test_sizes(text: str, count: int) -> None:
    assert env.size(text) == count


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30d", 30 * 86400), ("2w", 14 * 86400)])
def test_ages(text: str, seconds: float) -> None:
    assert env.age(text) == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("K3DSL_CACHE", "yes"),
        ("K3DSL_CACHE", "readonly"),
        ("K3DSL_CACHE_MAX_BYTES", "lots"),
        ("K3DSL_CACHE_MAX_BYTES", "-1"),
        ("K3DSL_CACHE_MAX_BYTES", "9" * 400),
        ("K3DSL_CACHE_MAX_BYTES", "99999999T"),
        ("K3DSL_CACHE_DIR", "relative/folder"),
        ("K3DSL_LOG", "loud"),
        ("K3DSL_CACHE_LAYERS", "relative"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(monkeypatch: Any, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        CompileCache()
    assert value in str(caught.value)
    assert "must be" in str(caught.value)


def test_every_bad_variable_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        env.settings({"K3DSL_CACHE": "yes", "K3DSL_LOG": "loud", "K3DSL_CACHE_MAX_BYTES": "x"})
    assert all(name in str(caught.value) for name in ("K3DSL_CACHE=", "K3DSL_LOG=", "K3DSL_CACHE_MAX_BYTES="))


def test_misspelt_variables_are_found() -> None:
    assert env.unknown({"K3DSL_CACHEDIR": "/x", "K3DSL_CACHE": "ro", "PATH": ""}) == ["K3DSL_CACHEDIR"]


def test_describe_tells_value_and_origin() -> None:
    rows = {name: (value, origin) for name, value, origin in env.describe({"K3DSL_CACHE": "ro"})}
    assert rows["K3DSL_CACHE"][0] == "ro"
    assert rows["K3DSL_CACHE"][1].startswith("environment")
    assert rows["K3DSL_CACHE_DIR"][0] == "unset"
    assert len(rows) == len(env.TABLE)


def test_a_password_is_nowhere_shown(monkeypatch: Any) -> None:
    layers = "https://user:s3cret@host:1/x:/b:http+rw://user:s3@cret@host"
    rows = {name: value for name, value, _ in env.describe({"K3DSL_CACHE_LAYERS": layers})}
    assert rows["K3DSL_CACHE_LAYERS"] == "https://host:1/x:/b:http+rw://host"
    assert env.redacted("/a@b") == "/a@b"


@pytest.mark.parametrize("url", ["https://user:s3cret@host:99999/x", "ftp://user:s3cret@host", "http://u:s3cret@",
                                 "https://user:s3/cret@host", "http://user:s3cret@host/x?y"])  # fmt: skip
def test_nor_in_the_error_for_a_bad_url(monkeypatch: Any, url: str) -> None:
    monkeypatch.setenv("K3DSL_CACHE_LAYERS", url)
    with pytest.raises(ConfigError, match=r"must be an absolute folder or an http\(s\) URL") as caught:
        CompileCache()
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_the_log_level(monkeypatch: Any) -> None:
    log = logging.getLogger("k3dsl")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    try:
        log.handlers.clear()
        assert env.logger().handlers == []  # the application decides
        monkeypatch.setenv("K3DSL_LOG", "info")
        assert (env.logger().level, len(env.logger().handlers)) == (logging.INFO, 1)
    finally:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
