"""The translations cover every input and output that the server declares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.places import ROOT
from scripts.server.client import Client

LANGUAGES = ("ja", "zh", "zh-TW")


@pytest.fixture(scope="module")
def declared(server: Any) -> dict[str, Any]:
    """Our nodes as the server declares them, without the deprecated ones, and without those that no search finds."""
    info = server.client.get("/object_info")
    return {
        name: about
        for name, about in info.items()
        if name.startswith("Resolute")
        and not name.startswith("ResoluteTest")
        and not about.get("deprecated")
        and not about.get("dev_only")
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_name_and_no_tooltip_is_missing(declared: dict[str, Any], language: str) -> None:
    written = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text("utf-8"))
    assert sorted(written) == sorted(declared)
    for name, about in declared.items():
        inputs = {**about["input"].get("required", {}), **about["input"].get("optional", {})}
        assert sorted(written[name]["inputs"]) == sorted(inputs), name
        assert sorted(written[name]["outputs"]) == sorted(map(str, range(len(about["output"])))), name
        for part in (*written[name]["inputs"].values(), *written[name]["outputs"].values()):
            assert part["name"] and part["tooltip"]


def test_the_server_serves_the_translations(client: Client) -> None:
    served = client.get("/i18n")
    for language in LANGUAGES:
        assert served[language]["nodeDefs"]["ResoluteCompileModel"]["display_name"]


def test_the_search_finds_nodes_by_what_people_want(declared: dict[str, Any]) -> None:
    words = {name: about.get("search_aliases") for name, about in declared.items()}
    assert [name for name, found in words.items() if not found] == []
    wanted = {"accelerate", "turbo", "speed up", "onediff", "torch compile", "加速", "更快", "高速化", "速い"}
    assert wanted <= set(words["ResoluteCompileModel"])
    assert "benchmark" in words["ResoluteReport"]
    assert "aspect ratio" in words["ResoluteResolution"]
