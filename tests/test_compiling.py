"""Compilers as child processes, with one that compiles nothing."""

import os
import tempfile
import time

import pytest

from k3dsl.compiling import Child


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_child_that_has_lost_its_parent_removes_its_folder(tmp_path, monkeypatch, busy):
    """As after kill -9 of a warm-up: both pipes are closed, perhaps while something is built."""
    (tmp_path / "k3dsl_echo.py").write_text("from k3dsl.compiling import serve\nserve(lambda request: request)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = Child("k3dsl_echo", os.environ)
    try:
        assert child.ask(b"x", time.monotonic() + 60)[0] == b"x"
        [folder] = tmp_path.glob("k3dsl-compile-*")
        process = child._process
        process.stdout.close()
        if busy:
            process.stdin.write((1).to_bytes(8, "little") + b"y")
        process.stdin.close()
        process.wait(60)
        assert not folder.exists()
    finally:
        child.end()
