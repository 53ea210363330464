"""The engine of our own: ZeRO 0 and 1, whole models and pipelines.

buckets.py     weights in flat tensors, beside them the sums of their gradients; who updates which run of them
sums.py        gradients of micro-batches, added up as they are made; the reduction begins as soon as a bucket is whole
runner.py      passes of micro-batches through the chunks of this rank, by a program
engine.py      all of it as an engine
"""
