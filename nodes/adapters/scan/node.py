"""`Node`: one node of a workflow in API form, with methods that read its inputs. And the values that rules return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ....compile_cache.errors import excerpt
from ....compile_cache.sizes import Size
from ..comfyui import latent_cells

Link = tuple[str, int]  # node id, output number

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Latent:
    """width, height: in cells, each `cell` pixels wide and high. is_video: it has frames too, which are not counted."""

    width: int
    height: int
    batch: int = 1
    cell: int = latent_cells.DEFAULT
    is_video: bool = False

    @property
    def pixels(self) -> Size:
        return Size(self.width * self.cell, self.height * self.cell)


@dataclass(frozen=True, slots=True)
class Image:
    """width, height: in image pixels."""

    width: int
    height: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class UnsizedImage:
    """An image whose batch is known and whose size is not. why: the error text for rules that need the size."""

    batch: int
    why: str


@dataclass(frozen=True, slots=True)
class Guidance:
    """The model and conditioning that a sampler uses. cfg: None if it is known only when the prompt runs.

    warning: a sentence if Warm Up cannot do exactly what the sampler does; otherwise empty.
    """

    model: Link
    positive: Link
    negative: Link | None
    cfg: float | None
    warning: str = ""


# The value of one output or input. None stands for values without a size, for example masks and conditioning.
Value = Latent | Image | UnsizedImage | Guidance | int | float | str | bool | None
Outputs = tuple[Value, ...]
# The file name in LoadImage -> (width, height) in pixels, or None if it cannot be read. See `image_files.image_size`.
ImageSize = Callable[[str], tuple[int, int] | None]
_T = TypeVar("_T")


class NotKnownError(Exception):
    """A value cannot be computed from the workflow alone. The message names the node and the reason, for the user."""


class Node:
    """A node and its resolved inputs.

    values: the outputs of the nodes upstream, or the reason why they are not known, by node id. image_size: finds the
    size of an image file; None without a server.
    """

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
        self._links: dict[str, Link] | None = None
        self._values = {} if values is None else values  # shared: `evaluate` fills it node by node
        meta = content.get("_meta")
        title = meta.get("title") if isinstance(meta, Mapping) else None
        name = title if isinstance(title, str) and title.strip() else self.class_type
        self.label = f"{excerpt(name.strip())} {excerpt(node_id)}"

    def unknown(self, why: str) -> NotKnownError:
        """An error for a rule to raise: this node's label and the reason."""
        return NotKnownError(f"{self.label}: {why}")

    def links(self) -> dict[str, Link]:
        """The inputs that are connected: input name -> link."""
        if self._links is None:  # read once: a walk through the graph asks each node again and again
            found = {name: as_link(value) for name, value in self.inputs.items()}
            self._links = {name: link for name, link in found.items() if link is not None}
        return self._links

    def link(self, name: str) -> Link:
        """The link of an input. Raises NotKnownError if nothing is connected to it."""
        link = as_link(self.inputs.get(name))
        if link is None:
            raise self.unknown(f"nothing is connected to '{name}'")
        return link

    def value(self, name: str, default: Any = _MISSING) -> Value:
        """The value of an input, typed in or from its link. Raises NotKnownError if it is missing or not known."""
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
            raise self.unknown(f"'{name}' comes from node {excerpt(source)}, which is not in the workflow")
        if isinstance(outputs, NotKnownError):
            raise outputs
        if not 0 <= output < len(outputs):
            raise self.unknown(f"'{name}' comes from output {output} of node {excerpt(source)}, which does not exist")
        return outputs[output]

    def integer(self, name: str, default: Any = _MISSING) -> int:
        """The value as an INT. ComfyUI converts it with `int(value)` too."""
        return self._converted(int, name, default)

    def number(self, name: str, default: Any = _MISSING) -> float:
        """The value as a FLOAT. ComfyUI converts it with `float(value)` too."""
        return self._converted(float, name, default)

    def text(self, name: str, default: Any = _MISSING) -> str:
        return self._of_type(str, name, default)

    def latent(self, name: str) -> Latent:
        return self._of_type(Latent, name)

    def image(self, name: str) -> Image:
        """The image of an input. Raises NotKnownError if its size is not known."""
        value = self.value(name)
        if isinstance(value, UnsizedImage):
            raise NotKnownError(value.why)
        return self._of_type(Image, name)

    def image_batch(self, name: str) -> int:
        """The batch of an image, for rules that do not need its size."""
        value = self.value(name)
        return value.batch if isinstance(value, UnsizedImage) else self._of_type(Image, name).batch

    def guidance(self, name: str) -> Guidance:
        return self._of_type(Guidance, name)

    def _converted(self, kind: Callable[[Any], _T], name: str, default: Any) -> _T:
        value = self.value(name, default)
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            raise self.unknown(f"'{name}' is not a usable number") from None

    def _of_type(self, kind: type[_T], name: str, default: Any = _MISSING) -> _T:
        value = self.value(name, default)
        if not isinstance(value, kind):
            raise self.unknown(f"'{name}' has a value of the wrong type")
        return value


def as_link(value: Any) -> Link | None:
    """The link if ComfyUI would read `value` as one, a list [node id, output number]; None otherwise."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    source, output = value
    if not isinstance(source, str) or isinstance(output, bool) or not isinstance(output, (int, float)):
        return None
    return (source, int(output)) if output == output // 1 else None
