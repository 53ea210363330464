"""FP8 and speed on one GPU, a section a call; each prints JSON lines to record under docs/benchmarks/.

    python tools/benchmarks/gpu.py parity|gemm|steps|curve|profile|all [--models 125m,1b3] [--recipes bf16]
        [--device cpu --tiny]

    parity   one linear layer by each recipe: Transformer Engine and torch's products against emulation
    gemm     FLOP/s of square products in bf16 and FP8: the ceiling of everything else
    steps    training steps of 125M to 8B parameters (of 8B as many layers as fit) in bf16 and FP8, against plain
             PyTorch with compile and Hugging Face's Llama on the same model in the same run: tokens/s, TFLOP/s, MFU
             over the data sheet's and the measured ceiling, memory
    curve    200 steps in bf16 and by each recipe from the same start: losses and their distance
    profile  where the time of a step goes, by kernel

What cannot run on a machine is said with its reason, not left out. With `--device cpu --tiny` all of it rehearses on a
laptop. FP8 MFU counts against the bf16 peak, as everybody's does. Kernels are those that runs take by default on the
device; `--deterministic` takes those of run.deterministic=true, to compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from arguments import config_value, count, device_name, names_of
from gpu_peers import PEERS
from gpu_smoke import make_config, make_engine, random_batch, timed
from plain_llama import Shape
from pydantic import ValidationError

from megalite.architecture.costs import count_parameters, flops_per_token
from megalite.config.fill import fill_model
from megalite.config.schema import BatchConfig, Fp8Config, ModelConfig
from megalite.config.validate import validate
from megalite.engine.build import DTYPES
from megalite.engine.runtime import connect_processes, set_determinism
from megalite.errors import ConfigError
from megalite.layers.flash import PACKAGES, use_flash_attention
from megalite.layers.fp8.available import why_unavailable
from megalite.layers.fp8.backends import choose_backend
from megalite.layers.gemm import choose_gemm
from megalite.layers.linear import ColumnParallelLinear
from megalite.parallel.axes import SINGLE
from megalite.train.device import find_peak

VOCAB = 32000


@dataclass(frozen=True)
class Case:
    """A model and how it is fed."""

    sizes: dict[str, int]
    seq_len: int
    micro_batch_size: int
    fits: tuple[int, ...] = ()
    """Fewer layers to try where memory runs out."""


MODELS = {
    "125m": Case({"hidden_size": 768, "num_layers": 12, "num_heads": 12, "ffn_hidden_size": 2048}, 2048, 32),
    "1b3": Case({"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5632}, 2048, 16),
    "3b": Case({"hidden_size": 2560, "num_layers": 32, "num_heads": 20, "ffn_hidden_size": 8704}, 2048, 8),
    "8b": Case(
        {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "ffn_hidden_size": 14336}, 4096, 2, (24, 20, 16)
    ),
}
TINY = Case({"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 128}, 128, 2)

RECIPES: dict[str, Fp8Config | None] = {
    "bf16": None,
    "te current": Fp8Config(backend="te", recipe="current", watch_every=None),
    "te block": Fp8Config(backend="te", recipe="block", watch_every=None),
    "scaled_mm current": Fp8Config(backend="scaled_mm", recipe="current", watch_every=None),
    "scaled_mm delayed": Fp8Config(backend="scaled_mm", recipe="delayed", watch_every=None),
    "scaled_mm rowwise": Fp8Config(backend="scaled_mm", recipe="rowwise", watch_every=None),
}
"""What is timed. Emulation is no contender."""
chosen_recipes = list(RECIPES)
"""Those of --recipes."""
packing = {"documents": 1}
"""Of a sequence, by --documents. Peers know of one alone, and are given one."""
settings: dict[str, dict[str, object]] = {}
"""Of the config, by --set: of megalite's steps, not of the peers'."""
BYTES_OF_A_PARAMETER = 18
"""Weight in bf16, gradient in fp32, and AdamW's three."""
SHARE_FOR_WEIGHTS = 0.8
"""Of the memory; the rest is for activations."""

PARITY_TOLERANCE = 0.02
"""Relative norm of the difference from emulation: two bf16 roundings and tensor cores' shorter sums; rounding by
another scale would be at 0.04 and more."""
CURVE_TOLERANCE = 0.01
"""Relative, of the mean loss over the last tenth of the steps."""


def say(section: str, name: str, **figures: object) -> None:
    """Print one result."""
    print(json.dumps({"section": section, "name": name, **figures}), flush=True)


def able(section: str, device: torch.device) -> Iterator[tuple[str, Fp8Config | None]]:
    """The chosen recipes that can run here; the others are said with their reason."""
    for name in chosen_recipes:
        fp8 = RECIPES[name]
        reason = why_unavailable(fp8, device) if fp8 is not None else ""
        if reason:
            say(section, name, left_out=reason)
        else:
            yield name, fp8


def parity(device: torch.device, tiny: bool, cases: dict[str, Case]) -> bool:
    """Result and gradients of a linear layer by each backend, as distances from emulation of the same recipe."""
    tokens, width = (128, 64) if tiny else (4096, 2048)
    passed = True
    for name, fp8 in able("parity", device):
        if fp8 is None:
            continue
        settings = {"backend": "emulate", "recipe": fp8.recipe, "watch_every": None}
        truth, found = (_linear(config, tokens, width, device) for config in (Fp8Config(**settings), fp8))
        plain = _linear(None, tokens, width, device)
        figures = {}
        for key, value in found.items():
            norm = truth[key].norm()
            figures[key] = ((value - truth[key]).norm() / norm).item()
            figures[f"{key} from bf16"] = ((value - plain[key]).norm() / norm).item()
        ok = all(figures[key] < PARITY_TOLERANCE for key in found)
        say("parity", name, passed=ok, **figures)
        passed &= ok
    return passed


def _linear(fp8: Fp8Config | None, tokens: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Result and gradients of one linear layer on the same numbers, fp32."""
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(n, width).to(device, torch.bfloat16) for n in (tokens, width, tokens))
    layer = ColumnParallelLinear(width, width, tp=SINGLE).to(device, torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    backend = None
    if fp8 is not None:
        backend = choose_backend(fp8, tp=SINGLE, replicas=SINGLE, device=device, keep_weights=True)
        layer.gemm = backend.make_layers({"layer": layer})["layer"]
    if fp8 is not None and fp8.recipe == "delayed":  # a first step to have a history
        layer(x).backward(grad)
        backend.end_step()
        layer.gemm.forget_weights()
        layer.weight.grad = None
    x.requires_grad_()
    with torch.autocast("cpu", enabled=False) if backend is None else backend.context():
        y = layer(x)
    y.backward(grad)
    return {"y": y.detach().float(), "dx": x.grad.float(), "dw": layer.weight.grad.float()}


def gemm(device: torch.device, tiny: bool, cases: dict[str, Case]) -> bool:
    """FLOP/s of square products, with and without rounding the operands."""
    for size in (64, 128) if tiny else (2048, 4096, 8192):
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        plain = choose_gemm(device.type, torch.bfloat16)
        flops = 2.0 * size**3
        runs: dict[str, Callable[[int], object]] = {"bf16": lambda _, p=plain, a=left, b=right: p.multiply(a, b)}
        eights = [x.to(torch.float8_e4m3fn) for x in (left, right)]
        one = torch.ones((), device=device)
        if not why_unavailable(Fp8Config(backend="scaled_mm"), device):
            runs["fp8"] = lambda _, a=eights[0], b=eights[1], s=one: torch._scaled_mm(
                a, b.t(), s, s, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            runs["fp8, careful sums"] = lambda _, a=eights[0], b=eights[1], s=one: torch._scaled_mm(
                a, b.t(), s, s, out_dtype=torch.bfloat16, use_fast_accum=False
            )
        for name, run in runs.items():
            seconds = timed(run, device, 3 if tiny else 50)
            say("gemm", f"{name} {size}", tflops=float(f"{flops / seconds / 1e12:.4g}"))
    return True


def steps(device: torch.device, tiny: bool, cases: dict[str, Case]) -> bool:
    """Tokens/s and memory of training steps, each model by each recipe and by the peers."""
    ceiling = measured_ceiling(device, tiny)
    for name, case in cases.items():
        for num_layers in (case.sizes["num_layers"], *case.fits):
            sizes = {**case.sizes, "num_layers": num_layers}
            if not _weights_fit(sizes, case, device):
                say("steps", f"{name}, {num_layers} layers", left_out="weights would leave no room for activations")
                continue
            try:
                _time_model(f"{name}, {num_layers} layers", sizes, case, device, tiny, ceiling)
                break
            except torch.OutOfMemoryError:
                say("steps", f"{name}, {num_layers} layers", left_out="out of memory")
                free(device)
    return True


def _weights_fit(sizes: dict[str, int], case: Case, device: torch.device) -> bool:
    """Whether to try at all: finding out by trying takes minutes."""
    if device.type != "cuda" or settings:
        return True
    model = fill_model(ModelConfig(vocab_size=VOCAB, **sizes), BatchConfig(seq_len=case.seq_len))
    memory = SHARE_FOR_WEIGHTS * torch.cuda.get_device_properties(device).total_memory
    return BYTES_OF_A_PARAMETER * count_parameters(model) < memory


def _time_model(name: str, sizes: dict[str, int], case: Case, device: torch.device, tiny: bool, ceiling: float) -> None:
    tokens, count = case.seq_len * case.micro_batch_size, 3 if tiny else 10
    shape = Shape(
        sizes["hidden_size"], sizes["num_layers"], sizes["num_heads"], sizes["ffn_hidden_size"], VOCAB, case.seq_len
    )
    peak = find_peak(device, torch.bfloat16)

    def measure(who: str, make: Callable[[], Callable[[int], object]], flops: float) -> None:
        free(device)
        run = make()
        seconds = timed(run, device, count)
        rate = flops * tokens / seconds
        say(
            "steps",
            f"{name}: {who}",
            tokens_per_second=round(tokens / seconds),
            tflops=float(f"{rate / 1e12:.4g}"),
            mfu=round(rate / peak.flops, 4),
            mfu_is_of=str(peak),
            mfu_measured=round(rate / ceiling, 4),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        )

    for recipe, fp8 in able("steps", device):
        precision = {"fp8": None if fp8 is None else fp8.model_dump()}
        engine, config = make_engine(
            device,
            {**sizes, "tie_embeddings": True},
            case.seq_len,
            case.micro_batch_size,
            **_sections(precision=precision, train={"compile": "off" if tiny else "on"}),
        )
        batch = random_batch(case.micro_batch_size, case.seq_len, VOCAB, documents=packing["documents"]).to(device)
        flops = flops_per_token(fill_model(config.model, config.batch), case.seq_len)
        try:
            measure(f"megalite, {recipe}", lambda e=engine, b=batch: lambda _: e.train_step([b], 3e-4), flops)
        finally:
            engine.close()
            del engine
    for who, make in PEERS.items():
        try:
            measure(f"{who}, compiled", lambda make=make: make(shape, case.micro_batch_size, device), flops)
        except torch.OutOfMemoryError:
            say("steps", f"{name}: {who}", left_out="out of memory")
            free(device)


def _why_not(case: Case) -> str:
    """What is wrong with --set, in a line; empty where nothing is."""
    own = {**case.sizes, "tie_embeddings": True, "vocab_size": VOCAB}
    for section, values in settings.items():
        if section == "batch" or (section == "model" and own.keys() & values.keys()):
            return f"--set {section}: sizes are those of --models, --micro-batch-size and --documents"
    try:
        validate(make_config(case.sizes, case.seq_len, case.micro_batch_size, **_sections()), 1)
    except (ValidationError, ConfigError) as error:
        return f"--set: {' '.join(str(error).split())}"
    return ""


def _sections(**sections: dict[str, object]) -> dict[str, dict[str, object]]:
    """These of a config, with what --set says in them."""
    return {name: {**sections.get(name, {}), **settings.get(name, {})} for name in {**sections, **settings}}


def curve(device: torch.device, tiny: bool, cases: dict[str, Case]) -> bool:
    """Losses of the same model on the same tokens, by each recipe and in other formats: text-like tokens, so that there
    is much to learn."""
    case, count = (TINY, 10) if tiny else (MODELS["125m"], 200)
    curves: dict[str, list[float]] = {}
    ways: dict[str, dict] = {
        name: {"precision": {"fp8": None if fp8 is None else fp8.model_dump()}} for name, fp8 in able("curve", device)
    }
    ways["masters in bf16"] = {"precision": {"master_dtype": "bf16"}, "parallel": {"zero_stage": 3}}
    if device.type == "cuda":
        ways["fp16"] = {"precision": {"dtype": "fp16"}}
    for name, sections in ways.items():
        engine, _ = make_engine(device, case.sizes, case.seq_len, case.micro_batch_size, **sections)
        curves[name] = []
        for number in range(count):
            batch = random_batch(case.micro_batch_size, case.seq_len, VOCAB, documents=1, seed=number)
            batch.tokens.remainder_(97 + number % 7)
            batch.labels.copy_((batch.tokens * 31 + 7) % 1009)  # a rule to be learned
            curves[name].append(engine.train_step([batch.to(device)], 1e-3).loss)
        engine.close()
        free(device)
    tail = max(1, count // 10)
    means = {name: sum(losses[-tail:]) / tail for name, losses in curves.items()}
    passed = True
    for name, losses in curves.items():
        distance = abs(means[name] - means["bf16"]) / means["bf16"]
        passed &= tiny or distance < CURVE_TOLERANCE
        say("curve", name, last=means[name], from_bf16=distance, losses=[round(loss, 4) for loss in losses])
    return passed


def profile(device: torch.device, tiny: bool, cases: dict[str, Case]) -> bool:
    """The kernels that a step spends its time in, in bf16 and in FP8."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    case = TINY if tiny else MODELS["1b3"]
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    for name, fp8 in able("profile", device):
        precision = {"fp8": None if fp8 is None else fp8.model_dump()}
        engine, _ = make_engine(
            device,
            case.sizes,
            case.seq_len,
            case.micro_batch_size,
            precision=precision,
            train={"compile": "off" if tiny else "on"},
        )
        batch = random_batch(case.micro_batch_size, case.seq_len, VOCAB, documents=1).to(device)
        timed(lambda _, e=engine, b=batch: e.train_step([b], 3e-4), device, 1)
        with torch_profile(activities=kinds) as found:
            engine.train_step([batch], 3e-4)
        say("profile", name, table=found.key_averages().table(sort_by=key, row_limit=60).splitlines())
        engine.close()
        free(device)
    return True


def measured_ceiling(device: torch.device, tiny: bool) -> float:
    """FLOP/s of a large bf16 product."""
    size = 128 if tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / timed(lambda _: torch.mm(left, right), device, 3 if tiny else 50)


def free(device: torch.device) -> None:
    """Give back what the last case held."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


SECTIONS = {"parity": parity, "gemm": gemm, "steps": steps, "curve": curve, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=(*SECTIONS, "all"))
    parser.add_argument(
        "--models", type=names_of(MODELS), default=list(MODELS), help="for steps: which of " + ", ".join(MODELS)
    )
    parser.add_argument(
        "--recipes", type=names_of(RECIPES), default=list(RECIPES), help="which of " + ", ".join(RECIPES)
    )
    parser.add_argument("--documents", type=count, default=1, help="for steps: of equal length in a sequence")
    parser.add_argument("--micro-batch-size", type=count, help="for steps: sequences, in place of each model's own")
    parser.add_argument("--flash", choices=("torch", *PACKAGES), default="torch", help="train.flash_attention")
    parser.add_argument("--peers", type=names_of((*PEERS, "none")), default=list(PEERS), help="for steps: beside whom")
    parser.add_argument(
        "--set",
        type=config_value,
        action="append",
        default=[],
        help="for steps: of megalite's config, SECTION.KEY=VALUE; may be given several times",
    )
    parser.add_argument("--device", type=device_name, default="cuda")
    parser.add_argument("--deterministic", action="store_true", help="as with run.deterministic=true, to see its cost")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    arguments = parser.parse_args()
    chosen_recipes[:] = arguments.recipes
    if (arguments.set or arguments.micro_batch_size) and arguments.section != "steps":
        parser.error(f"--set and --micro-batch-size are for steps, found {arguments.section}")
    cases = {"tiny": TINY} if arguments.tiny else {name: MODELS[name] for name in arguments.models}
    if arguments.micro_batch_size:
        cases = {name: replace(case, micro_batch_size=arguments.micro_batch_size) for name, case in cases.items()}
    packing["documents"] = arguments.documents
    for section, key, value in arguments.set:
        settings.setdefault(section, {})[key] = value
    if wrong := next((why for case in cases.values() if (why := _why_not(case))), ""):
        parser.error(wrong)
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "torch": torch.__version__,
        "dtype": str(DTYPES["bf16"]),
        "deterministic": arguments.deterministic,
        "documents": arguments.documents,
        "flash_attention": arguments.flash,
        "set": settings,
        "micro_batch_size": arguments.micro_batch_size or "each model's own",
    }
    print(json.dumps(about), flush=True)
    set_determinism(arguments.deterministic or None, device.type)
    use_flash_attention(arguments.flash, device)
    for who in set(PEERS) - set(arguments.peers):
        del PEERS[who]
    chosen = SECTIONS if arguments.section == "all" else {arguments.section: SECTIONS[arguments.section]}
    with tempfile.TemporaryDirectory() as folder:
        connect_processes(rank=0, world_size=1, device_type=device.type, init_method=f"file://{folder}/store")
        passed = [section(device, arguments.tiny, cases) for section in chosen.values()]
        torch.distributed.destroy_process_group()  # else NCCL may hang when Python exits
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
