"""Everything here needs the `amd` extra: the decoder to run code objects, triton for its assembler and compiler."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("tinygrad") is None or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gfx950" in item.path.parts:
            item.add_marker(pytest.mark.emulator)
