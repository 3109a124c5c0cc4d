"""The epilogues: rotation against complex multiplication, exact copies, roundings, slots."""

import pytest
import torch
from cases import FORMATS, empty_cache, fp8_steps

from k3dsl import reference as ref
from k3dsl.errors import ConfigError

HALVES = [torch.bfloat16, torch.float16]


def inputs(tokens: int = 4, heads: int = 3, dtype=torch.bfloat16, seed: int = 0):
    """q, k_nope, v as slices of wider tensors, k_pe as a slice of a workspace: strided as an engine has them."""
    g = torch.Generator().manual_seed(seed)
    kv = (torch.randn(tokens, heads, 256, generator=g) * 0.2).to(dtype)
    work = (torch.randn(tokens, 576, generator=g) * 0.2).to(dtype)
    return {
        "q": (torch.randn(tokens, heads, 192, generator=g) * 0.2).to(dtype),
        "k_nope": kv[..., :128],
        "v": kv[..., 128:],
        "k_pe": work[:, 512:],
        "kv_c_normed": (torch.randn(tokens, 512, generator=g) * 0.2).to(dtype),
        "ql_nope": (torch.randn(tokens, heads, 512, generator=g) * 0.2).to(dtype),
        "q_pe": (torch.randn(tokens, heads, 192, generator=g) * 0.2).to(dtype)[..., 128:],
    }


def angles(positions: int = 64, base: float = 50000.0) -> torch.Tensor:
    turn = torch.arange(positions).double()[:, None] * base ** (-2 * torch.arange(32).double() / 64)
    return torch.cat([turn.cos(), turn.sin()], dim=1).float()


def complex_rotation(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """float64 [T, ..., 64]: pairs as complex numbers, times e^(i angle)."""
    pair = torch.view_as_complex(x.double().contiguous().unflatten(-1, (32, 2)))
    turn = torch.complex(table[positions, :32].double(), table[positions, 32:].double())
    turn = turn.reshape(len(positions), *[1] * (x.dim() - 2), 32)
    return torch.view_as_real(pair * turn).flatten(-2)


SLOTS = torch.tensor([-1, 0, -1, 5])
POSITIONS = torch.tensor([1, 7, 13, 0])
ROPE = [pytest.param(False, id="nope"), pytest.param(True, id="rope")]


def rope_arguments(rope: bool) -> dict:
    return {"positions": POSITIONS, "cos_sin_cache": angles()} if rope else {}


def cache_for(kv_format: str, dtype) -> torch.Tensor:
    cache = empty_cache(2, 8, kv_format)
    return cache.view(torch.int16).view(dtype) if kv_format == "bf16" else cache


def check_cache(cache, x, rope: bool, kv_format: str, scale_inv: float = 1.0):
    """Live slots hold what they should to the bit where there is no rotation, the others their fill."""
    raw = ref.bits(cache).reshape(16, -1)
    assert bool((raw[[1, 2, 3, 4, *range(6, 16)]] == 0xFF).all())
    k_pe = complex_rotation(x["k_pe"], POSITIONS, angles()) if rope else x["k_pe"].double()
    for token, slot in ((1, 0), (3, 5)):
        got, latent = cache.reshape(16, -1)[slot], x["kv_c_normed"][token]
        if kv_format == "bf16":
            assert torch.equal(got[:512], latent)
            assert_rounded(got[512:], k_pe[token], x["k_pe"].dtype)
        elif kv_format == "fp8":
            assert torch.equal(got[:512], ref.f8(latent.float() * scale_inv).view(torch.uint8))
            assert fp8_steps(got[512:], ref.f8(k_pe[token].float() * scale_inv)).max() <= (1 if rope else 0)
        else:
            record = ref.ds_mla_pack(latent[None], x["k_pe"][token][None])[0]
            assert torch.equal(got[:528], record[:528])
            assert_rounded(got[528:].view(x["k_pe"].dtype), k_pe[token], x["k_pe"].dtype)


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, dtype) -> None:
    """`got` is `exact` rounded once to `dtype`; float32 products may tip a value that lies mid-step."""
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert got.dtype == dtype
    assert bool(((got.double() - exact).abs() <= exact.abs() * unit + 2.0**-22).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_rotation_is_a_complex_product(dtype):
    x = inputs(dtype=dtype)
    for part in (x["q_pe"], x["k_pe"]):
        got = ref.rotate(part, POSITIONS, angles())
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), complex_rotation(part, POSITIONS, angles()), rtol=0, atol=2.0**-23)
    with pytest.raises(ConfigError, match="given together or not at all"):
        ref.rotate(x["k_pe"], POSITIONS, None)


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_format", ["bf16", "fp8_ds_mla"])
def test_prefill_in_16_bits(kv_format, dtype, rope):
    x = inputs(dtype=dtype)
    cache, q = cache_for(kv_format, dtype), x["q"].clone()
    function = (
        ref.fused_mla_key_concat_kv_cache_insert if kv_format == "bf16" else ref.fused_mla_key_concat_ds_mla_insert
    )
    k = function(q, x["k_nope"], x["k_pe"], x["kv_c_normed"], cache, SLOTS, **rope_arguments(rope))
    assert k.is_contiguous()
    assert torch.equal(k[..., :128], x["k_nope"])
    assert torch.equal(q[..., :128], x["q"][..., :128])
    if rope:
        assert_rounded(q[..., 128:], complex_rotation(x["q"][..., 128:], POSITIONS, angles()), dtype)
        want = complex_rotation(x["k_pe"], POSITIONS, angles())[:, None].expand(-1, 3, -1)
        assert_rounded(k[..., 128:], want, dtype)
    else:
        assert torch.equal(q, x["q"])
        assert torch.equal(k[..., 128:], x["k_pe"][:, None].expand(-1, 3, -1))
    check_cache(cache, x, rope, kv_format)


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("dtype", HALVES)
def test_prefill_in_fp8(dtype, rope):
    x = inputs(dtype=dtype)
    cache = cache_for("fp8", dtype)
    inverse = {"q": 2.0, "k": 3.0, "v": 5.0, "cache": 0.7}
    scales = [torch.tensor([s]) for s in inverse.values()]
    before = x["q"].clone()
    q, k, v = ref.fused_mla_qkv_quant_kv_cache_fp8_insert(
        x["q"], x["k_nope"], x["k_pe"], x["kv_c_normed"], x["v"], cache, SLOTS, *scales, **rope_arguments(rope)
    )
    assert torch.equal(x["q"], before)

    def same(a: torch.Tensor, b: torch.Tensor, steps: int = 0) -> bool:
        return a.dtype == torch.float8_e4m3fn and a.is_contiguous() and int(fp8_steps(a, ref.f8(b)).max()) <= steps

    assert same(v, x["v"].float() * 5.0)
    assert same(k[..., :128].contiguous(), x["k_nope"].float() * 3.0)
    assert same(q[..., :128].contiguous(), x["q"][..., :128].float() * 2.0)
    q_pe, k_pe = x["q"][..., 128:].double(), x["k_pe"].double()
    if rope:
        q_pe, k_pe = (complex_rotation(p, POSITIONS, angles()) for p in (q_pe, k_pe))
    assert same(q[..., 128:].contiguous(), q_pe.float() * 2.0, int(rope))
    assert same(k[..., 128:].contiguous(), (k_pe.float() * 3.0)[:, None].expand(-1, 3, -1).contiguous(), int(rope))
    check_cache(cache, x, rope, "fp8", 0.7)


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode(kv_format, dtype, rope):
    x = inputs(dtype=dtype)
    cache = cache_for(kv_format, dtype)
    fp8 = kv_format == "fp8"
    query = ref.fused_mla_decode_q_concat_kv_cache_insert(
        x["ql_nope"], x["q_pe"], x["kv_c_normed"], x["k_pe"], cache, SLOTS,
        ds_mla=kv_format == "fp8_ds_mla",
        q_scale_inv=torch.tensor([4.0]) if fp8 else None,
        cache_scale_inv=torch.tensor([0.5]) if fp8 else None,
        **rope_arguments(rope),
    )  # fmt: skip
    assert query.shape == (4, 3, 576)
    assert query.is_contiguous()
    q_pe = complex_rotation(x["q_pe"], POSITIONS, angles()) if rope else x["q_pe"].double()
    if fp8:
        assert fp8_steps(query[..., :512], ref.f8(x["ql_nope"].float() * 4.0)).max() == 0
        assert fp8_steps(query[..., 512:], ref.f8(q_pe.float() * 4.0)).max() <= int(rope)
    else:
        assert torch.equal(query[..., :512], x["ql_nope"])
        assert_rounded(query[..., 512:], q_pe, dtype)
    check_cache(cache, x, rope, kv_format, 0.5)


def test_fp8_rotation_has_no_rounding_in_between():
    """Where rounding to bf16 first would give another byte, and it is taken out of many draws."""
    x = inputs(tokens=4, heads=64, seed=3)
    one = torch.ones(1)
    query = ref.fused_mla_decode_q_concat_kv_cache_insert(
        x["ql_nope"], x["q_pe"], x["kv_c_normed"], x["k_pe"], cache_for("fp8", None), SLOTS,
        q_scale_inv=one, cache_scale_inv=one, **rope_arguments(True),
    )  # fmt: skip
    rotated = ref.rotate(x["q_pe"], POSITIONS, angles())
    direct, twice = ref.f8(rotated), ref.f8(rotated.bfloat16())
    assert fp8_steps(direct, twice).max() == 1
    assert fp8_steps(query[..., 512:], direct).max() == 0


def test_scale_without_clamping_would_overflow():
    """Values past 448 saturate, and NaN becomes -448 (the clamp's maxNum), unlike in the query kernel."""
    x = inputs()
    x["ql_nope"][0, 0, :3] = torch.tensor([torch.nan, 1e5, -1e5]).bfloat16()
    x["kv_c_normed"][1, :2] = torch.tensor([torch.nan, torch.inf]).bfloat16()
    cache, one = cache_for("fp8", None), torch.ones(1)
    query = ref.fused_mla_decode_q_concat_kv_cache_insert(
        x["ql_nope"], x["q_pe"], x["kv_c_normed"], x["k_pe"], cache, SLOTS, q_scale_inv=one, cache_scale_inv=one
    )
    assert query[0, 0, :3].float().tolist() == [-448, 448, -448]
    assert cache[0, 0, :2].tolist() == [0xFE, 0x7E]


def test_scales_must_fit_the_format():
    x = inputs()
    arguments = [x["ql_nope"], x["q_pe"], x["kv_c_normed"], x["k_pe"], cache_for("fp8", None), SLOTS]
    for wrong in ({"q_scale_inv": torch.ones(1)}, {"cache_scale_inv": torch.ones(1)},
                  {"q_scale_inv": torch.ones(1), "cache_scale_inv": torch.ones(1), "ds_mla": True}):  # fmt: skip
        with pytest.raises(ConfigError, match="given together, for an fp8 cache, and never with ds_mla"):
            ref.fused_mla_decode_q_concat_kv_cache_insert(*arguments, **wrong)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("tokens", [0, 3])
def test_context_packs(tokens, heads, dtype):
    x = inputs(tokens, heads, dtype)
    k = ref.context_pack(x["k_nope"], x["k_pe"])
    assert k.is_contiguous()
    assert k.shape == (tokens, heads, 192)
    assert torch.equal(k, torch.cat([x["k_nope"], x["k_pe"][:, None].repeat(1, heads, 1)], dim=2))
    k8, v8 = ref.context_pack_fp8(x["k_nope"], x["v"], x["k_pe"])
    assert k8.is_contiguous()
    assert v8.is_contiguous()
    assert torch.equal(k8.float(), k.to(torch.float8_e4m3fn).float())
    assert torch.equal(v8.float(), x["v"].to(torch.float8_e4m3fn).float())


def test_context_pack_copies_fp8_and_saturates():
    x = inputs(3)
    k_pe = torch.full((3, 64), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x["k_nope"][0, 0, :3] = torch.tensor([1e4, -1e4, torch.nan]).bfloat16()
    k8, _ = ref.context_pack_fp8(x["k_nope"], x["v"], k_pe)
    assert bool((k8.view(torch.uint8)[..., 128:] == 0xFF).all())
    assert k8.view(torch.uint8)[0, 0, :3].tolist() == [0x7E, 0xFE, 0x7F]
