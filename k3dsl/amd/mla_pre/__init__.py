"""The monolithic mla_pre: one launch from the AttnRes seam to the input of the attention core.

`k3dsl.amd.mla_pre` is this package and the function at once: calling it is calling `mla_pre.launch.mla_pre`. A package
of this name is what Python binds in `k3dsl.amd` as soon as any module of it is imported, so a function of the same name
could not be relied on.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, key: Any, **arguments: Any) -> None:
        from k3dsl.amd.mla_pre.launch import mla_pre

        mla_pre(key, **arguments)

    @property
    def __signature__(self) -> Any:  # for help() and inspect
        import inspect

        from k3dsl.amd.mla_pre.launch import mla_pre

        return inspect.signature(mla_pre)


sys.modules[__name__].__class__ = _CallablePackage
