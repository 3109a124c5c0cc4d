"""Core and merge of the `hopper` attention core on the inputs of tests/cases.py, with poison around all they write."""

from dataclasses import dataclass, field

import harness
import torch
from cases import CoreInputs
from hopper_partials import merged

from k3dsl.nvidia.core import hopper
from k3dsl.nvidia.driver import LaunchPlan, driver
from k3dsl.nvidia.tensor_map import TensorMap

LOG2E = 1.4426950408889634
CANARY = 64  # elements after each output that must stay as they are


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor of NaN, the NaN after it)."""
    count = torch.Size(shape).numel()
    flat = torch.full((count + CANARY,), torch.nan, dtype=dtype, device="cuda")
    return flat[:count].view(shape), flat[count:]


@dataclass
class Workspace:
    """0xFF everywhere, which is NaN."""

    partial: torch.Tensor
    stats: torch.Tensor
    after: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, *sizes: hopper.Workspace) -> "Workspace":
        partial, after = guarded((max(s.partial for s in sizes) // 4,), torch.float32)
        stats, after_stats = guarded((max(s.stats for s in sizes) // 4,), torch.float32)
        made = cls(partial, stats, [after, after_stats])
        made.poison()
        return made

    def poison(self) -> None:
        for tensor in (self.partial, self.stats):
            tensor.view(torch.int32).fill_(-1)

    def intact(self) -> bool:
        return all(bool(x.isnan().all()) for x in self.after)


class Run:
    """Plans of core and merge for these inputs. sm_count: how many SMs the split is made for."""

    def __init__(
        self,
        given: CoreInputs,
        *,
        p: str | None = None,
        sm_count: int | None = None,
        workspace: Workspace | None = None,
        lse: bool = True,
    ) -> None:
        requests, heads, cache = len(given.lengths), given.query.shape[-2], given.cache
        self.given, self.sm_count = given, sm_count or torch.cuda.get_device_properties(0).multi_processor_count
        self.key = hopper.choose(heads=heads, q=given.q, page=cache.shape[1], kv=given.kv_format, p=p)
        self.merge_key = hopper.merge_key(self.key, requests=requests)
        self.sizes = hopper.workspace(self.key, requests=requests, sm_count=self.sm_count)
        self.workspace = workspace or Workspace.of(self.sizes)
        self.out, self.after_out = guarded((requests, given.q, heads, hopper.LATENT), torch.bfloat16)
        self.lse, self.after_lse = guarded((requests, given.q, heads), torch.float32)
        size = cache.element_size()
        maps = {}
        facts = hopper.kv_maps(
            self.key, pages=cache.shape[0], page_stride=cache.stride(0) * size, token_stride=cache.stride(1) * size
        )
        for name, fact in facts.items():
            maps[name] = TensorMap(driver(), address=cache.data_ptr(), **fact)
        for name, fact in hopper.query_maps(self.key, rows=requests * given.q).items():
            maps[name] = TensorMap(driver(), address=given.query.data_ptr(), **fact)
        shared = {
            "lengths": given.lengths.data_ptr(),
            "partial": self.workspace.partial.data_ptr(),
            "stats": self.workspace.stats.data_ptr(),
            "requests": requests,
            "splits": hopper.splits(self.key, self.sm_count),
            "slots": self.sizes.slots,
        }
        core = hopper.geometry(self.key, requests=requests, sm_count=self.sm_count)
        merge = hopper.merge_geometry(self.merge_key, self.key, requests=requests)
        self.core_plan = LaunchPlan(
            harness.function(self.key),
            core,
            self.key.params,
            table=given.block_table.data_ptr(),
            table_stride=given.block_table.stride(0),
            scale_log2=given.scale * LOG2E,
            **maps,
            **shared,
        )
        self.merge_plan = LaunchPlan(
            harness.function(self.merge_key),
            merge,
            self.merge_key.params,
            out=self.out.data_ptr(),
            lse=self.lse.data_ptr() if lse else 0,
            columns=self.key.columns,
            out_scale=given.out_scale,
            **shared,
        )

    def launch(self) -> None:
        """Core and merge on torch's current stream."""
        stream = harness.stream()
        self.core_plan.launch(stream)
        self.merge_plan.launch(stream)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) after a launch on a poisoned workspace. Checks that nothing else was written."""
        self.workspace.poison()
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.launch()
        torch.cuda.synchronize()
        assert self.workspace.intact()
        assert self.after_out.isnan().all()
        assert self.after_lse.isnan().all()
        return self.out.clone(), self.lse.clone()

    def partials(self) -> torch.Tensor:
        """What the core of the last launch left, in the type that it left it in."""
        kind = {"f16": torch.float16, "f32": torch.float32}[self.key.partial]
        return self.workspace.partial.view(kind)[: self.sizes.partial // kind.itemsize]

    def unrounded(self) -> torch.Tensor:
        """float64 [R, q, H, 512]: the partials of the last launch merged here, by the host's cut and no rounding."""
        out, _ = merged(
            self.key,
            self.partials(),
            self.workspace.stats[: self.sizes.stats // 4],
            self.given.lengths.tolist(),
            sm_count=self.sm_count,
            out_scale=self.given.out_scale,
        )
        return out
