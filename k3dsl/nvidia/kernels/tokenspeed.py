"""The `tokenspeed` core as a host object, compiled from the package's own source by its own function.

What the package would compile in front of the first request, for the device at hand, is compiled here for a key: its
compile function is called with our arguments, and only two things that it passes on are exchanged: the calling
convention (a plain C function of prepared arguments, so that no runtime of the compiler is needed to call it) and the
stream (an argument instead of a global). It asks the GPU one question, how many clusters fit, which only persistent
grids use.
"""

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import find_runtime_libraries, make_fake_stream

from k3dsl.errors import CompileError
from k3dsl.nvidia.core.tokenspeed import LATENT, ROPE, SKIP_CORRECTION, TokenspeedKey, fold, signature, tile


def compile_object(key: TokenspeedKey, target: str, options: str, prefix: str) -> bytes:
    """The relocatable object of `key`: a host launcher, its symbols with `prefix`, and the two kernels' cubin."""
    import torch
    from tokenspeed_mla import mla_decode

    compiled: list[Any] = []

    def compile_plain(*arguments: Any, options: str) -> Any:
        wanted = f"--gpu-arch={target}"
        if wanted not in options.split() or "--enable-tvm-ffi" not in options.split():
            raise CompileError(f"tokenspeed_mla compiles with {options!r}, which is not understood")
        streams = [i for i, a in enumerate(arguments) if type(a).__name__ == fake_stream]
        if len(streams) != 1:
            raise CompileError(f"tokenspeed_mla passes {len(streams)} streams, one is understood")
        plain = list(arguments)
        plain[streams[0]] = make_fake_stream()
        compiled.append(cute.compile(*plain, options=ours))
        return compiled[0]

    fake_stream = type(make_fake_stream()).__name__
    ours = f"--gpu-arch {target} {options} remarks{{ptx}}"
    # Exporting for another target than the DSL runs on looks the runtime's symbols up in the process.
    ctypes.CDLL(find_runtime_libraries(enable_tvm_ffi=False)[0], ctypes.RTLD_GLOBAL)
    view = {name: getattr(cute, name) for name in dir(cute) if not name.startswith("__")}
    mla_decode.cute = SimpleNamespace(**{**view, "compile": compile_plain})
    mla_decode.get_max_active_clusters = lambda size: 1
    mla_decode._get_compiled_mla_kernel.cache_clear()
    major, minor = int(target[3:-2]), int(target[-2])
    rows = tile(target, key.heads, key.q)
    mla_decode._get_compiled_mla_kernel(
        torch_dtype=torch.float8_e4m3fn,
        page_size=key.page,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        is_persistent=False,
        is_var_seq=True,
        is_var_split_kv=False,
        compute_capability=(major, minor),
        has_local_visible_lens=False,
        skip_correction_threshold=SKIP_CORRECTION,
        is_workspace_size_zero=key.capacity == 0,
        fold_sq_factor=1 if key.pack else fold(key.heads, key.q, rows),
        causal_mask=True,
        num_heads=key.heads,
        seq_len_q=key.q,
        window_left=-1,
        cp_world=key.ranks,
        cp_rank=key.rank,
        cp_interleave_size=key.interleave,
        use_pdl=True,
        return_lse=key.lse,
        reducer_d_tiles=key.bands,
        reducer_max_splits=key.capacity or 4,
        pack_q=key.pack,
        partial_fp16=False,
    )
    if len(compiled) != 1:
        raise CompileError(f"tokenspeed_mla compiled {len(compiled)} objects, one is understood")
    found = _signature(str(compiled[0].ir_module))
    if found != signature(key):
        raise CompileError(
            f"tokenspeed_mla's launcher takes {found}, the arguments that are packed are {signature(key)}"
        )
    data = compiled[0].dump_to_object(prefix)
    if not isinstance(data, bytes):
        raise CompileError(f"the compiler gives a {type(data).__name__} for an object")
    return data


def _signature(module: str) -> tuple[str, ...]:
    """The launcher's argument types, from the compiled module: `ptr 4xi32 3xi64` is a tensor, extents then strides."""
    found = re.findall(r"llvm\.func @_mlir_ciface_\w+\((.*)\) -> i32 attributes", module)
    if len(found) != 1:
        raise CompileError(f"the compiled module has {len(found)} launchers, one is understood")
    arguments = re.split(r"(?:, )?%arg\d+: ", found[0])[1:]
    return tuple(_type(argument) for argument in arguments)


def _type(text: str) -> str:
    scalars = re.findall(r"ptr|i32|i64|f32", text)
    if "struct" not in text:
        return scalars[0]
    kinds: list[list[Any]] = []
    for group in re.findall(r"struct<\(((?:i32|i64)(?:, (?:i32|i64))*)\)>|\b(i32|i64)\b", text):
        names = (group[0] or group[1]).split(", ")
        kinds.append([len(names), names[0]])
        if len(set(names)) != 1:
            return text
    return " ".join(["ptr", *(f"{count}x{name}" for count, name in kinds)])
