"""Engines on DeepSpeed: what is said of its settings, states and places stays in this folder.

base.py           what both engines share            plain.py   ZeRO 0-3, a whole model on each rank
update.py         norm, clipping, gate, one look     pipeline.py   ZeRO 0-1, a stage a rank, 1F1B
partition.py      which part of each weight ZeRO keeps here; stage_state.py reads and writes it
"""
