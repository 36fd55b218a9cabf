"""Regions compiled by inductor with dynamic shapes; on CUDA, one capture of the whole forward per signature.

`backend` is the entry point; a `program` is one module and its calls. A folder imports only folders listed below it:

    compiler/    the compile queue and its workers: compile many regions at once, beside the calls
    regions/     the regions of one module, and the table of compiled regions that all modules share
    lower/       from a block to compiled code: trace, lower, and store as an artifact
"""
