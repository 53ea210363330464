"""Training speed of a mixture of experts on this CPU: against transformers' module, and a dense model of equal cost.

    python tools/benchmarks/experts.py [--rounds 3] [--steps 8] [--experts 8] [--top-k 2] [--vocab 8192] [--only ...]
        [--out F.json]

Hidden 384, 6 layers, 6 heads, experts of width 512, untied, sequences of 512, micro-batches of 4, fp32, AdamW,
clipping; one process on all cores. The dense model's MLP is as wide as a token's experts together. transformers'
Mixtral runs with its ways to multiply experts, but batched_mm, which gathers each token's matrices and takes 6 GB, and
with "medium" products, by which torch goes to oneDNN as ours do. Cases are interleaved, round by round: a ratio is the
median over the rounds of what two cases did in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import count, names_of, out_file
from gpu_smoke import random_batch
from train_cpu import write_record

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.fork_server import RANK_MEMORY

HIDDEN, LAYERS, HEADS, WIDTH = 384, 6, 6, 512
SEQ_LEN, MICRO = 512, 4
TIMEOUT_SECONDS = 600.0
OURS, DENSE = "megalite", "megalite, dense"
CASES = (
    *(OURS, f"{OURS}, compiled", DENSE, f"{DENSE}, compiled"),
    *("transformers eager", "transformers grouped_mm", "transformers eager medium", "transformers grouped_mm medium"),
)


def ours(given: argparse.Namespace, *, is_dense: bool, is_compiled: bool) -> Callable[[], float]:
    """A step of ours."""
    moe = {"num_experts": given.experts, "top_k": given.top_k, "ffn_hidden_size": WIDTH, "aux_loss": 0.01}
    config = Config(
        model={
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "ffn_hidden_size": WIDTH * given.top_k,
            "vocab_size": given.vocab,
            "moe": None if is_dense else moe,
        },
        batch={"seq_len": SEQ_LEN, "micro_batch_size": MICRO, "global_batch_size": MICRO},
        precision={"dtype": "fp32"},
        train={"steps": 1000, "compile": "on" if is_compiled else "off"},
    )
    plan = make_plan(config, 1)
    engine = build_engine(config, plan, connect(Mesh(), 0), torch.device("cpu"), FreshWeights(plan.model, 0))
    batch = random_batch(MICRO, SEQ_LEN, given.vocab, documents=1)
    return lambda: engine.train_step([batch], 1e-4).loss


def theirs(given: argparse.Namespace, how: str) -> Callable[[], float]:
    """A step of transformers' Mixtral, with torch's own optimizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=given.vocab,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            num_local_experts=given.experts,
            num_experts_per_tok=given.top_k,
            sliding_window=None,
            attn_implementation="sdpa",
            experts_implementation=how,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = random_batch(MICRO, SEQ_LEN, given.vocab, documents=1).tokens.view(MICRO, SEQ_LEN)

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def run_case(name: str, given: argparse.Namespace) -> float:
    """Tokens a second of one case, in this process."""
    torch.manual_seed(0)
    if name.startswith(OURS):
        step = ours(given, is_dense="dense" in name, is_compiled="compiled" in name)
    else:
        if name.endswith("medium"):
            torch.set_float32_matmul_precision("medium")
        step = theirs(given, name.split()[1])
    for _ in range(3):
        step()
    began = time.perf_counter()
    for _ in range(given.steps):
        step()
    return given.steps * MICRO * SEQ_LEN / (time.perf_counter() - began)


def measure(name: str, arguments: list[str]) -> float:
    """The same in a process of its own."""
    environment = {**os.environ, **RANK_MEMORY, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, __file__, *arguments, "--case", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=8)
    parser.add_argument("--experts", type=count, default=8)
    parser.add_argument("--top-k", type=count, default=2)
    parser.add_argument("--vocab", type=count, default=8192)
    parser.add_argument("--only", type=names_of(CASES), default=list(CASES))
    parser.add_argument("--out", type=out_file)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.top_k > given.experts:
        parser.error(f"--top-k: found {given.top_k}, of {given.experts} experts")
    if given.case:
        print(run_case(given.case, given))
        return
    sizes = ("steps", "experts", "top_k", "vocab")
    arguments = [part for name in sizes for part in (f"--{name.replace('_', '-')}", str(getattr(given, name)))]
    rates: dict[str, list[float]] = {name: [] for name in given.only}
    for _ in range(given.rounds):
        for name in given.only:
            rates[name].append(measure(name, arguments))
    rows = []
    for name, found in rates.items():
        ratios = {
            other: round(statistics.median(mine / its for mine, its in zip(found, others, strict=True)), 3)
            for other, others in rates.items()
            if other != name and name.startswith(OURS)
        }
        rows.append({"case": name, "tokens_per_second": round(statistics.median(found)), "ratios": ratios})
        print(json.dumps(rows[-1]), flush=True)
    if given.out:
        write_record(Path(given.out), {name: getattr(given, name) for name in sizes}, rows)


if __name__ == "__main__":
    main()
