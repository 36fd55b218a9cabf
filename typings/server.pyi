from typing import Any

from aiohttp import web

class PromptServer:
    instance: PromptServer  # missing until the server runs
    routes: web.RouteTableDef
    prompt_queue: Any
    def send_progress_text(self, text: bytes | bytearray | str, node_id: str) -> None: ...
    def send_sync(self, event: str, data: dict[str, Any], sid: str | None = None) -> None: ...
