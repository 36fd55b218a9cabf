"""The files for KubeRay: the manifest against the part of KubeRay's CRD that it uses, and what it names."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.places import ROOT
from scripts.serving import config

DEPLOY = ROOT / "scripts" / "serving" / "deploy"
SCHEMA = json.loads(Path(__file__).with_name("rayservice_schema.json").read_text("utf-8"))["schema"]
SETTINGS, SERVICE = yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text("utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def wrong(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What Kubernetes would refuse; it drops an unknown field, so that counts too."""
    if schema.get("x-kubernetes-int-or-string"):
        fits = isinstance(value, (int, str)) and bool(re.search(schema.get("pattern", ""), str(value)))
        return [] if fits else [f"{at}: {value!r}"]
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if value not in schema.get("enum", [value]):
        return [f"{at}: {value!r}"]
    found = []
    if isinstance(value, list):
        for number, each in enumerate(value):
            found += wrong(each, schema["items"], f"{at}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        found += [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, each in value.items():
            known = schema["properties"].get(name)
            found += wrong(each, known, f"{at}.{name}") if known else [f"{at}.{name} is unknown"]
    elif isinstance(value, dict) and "additionalProperties" in schema:
        for name, each in value.items():
            found += wrong(each, schema["additionalProperties"], f"{at}.{name}")
    return found


def test_the_manifest_fits_kuberays_schema() -> None:
    assert wrong(SERVICE, SCHEMA) == []
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "two"),
        (("rayClusterConfig", "workerGroupSpecs", 0, "maxReplica"), 4),
        (("rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 2),
        (("serveConfig",), ""),
    ],
)
def test_the_check_finds_a_mistake(path: tuple[Any, ...], value: Any) -> None:
    manifest = copy.deepcopy(SERVICE)
    place = manifest["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert len(wrong(manifest, SCHEMA)) == 1


def test_what_the_manifest_names_is_there(tmp_path: Path) -> None:
    serve = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    module, name = serve["applications"][0]["import_path"].split(":")
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    assert f"def {name}(" in Path(found.origin).read_text("utf-8")
    (tmp_path / "main.py").write_text("")
    made = config.from_plain({**yaml.safe_load(SETTINGS["data"]["fleet.yaml"]), "comfyui": str(tmp_path)})
    (workers,) = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (made.replicas, made.max_replicas) == (workers["minReplicas"], workers["maxReplicas"])
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= made.drain_seconds


def test_the_pinned_ray_is_the_manifests_and_the_image_has_the_paths() -> None:
    version = SERVICE["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]=={version}" in (ROOT / "requirements-fleet.txt").read_text("utf-8")
    image = (DEPLOY / "Dockerfile").read_text("utf-8")
    for name in ("/opt/ComfyUI", "/opt/comfyui-env/bin/python", "/etc/resolute/fleet.yaml", "requirements-fleet.txt"):
        assert name in image
