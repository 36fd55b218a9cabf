"""What Resolute uses of ComfyUI, typed for mypy: see CONTRIBUTING.md, "Types". Nothing here runs."""
