"""The models, sizes and files that a workflow will use, as the scanner reads them. Replicas are ranked by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import pack

ImageSize = Callable[[str], "tuple[int, int] | None"]


@dataclass(frozen=True, slots=True)
class Need:
    """Unknown parts are left out, and match anything.

    shapes: one for each sampler and decoder: the digest of what it runs, and the size ("4f2a... 1024x1024x1").
    chains: these digests alone. files: a digest of each loader that a model comes from. sizes: (width, height), pixels.
    """

    shapes: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()

    def plain(self) -> dict[str, Any]:
        """As an argument of a call, where the router reads it."""
        return {
            "shapes": list(self.shapes),
            "chains": list(self.chains),
            "files": list(self.files),
            "sizes": [list(size) for size in self.sizes],
        }


def need_of(prompt: Any, image_size: ImageSize | None = None) -> Need:
    """Scan a workflow in API form. A workflow that the scanner refuses needs nothing known: ComfyUI will say why."""
    scanner, errors = pack.module("nodes.adapters.scan.workflow"), pack.module("compile_cache.errors")
    try:
        found = scanner.scan(prompt, image_size=image_size)
        nodes, _ = scanner.evaluate(scanner.parse_workflow(prompt), None)
    except errors.UserError:
        return Need()
    shapes, chains, files = set[str](), set[str](), set[str]()
    sizes = set[tuple[int, int]]()
    runners = [(each, each.model) for each in found.samplings] + [(each, each.vae) for each in found.decodings]
    for runner, (source, _) in runners:
        parts = _upstream(nodes, source)
        chain = _digest(parts.values())
        chains.add(chain)
        shapes.add(f"{chain} {runner.size.width}x{runner.size.height}x{runner.batch}")
        sizes.add((runner.size.width, runner.size.height))
        files |= {_digest([part]) for name, part in parts.items() if not nodes[name].links()}
    return Need(tuple(sorted(shapes)), tuple(sorted(chains)), tuple(sorted(files)), tuple(sorted(sizes)))


def _upstream(nodes: Mapping[str, Any], name: str) -> dict[str, tuple[str, list[Any]]]:
    """The class and the typed-in inputs of a node and of all nodes that it depends on, by id."""
    found = pack.module("nodes.adapters.scan.graph").upstream(nodes, [name])
    return {each: (nodes[each].class_type, _typed_in(nodes[each])) for each in found}


def _typed_in(node: Any) -> list[Any]:
    linked = node.links()
    return sorted([name, value] for name, value in node.inputs.items() if name not in linked)


def _digest(parts: Iterable[Any]) -> str:
    texts = sorted(json.dumps(part, sort_keys=True, default=str) for part in parts)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
