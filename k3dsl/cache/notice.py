"""What is not as it should be, said once: the cache goes on without it; `explain`, `stats` and `doctor` can tell."""

from k3dsl.env import logger

#: What this process has warned of already: (folder, code).
_said: set[tuple[str, str]] = set()


class Notices:
    """The degraded states of one cache, by code."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.degraded: dict[str, str] = {}

    def say(self, code: str, message: str) -> None:
        """Notes a degraded state and warns of it once a process, whatever number of kernels meets it."""
        self.degraded.setdefault(code, message)
        if (self._where, code) not in _said:
            _said.add((self._where, code))
            logger().warning("compile cache: %s", message)
