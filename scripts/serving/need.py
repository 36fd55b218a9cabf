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
    runners = [(each, each.model[0]) for each in found.samplings] + [(each, each.vae[0]) for each in found.decodings]
    digests = _digests(nodes, [source for _, source in runners])
    shapes = {
        f"{digests[source]} {runner.size.width}x{runner.size.height}x{runner.batch}" for runner, source in runners
    }
    files = {digest for name, digest in digests.items() if not nodes[name].links()}
    sizes = {(runner.size.width, runner.size.height) for runner, _ in runners}
    chains = {digests[source] for _, source in runners}
    return Need(tuple(sorted(shapes)), tuple(sorted(chains)), tuple(sorted(files)), tuple(sorted(sizes)))


def _digests(nodes: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Of each of these nodes and of all that they depend on, by id: a digest of its class, its typed-in inputs, and the
    digests of what is linked into it. Each node is read once, however many samplers depend on it.
    """
    active_links = pack.module("nodes.adapters.scan.graph").active_links
    found: dict[str, str] = {}
    entered = set[str]()
    waiting = list(names)
    while waiting:
        name = waiting[-1]
        links = {} if name in found else active_links(nodes[name])
        before = [source for source, _ in links.values() if source in nodes and source not in entered]
        if name not in found and name not in entered and before:
            entered.add(name)
            waiting += before
            continue
        waiting.pop()
        if name not in found:
            entered.add(name)
            linked = sorted([each, found.get(source, ""), slot] for each, (source, slot) in links.items())
            found[name] = _digest([nodes[name].class_type, _typed_in(nodes[name]), linked])
    return found


def _typed_in(node: Any) -> list[Any]:
    linked = node.links()
    return sorted([name, value] for name, value in node.inputs.items() if name not in linked)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]
