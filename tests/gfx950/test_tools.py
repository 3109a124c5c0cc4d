"""The command line, the disassembler, profiles and traces, and what the machine refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly import assemble

from tools.gfx950 import (
    CodeObject,
    CodeObjectError,
    Emulator,
    Launch,
    Memory,
    UnsupportedInstructionError,
    build,
    table,
    toolkit,
)
from tools.gfx950.__main__ import main
from tools.gfx950.codeobject import Argument
from tools.gfx950.decode import decode
from tools.gfx950.disassembly import listing, text_of
from tools.gfx950.emulator import value_bytes

ROOT = Path(__file__).parents[2]
COPY = """s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_write_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[6:7] sc1
    s_endpgm"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "copy.hsaco").write_bytes(assemble(COPY, lds=256).data)
    np.save(tmp_path / "x.npy", np.arange(64, dtype="<u4"))
    args = [{"file": "x.npy"}, {"zeros": [64], "dtype": "uint32", "save": "y.npy", "uninitialised": True}]
    (tmp_path / "args.json").write_text(json.dumps(args))
    return tmp_path


def arguments(command: str, files: Path, *more: str) -> list[str]:
    return [
        command,
        str(files / "copy.hsaco"),
        "--kernel",
        "k",
        "--grid",
        "1",
        "--block",
        "64",
        "--args",
        str(files / "args.json"),
        *more,
    ]


def test_run_saves_what_the_kernel_wrote(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("run", files, "--model", "weak", "--seed", "3")) == 0
    assert list(np.load(files / "y.npy")) == list(range(64))
    assert "11 wave instructions in 1 waves" in capsys.readouterr().out


def test_the_module_runs_as_a_program(files: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gfx950", *arguments("run", files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wave instructions" in done.stdout


def test_profile_counts_bytes_by_space_and_scope(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("profile", files)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["global", "wave", "read", "256", "bytes"] in lines
    assert ["global", "device", "write", "256", "bytes"] in lines
    assert ["lds", "workgroup", "write", "256", "bytes"] in lines
    assert ["scalar", "wave", "read", "16", "bytes"] in lines
    assert ["4", "36.4", "%", "s_waitcnt"] in lines


@pytest.mark.parametrize(("stride", "extra"), [(4, 0), (8, 1), (256, 63)])
def test_bank_conflicts(stride: int, extra: int) -> None:
    x = np.zeros(2, "<u4")
    code = assemble(f"v_mul_u32_u24 v1, {stride}, v0\nds_write_b32 v1, v0\ns_endpgm", lds=32768)
    done = Emulator(Memory(x), profile=True).launch(code, "k", 1, 64, [x, x])
    # 64 banks of 4 bytes: words 0, 2, 4 ... meet in pairs; a pitch of 64 puts all lanes on one bank
    assert done.profiles[0].bank_conflicts == extra


def test_trace_shows_one_wave(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("trace", files)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "s_load_dwordx4 s[4:7], s[0:1]" in lines[0]
    assert "v_lshlrev_b32 v1, 2, v0" in lines[1]
    assert "exec ffffffffffffffff" in lines[1]
    assert len(lines) == 12


def test_disassembly(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disasm", str(files / "copy.hsaco")]) == 0
    out = capsys.readouterr().out
    for text in (
        "k: 512 vector registers, 256 bytes of LDS",
        "s_waitcnt vmcnt(0)",
        "global_store_dword v1, v3, s[6:7] sc1",
        "ds_read_b32 v3, v1",
    ):
        assert text in out


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_16x16x32_bf16 a[0:3], v[4:7], a[8:11], v[0:3]".replace("v[0:3]", "a[0:3]"),
        "v_add_u32 v1, 0x12345, v2",
        "s_mov_b64 exec, vcc",
        "buffer_load_dwordx4 v[4:7], v1, s[8:11], s3 offen offset:16 sc0 nt",
        "v_readlane_b32 s3, v1, s4",
        "ds_write2_b64 v1, v[2:3], v[4:5] offset0:1 offset1:2",
        "global_atomic_add_x2 v[2:3], v1, v[4:5], s[6:7] offset:-8 sc0",
    ],
)
def test_disassembly_is_close_to_the_assemblers_syntax(text: str) -> None:
    code = assemble(text + "\ns_endpgm")
    first = next(decode(code.code(code.kernel())))
    assert set(text.replace(",", "").split()) == set(text_of(first).replace(",", "").split())


def test_an_unscaled_f8f6f4_mfma_does_not_swallow_its_neighbour() -> None:
    code = assemble(
        "v_add_f64 v[2:3], v[4:5], v[6:7]\nv_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]\n"
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21\ns_endpgm"
    )
    names = [i.name for i in decode(code.code(code.kernel()))]
    assert names[:4] == ["V_ADD_F64", "V_MFMA_F32_16X16X128_F8F6F4", "V_MFMA_SCALE_F32_16X16X128_F8F6F4", "S_ENDPGM"]


def test_an_unknown_instruction_stops_with_name_address_and_encoding() -> None:
    x = np.zeros(2, "<u4")
    with pytest.raises(UnsupportedInstructionError) as stop:
        Emulator(Memory(x)).launch(assemble("s_nop 0\nv_lerp_u8 v1, v2, v3, v4\ns_endpgm"), "k", 1, 64, [x, x])
    assert "0x4: v_lerp_u8 v1, v2, v3, v4 [0100cdd1" in str(stop.value)


def refused(match: str, grid: int = 1, block: int = 64, dynamic_lds: int = 0, **how: int) -> None:
    x = np.zeros(2, "<u4")
    with pytest.raises(CodeObjectError, match=match):
        Emulator(Memory(x)).launch(assemble("s_endpgm", **how), "k", grid, block, [x, x], dynamic_lds=dynamic_lds)


def test_the_machine_has_limits() -> None:
    refused("private segment of 64 bytes", private=64)
    refused("163844 bytes of LDS, a compute unit has 163840", lds=163840, dynamic_lds=4)
    refused("1088 threads a workgroup", block=1088)


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    assert main(["disasm", str(tmp_path / "text")]) == 1
    assert "not an ELF file" in capsys.readouterr().err
    wrong = bytearray(assemble("s_endpgm").data)
    wrong[48] = 0x4C  # the machine flag of another target
    with pytest.raises(CodeObjectError, match="another target"):
        CodeObject(bytes(wrong))
    with pytest.raises(CodeObjectError, match="kernel 'absent' is not in the code object; it has k"):
        assemble("s_endpgm").kernel("absent")


def test_arguments_are_checked() -> None:
    x = np.zeros(2, "<u4")
    with pytest.raises(ValueError, match="takes 2 arguments, 1 were given"):
        Emulator(Memory(x)).launch(assemble("s_endpgm"), "k", 1, 64, [x])
    with pytest.raises(ValueError, match="positive sizes"):
        Emulator(Memory(x)).launch(assemble("s_endpgm"), "k", 0, 64, [x, x])


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("model", "wek", "flat or weak"),
        ("seed", 1 << 64, "an int from 0 to 18446744073709551615"),
        ("seed", 1.0, "an int from 0"),
        ("quantum", -5, "an int from 1"),
        ("resident", -1, "an int from 1 to 2147483647"),
        ("lds_fill", 1 << 32, "an int from 0 to 4294967295"),
    ],
)
def test_options_are_checked(option: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r} must be {allowed}")):
        Emulator(Memory(), **{option: value})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"device": -1}, "device=-1 must be an int from 0 to 7"),
        ({"device": 8}, "device=8 must be an int from 0 to 7"),
        ({"dynamic_lds": -5}, "dynamic_lds=-5 must be an int from 0"),
        ({"grid": 1 << 33}, "grid=8589934592 must be one to three positive sizes"),
        ({"grid": (1 << 31, 1 << 31, 4)}, "must be one to three positive sizes with a product below 2^31"),
        ({"block": 64.0}, "block=64.0 must be one to three positive sizes"),
    ],
)
def test_launches_are_checked(how: dict[str, Any], message: str) -> None:
    x = np.zeros(2, "<u4")
    launch = Launch(
        **{"code_object": assemble("s_endpgm"), "kernel": "k", "grid": 1, "block": 64, "args": [x, x], **how}
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Emulator(Memory(x), model="weak").run([launch])


def test_sizes_may_be_numpys_and_a_run_needs_a_launch() -> None:
    x = np.zeros(2, "<u4")
    done = Emulator(Memory(x)).launch(assemble("s_endpgm"), "k", np.int64(2), np.array([64, 2]), [x, x])  # type: ignore[arg-type]
    assert done.waves == 4
    with pytest.raises(ValueError, match="no launch was given"):
        Emulator(Memory(x)).run([])


def packed(value: object, size: int) -> bytes:
    return value_bytes(value, Argument(0, size, "by_value"))


def test_numbers_are_as_wide_as_the_argument() -> None:
    for value in (5, np.uint8(5), np.int64(5)):
        assert packed(value, 8) == (5).to_bytes(8, "little")
    assert packed(np.int8(-5), 4) == (-5).to_bytes(4, "little", signed=True)
    assert packed(np.True_, 4) == packed(True, 4) == (1).to_bytes(4, "little")
    assert packed(0.5, 4) == packed(np.float64(0.5), 4) == packed(np.float32(0.5), 4) == np.float32(0.5).tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(5), "float32 gives 4 bytes, it takes 8"),
        (b"ab", "bytes gives 2 bytes, it takes 8"),
        ("5", "'5' is no address, array, number or bytes that fits 8 bytes"),
        ([1, 2], r"\[1, 2\] is no address, array, number or bytes"),
        (1 << 64, "18446744073709551616 is no address, array, number or bytes"),
    ],
)
def test_what_does_not_fit_an_argument_is_named(value: object, message: str) -> None:
    x = np.zeros(2, "<u4")
    with pytest.raises(ValueError, match=f"argument 1 of kernel k: {message}"):
        Emulator(Memory(x)).launch(assemble("s_endpgm"), "k", 1, 64, [x, value])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"zeros": [4], "dtype": "int33"}, 0], "argument 0, {'zeros': [4], 'dtype': 'int33'}: data type 'int33' not"),
        ([{"zeros": [4], "dtype": "object"}, 0], "dtype object holds addresses of Python"),
        ([{"zeros": [-4]}, 0], "argument 0, {'zeros': [-4]}: negative dimensions"),
        ([0, {"file": "empty.npy"}], "argument 1, {'file': 'empty.npy'}: No data left in file"),
        ([0, {"save": "x.npy"}], "argument 1, {'save': 'x.npy'}: needs one of file, zeros"),
        ([0, "x"], "argument 1 of kernel k: 'x' is no address"),
        ([0, [1]], "argument 1 of kernel k: [1] is no address"),
        ([0, 1 << 64], "argument 1 of kernel k: 18446744073709551616 is no address"),
        ({"zeros": [4]}, "holds a dict, must hold a list"),
    ],
)
def test_the_command_line_names_the_argument(
    files: Path, capsys: pytest.CaptureFixture[str], entries: object, message: str
) -> None:
    (files / "empty.npy").touch()
    (files / "args.json").write_text(json.dumps(entries))
    assert main(arguments("run", files)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--wave", "5"), "wave=5 must be an int from 0 to 0"),
        (("--wave", "-1"), "wave=-1 must be an int from 0 to 0"),
        (("--workgroup", "9"), "workgroup=9 must be an int from 0 to 0"),
    ],
)
def test_a_trace_is_of_a_wave_that_there_is(
    files: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str], message: str
) -> None:
    assert main(arguments("trace", files, *more)) == 1
    assert message in capsys.readouterr().err
    assert not (files / "y.npy").exists()


def test_damaged_code_objects_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = assemble(COPY, lds=256).data
    for size in range(4, len(whole), 97):  # in the header, in the tables, in the program
        (tmp_path / "cut.hsaco").write_bytes(whole[:size])
        assert main(["disasm", str(tmp_path / "cut.hsaco")]) == 1
        assert "a damaged code object: " in capsys.readouterr().err
    for at, byte in ((5, 9), (40, 255), (62, 200)):  # byte order, place and number of the sections
        wrong = bytearray(whole)
        wrong[at] = byte
        with pytest.raises(CodeObjectError, match="a damaged code object: "):
            CodeObject(bytes(wrong))
    with pytest.raises(CodeObjectError, match="a damaged code object: KeyError"):
        CodeObject(whole.replace(b".value_kind", b".value_kinb"))


def test_hidden_arguments_and_workgroup_ids() -> None:
    out = np.zeros((2, 3, 2, 128), "<u4")
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
        s_mul_i32 s8, s2, 512
        v_lshlrev_b32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        v_add_u32 v1, s8, v1
        v_mov_b32 v2, s2
        global_store_dword v1, v2, s[4:5]
        s_endpgm"""
    Emulator(Memory(out)).launch(assemble(body), "k", 12, 128, [out, out])
    assert (out.reshape(12, 128) == np.arange(12)[:, None]).all()


def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def fake(command: list[str]) -> None:
        calls.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"x")

    monkeypatch.setattr(build, "run", fake)
    first = build.build(tmp_path)
    count = len(calls)
    assert count == len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert build.build(tmp_path) == first
    assert len(calls) == count
    monkeypatch.setenv("CXX", "another-compiler")
    assert build.build(tmp_path) != first


def test_ziglang_serves_when_the_system_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.compiler()[1:] == ["-m", "ziglang", "c++"]
    assert toolkit.linker()[1:] == ["-m", "ziglang", "ld.lld"]


def test_the_table_in_the_page_is_current() -> None:
    page = (ROOT / "docs" / "gfx950.md").read_text()
    assert table.markdown() in page
    runs = {name for group in table.supported().values() for name in group[0]}
    assert {
        "v_mfma_scale_f32_16x16x128_f8f6f4",
        "ds_read_b64_tr_b16",
        "global_load_lds_dwordx4",
        "s_memrealtime",
    } <= runs


def test_every_operation_of_the_core_is_reachable_from_an_encoding() -> None:
    from tinygrad.runtime.autogen.amd.cdna import enum as encodings

    named = {
        table.operation(m.name.removesuffix("_E32").removesuffix("_E64"))
        for e in table.FORMATS.values()
        for m in getattr(encodings, e)
    }
    unreachable = set(build.operations()) - named
    assert not unreachable


def test_listing_covers_every_byte() -> None:
    code = assemble(COPY, lds=256)
    program = Emulator.program(code, code.kernel())
    assert sum(i.size for i in program.instructions) == code.kernel().size
    assert len(list(listing(program))) == len(program.instructions)
