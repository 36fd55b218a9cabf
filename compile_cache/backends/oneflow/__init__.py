"""OneFlow graphs: the only folder that imports oneflow or onediff, and only once a prompt uses this backend."""
