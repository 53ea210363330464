"""The engine on DeepSpeed: what is said of its settings, states and places stays in this folder.

config.py          its settings, from ours                start.py           its engine, given a stage
partition.py       which part of each weight ZeRO keeps here; `engine.stage_state` reads and writes it
update.py          norm, clipping, gate, one look         gate.py            an update that others can veto
step_numbers.py    what a step says                       loss_scaling.py    in fp16
frozen.py          gradients of frozen weights            footprint.py       the bytes that all of it keeps
engine.py          all of it as an engine
"""
