"""The compile cache: keys become objects, through memory, one folder, read-only layers, and at last a build."""

from k3dsl.cache.key import ABSENT, CompileKey, Difference, KeyTypeError
from k3dsl.cache.sources import source_digest

__all__ = ["ABSENT", "CompileKey", "Difference", "KeyTypeError", "source_digest"]
