"""ComfyUI's module of this name, not the folder of ours."""

from typing import Any

class CheckpointLoaderSimple:
    def load_checkpoint(self, ckpt_name: str) -> tuple[Any, Any, Any]: ...
