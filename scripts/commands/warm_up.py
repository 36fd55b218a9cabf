"""Client of `POST /resolute/warm-up`: post a workflow to a running server, print the progress, and read the report.

Progress comes over ComfyUI's websocket and needs aiohttp, which every ComfyUI environment has. Without aiohttp the
client waits for the end and prints only the report.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import PromptError, SetupError
from ..server.client import Client, each_node_error
from ..server.events import follow

ROUTE = "/resolute/warm-up"
TIMEOUT = 24 * 3600.0  # seconds; Ctrl+C and ComfyUI's own Cancel end it earlier

Say = Callable[[str], None]


def read_workflow(path: Path) -> Any:
    """The JSON of a workflow file. Raises SetupError if it cannot be read; the server checks its content."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}.") from None


def warm_up(client: Client, workflow: Any, say: Say, sizes: str | None = None) -> list[str]:
    """Queue the warm-up of a workflow in API form and wait for its end. Returns the texts of its report.

    say: gets each line of progress. sizes: a list of sizes in place of those of the workflow.

    Raises PromptError if the server refuses the workflow or the prompt fails, and ServerError if no server answers.
    """

    def queue() -> str:
        return _queue(client, workflow, say, sizes)

    if importlib.util.find_spec("aiohttp") is None:
        say("No progress is shown: this Python has no aiohttp. Use the Python that runs your ComfyUI.")
        history = client.wait(queue(), TIMEOUT)
    else:
        history = follow(client, queue, TIMEOUT, say).history
    return client.outputs(history, "text")


def _queue(client: Client, workflow: Any, say: Say, sizes: str | None) -> str:
    asked = {} if sizes is None else {"sizes": sizes}
    try:
        answer = client.post(ROUTE, {"prompt": workflow, "client_id": client.client_id, **asked})
    except urllib.error.HTTPError as error:
        raise PromptError(_refusal(error)) from None
    for sentence in answer["unknown"]:
        say(f"note: {sentence}")
    return str(answer["prompt_id"])


def _refusal(error: urllib.error.HTTPError) -> str:
    """Why the server refused the request: the message of our route, or ComfyUI's errors for nodes of the prompt."""
    if error.code in (404, 405):
        return f"The server has no {ROUTE}: install Resolute there, or update it."
    try:
        answer = json.loads(error.read().decode("utf-8", "replace"))
        message = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server refused the workflow with status {error.code} and gave no reason. See its log."
    return "; ".join([message, *each_node_error(answer.get("node_errors") or {})])
