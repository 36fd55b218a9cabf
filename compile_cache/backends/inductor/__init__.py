"""Regions compiled by inductor with dynamic shapes, then a capture of the whole forward per signature on CUDA.

`backend` is the entrance; a `program` is one module and its calls. A folder imports only folders below it:

    parallel/    compile many regions at once, in processes of their own
    regions/     the regions of one module, and the table of compiled regions that all modules share
    compile/     from a block to compiled code: trace, lower, and keep it as an artifact
"""
