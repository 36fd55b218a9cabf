"""One node of a workflow in API form, as a rule sees it, and the values that rules pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Link = tuple[str, int]  # node id, number of its output

_LONGEST_TITLE = 60
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Latent:
    """width, height: in cells of the latent, eight pixels each."""

    width: int
    height: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Image:
    """width, height: in pixels."""

    width: int
    height: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class UnsizedImage:
    """An image of which only the batch is known; why: the sentence for whoever needs its size."""

    batch: int
    why: str


@dataclass(frozen=True, slots=True)
class Guidance:
    """What a sampler calls. cfg: None where it is known only when the prompt runs; remark: what this cannot express."""

    model: Link
    positive: Link
    negative: Link | None
    cfg: float | None
    remark: str = ""


# None: an output that no rule needs, such as a mask or a text.
Value = Latent | Image | UnsizedImage | Guidance | int | float | str | bool | None
Outputs = tuple[Value, ...]
# What LoadImage is given -> width and height in pixels, where a server can tell them; see `scan`.
ImageSize = Callable[[str], tuple[int, int] | None]
_T = TypeVar("_T")


class NotKnownError(Exception):
    """A value cannot be told from the graph. The message names the node and why; it is for people."""


class Node:
    """A node with its inputs resolved: `values` are the outputs of the nodes before it, or why they are not known."""

    def __init__(
        self,
        node_id: str,
        content: Mapping[str, Any],
        values: Mapping[str, Outputs | NotKnownError] | None = None,
        image_size: ImageSize | None = None,
    ) -> None:
        self.id = node_id
        self.class_type: str = content["class_type"]
        self.inputs: Mapping[str, Any] = content["inputs"]
        self.image_size = image_size
        self._values = {} if values is None else values  # filled while the nodes before this one are evaluated
        meta = content.get("_meta")
        title = meta.get("title") if isinstance(meta, Mapping) else None
        name = title if isinstance(title, str) and title.strip() else self.class_type
        self.label = f"{name.strip()[:_LONGEST_TITLE]} {node_id}"

    def unknown(self, why: str) -> NotKnownError:
        """The error that names this node."""
        return NotKnownError(f"{self.label}: {why}")

    def links(self) -> dict[str, Link]:
        """Input name -> where it comes from, for the inputs that are links."""
        found = {name: as_link(value) for name, value in self.inputs.items()}
        return {name: link for name, link in found.items() if link is not None}

    def link(self, name: str) -> Link:
        """Raises NotKnownError where the input is not a link."""
        link = as_link(self.inputs.get(name))
        if link is None:
            raise self.unknown(f"nothing is connected to '{name}'")
        return link

    def value(self, name: str, default: Any = _MISSING) -> Value:
        """What the input is: typed in, or what comes over its link. Raises NotKnownError."""
        given = self.inputs.get(name, default)
        if given is _MISSING:
            raise self.unknown(f"'{name}' is missing")
        link = as_link(given)
        if link is None:
            plain: Value = given
            return plain
        source, output = link
        outputs = self._values.get(source)
        if outputs is None:
            raise self.unknown(f"'{name}' comes from node {source}, which the workflow does not have")
        if isinstance(outputs, NotKnownError):
            raise outputs
        if not 0 <= output < len(outputs):
            raise self.unknown(f"'{name}' comes from output {output} of node {source}, which has no such output")
        return outputs[output]

    def integer(self, name: str, default: Any = _MISSING) -> int:
        """As ComfyUI converts it: `int(value)`."""
        return self._converted(int, name, default)

    def number(self, name: str, default: Any = _MISSING) -> float:
        """As ComfyUI converts it: `float(value)`."""
        return self._converted(float, name, default)

    def text(self, name: str, default: Any = _MISSING) -> str:
        return self._of_type(str, name, default)

    def latent(self, name: str) -> Latent:
        return self._of_type(Latent, name)

    def image(self, name: str) -> Image:
        value = self.value(name)
        if isinstance(value, UnsizedImage):
            raise NotKnownError(value.why)
        return self._of_type(Image, name)

    def pictures(self, name: str) -> int:
        """The batch of an image, for a rule that does not need its size."""
        value = self.value(name)
        return value.batch if isinstance(value, UnsizedImage) else self._of_type(Image, name).batch

    def guidance(self, name: str) -> Guidance:
        return self._of_type(Guidance, name)

    def _converted(self, kind: Callable[[Any], _T], name: str, default: Any) -> _T:
        value = self.value(name, default)
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            raise self.unknown(f"'{name}' is no number that could be used") from None

    def _of_type(self, kind: type[_T], name: str, default: Any = _MISSING) -> _T:
        value = self.value(name, default)
        if not isinstance(value, kind):
            raise self.unknown(f"'{name}' is not what this input takes")
        return value


def as_link(value: Any) -> Link | None:
    """`value` as a link where ComfyUI reads it as one: a list of a node's id and an output's number."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    source, output = value
    if not isinstance(source, str) or isinstance(output, bool) or not isinstance(output, (int, float)):
        return None
    return (source, int(output)) if output == output // 1 else None
