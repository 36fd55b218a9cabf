"""Everything that knows ComfyUI: thin node classes here, the work in `adapters`."""
