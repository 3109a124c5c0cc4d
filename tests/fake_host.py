"""An object with host code that launches nothing: what a compile of the tokenspeed core gives, without the compiler."""

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fake_cuda import make_cubin

from k3dsl.nvidia.host_object import PREFIX, link, linker

_SOURCE = """
void _mlir_%(p)s_cuda_init(void **a) {}
void _mlir_%(p)s_cuda_load_to_device(void **a) {}
void _mlir_%(p)s__mlir_ciface_nothing(void **a, int n) {}
__attribute__((used)) static const unsigned char code[] __attribute__((aligned(8))) = {%(bytes)s};
"""


@cache
def host_object(arch: str) -> bytes:
    """A host object for `arch` with two kernels and no instruction in them. Needs a C compiler, as linking does."""
    cubin = make_cubin((), symbol="fake_mla_tokenspeed", arch=arch, kernels=2)
    size = len(cubin).to_bytes(8, "little")
    fatbin = b"\x50\xed\x55\xba\x01\x00\x10\x00" + (len(cubin) + 64).to_bytes(8, "little")
    fatbin += b"\x02\x00\x01\x01" + (64).to_bytes(4, "little") + size + bytes(48) + cubin
    source = _SOURCE % {"p": PREFIX, "bytes": ",".join(map(str, fatbin))}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "fake.c").write_text(source)
        command = [*linker(), "-c", "-fPIC", "-ffreestanding", "fake.c", "-o", "fake.o"]
        subprocess.run(command, cwd=folder, check=True)
        return link(Path(folder, "fake.o").read_bytes())
