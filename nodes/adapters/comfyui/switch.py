"""The switch *Resolute on/off* of a whole workflow, as one more input of our nodes in the prompt.

The front end adds it to the prompt that it queues; the nodes do not declare it, so it is no widget and no part of a
saved node. ComfyUI's cache signature of a node has all its inputs, so nodes after ours run again after a switch.
"""

from __future__ import annotations

from comfy_execution.progress import get_progress_state

from ....compile_cache.texts import Text
from .messages import show_on_node

INPUT = "resolute"
OFF = "off"
IS_OFF = Text("Resolute is off: this runs as without it")


def is_off(node_id: str | None) -> bool:
    """The switch is off for a node of the running prompt; then the node's text says so.

    The input is "off", or begins with "off ": *Measure against stock* adds the number of its run, and shows its result
    on the node.
    """
    prompt = get_progress_state().dynprompt
    if node_id is None or not prompt.has_node(node_id):
        return False
    value = prompt.get_node(node_id).get("inputs", {}).get(INPUT, "")
    if not isinstance(value, str) or value.split(" ")[0] != OFF:
        return False
    if value == OFF:
        show_on_node(IS_OFF, node_id)
    return True
