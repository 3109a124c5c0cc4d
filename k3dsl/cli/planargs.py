"""The arguments that name a deployment, shared by warmup, plan and `cache why`; the plan file has the same names."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from k3dsl.deployment import Deployment
from k3dsl.dims import MlaDims
from k3dsl.errors import ConfigError

MODELS: Final[dict[str, Callable[[int], MlaDims]]] = {"kimi-k3": MlaDims.kimi_k3}

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="TOML file with these arguments; options here override it.")
]
Model = Annotated[str | None, typer.Option(help="Model: kimi-k3.", show_default="kimi-k3")]
Tp = Annotated[int | None, typer.Option(help="Tensor-parallel ranks: 8 or 16.", show_default="8")]
TargetList = Annotated[
    str | None, typer.Option("--target", help="Targets, e.g. sm_90a,sm_100a.", show_default="that of the present GPU")
]
KvFormat = Annotated[
    str | None,
    typer.Option("--kv-format", help="Cache format: fp8 or bf16; on gfx950 fp8 or fp8_ds_mla.", show_default="fp8"),
]
Batches = Annotated[
    str | None, typer.Option(help="Rows of a step, e.g. 1-8,16,32,64.", show_default="1-8,16,32,64; on gfx950 1-8,16")
]
Queries = Annotated[str | None, typer.Option(help="Tokens of a request in a step, e.g. 1,4.", show_default="1")]
PageSize = Annotated[int | None, typer.Option(help="Tokens of a cache page.", show_default="64")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens that a request may reach.", show_default="131072")]
Core = Annotated[str | None, typer.Option(help="Attention core.", show_default="auto")]
Dcp = Annotated[int | None, typer.Option(help="Ranks that share a context.", show_default="1")]
Interleave = Annotated[
    int | None, typer.Option(help="Consecutive positions of a context on one rank.", show_default="1")
]
Epilogues = Annotated[
    str | None,
    typer.Option(help="Dtypes that the fused epilogues are built for: bf16, fp16, none.", show_default="bf16"),
]
Host = Annotated[
    str | None,
    typer.Option(
        help="ISA of the machines with the GPUs: x86-64 or aarch64 (GB200, GB300).", show_default="this machine's"
    ),
]
PDtype = Annotated[
    str | None,
    typer.Option("--p-dtype", help="Softmax weights in the hopper core: f16 or e4m3 (fp8 cache).", show_default="auto"),
]

#: Numbers of a range, at most: far more than any step has rows.
_MOST: Final = 4096


def numbers(text: "str | list[int]", what: str) -> tuple[int, ...]:
    """(1, 2, 3, 16) of "1-3,16". Raises ConfigError naming the piece that is none of N, N-M."""
    if isinstance(text, list):
        return tuple(text)
    if isinstance(text, int):
        return (text,)
    found: list[int] = []
    for piece in str(text).split(","):
        low, dash, high = piece.strip().partition("-")
        if len(piece) > 20 or not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ConfigError(f"{what}={text!r}: {piece.strip()!r} must be a number or a range such as 1-8")
        if int(high or low) - int(low) > _MOST:
            raise ConfigError(f"{what}={text!r}: {piece.strip()!r} must be a range of {_MOST} numbers at most")
        found += range(int(low), int(high or low) + 1)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class PlanArguments:
    """The arguments as given; None where they were not. `takes_plan` makes options of them."""

    plan: PlanFile = None
    model: Model = None
    tp: Tp = None
    target: TargetList = None
    kv_format: KvFormat = None
    batches: Batches = None
    queries: Queries = None
    page_size: PageSize = None
    max_context: MaxContext = None
    core: Core = None
    dcp: Dcp = None
    interleave: Interleave = None
    epilogues: Epilogues = None
    host: Host = None
    p_dtype: PDtype = None

    def deployments(self) -> list[Deployment]:
        """One deployment a target. Raises ConfigError for bad arguments or a bad plan file."""
        given = dict(_read(self.plan) if self.plan is not None else {})
        given |= {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}
        model = given.pop("model", "kimi-k3")
        if not isinstance(model, str) or model not in MODELS:
            raise ConfigError(f"model={model!r} must be one of {', '.join(MODELS)}")
        dims = MODELS[model](given.pop("tp", 8))
        for name in ("batches", "queries"):
            if name in given:
                given[name] = numbers(given[name], name)
        if "epilogues" in given:
            given["epilogues"] = _dtypes(given["epilogues"])
        targets = given.pop("target", None)
        if targets is None:
            targets = _present()
        names = targets if isinstance(targets, list) else [t.strip() for t in str(targets).split(",")]
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"target={targets!r} must be a target or several, e.g. sm_90a,sm_100a")
        return [Deployment(dims, target=name, **given) for name in dict.fromkeys(names)]


#: Those that a plan file may have.
_NAMES: Final = tuple(field.name for field in fields(PlanArguments) if field.name != "plan")


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of PlanArguments in place of its parameter `given`."""
    own, options = inspect.signature(command, eval_str=True), get_type_hints(PlanArguments, include_extras=True)
    found: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        if parameter.name != "given":
            found.append(parameter)
            continue
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found += [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in options.items()]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = PlanArguments(**{name: arguments.pop(name) for name in options})
        command(given=given, **arguments)

    # Both are what typer reads.
    run.__signature__ = own.replace(parameters=found)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return run


def _dtypes(text: "str | list[str]") -> tuple[str, ...]:
    """("bf16", "fp16") of "bf16,fp16", () of "none"; the deployment checks the names."""
    if isinstance(text, list):
        return tuple(text)
    names = tuple(dict.fromkeys(piece.strip() for piece in str(text).split(",")))
    if "none" in names and len(names) > 1:
        raise ConfigError(f"epilogues={text!r}: none must be alone, or left out")
    return () if names == ("none",) else names


def _present() -> str:
    from k3dsl.preparing import detect_target

    target = detect_target()
    if target is None:
        raise ConfigError("no GPU here whose target could be the default: give --target, e.g. --target sm_90a")
    return target


def _read(path: Path) -> dict[str, Any]:
    """The arguments in a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"plan file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan file {path}: {error}") from error
    unknown = [name for name in found if name not in _NAMES]
    if unknown:
        raise ConfigError(f"plan file {path}: {', '.join(unknown)} must be among {', '.join(_NAMES)}")
    return found
