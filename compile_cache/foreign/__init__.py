"""Find code of other packs in a model: on its modules, and in the Python modules around its classes."""
