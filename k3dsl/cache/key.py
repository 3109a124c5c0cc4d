"""What a compiled kernel is known by: the frozen facts that reach codegen, in one canonical encoding.

Two keys are equal exactly if their encodings are, and the encoding is injective: it can be decoded, piece by piece, so
no two different keys share one. It keeps types (1, 1.0 and True differ) and every bit of a float (-0.0, NaN payloads).
It depends on values alone: not on dict order, the hash seed, object identity or the process.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from k3dsl.errors import ConfigError

Scalar: TypeAlias = "bool | int | float | str | bytes | None"
Value: TypeAlias = "Scalar | tuple[Value, ...] | Mapping[str, Value]"

#: Heads every encoding: an encoding of another version can never equal one of this.
_MAGIC: Final = b"k3dsl-key-1\0"
#: A target names a folder, so it holds nothing that means something in a path.
_TARGET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
#: Digits of a digest that people see: 48 bits.
_SHORT: Final = 12
#: Integers up to here survive every JSON reader; larger ones are written in hex.
_JSON_INT: Final = 2**53
_FIELDS: Final = ("kernel", "params", "target", "toolchain", "sources")
_ALLOWED: Final = "None, bool, int, float, str, bytes, a tuple of those, or a mapping from str to those"


class KeyTypeError(ConfigError, TypeError):
    """A value of a key is of a type that has no canonical encoding."""


class _Absent:
    """Stands for a field that one of two keys does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()


class Difference(NamedTuple):
    """A field in which two keys differ: `field` is a dotted path such as "params.heads"."""

    field: str
    mine: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.mine!r} here, {self.theirs!r} there"


@dataclass(frozen=True, eq=False, repr=False)
class CompileKey:
    """Everything that reaches codegen of one kernel, and nothing else.

    kernel     the kernel family, e.g. "mla_value"
    params     its compile-time facts: scalars and nested tuples, by name
    target     the architecture string as its toolchain spells it, e.g. "sm_90a"
    toolchain  compiler, native libraries, flavour, options: name -> version
    sources    digest of the sources that the kernel is traced from (`sources.source_digest`)

    Frozen and hashable; `digest` is the sha256 of the canonical `encoding` in hex, `short` its first 12 digits. Raises
    ConfigError with every problem; a value whose type has no canonical encoding raises KeyTypeError (a ConfigError).
    """

    kernel: str
    params: Mapping[str, Value]
    target: str
    toolchain: Mapping[str, Value]
    sources: Value
    encoding: bytes = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        problems: list[str] = []
        if type(self.kernel) is not str or not self.kernel:
            problems.append(f"kernel={self.kernel!r} must be a non-empty str")
        if type(self.target) is not str or not _TARGET.fullmatch(self.target):
            problems.append(f"target={self.target!r} must be letters, digits and any of _ . + - (64 at most)")
        for name in ("params", "toolchain"):
            if not isinstance(getattr(self, name), Mapping):
                problems.append(f"{name}={getattr(self, name)!r} must be a mapping from str to values")
        types: list[str] = []
        fields = {name: _freeze(getattr(self, name), name, types) for name in _FIELDS}
        if types:
            raise KeyTypeError.of("CompileKey", problems + types)
        if problems:
            raise ConfigError.of("CompileKey", problems)
        encoding = _MAGIC + _encode(fields)
        for name, value in (*fields.items(), ("encoding", encoding), ("digest", sha256(encoding).hexdigest())):
            object.__setattr__(self, name, value)

    @property
    def short(self) -> str:
        """The digest as people see it."""
        return short(self.digest)

    def __eq__(self, other: object) -> bool:
        # Not field by field: there 1 == 1.0 == True and NaN != NaN.
        return self.encoding == other.encoding if isinstance(other, CompileKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompileKey, (self.kernel, _thaw(self.params), self.target, _thaw(self.toolchain), _thaw(self.sources))

    def __repr__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in sorted(self.params.items()))
        return f"<CompileKey {self.kernel}({params}) {self.target} {self.short}>"

    def diff(self, other: "CompileKey") -> list[Difference]:
        """The fields in which this key and `other` differ, by path; empty exactly if they are equal."""
        mine, theirs = self._fields(), other._fields()
        return [
            Difference(".".join(path), mine.get(path, ABSENT), theirs.get(path, ABSENT))
            for path in sorted({*mine, *theirs})
            if path not in mine or path not in theirs or _encode(mine[path]) != _encode(theirs[path])
        ]

    def _fields(self) -> dict[tuple[str, ...], Any]:
        """Every leaf by path. An empty mapping inside params is a leaf, so that it differs from an absent one."""
        found: dict[tuple[str, ...], Any] = {}

        def walk(path: tuple[str, ...], value: Any) -> None:
            if isinstance(value, Mapping) and (value or len(path) == 1):
                for name, inner in value.items():
                    walk((*path, name), inner)
            else:
                found[path] = _thaw(value)

        for name in _FIELDS:
            walk((name,), getattr(self, name))
        return found

    def to_json(self) -> dict[str, Any]:
        """The key in JSON types, without loss; `from_json` is its inverse."""
        return {
            "kernel": self.kernel,
            "params": {name: _to_json(value) for name, value in sorted(self.params.items())},
            "target": self.target,
            "toolchain": {name: _to_json(value) for name, value in sorted(self.toolchain.items())},
            "sources": _to_json(self.sources),
        }

    @classmethod
    def from_json(cls, form: Any) -> "CompileKey":
        """The key that `to_json` wrote. Raises ConfigError if `form` is not such a form."""
        if not isinstance(form, dict) or set(form) != set(_FIELDS):
            raise ConfigError(f"a key in JSON has exactly the fields {', '.join(_FIELDS)}")
        values = dict(form)
        for name in ("params", "toolchain"):
            if not isinstance(form[name], dict):
                raise ConfigError(f"{name}={form[name]!r} of a key in JSON must be an object")
            values[name] = {inner: _from_json(value) for inner, value in form[name].items()}
        return cls(**{**values, "sources": _from_json(form["sources"])})


def is_digest(text: str) -> bool:
    """Whether `text` is a full digest."""
    return _DIGEST.fullmatch(text) is not None


def short(digest: str) -> str:
    """A digest as people see it."""
    return digest[:_SHORT]


def _freeze(value: Any, path: str, problems: list[str]) -> Any:
    """`value` with read-only mappings, every refused part noted by path. Exact types: a subclass may mean anything."""
    kind = type(value)
    if value is None or kind in (bool, int, float, bytes):
        return value
    if kind is str:
        if not _utf8(value):
            problems.append(f"{path}={value!r} holds lone surrogates, which no file can hold")
        return value
    if kind is tuple:
        return tuple(_freeze(item, f"{path}[{index}]", problems) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        names = [name for name in value if type(name) is not str or not _utf8(name)]
        problems.extend(f"{path} has the name {name!r}, which must be a str" for name in names)
        return MappingProxyType(
            {name: _freeze(item, f"{path}.{name}", problems) for name, item in value.items() if name not in names}
        )
    hint = "; use a tuple" if kind is list else ""
    problems.append(f"{path}={value!r} is of type {kind.__qualname__}; allowed are {_ALLOWED}{hint}")
    return None


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _thaw(value: Any) -> Any:
    """Read-only mappings as dicts, which can be pickled."""
    if isinstance(value, tuple):
        return tuple(_thaw(item) for item in value)
    return {name: _thaw(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _encode(value: Any) -> bytes:
    """A tag, then a fixed size or a length, then the content: decodable without knowing what follows."""
    if value is None:
        return b"N"
    if value is True or value is False:
        return b"T" if value else b"F"
    if isinstance(value, int):
        return b"i" + _sized(b"%x" % value if value >= 0 else b"-%x" % -value)
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"s" + _sized(value.encode())
    if isinstance(value, bytes):
        return b"b" + _sized(value)
    if isinstance(value, tuple):
        return b"t%d:" % len(value) + b"".join(map(_encode, value))
    pairs = sorted((name.encode(), item) for name, item in value.items())
    return b"m%d:" % len(pairs) + b"".join(_sized(name) + _encode(item) for name, item in pairs)


def _sized(content: bytes) -> bytes:
    return b"%d:" % len(content) + content


def _to_json(value: Any) -> Any:
    """Tuples are arrays; what JSON cannot hold is an object of one member that names its type."""
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": {name: _to_json(item) for name, item in sorted(value.items())}}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float):
        return {"float": f"nan:{struct.pack('>d', value).hex()}" if isnan(value) else repr(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _JSON_INT:
        return {"int": hex(value)}
    return value


def _from_json(form: Any) -> Any:
    if isinstance(form, list):
        return tuple(_from_json(item) for item in form)
    if form is None or isinstance(form, bool | int | str):
        return form
    try:
        ((kind, content),) = form.items()
        if kind == "map":
            return {name: _from_json(item) for name, item in content.items()}
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "int":
            return int(content, 16)
        if kind == "float" and content.startswith("nan:"):
            return struct.unpack(">d", bytes.fromhex(content[4:]))[0]
        if kind == "float":
            return float(content)
    except (AttributeError, TypeError, ValueError, struct.error):
        pass
    raise ConfigError(f"{form!r} is not a value of a key in JSON")
