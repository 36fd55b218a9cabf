"""The settings of ComfyUI's dialog. The environment variable of a setting takes precedence.

ComfyUI keeps the settings of its only user in `user/default/comfy.settings.json`. They are read once, when
ComfyUI's server starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folder_paths

from ....compile_cache.config import COMPILE, given_variables

logger = logging.getLogger(__name__)

# Name in the dialog -> environment variable.
VARIABLES = {
    "Resolute.BudgetMiB": "RESOLUTE_BUDGET_MB",
    "Resolute.Captures": "RESOLUTE_CAPTURE",
    "Resolute.Compile": "RESOLUTE_COMPILE",
    "Resolute.Remember": "RESOLUTE_REMEMBER",
    "Resolute.Workers": "RESOLUTE_WORKERS",
}
# The number that means "automatic": the variable is then not set.
_AUTOMATIC = {"Resolute.BudgetMiB": 0, "Resolute.Workers": -1}
_MAX_NUMBER = 1 << 24  # MiB


def variables() -> dict[str, str]:
    """The settings of the dialog, as environment variables: name -> text."""
    return _in_variables(_read())


def all_set() -> dict[str, str]:
    """Every variable that is set in the environment or in the dialog; the environment wins."""
    return {**variables(), **given_variables()}


def fixed() -> dict[str, str]:
    """Settings that an environment variable overrides: name in the dialog -> "VARIABLE=value"."""
    given = given_variables()
    return {name: f"{variable}={given[variable]}" for name, variable in VARIABLES.items() if variable in given}


def _in_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, variable in VARIABLES.items():
        value = settings.get(name)
        if variable == "RESOLUTE_COMPILE":
            found |= {variable: value} if value in COMPILE else {}
        elif isinstance(value, bool) or (
            isinstance(value, (int, float)) and value != _AUTOMATIC.get(name) and 0 <= value <= _MAX_NUMBER
        ):
            found[variable] = str(int(value))
    return found


def _read() -> dict[str, Any]:
    file = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    try:
        settings = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("Resolute: %s cannot be read (%s), so its settings are not used", file.name, error)
        return {}
    return settings if isinstance(settings, dict) else {}
