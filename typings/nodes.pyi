"""ComfyUI's module of this name, not the folder of ours."""

from typing import Any

class CheckpointLoaderSimple:
    def load_checkpoint(self, ckpt_name: str) -> tuple[Any, Any, Any]: ...

class ControlNetLoader:
    def load_controlnet(self, control_net_name: str) -> tuple[Any]: ...

NODE_CLASS_MAPPINGS: dict[str, type[Any]]
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str]
