"""The blocks that Resolute compiles: one file or folder for each kind of model; `families` lists them."""
