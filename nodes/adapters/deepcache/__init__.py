"""DeepCache (arXiv 2312.00858): on most steps of a sampling run, the deep blocks of a UNet are not run again.

`schedule` says which steps run in full, `run` holds what one sampling run keeps, `passes` are the two ways through the
network, and `node` adds it to a model patcher. The forward of the model runs the passes: see `forward/step_pass`.
"""
