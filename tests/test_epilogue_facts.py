"""Host facts of the epilogues: keys, parameters, launches, and the division of a slot by the page size."""

import random

import pytest

from k3dsl.errors import ConfigError
from k3dsl.nvidia import epilogue as facts
from k3dsl.nvidia.epilogue import EpilogueKey, epilogue_keys


@pytest.mark.parametrize("target", facts.TARGETS)
def test_every_enumerated_key_is_served(target):
    keys = epilogue_keys(12, kv_formats=("bf16", "fp8", "fp8_ds_mla"), dtypes=facts.DTYPES, rope=(False, True))
    assert len(keys) == len(set(keys)) == 2 * (2 * 3 * 2 + 3)
    assert all(facts.supports(key, target) == [] for key in keys)


def test_the_target_model_needs_five_keys():
    assert epilogue_keys(12) == [
        EpilogueKey("prefill", "fp8", "bf16", 12),
        EpilogueKey("decode", "fp8", "bf16", 12),
        EpilogueKey("context", "plain", "bf16", 12),
        EpilogueKey("context", "fp8", "bf16", 12),
        EpilogueKey("context", "fp8", "bf16", 12, pe_fp8=True),
    ]
    assert epilogue_keys(6, kv_formats=("bf16",), ops=("decode",)) == [EpilogueKey("decode", "plain", "bf16", 6)]


@pytest.mark.parametrize("bad", [{"heads": 0}, {"heads": 129}, {"heads": 12, "dtypes": ("fp32",)}])
def test_bad_facts_are_named(bad):
    heads = bad.pop("heads")
    with pytest.raises(ConfigError, match=r"heads|fp32"):
        epilogue_keys(heads, **bad)


def test_every_reason_is_named():
    reasons = facts.supports(EpilogueKey("encode", "int4", "fp32", 500), "sm_80")
    assert [r.split("=")[0] for r in reasons] == ["op", "format", "dtype", "heads", "target"]
    assert "prefill, decode, context" in reasons[0]
    assert facts.supports(EpilogueKey("context", "fp8_ds_mla", "bf16", 1), "sm_90a")
    assert facts.supports(EpilogueKey("context", "plain", "bf16", 1, rope=True), "sm_90a")
    assert facts.supports(EpilogueKey("prefill", "fp8", "bf16", 1, pe_fp8=True), "sm_90a")


@pytest.mark.parametrize(
    ("key", "units"),
    [
        (EpilogueKey("prefill", "plain", "bf16", 12), (576 + 12 * 192) // 8),
        (EpilogueKey("prefill", "plain", "bf16", 12, rope=True), (576 + 12 * 256) // 8),
        (EpilogueKey("prefill", "fp8", "bf16", 12), (576 + 12 * (192 + 192 + 128)) // 16),
        (EpilogueKey("prefill", "fp8_ds_mla", "bf16", 12), 12 * 192 // 8),
        (EpilogueKey("decode", "plain", "bf16", 12), 13 * 576 // 8),
        (EpilogueKey("decode", "fp8", "bf16", 12), 13 * 576 // 16),
        (EpilogueKey("decode", "fp8_ds_mla", "bf16", 12), 12 * 576 // 8),
        (EpilogueKey("context", "plain", "bf16", 12), 12 * 192 // 8),
        (EpilogueKey("context", "fp8", "bf16", 12), 12 * 320 // 16),
    ],
)
def test_units_and_grid(key, units):
    assert facts.units(key) == units
    for tokens in (1, 7, 64, 4096, 16384):
        launch = facts.geometry(key, tokens=tokens)
        share = facts.share(key, tokens)
        records = -(-tokens // 8) if key.format == "fp8_ds_mla" else 0
        assert launch.grid == (records + -(-tokens * units // (256 * share)), 1, 1)
        assert launch.block == (256, 1, 1)
        assert launch.pdl
        assert launch.smem == 0
        assert share == (1 if tokens * units <= facts.ONE_EACH else facts.most_per_thread(key))


def test_decode_sizes_take_one_unit_a_thread():
    assert all(facts.share(EpilogueKey("decode", "plain", "bf16", 12), b) == 1 for b in (1, 16, 64))


def test_too_many_or_no_tokens_are_refused():
    key = EpilogueKey("decode", "plain", "bf16", 128)
    most = facts.MAX_UNITS // facts.units(key)
    assert facts.geometry(key, tokens=most).grid[0] * 256 * 4 < 2**32
    with pytest.raises(ConfigError, match=str(most)):
        facts.geometry(key, tokens=most + 1)
    with pytest.raises(ConfigError, match="tokens=0"):
        facts.geometry(key, tokens=0)


def test_division_is_exact_below_2_to_31():
    rng = random.Random(0)
    sizes = [1, 2, 3, 5, 7, 16, 32, 48, 63, 64, 65, 127, 128, 896, 1000, 2**20 - 1, 2**30 + 1, 2**31 - 1, 2**31]
    for size in sizes + [rng.randrange(1, 2**31) for _ in range(300)]:
        mul, shift = facts.division(size)
        assert 0 < mul < 2**32
        assert 31 <= shift <= 62
        edges = [k * size + d for k in (0, 1, 2, (2**31 - 1) // size) for d in (-1, 0, 1)]
        for slot in edges + [rng.randrange(2**31) for _ in range(50)] + [2**31 - 1]:
            if 0 <= slot < 2**31:
                assert slot * mul >> shift == slot // size, (slot, size)


def test_parameters_are_those_that_a_key_needs():
    names = {p.name for p in EpilogueKey("prefill", "plain", "bf16", 12).params}
    assert "q" not in names  # not rotated: q is not even passed
    assert "positions" not in names
    rotated = {p.name for p in EpilogueKey("prefill", "plain", "bf16", 12, rope=True).params}
    assert rotated - names == {"q", "q_t", "q_h", "positions", "cos_sin"}
    assert facts.scales(EpilogueKey("prefill", "fp8", "bf16", 12)) == ("cache_scale", "k_scale", "v_scale", "q_scale")
    assert facts.scales(EpilogueKey("context", "fp8", "bf16", 12)) == ()
    for key in epilogue_keys(12, kv_formats=("bf16", "fp8", "fp8_ds_mla"), rope=(False, True)):
        assert len({p.name for p in key.params}) == len(key.params)
