from enum import Enum
from typing import Any

class Hidden(str, Enum):
    unique_id = "UNIQUE_ID"

class HiddenHolder:
    unique_id: str

class _Input:
    def __init__(self, id: str, *, optional: bool = False, tooltip: str | None = None) -> None: ...

class _Output:
    def __init__(self, id: str | None = None, display_name: str | None = None, tooltip: str | None = None) -> None: ...

class _Type:
    class Input(_Input): ...
    class Output(_Output): ...

class AnyType(_Type): ...
class Clip(_Type): ...
class ClipVision(_Type): ...
class Conditioning(_Type): ...
class ControlNet(_Type): ...
class Image(_Type): ...
class Latent(_Type): ...
class Model(_Type): ...
class Vae(_Type): ...

def Custom(io_type: str) -> type[_Type]: ...

class Boolean(_Type):
    class Input(_Input):
        def __init__(
            self, id: str, *, optional: bool = False, tooltip: str | None = None, default: bool | None = None
        ) -> None: ...

class Int(_Type):
    class Input(_Input):
        def __init__(
            self,
            id: str,
            *,
            optional: bool = False,
            tooltip: str | None = None,
            default: int | None = None,
            min: int | None = None,
            max: int | None = None,
            step: int | None = None,
        ) -> None: ...

class Float(_Type):
    class Input(_Input):
        def __init__(
            self,
            id: str,
            *,
            optional: bool = False,
            tooltip: str | None = None,
            default: float | None = None,
            min: float | None = None,
            max: float | None = None,
            step: float | None = None,
        ) -> None: ...

class String(_Type):
    class Input(_Input):
        def __init__(
            self,
            id: str,
            *,
            optional: bool = False,
            tooltip: str | None = None,
            multiline: bool = False,
            default: str | None = None,
        ) -> None: ...

class Combo(_Type):
    class Input(_Input):
        def __init__(
            self,
            id: str,
            options: list[str],
            *,
            optional: bool = False,
            tooltip: str | None = None,
            default: str | None = None,
        ) -> None: ...

class Schema:
    node_id: str
    def __init__(
        self,
        node_id: str,
        display_name: str | None = None,
        category: str = "sd",
        inputs: list[_Input] = ...,
        outputs: list[_Output] = ...,
        hidden: list[Hidden] = ...,
        description: str = "",
        *,
        is_output_node: bool = False,
        is_deprecated: bool = False,
        not_idempotent: bool = False,
    ) -> None: ...

class NodeOutput:
    def __init__(self, *args: Any, ui: dict[str, Any] | None = None) -> None: ...

class ComfyNode:
    """`execute` is not declared: each node has its own parameters."""

    hidden: HiddenHolder
    @classmethod
    def define_schema(cls) -> Schema: ...
