"""Fixtures that more than one test file uses."""

from collections.abc import Iterator

import pytest
from fake_cuda import FakeDriver

from k3dsl.nvidia import device as devices
from k3dsl.nvidia import driver as drivers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--aiter-source", metavar="DIR", help="a checkout of aiter to hold the adaptor's contract against")
    parser.addoption("--mla-pre-sweep", action="store_true", help="60 random builds of mla_pre too, about ten minutes")


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A FakeDriver with one H200, in place of the process's driver."""
    fake = FakeDriver()
    monkeypatch.setattr(drivers, "_driver", fake)
    devices.device.cache_clear()
    yield fake
    devices.device.cache_clear()
    assert fake.cuda.errors == []
