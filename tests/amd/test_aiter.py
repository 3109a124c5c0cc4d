"""The adaptor to aiter: what it hands over is enough to compute the right attention from, and aiter takes it.

Two halves. A stand-in computes attention from nothing but the arguments that aiter would get, so lists of pages,
padding, scales and LSE are checked against the oracle. And the signatures are checked against aiter's own source where
it is at hand: installed, or a checkout named by `pytest --aiter-source DIR`.
"""

import ast
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from k3dsl import reference
from k3dsl.amd.aiter import CONTRACT, AiterDecode, signature_problems
from k3dsl.errors import ConfigError, ToolchainError

SCALE = 192**-0.5
E4M3 = torch.float8_e4m3fn


class StandIn:
    """aiter's three functions in plain torch; `calls` are the arguments of the last ones."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}

    def get_mla_metadata_info_v1(self, *args: Any, **more: Any) -> tuple[Any, ...]:
        self._note("get_mla_metadata_info_v1", args, more)
        return ((2, torch.uint64), (257, torch.int32), ((8, 8), torch.int32), (9, torch.int32), ((8, 2), torch.int32),
                (8, torch.int32))  # fmt: skip

    def get_mla_metadata_v1(self, *args: Any, **more: Any) -> None:
        self._note("get_mla_metadata_v1", args, more)

    def mla_decode_fwd(self, *args: Any, **more: Any) -> tuple[None, torch.Tensor | None]:
        a = self._note("mla_decode_fwd", args, more)
        assert a["q_scale"].item() == a["kv_scale"].item() == 1
        pages, unit = a["kv_buffer"], a["page_size"]
        assert pages.dtype == a["q"].dtype == E4M3
        assert pages.shape[1:] == (unit, 1, 576)
        assert a["o"].shape == (*a["q"].shape[:2], 512)
        lse = torch.full(a["q"].shape[:2], torch.nan)
        world, rank = a.get("cp_world_size", 1), a.get("cp_rank", 0)
        for r in range(len(a["qo_indptr"]) - 1):
            first, last = a["qo_indptr"][r : r + 2].tolist()
            assert last - first == a["max_seqlen_q"]
            listed = a["kv_indices"][a["kv_indptr"][r] : a["kv_indptr"][r + 1]].long()
            keys = pages[listed].float().reshape(-1, 576)
            if len(listed):
                keys = keys[: (len(listed) - 1) * unit + int(a["kv_last_page_lens"][r])]
            total = len(keys) if world == 1 else int(a["g_kv_indptr"][r + 1] - a["g_kv_indptr"][r])
            position = torch.arange(len(keys)) * world + rank
            for t in range(first, last):
                seen = keys[position < total - (last - 1 - t)]
                logit = a["q"][t].float() @ seen.T * a["sm_scale"]
                a["o"][t] = (logit.softmax(1) @ seen[:, :512]).to(torch.bfloat16)
                lse[t] = logit.logsumexp(1)
        return None, lse if a["return_lse"] else None

    def _note(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
        names = CONTRACT[name][1]
        given = dict(zip(names, args, strict=False)) | more
        assert set(given) <= set(names), set(given) - set(names)
        self.calls[name] = given
        return given


def cache_of(blocks: int, page: int, seed: int = 0, interleaved: bool = False) -> torch.Tensor:
    values = torch.randn(blocks, page, 576, generator=torch.Generator().manual_seed(seed)).to(E4M3).view(torch.uint8)
    if not interleaved:
        return values
    pool = torch.full((blocks, 3, page, 576), 0x7F, dtype=torch.uint8)  # NaN in the other layers
    pool[:, 1] = values
    return pool[:, 1]


def query_of(rows: int, heads: int, seed: int = 1) -> torch.Tensor:
    values = torch.randn(rows, heads, 576, generator=torch.Generator().manual_seed(seed))
    return values.to(E4M3).view(torch.uint8)


def attend(
    decode: AiterDecode, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, q: int,
    totals: torch.Tensor | None = None, lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    rows, heads = query.shape[:2]
    out = torch.full((rows, heads, 512), torch.nan, dtype=torch.bfloat16)
    found = torch.full((rows, heads), torch.nan) if lse else None
    decode.plan(cache, table, lengths, totals, rows, q)
    decode.run(query, cache, table, lengths, totals, q, out, found)
    return out, found


CASES = [(16, 1, 12, False), (64, 4, 12, True), (1, 1, 12, False), (24, 2, 12, False), (16, 1, 96, True)]


@pytest.mark.parametrize(("page", "q", "heads", "interleaved"), CASES)
def test_attention_from_what_aiter_is_given(page: int, q: int, heads: int, interleaved: bool) -> None:
    """Whole and part-filled pages, an empty request, unused table entries far out of range, a strided table."""
    stand_in = StandIn()
    lengths = torch.tensor([page * 2, 0, page + 1, 3 * page - 1 or q], dtype=torch.int32).clamp(max=3 * page)
    lengths[lengths > 0] = lengths[lengths > 0].clamp(min=q)
    wide = torch.full((4, 9), 1 << 30, dtype=torch.int32)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    table = wide[:, :6]
    for r, n in enumerate(lengths.tolist()):
        need = -(-n // page)
        table[r, :need] = order[4 * r : 4 * r + need]
    cache, query = cache_of(16, page, interleaved=interleaved), query_of(4 * q, heads)
    decode = AiterDecode(SCALE, width=6, functions=stand_in)
    assert decode.problems(cache) == []
    decode.warm(cache, ((4 * q, q),), heads)
    out, _ = attend(decode, query, cache, table, lengths, q)
    want, _ = reference.core(query, cache, table, lengths, q, scale=SCALE, probabilities=torch.float32)
    live = (lengths > 0).repeat_interleave(q)  # what an empty request's rows hold is the layer's business
    torch.testing.assert_close(out[live], want.flatten(0, 1)[live], rtol=2**-7, atol=2e-3)
    made = stand_in.calls["get_mla_metadata_v1"]
    unit = page if page & (page - 1) == 0 else 1
    assert made["page_size"] == unit
    assert made["num_heads_per_head_k"] == {12: 16, 96: 96}[heads]
    assert made["is_causal"] is True
    assert made["kv_granularity"] == max(unit, 16)
    work = stand_in.calls["mla_decode_fwd"]
    for name in ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map"):
        assert work[name] is made[name], name
    assert work["work_meta_data"] is made["work_metadata_ptrs"]


def test_a_full_table_and_other_lengths_in_the_same_buffers() -> None:
    stand_in = StandIn()
    cache, query = cache_of(8, 16), query_of(2, 12)
    decode = AiterDecode(SCALE, width=4, functions=stand_in)
    decode.warm(cache, ((2, 1), (4, 2)), 12)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    addresses = []
    for lengths in ([64, 64], [1, 17], [64, 5]):
        given = torch.tensor(lengths, dtype=torch.int32)
        out, _ = attend(decode, query, cache, table, given, 1)
        want, _ = reference.core(query, cache, table, given, 1, scale=SCALE, probabilities=torch.float32)
        torch.testing.assert_close(out, want.flatten(0, 1), rtol=2**-7, atol=2e-3)
        addresses.append(
            [t.data_ptr() for t in (stand_in.calls["mla_decode_fwd"][n] for n in ("kv_indptr", "kv_indices"))]
        )
    assert addresses[0] == addresses[1] == addresses[2]  # a captured step replays with them
    before = decode._shapes[(2, 1)]
    decode.warm(cache_of(8, 16), ((2, 1),), 12)  # another layer
    assert decode._shapes[(2, 1)] is before


@pytest.mark.parametrize("ranks", [2, 8])
def test_context_parallel_ranks_see_their_share(ranks: int) -> None:
    """Round robin keys, causality by the positions of the whole context; the LSE in base 2."""
    q, totals = 2, torch.tensor([5 * ranks + 3, 2, 8 * ranks], dtype=torch.int32)
    outs, lses = [], []
    whole = cache_of(16, 4 * ranks, seed=5)
    query = query_of(3 * q, 96)
    table = torch.tensor([[3, 1], [2, 9], [7, 4]], dtype=torch.int32)
    for rank in range(ranks):
        lengths = reference.local_len(totals, ranks, rank)
        mine = whole[:, rank::ranks].contiguous()
        decode = AiterDecode(SCALE, 2, ranks, rank, functions=StandIn())
        decode.warm(mine, ((6, 2),), 96)
        out, lse = attend(decode, query, mine, table, lengths, q, totals, lse=True)
        outs.append(out)
        lses.append(lse)
    assert all(bool((x[(reference.local_len(totals, ranks, r) == 0).repeat_interleave(q)] == -torch.inf).all())
               for r, x in enumerate(lses))  # fmt: skip
    merged, _ = reference.merge(torch.stack(outs), torch.stack(lses))
    seen, want_lse = reference.core(query, whole, table, totals, q, scale=SCALE, probabilities=torch.float32)
    torch.testing.assert_close(merged, seen.flatten(0, 1), rtol=2**-6, atol=4e-3)
    total = torch.stack([reference.finite_lse(x) for x in lses]).mul(math.log(2)).logsumexp(0) / math.log(2)
    torch.testing.assert_close(total, want_lse.flatten(0, 1), rtol=1e-4, atol=1e-3)


def test_caches_that_aiter_cannot_read_are_named() -> None:
    one, two = (AiterDecode(SCALE, 4, ranks, functions=StandIn()) for ranks in (1, 2))
    strided = torch.zeros(4, 16, 640, dtype=torch.uint8)[..., :576]
    assert "slot stride of 640 bytes, must be 576" in one.problems(strided)[0]
    assert "must be 9216 for context parallelism" in two.problems(cache_of(4, 16, interleaved=True))[0]
    assert "must be 13824 for a page of 24 tokens" in one.problems(cache_of(4, 24, interleaved=True))[0]
    assert one.problems(cache_of(4, 16, interleaved=True)) == []
    two.warm(cache_of(4, 16), ((1, 1),), 32)
    with pytest.raises(ConfigError, match="totals is needed"):
        two.plan(cache_of(4, 16), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), None, 1, 1)
    with pytest.raises(ConfigError, match="heads=200 fit none"):
        one.warm(cache_of(4, 16), ((1, 1),), 200)


def test_without_aiter_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="amd-aiter, which is not installed"):
        AiterDecode(SCALE, 4)


def test_another_signature_is_found() -> None:
    right = CONTRACT["mla_decode_fwd"][1]
    assert signature_problems("mla_decode_fwd", (*right, "more")) == []
    assert signature_problems("mla_decode_fwd", right[1:]) == ["aiter's mla_decode_fwd has no parameter 'q'"]
    assert "in another order" in signature_problems("mla_decode_fwd", (right[1], right[0], *right[2:]))[0]


def test_the_contract_is_aiters_own(request: pytest.FixtureRequest) -> None:
    """Names and order of the parameters that the adaptor passes, read from aiter's source without importing it."""
    root = request.config.getoption("--aiter-source")
    if root is None:
        spec = importlib.util.find_spec("aiter")
        if spec is None or spec.origin is None:
            pytest.skip("aiter is not installed and no --aiter-source was given")
        root = str(Path(spec.origin).parent.parent)
    for name, (file, _) in CONTRACT.items():
        tree = ast.parse((Path(root) / file).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert found, f"{file} has no {name}"
        arguments = found[-1].args
        parameters = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        assert signature_problems(name, parameters) == []
