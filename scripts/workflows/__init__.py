"""The bundled workflows: what each contains, where its nodes stand, and the files in `workflows/`."""
