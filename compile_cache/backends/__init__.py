"""The backends that run, compile and capture modules: one file or folder each, behind the interface of `base`."""
