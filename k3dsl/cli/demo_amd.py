"""`k3dsl demo --target gfx950`: on the GPU, on the emulator of a checkout or on the reference; it says which."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from k3dsl.cli.console import out
from k3dsl.cli.demo import Demo
from k3dsl.deployment import REFERENCE, Deployment
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError

if TYPE_CHECKING:
    from k3dsl.cache import CompileCache
    from k3dsl.scenario import Stack


def emulator_present() -> str | None:
    """Why there is no emulator here; None if there is. It lives in tools/ of a checkout, not in the package."""
    try:
        if find_spec("tools.gfx950") is None:
            return "tools/gfx950 is not importable: not in a checkout"
    except ModuleNotFoundError:
        return "tools/gfx950 is not importable: not in a checkout"
    missing = [name for name in ("flydsl", "tinygrad") if find_spec(name) is None]
    return f"{', '.join(missing)} missing: pip install 'k3dsl[amd]'" if missing else None


@dataclass
class AmdDemo(Demo):
    """A stack of gfx950 layers. `place`: where mla_pre ran; `attention`: where the decode did."""

    place: str = ""
    attention: str = ""
    why: str = ""

    @property
    def limit(self) -> float:
        """Of the reference, which shares every rounding with what it is compared with, and of kernels: a sum in another
        order may flip a value of four bits, and with it a head's query. 3.4e-2 was the largest of 12 rows and steps.
        """
        return 1e-2 if self.place == REFERENCE else 8e-2

    @property
    def captured(self) -> bool:
        """On a GPU with aiter: the reference's attention cannot be captured, and nothing is on an emulator."""
        return self.place == "gpu" and self.attention != REFERENCE

    def run(self) -> "AmdDemo":
        """Prepares, decodes and compares every step."""
        import torch

        from k3dsl.amd.mla_pre.key import MAX_BLOCKS, MAX_TOKENS
        from k3dsl.amd.prepared import prepare_layer
        from k3dsl.preparing import detect_target
        from k3dsl.scenario import LENGTHS
        from k3dsl.scenario_amd import SeamStack

        rows = len(LENGTHS) * self.q
        bad = [] if self.tp == 8 else [f"tp={self.tp} must be 8 on gfx950"]
        bad += [] if self.kv_format == "fp8" else [f"kv_format={self.kv_format!r} must be fp8 for mla_pre"]
        bad += [] if rows <= MAX_TOKENS else [f"q={self.q}: {len(LENGTHS)} requests are {rows} rows, of {MAX_TOKENS}"]
        if bad:
            raise ConfigError.of("demo", bad)
        on_gpu = detect_target() == "gfx950"
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        plan = Deployment(MlaDims(), target="gfx950", page_size=self.page_size, batches=(rows,), queries=(self.q,))
        stack = SeamStack(
            MlaDims(),
            layers=self.layers,
            q=self.q,
            page=self.page_size,
            steps=self.steps,
            device=device,
            seed=self.seed,
        )
        self.lengths.append(stack.lengths.tolist())
        runtime, cache = self._place(on_gpu, stack)
        prepared = [
            prepare_layer(plan, layer.weights, cache=cache, runtime=runtime, nblocks=(1 + i % MAX_BLOCKS,))
            for i, layer in enumerate(stack.layers)
        ]
        self._note_keys(cache, prepared)
        for layer, one in zip(stack.layers, prepared, strict=True):
            one.prepare_cache(layer.cache)
            if runtime is not None and not on_gpu:
                _open_memory(runtime, stack, one)
        assert prepared[0].decode is not None
        self.attention = prepared[0].decode.name
        self._note_resources(cache)
        self._decode(stack, prepared, self.captured)
        self.lengths.append(stack.lengths.tolist())
        for one in prepared:
            one.rank.check()
        return self

    def _place(self, on_gpu: bool, stack: "Stack") -> "tuple[Any, CompileCache | None]":
        """Where mla_pre runs: (runtime or None for the default, cache)."""
        from k3dsl.cache import CompileCache

        if on_gpu:
            self.place = "gpu"
            return None, CompileCache()
        self.why = emulator_present() or ""
        if self.why:
            self.place = REFERENCE
            return None, None
        self.place = "emulator"
        tools = import_module("tools.gfx950")
        return import_module("tools.gfx950.runtime").EmulatorRuntime(tools.Memory()), CompileCache()

    def _note_keys(self, cache: "CompileCache | None", prepared: "list[Any]") -> None:
        """The kernels that will be needed, and which of them the cache has."""
        from k3dsl.amd.toolchain import compile_key

        if cache is None:
            return
        for build in dict.fromkeys(k for one in prepared for k in one.builds):
            key = compile_key(build, "gfx950")
            there = key in cache
            self.hits, self.compiled = self.hits + there, self.compiled + (not there)
            facts = {"kernel": key.kernel, "params": dict(key.params), "digest": key.digest}
            self.kernels.append(facts | {"from": "hit" if there else "compiled", "key": key})

    def _note_resources(self, cache: "CompileCache | None") -> None:
        for kernel in self.kernels:
            entry = cache.get(kernel.pop("key")) if cache is not None else None
            resources = entry.resources if entry is not None else {}
            kernel |= {"registers": resources.get("vgprs"), "build_seconds": resources.get("build_seconds")}

    def document(self) -> "dict[str, Any]":
        """For --json."""
        return super().document() | {"executor": self.place, "decode": self.attention, "note": self.why}

    def show(self) -> None:
        """For people."""
        where = {"gpu": "on the GPU", "emulator": "on the gfx950 emulator", REFERENCE: "on the reference"}[self.place]
        out().print(f"mla_pre {where}, decode attention on {self.attention}{f' ({self.why})' if self.why else ''}")
        super().show()


def _open_memory(runtime: Any, stack: Any, layer: Any) -> None:
    """Registers with the emulator all that the layer's kernel touches: it stops at any other address."""
    for tensor in (*stack.prefixes, *stack.deltas, *stack.blocks, stack.slots):
        runtime.memory.add(tensor)
    for one in stack.layers:
        for tensor in (one.projected, one.cache):
            runtime.memory.add(tensor)
    for tensor in layer.memory():
        runtime.memory.add(tensor)
