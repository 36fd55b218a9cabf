"""Serve's own check of the configuration in the KubeRay manifest."""

from __future__ import annotations

import yaml
from ray.serve.schema import ServeDeploySchema

from scripts.places import ROOT


def test_serve_accepts_the_manifests_configuration() -> None:
    manifest = ROOT / "scripts" / "serving" / "deploy" / "rayservice.yaml"
    _, service = yaml.safe_load_all(manifest.read_text("utf-8"))
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).applications
    assert application.import_path == "scripts.serving.application:build"
