"""Starts a Ray of this process's own on this machine, also on two slow cores: few processes, and time to come up."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from ..errors import ServerError
from ..places import ROOT
from ..ports import free_ports
from .parent_death import end_with_parent

_STARTS = 4  # see `LocalRay`
_NODE_SECONDS = 45
_SECONDS = 300
_STOP_SECONDS = 60
_OBJECT_STORE = 200 * 1024 * 1024  # bytes; files go through it in small parts
_UP = "Ray runtime started"  # what `ray start` prints when its node is up
_ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": str(_NODE_SECONDS),
    "RAY_agent_register_timeout_ms": str(1000 * _SECONDS),
    "RAY_worker_register_timeout_seconds": str(_SECONDS),
    "RAY_gcs_server_port_wait_time_s": str(_SECONDS),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(_SECONDS),
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    # Ray gives its workers a niceness of 15, which ComfyUI would inherit: any other program would slow it down.
    "RAY_worker_niceness": "0",
    # All of this Ray is on one machine, so each of its ports, the metrics' too, is on the loopback. Ray's default on
    # Windows and macOS; elsewhere it would listen on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # No idle workers, no metrics, and no reports of use to Ray's makers.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_environment(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set Ray's limits and a token of this Ray's own, where the user set none. Before `import ray` reads them."""
    if "RAY_AUTH_MODE" not in variables:  # Ray's default differs between a node and a process that connects to it
        variables.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    for name, value in _ENVIRONMENT.items():
        variables.setdefault(name, value)


class LocalRay:
    """`ray start` in the foreground, on free ports, with as few processes as it allows. It ends with this process.

    Ray's node ends if an agent, a Python with hundreds of modules, does not write its ports within 15 seconds; no
    setting changes that. On two busy cores it takes longer, so the ports are given where Ray takes them, what is not
    needed stays off, and a start that failed is tried again.
    """

    def __init__(self, log: Path, cpus: int, temporary: Path | None = None) -> None:
        """log: for what `ray start` prints. cpus: how many Ray shares out. temporary: for its files (/tmp/ray)."""
        self._log, self._cpus, self._temporary = log, cpus, temporary
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and connect this process to it. Raises ServerError with the end of its log."""
        set_environment()
        for attempt in range(_STARTS):
            ports = free_ports(5)
            try:
                self._start(ports)
                break
            except ServerError:
                self.stop()
                if attempt + 1 == _STARTS:
                    raise
        import ray

        ray.init(address=f"127.0.0.1:{ports[0]}", log_to_driver=False)

    def _start(self, ports: list[int]) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # actors import this package
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                self.command(ports),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C must reach the fleet alone: its prompts end first
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        self._wait(self._process)

    def command(self, ports: list[int]) -> list[str]:
        """The command line of `ray start`."""
        names = ("", "dashboard-agent-grpc-", "dashboard-agent-listen-", "runtime-env-agent-", "metrics-export-")
        return [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            *(f"--{name}port={port}" for name, port in zip(names, ports, strict=True)),
            f"--num-cpus={self._cpus}", f"--object-store-memory={_OBJECT_STORE}", "--include-dashboard=false",
            "--no-monitor", "--include-log-monitor=false", "--disable-usage-stats",
            *([f"--temp-dir={self._temporary}"] if self._temporary else []),
        ]  # fmt: skip

    def stop(self) -> None:
        """End it and the processes that it started."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Linux then ends what it started
            self._process.wait()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _SECONDS
        while _UP not in (text := self._log.read_text("utf-8", "replace")):
            if process.poll() is not None:
                raise ServerError(f"Ray ended before it was ready. The end of {self._log}:\n{text[-2000:]}")
            if time.monotonic() > deadline:
                raise ServerError(f"Ray was not ready after {_SECONDS} s. The end of {self._log}:\n{text[-2000:]}")
            time.sleep(0.1)
