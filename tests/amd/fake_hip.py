"""A stand-in for libamdhip64: Python functions with HIP's names that record what they were given."""

import ctypes
from typing import Any

from k3dsl.amd.hip import SIGNATURES

_TEXT = ctypes.create_string_buffer(b"made up")
_TEXT_AT = ctypes.addressof(_TEXT)
SIZES = {"ptr": 8, "i32": 4, "i64": 8, "f32": 4}


class FakeHip:
    """Set `fail[name] = status` to have a function refuse. `launches` holds grid, block, lds, stream and arguments."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.loaded: dict[int, tuple[int, bytes]] = {}
        self.launches: list[dict[str, Any]] = []
        self.extra: list[Any] = []
        self.sizes: list[int] = []  # of the arguments of the next launch
        self.device = 0
        self.captured: set[int] = set()
        self.asked: list[int] = []
        self.synchronized: list[int] = []
        bodies = {
            "hipInit": lambda flags: None,
            "hipGetDeviceCount": lambda out: self._put(out, ctypes.c_int, 1),
            "hipGetDevice": lambda out: self._put(out, ctypes.c_int, self.device),
            "hipSetDevice": lambda index: setattr(self, "device", index),
            "hipModuleLoadData": self._load,
            "hipModuleUnload": lambda module: self.loaded.pop(module),
            "hipModuleGetFunction": lambda out, module, name: self._put(out, ctypes.c_void_p, module + 1),
            "hipModuleLaunchKernel": self._launch,
            "hipStreamIsCapturing": self._capturing,
            "hipStreamSynchronize": lambda stream: self.synchronized.append(stream or 0),
        }
        for name, body in bodies.items():
            setattr(self, name, self._function(name, body))
        self.hipGetErrorString = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(lambda status: _TEXT_AT)

    def _function(self, name: str, body: Any) -> Any:
        def call(*arguments: Any) -> int:
            if status := self.fail.get(name):
                return status
            body(*arguments)
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(call)  # what C passes, and no more

    @staticmethod
    def _put(out: Any, kind: Any, value: int) -> None:
        ctypes.cast(out, ctypes.POINTER(kind))[0] = value

    def _load(self, out: Any, image: int) -> None:
        handle = 0x1000 * (len(self.loaded) + 1)
        self.loaded[handle] = (self.device, ctypes.string_at(image, 4))
        self._put(out, ctypes.c_void_p, handle)

    def _capturing(self, stream: int, out: Any) -> None:
        self.asked.append(stream)
        self._put(out, ctypes.c_int, int(stream in self.captured))

    def _launch(self, function: int, *rest: Any) -> None:
        gx, gy, gz, bx, by, bz, lds, stream, array, extra = rest
        self.extra.append(extra)
        places = (ctypes.c_void_p * len(self.sizes)).from_address(array)
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.launches.append(
            {"function": function, "grid": (gx, gy, gz), "block": (bx, by, bz), "lds": lds, "stream": stream or 0}
            | {"values": values, "device": self.device}
        )
