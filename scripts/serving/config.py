"""The settings of a fleet, from a YAML file and the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SetupError

ROUTERS = ("warm", "default")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The settings.

    comfyui: the folder with main.py, on every node. python: the interpreter that runs it.
    folder: what the replicas share (store, input files, the most used workflows), and what the ingress keeps; every
        node needs it under this path.
    arguments, environment: for each ComfyUI, beside those that the fleet sets.
    replicas, max_replicas: Serve starts `replicas`, and adds up to `max_replicas` while more than `target_ongoing`
        prompts wait or run at each for `grow_seconds`. Serve ends the added ones when fewer did for `shrink_seconds`.
    gpus, cpus: what Ray reserves for each replica.
    ongoing: prompts at one replica, the running one included. waiting: prompts that no replica has taken yet; one more
        is refused.
    imbalance: a warm replica is preferred while it has at most this many prompts more than the least busy one.
    attempts: how often a prompt starts before the loss of its replica becomes its error.
    warm_workflows: how many of the most used workflows a new replica warms up before it takes prompts.
    body_mb: limit of a request's body. drain_seconds: how long a replica that goes may finish its prompts.
    stats_seconds: how often a replica reports what is ready.
    enable_cors_header: as ComfyUI's option of this name: the origin whose pages may use the fleet, or "*" for any.
        Without it pages of other sites are refused.
    router: "warm", or "default", which is Serve's own, for comparison.
    """

    comfyui: Path
    folder: Path
    python: Path = Path(sys.executable)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    max_replicas: int = 0
    target_ongoing: float = 2.0
    grow_seconds: float = 30.0
    shrink_seconds: float = 600.0
    gpus: float = 1.0
    cpus: float = 1.0
    ongoing: int = 8
    waiting: int = 256
    imbalance: int = 4
    attempts: int = 2
    warm_workflows: int = 8
    body_mb: int = 64
    drain_seconds: float = 600.0
    stats_seconds: float = 2.0
    host: str = "127.0.0.1"
    port: int = 8188
    enable_cors_header: str = ""
    router: str = "warm"

    def plain(self) -> dict[str, Any]:
        """As JSON, for the actors."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        paths = {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        return {**values, **paths, "arguments": list(self.arguments), "environment": dict(self.environment)}


def from_plain(values: Mapping[str, Any]) -> FleetConfig:
    """The settings from JSON or YAML. Raises SetupError, which names the setting, for a value that cannot be used."""
    known = {each.name: str(each.type) for each in dataclasses.fields(FleetConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SetupError(f"A fleet has no setting {unknown[0]!r}. Its settings are {', '.join(known)}.")
    for name in ("comfyui", "folder"):
        if not values.get(name):
            raise SetupError(f"A fleet needs {name!r}. Give --{name} FOLDER, or {name}: FOLDER in the configuration.")
    config = FleetConfig(**{name: _converted(name, known[name], value) for name, value in values.items()})
    if config.router not in ROUTERS:
        raise SetupError(f"router: {config.router!r} is none of {', '.join(ROUTERS)}.")
    if config.replicas < 1 or config.ongoing < 1 or config.attempts < 1:
        raise SetupError("replicas, ongoing and attempts must be at least 1.")
    if not (config.enable_cors_header.isascii() and config.enable_cors_header.isprintable()):
        raise SetupError(
            f'enable_cors_header: {config.enable_cors_header!r} is no origin, such as "https://example.com".'
        )
    if not (config.comfyui / "main.py").is_file():
        raise SetupError(f"comfyui: {config.comfyui} has no main.py. Name the folder of a ComfyUI.")
    return config


def read(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises SetupError if it cannot be read or is no mapping."""
    import yaml  # type: ignore[import-untyped]  # a requirement of Ray

    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}.") from None
    except yaml.YAMLError as error:
        raise SetupError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise SetupError(f"{path} must hold settings, such as `replicas: 2`.")
    return values


def _converted(name: str, kind: str, value: Any) -> Any:
    try:
        if kind == "Path":
            return Path(str(value)).expanduser().absolute()
        if kind in ("int", "float") and not isinstance(value, bool):
            return {"int": int, "float": float}[kind](value)
        if kind == "str" and isinstance(value, str):
            return value
        if kind.startswith("tuple") and isinstance(value, (list, tuple)):
            return tuple(str(each) for each in value)
        if kind.startswith("Mapping") and isinstance(value, Mapping):
            return {str(key): str(text) for key, text in value.items()}
    except (TypeError, ValueError):
        pass
    raise SetupError(f"{name}: {value!r} cannot be used; it must be {kind}.")
