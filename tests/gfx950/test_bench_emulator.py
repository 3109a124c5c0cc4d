"""The emulator's bench, small: what it times is checked, and the check can fail."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="needs FlyDSL: pip install 'k3dsl[amd]'"),
]


def small(name: str) -> Callable[[], Any]:
    from tools.bench import emulator

    return {
        "layer_norm": partial(emulator.layer_norm, 4, 256),
        "matmul": partial(emulator.matmul, 128, 64),
        "mla_pre": partial(emulator.mla_pre, 1),
    }[name]


@pytest.mark.parametrize("name", ["layer_norm", "matmul", "mla_pre"])
def test_each_launch_is_checked(name: str) -> None:
    run, check = small(name)()
    for options in ({}, {"model": "weak", "seed": 1}):
        assert run(**options).instructions > 0
        check()
    with pytest.raises((AssertionError, RuntimeError)):
        check()  # it spoiled what the launch wrote
