"""Finding an AMD GPU: by the driver's file first, then by torch; torch stays unloaded where there is no driver."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import k3dsl
from k3dsl.amd import detect


def gpu(
    monkeypatch: pytest.MonkeyPatch, arch: str, hip: str | None = "7.0", driver: bool = True, count: int = 1
) -> None:
    monkeypatch.setattr(detect, "_DRIVER", Path("/" if driver else "/nowhere/kfd"))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=arch))


def test_an_mi355x_is_gfx950(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "gfx950:sramecc+:xnack-")
    assert k3dsl.detect_target() == "gfx950"
    assert k3dsl.detect_target("cuda:0").vendor == "amd"  # type: ignore[union-attr]
    assert detect.present(1) is None  # there is one device
    assert k3dsl.detect_target("cpu") is None


@pytest.mark.parametrize(
    "changes",
    [{"arch": "gfx942:sramecc+"}, {"hip": None}, {"driver": False}, {"count": 0}],
    ids=lambda c: next(iter(c)),
)
def test_everything_else_is_none(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]) -> None:
    gpu(monkeypatch, **({"arch": "gfx950"} | changes))  # type: ignore[arg-type]
    assert detect.present(0) is None


def test_doctor_sees_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from k3dsl.cli import doctor

    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    gpu(monkeypatch, "gfx950:sramecc+:xnack-", count=8)
    assert [(c.name, c.status) for c in doctor.gpu()] == [(f"GPU {index}", "ok") for index in range(8)]
    [kernels] = doctor.kernels(None)
    assert (kernels.name, kernels.status) == ("kernels gfx950", "info")
    assert kernels.found.startswith("not ready: tp 8: 0 of 72 keys")
    gpu(monkeypatch, "gfx942:sramecc+")
    [other] = doctor.gpu()
    assert (other.status, other.found) == ("warn", "AMD gfx942")
    assert doctor.kernels(None) == []


def test_a_machine_without_the_driver_loads_no_torch() -> None:
    code = "import sys, k3dsl; k3dsl.detect_target(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"] or Path("/dev/kfd").exists()
