"""A client of ComfyUI's HTTP API: queue a prompt, wait for it, fetch its images. Standard library only."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import PromptError, ServerError

Prompt = Mapping[str, Mapping[str, Any]]
History = dict[str, Any]

PROMPT_TIMEOUT = 1500.0  # seconds; a prompt may compile everything on a busy machine


class Client:
    """Talks to one ComfyUI server. Every method may raise ServerError if the server does not answer."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self.timeout = timeout
        self.client_id = uuid.uuid4().hex

    def get(self, path: str) -> Any:
        """The JSON answer of ``GET path``, None if it is empty."""
        return _parse(self.raw(path))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON answer of ``POST path``, None if it is empty."""
        return _parse(self.raw(path, json.dumps({} if body is None else body).encode()))

    def raw(self, path: str, body: bytes | None = None) -> bytes:
        """The answer's bytes. Raises urllib.error.HTTPError for an HTTP error."""
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            raise ServerError(f"{self.url}{path} does not answer: {error}") from error

    def queue(self, prompt: Prompt) -> str:
        """Queue a prompt in API form and return its id. Raises PromptError with each node's errors if rejected."""
        try:
            answer = self.post("/prompt", {"prompt": prompt, "client_id": self.client_id})
        except urllib.error.HTTPError as error:
            raise PromptError(_rejection(error)) from None
        if answer.get("node_errors"):
            # ComfyUI accepts such a prompt and runs only the valid outputs.
            raise PromptError("ComfyUI rejected nodes: " + _node_errors(answer["node_errors"]))
        return str(answer["prompt_id"])

    def wait(self, prompt_id: str, timeout: float = PROMPT_TIMEOUT) -> History:
        """Wait for a prompt and return its history entry.

        Raises PromptError if a node failed or the prompt was interrupted, and
        ServerError if it has not finished after ``timeout`` seconds.
        """
        started = time.monotonic()
        while (waited := time.monotonic() - started) < timeout:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                _raise_failure(entry)
                return dict(entry)
            time.sleep(min(max(0.03, waited / 100), 0.5))  # poll slowly, because each request costs the server time
        raise ServerError(f"Prompt {prompt_id} had not finished after {timeout:.0f} s.")

    def run(self, prompt: Prompt, timeout: float = PROMPT_TIMEOUT) -> History:
        """Queue a prompt and wait for it. Raises what ``queue`` and ``wait`` raise."""
        return self.wait(self.queue(prompt), timeout)

    def interrupt(self) -> None:
        """Cancel the running prompt."""
        self.post("/interrupt")

    def free(self, unload_models: bool = True) -> None:
        """Ask ComfyUI to unload models and empty its caches; its worker does so soon after."""
        self.post("/free", {"unload_models": unload_models, "free_memory": True})

    def outputs(self, history: History, key: str) -> list[Any]:
        """All values that nodes returned under ``ui[key]``, ordered by node id."""
        nodes = sorted(history["outputs"].items(), key=lambda item: (len(item[0]), item[0]))
        return [value for _, shown in nodes for value in shown.get(key, [])]

    def images(self, history: History, key: str = "images") -> list[bytes]:
        """The image files of a finished prompt, fetched from ``/view``. key: the ``ui`` entry."""
        return [self.raw("/view?" + urllib.parse.urlencode(image)) for image in self.outputs(history, key)]


def execution_seconds(history: History) -> float:
    """Seconds between ComfyUI's start and end messages of a finished prompt."""
    times = {name: data["timestamp"] for name, data in history["status"]["messages"]}
    seconds: float = (times["execution_success"] - times["execution_start"]) / 1000
    return seconds


def _parse(content: bytes) -> Any:
    return json.loads(content) if content.strip() else None


def _raise_failure(entry: History) -> None:
    status = entry.get("status") or {}
    if status.get("status_str") != "error":
        return
    for name, data in status.get("messages", []):
        if name == "execution_error":
            raise PromptError(
                f"Node {data['node_id']} ({data['node_type']}) failed: "
                f"{data['exception_type']}: {data['exception_message'].strip()}"
            )
        if name == "execution_interrupted":
            raise PromptError(f"The prompt was interrupted in node {data['node_id']}.")
    raise PromptError(f"The prompt failed: {status}")


def _rejection(error: urllib.error.HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        answer = json.loads(text)
    except ValueError:
        return f"ComfyUI rejected the prompt ({error.code}): {text[:400]}"
    about = answer.get("error") or {}
    if isinstance(about, str):
        about = {"message": about}
    detail = f" {about['details']}" if about.get("details") else ""
    nodes = _node_errors(answer.get("node_errors") or {})
    return f"ComfyUI rejected the prompt: {about.get('message', text[:400])}{detail} {nodes}".strip()


def _node_errors(errors: Mapping[str, Any] | list[Any]) -> str:
    return "; ".join(each_node_error(errors)) if isinstance(errors, Mapping) else ""


def each_node_error(errors: Mapping[str, Any]) -> Iterator[str]:
    for node, about in errors.items():
        for error in about.get("errors", []):
            yield f"node {node} ({about.get('class_type')}): {error['message']} {error['details']}"
