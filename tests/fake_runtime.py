"""A layer on a FakeDriver: CPU tensors, objects without code, and a stream that a test chooses."""

from pathlib import Path

import torch
from fake_cuda import FakeDriver, fake_build

from k3dsl import CompileCache, Deployment, MlaDims, MlaWeights
from k3dsl.nvidia import device as devices
from k3dsl.nvidia.prepared import PreparedMla
from k3dsl.nvidia.query import ELEMENT
from k3dsl.nvidia.runtime import Executables, Runtime

STREAM = 0x57


class Bench:
    """A fake device with a cache of fake objects for every key of `plan`."""

    def __init__(self, folder: Path, plan: Deployment, sm_count: int = 132) -> None:
        self.plan = plan
        self.fake = FakeDriver(sm_count=sm_count)
        self.stream = STREAM
        self.synchronized = 0
        self.cache = CompileCache(folder)
        for key in plan.keys():  # noqa: SIM118 - a method, not a dict's
            self.cache.get_or_build(key, fake_build)
        self.cache.seal()
        self.executables = Executables(self.fake)
        self.runtime = Runtime(
            self.executables,
            devices.read(0, self.fake),
            torch.device("cpu"),
            lambda: self.stream,
            self._synchronize,
        )

    def _synchronize(self) -> None:
        self.synchronized += 1

    def layer(self, seed: int = 0, **changes) -> PreparedMla:
        """A layer of the plan, not yet bound to a cache."""
        plan = self.plan
        arguments = {
            "attention": MlaWeights.random(plan.dims, seed=seed, q_scale=0.5, k_scale=0.25),
            "pitches": {rows: plan.dims.pitch for rows, _ in plan.shapes()},
            "query_scratch": self.runtime.query_scratch(plan.dims.heads, ELEMENT[plan.kv_format]),
            "queries": plan.queries,
            "core": plan.core,
            "cache": self.cache,
            "runtime": self.runtime,
            **changes,
        }
        positional = [arguments.pop(name) for name in ("attention", "pitches", "query_scratch")]
        return PreparedMla(*positional, **arguments)

    def kv(self, pages: int = 6, page: int | None = None, gap: int = 0) -> torch.Tensor:
        """A paged cache, its pages `gap` tokens apart."""
        dtype = torch.uint8 if self.plan.kv_format == "fp8" else torch.bfloat16
        page = page or self.plan.page_size
        return torch.zeros(pages, page + gap, 576, dtype=dtype)[:, :page]


def step(dims: MlaDims, rows: int, q: int = 1, width: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of a step, by the names of `run`."""
    return {
        "projected": torch.zeros(rows, dims.pitch, dtype=torch.bfloat16),
        "out": torch.zeros(rows, dims.heads * dims.v, dtype=torch.bfloat16),
        "slots": torch.zeros(rows, dtype=torch.int64),
        "block_table": torch.zeros(rows // q, width, dtype=torch.int32),
        "lengths": torch.ones(rows // q, dtype=torch.int32),
    }


def prepared(bench: Bench, **changes):
    """A layer of the plan that is bound to a cache, and the cache; what that launched is forgotten."""
    layer, kv = bench.layer(**changes), bench.kv()
    layer.prepare_cache(kv)
    bench.fake.launches.clear()
    return layer, kv


def run(layer: PreparedMla, kv: torch.Tensor, tensors: dict[str, torch.Tensor], q: int = 1, **more) -> None:
    """One step with the tensors of `step`."""
    layer.run(**tensors, cache=kv, q=q, **more)
