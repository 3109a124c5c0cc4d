"""Small kernels written in assembly and assembled by LLVM (through triton), so that decoder and emulator are tested
against an encoder that is not ours."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from triton._C.libtriton import amd
from triton.backends.amd.compiler import assemble_amdgcn

from tools.gfx950 import CodeObject, Emulator, Memory

TEMPLATE = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
.Lend_{name}:
.size {name}, .Lend_{name}-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 512
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset 256
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {private}
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_float_denorm_mode_32 {denormals}
  .amdhsa_float_denorm_mode_16_64 3
  .amdhsa_ieee_mode 1
  .amdhsa_fp16_overflow {overflow}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {private}
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: 512
    .agpr_count: 256
    .max_flat_workgroup_size: 1024
    .args: [{args}]
...
.end_amdgpu_metadata
"""


@cache
def assemble(
    body: str, arguments: int = 2, lds: int = 0, private: int = 0, denormals: int = 3, overflow: int = 0
) -> CodeObject:
    """One kernel `k` with `arguments` pointers. s[0:1] holds the address of these, s2 the workgroup, v0 the thread."""
    args = ", ".join(
        f"{{.offset: {8 * i}, .size: 8, .value_kind: global_buffer, .address_space: global}}" for i in range(arguments)
    )
    text = TEMPLATE.format(
        name="k",
        body=body,
        lds=lds,
        private=private,
        denormals=denormals,
        overflow=overflow,
        kernarg=8 * arguments,
        args=args,
    )
    with tempfile.NamedTemporaryFile() as source, tempfile.NamedTemporaryFile() as linked:
        source.write(assemble_amdgcn(text, "gfx950", ""))
        source.flush()
        amd.link_hsaco(source.name, linked.name)
        return CodeObject(Path(linked.name).read_bytes())  # the linker replaces the file


def probe(
    code: str,
    inputs: Sequence[np.ndarray],
    outputs: int,
    first_in: int = 32,
    first_out: int = 128,
    setup: str = "",
    lds: int = 0,
    denormals: int = 3,
    overflow: int = 0,
    **options: object,
) -> np.ndarray:
    """Runs `code` on every wave: input k (waves x 64 words) is in v[first_in + k]; returns outputs x waves x 64 words
    from v[first_out ...]. v0 holds the lane, v1 lane * 4."""
    stacked = np.stack([np.ascontiguousarray(x).view("<u4").reshape(-1, 64) for x in inputs], 1)
    waves, count = stacked.shape[:2]
    source, result = np.ascontiguousarray(stacked), np.zeros((waves, outputs, 64), "<u4")
    lines = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "v_lshlrev_b32 v1, 2, v0",
        "s_waitcnt lgkmcnt(0)",
        f"s_mul_i32 s8, s2, {256 * count}",
        "s_add_u32 s4, s4, s8",
        "s_addc_u32 s5, s5, 0",
        f"s_mul_i32 s8, s2, {256 * outputs}",
        "s_add_u32 s6, s6, s8",
        "s_addc_u32 s7, s7, 0",
    ]
    for k in range(count):
        lines += [f"global_load_dword v{first_in + k}, v1, s[4:5]", "s_add_u32 s4, s4, 256", "s_addc_u32 s5, s5, 0"]
    lines += ["s_waitcnt vmcnt(0)", setup, code, "s_waitcnt vmcnt(0) lgkmcnt(0)"]
    for k in range(outputs):
        lines += [f"global_store_dword v1, v{first_out + k}, s[6:7]", "s_add_u32 s6, s6, 256", "s_addc_u32 s7, s7, 0"]
    body = "\n".join([*lines, "s_endpgm"])
    memory = Memory(inputs=source, outputs=result)
    emulator = Emulator(memory, **options)  # type: ignore[arg-type]
    emulator.launch(assemble(body, lds=lds, denormals=denormals, overflow=overflow), "k", waves, 64, [source, result])
    return result.transpose(1, 0, 2)
