"""Runs a headless ComfyUI with fresh folders, a free port and a log file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import ServerError
from ..ports import free_port
from . import front_end
from .client import Client

# On the CPU, compiled and eager runs are comparable only with PyTorch's attention.
CPU_ARGUMENTS = ("--cpu", "--use-pytorch-cross-attention", "--disable-auto-launch", "--disable-api-nodes")
MODEL_FOLDERS = ("checkpoints", "diffusion_models", "vae", "loras", "controlnet", "text_encoders")
# What ComfyUI's log says of a package that is not there.
_MISSING = re.compile(r"No module named '([^']+)'|^(\S+) is not installed\.$", re.MULTILINE)
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "output", "models")


class ComfyServer:
    """Starts ComfyUI in a subprocess; as a context manager, also stops it.

    python, comfyui: interpreter and checkout to run.
    folder: base directory, made if needed; contains custom_nodes, input, output, user
        and ``server.log``.
    packs: name in custom_nodes -> folder of the pack, linked (copied if the file
        system does not support links).
    models: a folder in the layout of ComfyUI's ``models``, added to the search paths.
    cpu: run on the CPU. On CUDA, ComfyUI gets only folders, address and an in-memory
        database, so that its default command line is measured.
    arguments, environment: additional ones; an environment value of None removes the variable.
    """

    before_exec: Callable[[], None] | None = None  # in the new process, see subprocess.Popen

    def __init__(
        self,
        python: Path,
        comfyui: Path,
        folder: Path,
        *,
        packs: Mapping[str, Path] | None = None,
        models: Path | None = None,
        cpu: bool = True,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        ready_timeout: float = 240.0,
    ) -> None:
        self.python, self.comfyui, self.folder = python, comfyui, folder
        self.packs, self.models = dict(packs or {}), models
        self.cpu, self.arguments = cpu, tuple(arguments)
        self.environment = dict(environment or {})
        self.ready_timeout = ready_timeout
        self.log_path = folder / "server.log"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """``http://127.0.0.1:<port>``; ``start`` chooses the port."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> Client:
        """A client of this server."""
        return Client(self.url)

    @property
    def input_folder(self) -> Path:
        """The folder that LoadImage reads."""
        return self.folder / "input"

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ServerError with the end of the log."""
        self.begin()
        self.wait_until_ready()

    def begin(self) -> None:
        """Start the process, and do not wait until it answers."""
        self.prepare_folders()
        self.port = free_port()
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.comfyui,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=self.before_exec,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers, or stop it. Raises ServerError with the end of the log."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the process that ``start`` started."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def command(self) -> list[str]:
        """The command line that ``start`` runs."""
        command = [str(self.python), "main.py", "--listen", "127.0.0.1", "--port", str(self.port)]
        command += self.folder_arguments()
        # The default database is in the checkout, and two servers would conflict over it.
        command += ["--database-url", "sqlite:///:memory:"]
        if self.models is not None:
            command += ["--extra-model-paths-config", str(self.folder / "models.yaml")]
        if self.cpu:
            command += CPU_ARGUMENTS
        given = [*command, *self.arguments]
        python_path = self._environment().get("PYTHONPATH", "")
        return [*given, *front_end.arguments(self.python, self.folder / "front-end", given, python_path)]

    def folder_arguments(self) -> list[str]:
        """The arguments that name the server's folders."""
        return ["--base-directory", str(self.folder)]

    def log(self) -> str:
        """Everything the server has written so far."""
        try:
            return self.log_path.read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log, for error messages."""
        return "\n".join(self.log().splitlines()[-lines:])

    def prepare_folders(self) -> None:
        """Make the folders, with the packs and the names of the models."""
        for name in ("custom_nodes", "input", "output", "user", "temp", "models/checkpoints"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, source in self.packs.items():
            link(source, self.folder / "custom_nodes" / name)
        if self.models is not None:
            lines = ["resolute:", f"  base_path: '{self.models.as_posix()}'"]
            lines += [f"  {name}: {name}" for name in MODEL_FOLDERS]
            (self.folder / "models.yaml").write_text("\n".join(lines) + "\n", "utf-8")

    def _environment(self) -> dict[str, str]:
        merged: dict[str, str | None] = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # The caller's Python paths are wrong for this interpreter.
        merged.update({"PYTHONPATH": None, "PYTHONHOME": None})
        merged.update(self.environment)
        return {name: value for name, value in merged.items() if value is not None}

    def _remedy(self) -> str:
        """A sentence for a package that ComfyUI did not find; empty if it lacks none."""
        missing = [name for names in _MISSING.findall(self.log()) for name in names if name]
        if not missing:
            return ""
        requirements = self.comfyui / "requirements.txt"
        return f"Its Python lacks {missing[-1]}: run `{self.python} -m pip install -r {requirements}`. "

    def _is_own(self, argv: Sequence[str]) -> bool:
        """False if another server that was started with this port answers: it bound the port first, so this one ends,
        and its log says why. A custom node may clear its server's arguments, so an answer without the port counts.
        """
        return str(self.port) not in argv or set(self.folder_arguments()) <= set(argv)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.ready_timeout
        client = Client(self.url, timeout=5)
        while time.monotonic() < deadline:
            code = self.process.poll() if self.process else None
            if code is not None:
                raise ServerError(
                    f"ComfyUI ended with code {code} before it was ready. {self._remedy()}The end of "
                    f"{self.log_path}:\n{self.log_tail()}"
                )
            with contextlib.suppress(ServerError):
                if self._is_own(client.get("/system_stats")["system"]["argv"]):
                    return
            time.sleep(0.1)
        raise ServerError(
            f"ComfyUI was not ready after {self.ready_timeout:.0f} s. The end of {self.log_path}:\n{self.log_tail()}"
        )


def link(source: Path, target: Path) -> None:
    """Make ``target`` a symlink to ``source``, or a hard link or copy if symlinks are not available."""
    if target.is_symlink():
        target.unlink()
    if target.exists():
        return
    try:
        target.symlink_to(source.resolve(), target_is_directory=source.is_dir())
    except (OSError, NotImplementedError):  # Windows without developer mode
        if source.is_dir():
            shutil.copytree(source, target, ignore=NOT_COPIED)
            return
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
