"""A CUDA machine that is none: `device.cpp` makes the device, and here torch.cuda answers as with H100s.

    pretend(devices=2)      before anything imports torch; afterwards `cuda` tensors are real to torch
    seen.syncs              what the host waited for, and where from
    seen.streams, ...       what was asked of CUDA's streams, events and page-locked memory

Attention by document (torch's flash kernel) and scaled products of FP8 matrices (cuBLAS) have kernels of ours that
check their arguments as the real ones do. NCCL is gloo. Nothing that comes out of it is a GPU's result.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib.util
import threading
import traceback
import types
from pathlib import Path
from typing import Any

GIB = 2**30

NAME, CAPABILITY = "NVIDIA H100 80GB HBM3", (9, 0)

ALREADY_LOCKED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

NOT_OURS = ("/torch/", "/tests/stand_in/", "/threading.py", "/contextlib.py", "/functools.py")
"""Files that are never the reason why the host waits."""


class Seen:
    """What was asked of the device."""

    def __init__(self) -> None:
        self.is_on = True
        self.syncs: collections.Counter[tuple[str, str]] = collections.Counter()
        """(what, the two innermost places of the program that caused it), how often."""
        self.calls: collections.Counter[str] = collections.Counter()
        """Everything else, by name."""
        self.devices: list[int] = []
        """Devices in the order in which threads chose them."""

    def note(self, what: str) -> None:
        """Note a call; those that begin with `sync` with their place."""
        if not self.is_on:
            return
        if what.startswith("sync"):
            self.syncs[what.removeprefix("sync: "), _place()] += 1
        else:
            self.calls[what] += 1

    def clear(self) -> None:
        """Forget everything."""
        self.syncs.clear()
        self.calls.clear()
        self.devices = []

    @contextlib.contextmanager
    def aside(self):
        """Within it nothing is noted: the stand-in's own doing."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


seen = Seen()


def _place() -> str:
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not any(part in frame.filename for part in NOT_OURS) or "/deepspeed/" in frame.filename
    ]
    shown = [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}" for frame in frames[:-3:-1]]
    return f"{' <- '.join(shown)} ({threading.current_thread().name})"


class Event:
    """An event that is over as soon as it is recorded."""

    def __init__(self, *args: Any, **options: Any):
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True
        seen.note("event recorded")

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        assert self.is_recorded, "waits for an event that was never recorded"
        seen.note("sync: event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """A stream whose work is always done."""

    def __init__(self, device: Any = None, **options: Any):
        import torch

        assert device is None or isinstance(device, int) or torch.device(device).type == "cuda", device
        self.device = device
        seen.note("stream made")

    def wait_event(self, event: Event) -> None:
        assert event.is_recorded, "waits for an event that was never recorded"
        seen.note("stream waits for event")

    def wait_stream(self, stream: Stream) -> None:
        seen.note("stream waits for stream")

    def synchronize(self) -> None:
        seen.note("sync: stream")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class Runtime:
    """Page-locked memory, as `torch.cuda.cudart()` has it."""

    def __init__(self, device: ctypes.CDLL):
        self._device, self._locked = device, set()
        self.refuses = False
        """Whether locking fails, as under a memory limit."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses or address in self._locked:
            self._device.stand_in_fail()
            return ALREADY_LOCKED
        self._locked.add(address)
        self._device.stand_in_pin(ctypes.c_void_p(address), ctypes.c_size_t(size))
        seen.note("memory locked")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert address in self._locked, "unlocks what is not locked"
        self._locked.discard(address)
        self._device.stand_in_unpin(ctypes.c_void_p(address))
        seen.note("memory unlocked")
        return 0


def pretend(library: Path, devices: int = 1) -> ctypes.CDLL:
    """Let this process believe in CUDA devices. Before anything imports torch."""
    folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(str(library))
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: seen.note(what.decode()))
    device.stand_in_begin(devices, listener)
    device.listener = listener  # must live as long as the device
    import torch
    import torch._dynamo  # it looks at torch.cuda's own functions

    from tests.stand_in.graphs import Graphs

    graphs = Graphs(device, seen.note)
    _answer_as_cuda(torch, device, devices)
    torch.cuda.CUDAGraph, torch.cuda.graph = graphs.new_graph, graphs.capture
    _meet_by_gloo(torch)
    torch.distributed._symmetric_memory._is_test_mode = True  # of torch's own: collectives for what GPUs share
    from tests.stand_in.kernels import register_kernels

    device.kernels = register_kernels(graphs)
    return device


def _answer_as_cuda(torch: Any, device: ctypes.CDLL, devices: int) -> None:
    cuda, stream, runtime = torch.cuda, Stream(), Runtime(device)
    properties = types.SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=80 * GIB, multi_processor_count=132
    )

    def set_device(chosen: Any) -> None:
        index = chosen if isinstance(chosen, int) else torch.device(chosen).index or 0
        seen.devices.append(index)
        device.stand_in_choose(index)

    @contextlib.contextmanager
    def chosen(which: Any):
        before = device.stand_in_device()
        set_device(which)
        yield
        device.stand_in_choose(before)

    def nothing(*args: Any, **options: Any) -> None:
        pass

    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *a, **k: True),
        **dict.fromkeys(
            ("init", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"), nothing
        ),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *a: 2**20),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *a: stream),
        "memory_stats": lambda *a: {},
        "mem_get_info": lambda *a: (70 * GIB, 80 * GIB),
        "device_count": lambda: devices,
        "current_device": lambda: device.stand_in_device(),
        "set_device": set_device,
        "device": chosen,
        "stream": lambda *a: contextlib.nullcontext(),
        "get_device_name": lambda *a: NAME,
        "get_device_capability": lambda *a: CAPABILITY,
        "get_device_properties": lambda *a: properties,
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *a: seen.note("sync: device"),
        "cudart": lambda: runtime,
        "Event": Event,
        "Stream": Stream,
    }
    for name, answer in answers.items():  # a function each: the compiler keeps a table by function
        setattr(cuda, name, answer if isinstance(answer, type) else functools.partial(answer))
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = nothing
    torch.UntypedStorage.resize_ = _resize(torch, torch.UntypedStorage.resize_)


def _resize(torch: Any, real: Any) -> Any:
    """Memory that is given back stays, full of numbers that are none: whoever reads it will show it."""

    def resize(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return real(storage, size)
        assert size in (0, storage.size()), "grows beyond what it was"
        with seen.aside():
            if size == 0:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(255)
        return storage

    return resize


def _meet_by_gloo(torch: Any) -> None:
    import torch.distributed as dist

    real = dist.init_process_group

    @functools.wraps(real)
    def init_process_group(backend: str, *, device_id: Any = None, **options: Any) -> None:
        assert backend != "nccl" or device_id is not None, "NCCL guesses its device"
        real("gloo", **options)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.ProcessGroupGloo = _one_thread(dist.ProcessGroupGloo)


def _one_thread(gloo: type) -> type:
    """Groups for all of NCCL's collectives, some of whose names two threads must not write: `gather_by_gloo`."""

    class OneThread(gloo):
        def __init__(self, store: Any, rank: int, size: int, *, timeout: Any) -> None:
            options = gloo._Options()
            options._threads, options._timeout, options._devices = 1, timeout, [gloo.create_default_device()]
            super().__init__(store, rank, size, options)

    return OneThread
