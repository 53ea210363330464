"""Pipeline schedules as data: who does which pass when, what is sent, and the proof that it ends. Pure arithmetic.

operations.py   a pass of a chunk and micro-batch; where chunks lie; the order of each rank's passes
orders.py       1F1B, interleaved, ZB-H1         v_orders.py   ZB-V, DualPipe-V
files.py        an order of one's own
simulation.py   when each pass runs, the bubble, what is kept at most
programs.py     orders with their messages       proof.py      that programs end, and do everything once
"""
