"""One module for each command that needs no more: warm-up, bundle, compatibility, and the page of families."""
