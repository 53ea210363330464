"""Ranks do not grow with the shapes that they meet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalite.train.fork_server import RANK_MEMORY

NUM_SHAPES, FEW_BYTES = 600, 200 * 2**20

MULTIPLY_EVER_NEW_SHAPES = """
import random, sys, torch

def held():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_float32_matmul_precision("medium")
left, right = torch.randn(4, 1000, 32), torch.randn(4, 32, 1000)
halves = left.bfloat16(), right.bfloat16()
torch.bmm(left, right), torch.bmm(*halves)
before = held()
for length in random.Random(0).sample(range(8, 1000), int(sys.argv[1])):
    for a, b in ((left, right), halves):
        torch.bmm(a[:, :length], b[:, :, :length])
print(held() - before)
"""


FEW_HOLES = 8 * 2**20

FREE_AND_TAKE_AGAIN = """
import ctypes, random
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
libc.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)

def held():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def tensor(size):
    found = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(found), 64, size) == 0
    ctypes.memset(found, 1, size)
    return found

chance = random.Random(0)
sizes = [2**20 + 16 * chance.randrange(400) for _ in range(64)]
tensors = [tensor(size) for size in sizes]
before = held()
for _ in range(80):
    for index in range(0, 64, 2):
        libc.free(tensors[index])
    for _ in range(100):
        libc.malloc(chance.randrange(24, 104))
    for index in range(0, 64, 2):
        tensors[index] = tensor(sizes[index])
print(held() - before)
"""


@pytest.mark.parametrize("dropped", [(), tuple(RANK_MEMORY)], ids=["as ranks have it", "without"])
def test_products_of_ever_new_shapes(dropped: tuple[str, ...]):
    """What oneDNN has prepared for documents of so many lengths is let go again; the other case shows that it is not by
    itself, where oneDNN multiplies."""
    environment = {**os.environ, **RANK_MEMORY}
    kept = {name: value for name, value in environment.items() if name not in dropped}
    command = [sys.executable, "-c", MULTIPLY_EVER_NEW_SHAPES, str(NUM_SHAPES)]
    grown = int(subprocess.check_output(command, env=kept, text=True))
    if not dropped:
        assert grown < FEW_BYTES
    elif grown < FEW_BYTES:
        pytest.skip(f"this CPU's products keep nothing for a shape: {grown:,} bytes")


@pytest.mark.parametrize("dropped", [(), ("GLIBC_TUNABLES",)], ids=["as ranks have it", "without"])
def test_tensors_fit_where_as_large_ones_lay(dropped: tuple[str, ...]):
    """Though small objects that stay were made in between, as torch makes them: what glibc cuts off in front of and
    behind a tensor is no room for these alone. The other case shows that it is without the settings."""
    environment = {**os.environ, **RANK_MEMORY}
    kept = {name: value for name, value in environment.items() if name not in dropped}
    grown = int(subprocess.check_output([sys.executable, "-c", FREE_AND_TAKE_AGAIN], env=kept, text=True))
    if not dropped:
        assert grown < FEW_HOLES
    elif grown < FEW_HOLES:
        pytest.skip(f"this C library finds room where it was: {grown:,} bytes")
