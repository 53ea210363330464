"""Traces of a profiler, summed up: where the time of a step goes, and what of communication is exposed."""
