"""The code that a model reaches: its content for keys, and changes that other packs make to it.

`reach`: the functions and classes that the code reaches by names, and those that were replaced. `insides`:
changes inside an object that stays. `attributes`: code that a pack put into a module. `authors`: whose code a function
is. `content`: a value's content for a key, or that it has none.
"""
