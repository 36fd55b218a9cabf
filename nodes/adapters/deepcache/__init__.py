"""DeepCache (Ma, Fang and Wang, arXiv 2312.00858): on most steps, reuse the output of a UNet's deep blocks.

`schedule` plans which steps run in full, `run` keeps features during one sampling run and decides the pass of each
call, `passes` are the two passes through the network, and `node` adds DeepCache to a model patcher. The model's
forward, compiled or not, runs the passes: see `patch/step_pass`.
"""
