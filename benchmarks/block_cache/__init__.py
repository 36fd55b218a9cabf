"""Would a block cache, planned on one full run, beat fewer steps and core's EasyCache on a trained transformer?"""
