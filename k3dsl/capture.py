"""The capture guard: what must never happen inside a stream capture is refused before it touches the stream.

A compile, a module load, an allocation that replays will use, the growth of a workspace: each would end the capture
with a driver error, or worse, be frozen into the graph. A refusal leaves the stream and the capture valid.
"""

import sys
from collections.abc import Callable

from k3dsl.errors import CaptureError


def capturing() -> bool:
    """Whether torch's current stream is being captured. Loads nothing: without torch's CUDA there is no capture."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def guard(what: str, capturing: Callable[[], bool] = capturing) -> None:
    """Raises CaptureError if a capture is going on. `what`: what was about to happen, as the start of a sentence."""
    if capturing():
        raise CaptureError(
            f"{what} inside a stream capture is refused; the capture goes on. Do it before the capture begins: "
            "prepare_cache() compiles, loads, warms and sizes everything that run() uses"
        )
