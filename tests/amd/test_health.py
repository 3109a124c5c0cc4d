"""Health words, decoded: order by a clock that wraps, names, and what a tag says."""

import pytest
import torch

from k3dsl.amd.health import Tag, decode_health
from k3dsl.amd.mla_pre.key import HEALTH_WORDS, MlaPreBuild
from k3dsl.amd.mla_pre.layout import regions
from k3dsl.errors import ConfigError


def region(name: str) -> int:
    return regions(MlaPreBuild(tokens=8, ranks=8))[name].id


def words(*records: tuple[int, str, int, int, int, int], failed: int = 1) -> torch.Tensor:
    """(workgroup, region, pair, expected, seen, clock) each."""
    health = torch.zeros(HEALTH_WORDS, dtype=torch.int32)
    health[0] = failed
    for group, name, pair, expected, seen, clock in records:
        values = [1, region(name), pair, expected, seen, group, clock, 0]
        health[8 * (group + 1) : 8 * (group + 2)] = torch.tensor(values, dtype=torch.int32)
    return health


def test_a_sound_rank() -> None:
    health = decode_health(torch.zeros(HEALTH_WORDS, dtype=torch.int32))
    assert health
    assert health.lines() == ["sound: no wait was given up"]
    assert decode_health([0] * HEALTH_WORDS) == health


@pytest.mark.parametrize("given", [None, 5, "words", [None] * HEALTH_WORDS])
def test_what_is_no_health(given: object) -> None:
    with pytest.raises(
        ConfigError, match=f"health is .*, must be a tensor or a sequence of {HEALTH_WORDS} int32 words"
    ):
        decode_health(given)


def test_records_come_in_the_order_of_their_clocks() -> None:
    late, early = (200, "qg", 17, 2 * 256 + 4, 256 + 4, 900), (3, "part", 5, 2 * 256 + 4, 0, 400)
    health = decode_health(words(late, early))
    assert not health
    assert health.failed
    assert [r.workgroup for r in health.records] == [3, 200]
    assert [r.region for r in health.records] == ["part", "qg"]
    assert [r.ticks for r in health.records] == [0, 500]
    text = str(health)
    assert "2 of 256 workgroups gave up" in text
    assert "workgroup   3 gave up on part[5]: waited for epoch 2 slot 3, saw nothing" in text
    assert "+    0.005 ms workgroup 200 gave up on qg[17]: waited for epoch 2 slot 3, saw epoch 1 slot 3" in text


def test_the_clock_wraps() -> None:
    top = (1 << 31) - 1
    health = decode_health(words((0, "qa", 0, 257, 0, 5), (1, "qa", 0, 257, 0, top - 10), (2, "qn", 0, 257, 0, top)))
    assert [r.workgroup for r in health.records] == [1, 2, 0]
    assert [r.ticks for r in health.records] == [0, 10, 16]


def test_an_unknown_region_shows_its_number_and_a_header_alone_counts() -> None:
    health = words((9, "msq", 1, 257, 0, 3), failed=0)
    health[8 * 10 + 1] = 0x1234
    decoded = decode_health(health)
    assert not decoded
    assert decoded.records[0].region == "0x00001234"
    assert decoded.lines()[0].startswith("not marked FAILED; 1 of 256")
    alone = decode_health(words())
    assert not alone
    assert alone.lines() == ["FAILED; 0 of 256 workgroups gave up"]


def test_tags() -> None:
    assert Tag.of(0) is None
    assert Tag.of(1) == Tag(0, 0)
    assert Tag.of(((1 << 22) - 1) * 256 + 255 + 1) == Tag((1 << 22) - 1, 255)


def test_another_number_of_words_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"health has 8 words, must have 2056"):
        decode_health([0] * 8)
