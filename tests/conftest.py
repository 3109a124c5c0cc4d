"""Fixtures that more than one test file uses."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_cuda import FakeDriver

from k3dsl.nvidia import device as devices
from k3dsl.nvidia import driver as drivers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--aiter-source", metavar="DIR", help="a checkout of aiter to hold the adaptor's contract against")
    parser.addoption("--mla-pre-sweep", action="store_true", help="60 random builds of mla_pre too, about ten minutes")


#: FlyDSL and CuTe DSL abort in one process (both register the same nanobind enum), whichever is imported first.
BOTH_COMPILERS = find_spec("flydsl") is not None and find_spec("cutlass") is not None
HERE = Path(__file__).parent


def left_out(config: pytest.Config) -> tuple[str, ...]:
    """Folders whose tests cannot be in this run, as those of the other vendor's compiler are."""
    if not BOTH_COMPILERS:
        return ()
    return ("compile",) if config.option.markexpr in ("emulator", "sweep") else ("amd", "gfx950")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if any(collection_path == HERE / name for name in left_out(config)) else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    folders = ", ".join(f"tests/{name}" for name in left_out(config))
    return [f"left out: {folders}, as FlyDSL and CuTe DSL cannot be in one process; see -m emulator"] if folders else []


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A FakeDriver with one H200, in place of the process's driver."""
    fake = FakeDriver()
    monkeypatch.setattr(drivers, "_driver", fake)
    devices.device.cache_clear()
    yield fake
    devices.device.cache_clear()
    assert fake.cuda.errors == []
