"""Find code of other packs in a model: on its modules, and in the functions that its code reaches."""
