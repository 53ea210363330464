"""Stations that take documents away, or passages out of them: documents of an earlier station in, documents out.

find    the station's own tasks: signatures, counts, scores ...      near.py, substring.py, lines.py, ...
write   a shard: what stays -> part-*.parquet; names of what goes -> removed/part-*.parquet     filtering.py
"""
