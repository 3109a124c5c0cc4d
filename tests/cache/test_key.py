"""Keys: injective, canonical, the same everywhere, different for every fact."""

import copy
import json
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from cache_tools import make_key
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl.cache import ABSENT, CompileKey, KeyTypeError
from k3dsl.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


def bits(value: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", value))[0]


floats = st.integers(0, 2**64 - 1).map(bits)  # every float there is, each NaN too
text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | floats | text | st.binary(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
keys = st.builds(
    CompileKey,
    kernel=text.filter(bool),
    params=st.dictionaries(text, values, max_size=4),
    target=st.sampled_from(["sm_90a", "sm_90", "sm_100a", "gfx950"]),
    toolchain=st.dictionaries(text, text, max_size=2),
    sources=text,
)


def same(a: Any, b: Any) -> bool:
    """Equality that keeps types and float bits, written without the encoding under test."""
    if type(a) is not type(b):
        both_mappings = hasattr(a, "items") and hasattr(b, "items")
        if not both_mappings:
            return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "items"):
        return set(a) == set(b) and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


def facts(key: CompileKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in ("kernel", "params", "target", "toolchain", "sources")}


@settings(max_examples=300, deadline=None)
@given(keys, keys)
def test_two_keys_are_one_exactly_if_all_facts_are(a: CompileKey, b: CompileKey) -> None:
    """Lesson 12: identity is the content, not a name."""
    assert (a == b) == same(facts(a), facts(b))
    assert (a.digest == b.digest) == (a == b)
    assert (a.diff(b) == []) == (a == b)


@settings(max_examples=200, deadline=None)
@given(keys)
def test_copies_are_the_key_itself(key: CompileKey) -> None:
    through_json = CompileKey.from_json(json.loads(json.dumps(key.to_json())))
    for other in (through_json, pickle.loads(pickle.dumps(key)), copy.deepcopy(key), replace(key)):
        assert other == key
        assert other.digest == key.digest
        assert hash(other) == hash(key)
        assert same(facts(other), facts(key))


def test_no_collision_in_100_000_keys() -> None:
    generator = random.Random(0)
    choices = [None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, "", "1", "1.0", b"", b"1", (), (1,), ((1,),), {}, {"a": 1}]
    seen: dict[str, str] = {}
    for n in range(100_000):
        params = {f"p{generator.randrange(4)}": generator.choice(choices) for _ in range(generator.randrange(5))}
        key = CompileKey("k", {**params, "n": n // 2}, generator.choice(["sm_90a", "sm_90"]), {}, "")
        facts = repr((sorted((k, type(v).__name__, repr(v)) for k, v in key.params.items()), key.target))
        assert seen.setdefault(key.digest, facts) == facts
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    "family",
    [
        [1, 1.0, True, "1", b"1", (1,), {"1": 1}],
        [0, 0.0, -0.0, False, None, "", b"", (), {}],
        [math.nan, bits(0x7FF8000000000001), bits(0xFFF8000000000000), bits(0x7FF0000000000001), math.inf, -math.inf],
        [("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",)), ("a", "b", ()), "ab"],
        [2**63, 2**64, -(2**63), 2**53 + 1, float(2**53), 2**53],
        ["é", "e\u0301", "É"],
        [{"a": {"b": 1}}, {"a.b": 1}, {"a": {"b": {}}}, {"a": {}}],
    ],
    ids=["ones", "zeros", "nans", "nesting", "large", "unicode", "mappings"],
)
def test_values_that_look_alike_are_told_apart(family: list[Any]) -> None:
    """Lesson 12: types and every bit of a float are kept."""
    made = [make_key(value) for value in family]
    assert len({key.digest for key in made}) == len(family)
    for key in made:
        again = CompileKey.from_json(json.loads(json.dumps(key.to_json())))
        assert again.digest == key.digest
        for other in made:
            assert bool(key.diff(other)) == (key is not other)


def test_every_fact_counts() -> None:
    """Lessons 12, 15, 16: each field, each name and each value, one at a time; the target to its suffix."""
    base = make_key()
    changed = [
        make_key(kernel="mla_value2"),
        make_key(target="sm_90"),
        make_key(target="sm_100a"),
        make_key(sources="cd" * 32),
        make_key(toolchain={"dsl": "4.8.1", "flavour": "cu12"}),
        make_key(toolchain={"dsl": "4.8.2", "flavour": "cu13"}),
        make_key(toolchain={"dsl": "4.8.1"}),
        *(make_key(params={**base.params, name: "other"}) for name in base.params),
        *(make_key(params={k: v for k, v in base.params.items() if k != name}) for name in base.params),
        make_key(params={**base.params, "more": None}),
    ]
    assert len({key.digest for key in [base, *changed]}) == len(changed) + 1
    for key in changed:
        assert len(base.diff(key)) == 1


def test_the_difference_is_named() -> None:
    ours = make_key(params={"heads": 12, "shape": {"rows": 1}})
    theirs = make_key(params={"heads": 6, "shape": {"rows": 1}, "split": 4}, target="sm_100a")
    found = {item.field: (item.mine, item.theirs) for item in ours.diff(theirs)}
    assert found == {
        "params.heads": (12, 6),
        "params.split": (ABSENT, 4),
        "target": ("sm_90a", "sm_100a"),
    }
    assert "params.heads: 12 here, 6 there" in map(str, ours.diff(theirs))


class Heads(int):
    """A subclass may mean anything: its value says too little."""


@pytest.mark.parametrize(
    "value",
    [object(), [1, 2], {1, 2}, frozenset(), Heads(12), len, 1j, bytearray(b"x"), {1: 2}, "\ud800"],
    ids=lambda value: type(value).__name__,  # no addresses: every worker must name a test alike
)
def test_a_value_without_a_canonical_form_is_refused(value: Any) -> None:
    """Lesson 19: no repr of objects, no set order."""
    with pytest.raises(KeyTypeError, match=r"params\.n") as caught:
        make_key(value)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(KeyTypeError, match=r"params\.n\[1\]"):
        make_key((1, value))


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        CompileKey("", {"a": [1], "b": object()}, "../../etc", {"dsl": 1j}, "")
    for words in ("kernel=''", "params.a", "use a tuple", "params.b", "target='../../etc'", "toolchain.dsl"):
        assert words in str(caught.value)


@pytest.mark.parametrize("target", ["", ".", "..", "a/b", "sm 90", "-x", "x" * 65, "sm_90a\n", None])
def test_a_target_is_a_plain_name(target: Any) -> None:
    """Lesson 29: what names a folder cannot lead out of it."""
    with pytest.raises(ConfigError, match="target="):
        make_key(target=target)


def test_a_key_is_frozen_all_through() -> None:
    params = {"heads": 12, "nested": {"a": 1}}
    key = make_key(params=params)
    before = key.digest
    params["heads"] = 6
    params["nested"]["a"] = 2  # type: ignore[index]
    assert (key.params["heads"], key.params["nested"]) == (12, {"a": 1})
    assert CompileKey(**facts(key)).digest == before
    with pytest.raises(FrozenInstanceError):
        key.kernel = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        key.params["heads"] = 6  # type: ignore[index]


def test_the_order_of_a_mapping_is_no_fact() -> None:
    """Lesson 19."""
    assert make_key(params={"a": 1, "b": {"c": 1, "d": 2}}) == make_key(params={"b": {"d": 2, "c": 1}, "a": 1})


@pytest.mark.parametrize(
    "form",
    [None, [], {}, {"kernel": "k"}, {**make_key().to_json(), "more": 1}, {**make_key().to_json(), "params": []},
     {**make_key().to_json(), "sources": {"float": "x"}}, {**make_key().to_json(), "sources": {"what": 1}},
     {**make_key().to_json(), "sources": {"bytes": 1}}, {**make_key().to_json(), "sources": 1.5}],
)  # fmt: skip
def test_json_that_is_no_key_is_refused(form: Any) -> None:
    with pytest.raises(ConfigError):
        CompileKey.from_json(form)


PROGRAM = """
from k3dsl.cache import CompileKey, source_digest
key = CompileKey(
    "mla_value",
    {"heads": 12, "eps": 1e-5, "zero": -0.0, "tags": ("a", "b"), "nested": {"y": 1, "x": None}},
    "sm_90a", {"dsl": "4.8.1", "cuda": "13"}, source_digest("k3dsl.nvidia.value"),
)
print(key.digest)
"""


def digest_in(folder: Path, checkout: Path, **environ: str) -> str:
    variables = {"PYTHONPATH": str(checkout), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_same_in_every_process_and_checkout(tmp_path: Path) -> None:
    """Lessons 19, 20: hash seed, working directory, checkout path, user's variables and mtimes are no facts."""
    checkout = tmp_path / "elsewhere" / "checkout"
    shutil.copytree(REPOSITORY / "k3dsl", checkout / "k3dsl", ignore=shutil.ignore_patterns("__pycache__"))
    for file in checkout.rglob("*.py"):
        os.utime(file, (1, 1))
    digests = {
        digest_in(tmp_path, REPOSITORY, PYTHONHASHSEED="0"),
        digest_in(REPOSITORY, REPOSITORY, PYTHONHASHSEED="1", HOME="/nowhere", USER="other", LANG="C"),
        digest_in(tmp_path, checkout, PYTHONHASHSEED="4000000", CUDA_VISIBLE_DEVICES="3", K3DSL_CACHE_DIR="/x"),
    }
    assert len(digests) == 1
