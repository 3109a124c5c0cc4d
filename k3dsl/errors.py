"""Every error that k3dsl raises on purpose. All derive from `K3Error`."""


class K3Error(Exception):
    """Base of all k3dsl errors."""


class ConfigError(K3Error, ValueError):
    """A value is not one that k3dsl serves. The message names every bad value and what is allowed."""

    @classmethod
    def of(cls, what: str, problems: list[str]) -> "ConfigError":
        """One error for all problems of `what`, a line each."""
        head = f"{what}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"
        return cls("\n  - ".join([head, *problems]))


class NotPrepared(K3Error, KeyError):
    """`run()` was asked for a (rows, q) that `prepare` did not prepare."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class CaptureError(K3Error, RuntimeError):
    """A compile, a module load or a workspace growth was about to happen inside a stream capture."""


class CacheMiss(K3Error, KeyError):
    """A sealed (or frozen) cache was asked for a key that it does not hold."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CompileError(K3Error, RuntimeError):
    """A kernel did not compile, or compiled to something that its target cannot run well (a spill)."""


class ToolchainError(K3Error, RuntimeError):
    """A compiler, a driver or a package that is needed is missing or of the wrong version."""


class LaunchError(K3Error, RuntimeError):
    """The driver refused a load or a launch."""


class PeerError(K3Error, RuntimeError):
    """A rank of a context-parallel group did not answer within its bound.

    rank: who waited; peer: for whom; region, row, parity: for what; seconds: the bound. None where it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        region: str | None = None,
        row: int | None = None,
        parity: int | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.region = rank, peer, region
        self.row, self.parity, self.seconds = row, parity, seconds
