"""The commands of `scripts/fleet`: start, show and end a fleet."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ServerError, SetupError
from ..places import ROOT, cache_root
from ..server.client import Client
from . import config as settings
from .ray_start import LocalRay

APPLICATION = "fleet"
_DOWN_SECONDS = 900.0
_STATE = "fleet.json"


def default_folder() -> Path:
    """Below ~/.cache/resolute."""
    return cache_root() / "fleet"


def up(file: Path | None, given: Mapping[str, Any], arguments: Sequence[str], address: str | None) -> int:
    """Start the fleet and keep it until SIGINT or SIGTERM. Raises SetupError for what cannot work."""
    values = {"folder": str(default_folder()), **(settings.read(file) if file else {}), **given}
    if arguments:
        values["arguments"] = list(arguments)
    if "--cpu" in values.get("arguments", ()) and "gpus" not in values:
        values["gpus"] = 0
    config = settings.from_plain(values)
    _require_port(config.host, config.port)
    _require_folder(config.folder)
    local = _start_ray(address, config)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    import ray
    from ray import serve

    from .application import build

    try:
        if local is not None:
            _require_gpus(config)
        serve.start(http_options={"host": config.host, "port": config.port, "location": "HeadOnly"})
        serve.run(build(config), name=APPLICATION, route_prefix="/", blocking=False)
        url = f"http://{config.host}:{config.port}"
        _write_state(config.folder, {"pid": os.getpid(), "url": url})
        print(f"The fleet answers at {url} with {config.replicas} replicas. Ctrl+C ends it.", flush=True)
        if config.folder != default_folder():
            print(f"Its folder, for `scripts/fleet status` and `down`: --folder {config.folder}", flush=True)
        stopped.wait()
        print("Waiting for the running prompts to end.", flush=True)
    except RuntimeError as error:  # Serve's, with the end of what a replica or the ingress raised
        raise ServerError(f"The fleet did not start. {error}") from None
    finally:
        (config.folder / _STATE).unlink(missing_ok=True)
        with contextlib.suppress(Exception):  # a Ray that is already gone
            serve.delete(APPLICATION)
            if address is None:
                serve.shutdown()
        ray.shutdown()
        if local is not None:
            local.stop()
    return 0


def status(folder: Path) -> int:
    """Print one line for each replica."""
    state = _state(folder)
    found = Client(state["url"]).get("/resolute/fleet")
    replicas = found["replicas"]
    print(f"{state['url']}: {len(replicas)} replicas, {found['open']} prompts, {found['waiting']} of them wait")
    for each in replicas:
        ready = "ready" if each.get("ready") else "starting"
        print(
            f"  {each['replica']}  {ready}, {each['load']} prompts, {len(each.get('shapes', ()))} shapes, "
            f"{len(each.get('structures', ()))} models with regions, {each.get('comfyui', '')}"
        )
    return 0


def down(folder: Path) -> int:
    """End the fleet that uses this folder, and wait until its prompts are over."""
    pid = int(_state(folder)["pid"])
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 0
        time.sleep(0.2)
    raise ServerError(f"The fleet (process {pid}) had not ended after {_DOWN_SECONDS:.0f} s.")


def _start_ray(address: str | None, config: settings.FleetConfig) -> LocalRay | None:
    """Connect to a cluster, or start a Ray of this fleet's own and return it."""
    if address is not None:
        import ray

        # Actors import this package; ComfyUI's processes do not inherit the variable.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}})
        except ConnectionError as error:
            raise SetupError(f"There is no Ray cluster at {address!r}: {error}") from None
        return None
    reserved = config.cpus * max(config.replicas, config.max_replicas)
    local = LocalRay(config.folder / "ray.log", max(int(reserved) + 1, os.cpu_count() or 1))
    local.start()
    return local


def _require_gpus(config: settings.FleetConfig) -> None:
    import ray

    found = ray.cluster_resources().get("GPU", 0)
    if found < config.gpus * config.replicas:
        raise SetupError(
            f"{config.replicas} replicas need {config.gpus * config.replicas:g} GPUs, and Ray finds {found:g}. "
            "Use --replicas, or --gpus 0 with `-- --cpu`."
        )


def _require_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(f"{host}:{port} cannot be used: {error.strerror}. Choose another --port.") from None


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise SetupError(f"The fleet's folder {folder} cannot be written: {error.strerror or error}.") from None


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / _STATE).write_text(json.dumps(state), "utf-8")


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text("utf-8"))
    except (OSError, ValueError):
        raise SetupError(f"No fleet that `scripts/fleet up` started uses {folder}.") from None
    return state
