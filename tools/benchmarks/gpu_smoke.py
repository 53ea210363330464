"""First checks on a GPU, one call each.

    python tools/benchmarks/gpu_smoke.py parity|engines|waits|speed [--tiny] [--device cpu]

    parity   the model on the device in bf16 against the CPU in fp32: loss, gradients, and no leak between documents
    engines  a few steps at ZeRO 0-3, with recomputation and compilation, all from the same start
    waits    how often the host waits for the device in a step of 1 and of 4 micro-batches, by torch's own count
    speed    tokens/s and MFU of two models in bf16, against plain PyTorch with compile in the same run

Prints one JSON line a check and exits 1 when one fails. With `--device cpu --tiny` all of it rehearses on a laptop.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from arguments import device_name
from gpu_peers import plain_step
from plain_llama import Shape

from megalite.architecture.costs import flops_per_token
from megalite.config.fill import fill_model
from megalite.config.plan import make_plan
from megalite.config.schema import BatchConfig, Config, ModelConfig
from megalite.data.loader import Batch
from megalite.engine.build import DTYPES, build_engine
from megalite.engine.protocol import Engine
from megalite.engine.runtime import connect_processes, set_determinism
from megalite.layers.documents import Documents, Targets
from megalite.layers.gemm import PLAIN
from megalite.layers.grouped import GroupedProduct
from megalite.layers.parts import choose_parts
from megalite.model.initialize import FreshWeights, fill
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.device import find_peak

BF16_LOSS_TOLERANCE = 2e-2
"""bf16 keeps 8 bits: a mean loss near 7 moves by about a hundredth."""
BF16_GRADIENT_TOLERANCE = 5e-2
BF16_ROUTED_GRADIENT_TOLERANCE = 2e-1
BF16_PRODUCT_TOLERANCE = 5e-3
"""Relative, of a whole weight's gradient."""
SIZES = {
    "125m": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "ffn_hidden_size": 2048},
    "1b3": {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5632},
}
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128}


def report(check: str, passed: bool, **figures: object) -> bool:
    """Print the outcome of a check as a JSON line."""
    print(json.dumps({"check": check, "passed": passed, **figures}), flush=True)
    return passed


def random_batch(num_sequences: int, seq_len: int, vocab_size: int, documents: int, seed: int = 0) -> Batch:
    """Random tokens, each sequence holding `documents` documents of equal length."""
    return packed_batch(num_sequences * documents * (seq_len // documents,), vocab_size, seed, max_seqlen=seq_len)


def packed_batch(lengths: Sequence[int], vocab_size: int, seed: int = 0, max_seqlen: int | None = None) -> Batch:
    """Random tokens in documents of these lengths."""
    num_tokens = sum(lengths)
    stream = torch.randint(0, vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return Batch(
        tokens=stream[:-1],
        labels=stream[1:],
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths) if max_seqlen is None else max_seqlen,
        keys=torch.arange(num_tokens),
    )


def parity(device: torch.device, tiny: bool) -> bool:
    """The same weights and tokens on the device in bf16 and on the CPU in fp32."""
    return compare({**TINY, "num_kv_heads": 2, "qk_norm": True}, device)


def compare(sizes: dict, device: torch.device, *, of_routers: bool = False) -> bool:
    """Loss and gradients of a model on the device in bf16 against those on the CPU in fp32, and that no document sees
    another.

    Args:
        of_routers: some tokens go to other experts in bf16, so that gradients differ by more.
    """
    model = fill_model(ModelConfig(vocab_size=1000, **sizes), BatchConfig(seq_len=256))
    batch = random_batch(4, 256, 1000, documents=4)

    def build(where: torch.device, dtype: torch.dtype) -> Stage:
        spec = StageSpec(model, parts=choose_parts(model, where.type, dtype))
        stage = Stage(spec)
        fill(stage, FreshWeights(model, 0))
        stage.to(where, dtype).routers.to(where)
        return stage

    def loss_of(stage: Stage, where: torch.device) -> torch.Tensor:
        on = batch.to(where)
        documents = Documents(on.positions, on.cu_seqlens, on.max_seqlen, on.keys)
        weights = torch.full(on.tokens.shape, 1 / len(on.tokens), device=where)
        return stage(on.tokens, documents, Targets(on.labels, weights))

    truth, tested = build(torch.device("cpu"), torch.float32), build(device, torch.bfloat16)
    losses = [loss_of(truth, torch.device("cpu")), loss_of(tested, device)]
    for loss in losses:
        loss.backward()
    worst = 0.0
    for want, got in zip(truth.parameters(), tested.parameters(), strict=True):
        difference = (got.grad.float().cpu() - want.grad).norm() / want.grad.norm()
        worst = max(worst, difference.item())
    gap = abs(losses[0].item() - losses[1].item())
    ok = report("loss", gap < BF16_LOSS_TOLERANCE, difference=gap)
    allowed = BF16_ROUTED_GRADIENT_TOLERANCE if of_routers else BF16_GRADIENT_TOLERANCE
    ok &= report("gradients", worst < allowed, worst_relative_difference=worst)

    on = batch.to(device)
    changed = on.tokens.clone()
    changed[:64] = (changed[:64] + 1) % 1000
    logits = [
        tested.logits(tokens, Documents(on.positions, on.cu_seqlens, on.max_seqlen, on.keys)).detach()
        for tokens in (on.tokens, changed)
    ]
    leak = (logits[0][64:] != logits[1][64:]).sum().item()
    return ok & report("no leak between documents", leak == 0, changed_logits=leak)


def make_config(sizes: dict, seq_len: int, micro: int, num_micro_batches: int = 1, **sections: dict) -> Config:
    """Of a run on one rank."""
    values: dict[str, dict] = {
        "model": {"vocab_size": 32000, "tie_embeddings": False, **sizes},
        "parallel": {"zero_stage": 1},
        "batch": {"micro_batch_size": micro, "global_batch_size": micro * num_micro_batches, "seq_len": seq_len},
        "precision": {"dtype": "bf16"},
        "train": {"steps": 1000, "compile": "off"},
    }
    for section, said in sections.items():
        values[section] = {**values.get(section, {}), **said}
    return Config(**values)


def make_engine(
    device: torch.device, sizes: dict, seq_len: int, micro: int, num_micro_batches: int = 1, **sections: dict
) -> tuple[Engine, Config]:
    """An engine on one rank."""
    config = make_config(sizes, seq_len, micro, num_micro_batches, **sections)
    plan = make_plan(config, 1)
    return build_engine(config, plan, connect(Mesh(), 0), device, FreshWeights(plan.model, 0)), config


def engines(device: torch.device, tiny: bool) -> bool:
    """Four steps of two micro-batches in every way that one rank can train; all losses agree to bf16 noise."""
    sizes = TINY if tiny else SIZES["125m"]
    ways = {
        "zero 0 fp32": {"parallel": {"zero_stage": 0}, "precision": {"dtype": "fp32"}},
        "zero 1": {},
        "zero 2": {"parallel": {"zero_stage": 2}},
        "zero 3": {"parallel": {"zero_stage": 3}},
        "zero 3, DeepSpeed": {"parallel": {"zero_stage": 3, "engine": "deepspeed"}},
        "masters in bf16": {"parallel": {"zero_stage": 3}, "precision": {"master_dtype": "bf16"}},
        "selective": {"train": {"recompute": "selective"}},
        "full": {"train": {"recompute": "full"}},
        "full, offloaded": {"train": {"recompute": "full", "offload_activations": True}},
        "MLPs in chunks": {"train": {"mlp_chunk_tokens": 200}},
        "compiled": {"train": {"compile": "on"}},
    }
    if device.type == "cuda":
        ways["fp16"] = {"precision": {"dtype": "fp16"}}
        ways["recorded"] = {"train": {"cuda_graphs": True}}
        ways["recorded, compiled"] = {"train": {"cuda_graphs": True, "compile": "on"}}
    curves = {}
    for name, sections in ways.items():
        engine, _ = make_engine(device, sizes, 256, 2, num_micro_batches=2, **sections)
        lengths = ((256, 256), (100, 156, 3, 253))  # whole sequences, and documents of any length
        curves[name] = []
        for step in range(4):
            batches = [packed_batch(each, 32000, seed=2 * step + n).to(device) for n, each in enumerate(lengths)]
            lengths = lengths[::-1]  # a graph is recorded of the first of a step
            curves[name].append(engine.train_step(batches, 1e-3).loss)
        engine.close()
    worst = max(abs(a - b) for curve in curves.values() for a, b in zip(curve, curves["zero 0 fp32"], strict=True))
    return report("engines agree", worst < BF16_LOSS_TOLERANCE, worst_difference=worst, curves=curves)


def waits(device: torch.device, tiny: bool) -> bool:
    """Synchronising calls of a step in steady state, as torch reports them: one, and none a micro-batch. (What NCCL or
    events of DeepSpeed wait for is not among them.)"""
    passed = True
    for name, sections in {
        "zero 1": {},
        "zero 2": {"parallel": {"zero_stage": 2}},
        "zero 3": {"parallel": {"zero_stage": 3}},
        "zero 3, DeepSpeed": {"parallel": {"zero_stage": 3, "engine": "deepspeed"}},
        "deterministic": {},
        **({"recorded": {"train": {"cuda_graphs": True}}} if device.type == "cuda" else {}),
    }.items():
        set_determinism(name == "deterministic", device.type)
        counts = {}
        for num_micro_batches in (1, 4):
            engine, _ = make_engine(device, TINY, 64, 1, num_micro_batches=num_micro_batches, **sections)
            batches = [random_batch(1, 64, 32000, documents=2).to(device) for _ in range(num_micro_batches)]
            for _ in range(3):
                engine.train_step(batches, 1e-3)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                engine.train_step(batches, 1e-3)
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            where = [
                f"{Path(each.filename).name}:{each.lineno}"
                for each in found
                if "called a synchronizing" in str(each.message)
            ]
            counts[num_micro_batches] = where
            engine.close()
        ok = all(len(where) <= 1 for where in counts.values())
        passed &= report(f"waits of a step, {name}", ok, by_micro_batches=counts)
    set_determinism(None, device.type)
    return passed


def timed(step: Callable[[int], None], device: torch.device, steps: int, warmup: int = 5) -> float:
    """Seconds a step."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for number in range(warmup):
        step(number)
    wait()
    start = time.perf_counter()
    for number in range(steps):
        step(number)
    wait()
    return (time.perf_counter() - start) / steps


def speed(device: torch.device, tiny: bool) -> bool:
    """Tokens a second and MFU of megalite and of plain PyTorch, the same model in the same run."""
    runs = [("tiny", TINY, 128, 2)] if tiny else [("125m", SIZES["125m"], 2048, 16), ("1b3", SIZES["1b3"], 2048, 8)]
    peak = find_peak(device, DTYPES["bf16"])
    for name, sizes, seq_len, micro in runs:
        tokens, steps = seq_len * micro, 3 if tiny else 20
        engine, config = make_engine(device, sizes, seq_len, micro, train={"compile": "on"})
        batch = random_batch(micro, seq_len, 32000, documents=1).to(device)
        ours = timed(lambda number, engine=engine, batch=batch: engine.train_step([batch], 3e-4), device, steps)
        engine.close()
        del engine
        shape = Shape(
            sizes["hidden_size"], sizes["num_layers"], sizes["num_heads"], sizes["ffn_hidden_size"], 32000, seq_len
        )
        peer = timed(plain_step(shape, micro, device), device, steps)
        flops = flops_per_token(fill_model(config.model, config.batch), seq_len) * tokens
        report(
            f"speed {name}",
            True,
            tokens_per_second=round(tokens / ours),
            mfu=round(flops / ours / peak.flops, 4),
            mfu_is_of=str(peak),
            plain_compiled_tokens_per_second=round(tokens / peer),
            ratio=round(peer / ours, 3),
        )
    return True


def experts(device: torch.device, tiny: bool) -> bool:
    """Products in groups against a loop over them, in bf16, with a group without rows; and the loss and gradients of a
    model with experts on the device in bf16 against the CPU's in fp32."""
    hidden, width, sizes = (64, 32, [40, 0, 17, 71]) if tiny else (2048, 768, [700, 0, 1100, 2296])
    generator = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)
        for rows, columns in ((4 * width, hidden), (sum(sizes), hidden), (sum(sizes), width))
    )
    product, matrices = GroupedProduct(PLAIN), weight / hidden**0.5
    counts = torch.tensor(sizes, device=device)
    found = [product.product(x, matrices, counts), *product.gradients(grad, x, matrices, counts)]
    parts = list(zip(x.split(sizes), grad.split(sizes), matrices.chunk(4), strict=True))
    wanted = [
        torch.cat([rows @ matrix.t() for rows, _, matrix in parts]),
        torch.cat([back @ matrix for _, back, matrix in parts]),
        torch.cat([back.t() @ rows for rows, back, _ in parts]),
    ]
    errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, wanted, strict=True)]
    ok = report("products in groups", max(errors) < BF16_PRODUCT_TOLERANCE, errors=errors)
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 128, "aux_loss": 0.01, "z_loss": 0.001}
    return ok & compare({**TINY, "moe": moe}, device, of_routers=True)


def offload(device: torch.device, tiny: bool) -> bool:
    """A long sequence with full recomputation, its blocks' inputs on the device and in the host's memory: the losses
    are equal, and copies hide behind compute when a step takes as long."""
    sizes, seq_len = (TINY, 256) if tiny else (SIZES["1b3"], 32768)
    losses, seconds, peaks = {}, {}, {}
    set_determinism(True, device.type)
    for away in (False, True):
        train = {"recompute": "full", "offload_activations": away}
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        engine, _ = make_engine(device, sizes, seq_len, 1, train=train)
        batch = random_batch(1, seq_len, 32000, documents=4).to(device)
        losses[away] = [engine.train_step([batch], 1e-4).loss for _ in range(2)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds[away] = timed(lambda number, e=engine, b=batch: e.train_step([b], 1e-4), device, 3, warmup=1)
        peaks[away] = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        engine.close()
        del engine
        gc.collect()
    return report(
        "offload",
        losses[True] == losses[False],
        losses_without=losses[False],
        ratio_of_time=round(seconds[True] / seconds[False], 3),
        bytes_saved=peaks[False] - peaks[True],
        left_by_the_first=before,
        losses=losses[True],
    )


CHECKS = {
    "parity": parity,
    "engines": engines,
    "waits": waits,
    "speed": speed,
    "offload": offload,
    "experts": experts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", type=device_name, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__}), flush=True)
    set_determinism(None, device.type)
    with tempfile.TemporaryDirectory() as folder:
        connect_processes(rank=0, world_size=1, device_type=device.type, init_method=f"file://{folder}/store")
        passed = CHECKS[arguments.check](device, arguments.tiny)
        torch.distributed.destroy_process_group()  # else NCCL may hang when Python exits
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
