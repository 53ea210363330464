"""One training set-up, timed: `python tools/benchmarks/cases.py '{"case": "megalite", ...}'` on each of its ranks.

Every case trains the same model on random tokens with AdamW and clipping at 1.0, so that only the implementation
differs. Prints one JSON line from rank 0: tokens a second over the timed steps, by the clock and by the CPU time of the
rank (all its threads), and its peak memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from plain_llama import Llama, Shape
from step_profile import accompany_profile, profile_step


@dataclass(frozen=True)
class Job:
    """What a case is to do."""

    case: str
    vocab: int = 32000
    micro_batch_size: int = 4
    accum: int = 1
    warmup: int = 3
    steps: int = 8
    compile: bool = False
    matmul: str = "highest"
    """For `torch.set_float32_matmul_precision`; with "medium" fp32 products may go through bf16."""
    bf16: bool = False
    """Autocast of a peer; of megalite, bf16 weights over fp32 masters."""
    static: bool = False
    """Of DDP: every step has the same graph, and gradients lie in what is reduced."""
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    blocks: tuple[int, ...] | None = None
    """Blocks of each chunk of a pipeline; None leaves it to megalite."""
    hidden: int = 384
    layers: int = 6
    seq_len: int = 512
    schedule: str | None = None
    """Of a pipeline; None for what a config without one has, which a release before knows too."""
    profile: bool = False
    """Say where the time goes, and how near products come to the machine's limit."""

    @property
    def shape(self) -> Shape:
        """Llama style, tied, heads of 64; W1 where nothing else is asked for."""
        ffn = -(-8 * self.hidden // 48) * 16
        return Shape(self.hidden, self.layers, self.hidden // 64, ffn, self.vocab, self.seq_len)

    @property
    def product_flops(self) -> float:
        """Of a step's products by weights, in a forward and a backward pass."""
        shape = self.shape
        block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn
        weights = shape.layers * block + shape.vocab * shape.hidden
        return 6.0 * weights * self.accum * self.micro_batch_size * shape.seq_len


Step = Callable[[int], None]


def plain_step(job: Job) -> Step:
    """Plain PyTorch, DistributedDataParallel when there are several ranks; compiled when asked."""
    torch.manual_seed(0)
    model = Llama(job.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    of_ddp = {"static_graph": True, "gradient_as_bucket_view": True} if job.static else {}
    run = torch.nn.parallel.DistributedDataParallel(model, **of_ddp) if world_size() > 1 else model
    run = torch.compile(run) if job.compile else run

    def step(number: int) -> None:
        for micro in range(job.accum):
            tokens, labels = random_tokens(job, number * job.accum + micro)
            with autocast(job):
                loss = run(tokens, labels) / job.accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_tp_step(job: Job) -> Step:
    """Plain PyTorch cut by torch's own tensor parallelism (DTensor)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Llama(job.shape)
    mesh = init_device_mesh("cpu", (world_size(),))
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.o": RowwiseParallel(), "down": RowwiseParallel()}
        plan |= {"gate": ColwiseParallel(), "up": ColwiseParallel()}
        parallelize_module(block, mesh, plan)
    model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())  # tying is lost under DTensor
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)

    def step(number: int) -> None:
        tokens, labels = random_tokens(job, number, rank=0)
        model(tokens, labels).backward()  # no clipping: torch's does not take plain and DTensor gradients together
        optimizer.step()
        optimizer.zero_grad()

    return step


def megatron_tp_step(job: Job) -> Step:
    """Megatron-core's model and tensor parallelism, brought to run without CUDA."""
    from megatron_case import megatron_model

    model = megatron_model(job, world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(number: int) -> None:
        model(*random_tokens(job, number, rank=0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def litgpt_step(job: Job) -> Step:
    """litgpt's model and loss, compiled, as its pretraining does."""
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    shape = job.shape
    torch.manual_seed(0)
    config = LitConfig(
        block_size=shape.seq_len,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        padded_vocab_size=shape.vocab,
        vocab_size=shape.vocab,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.ffn,
    )
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model)

    def step(number: int) -> None:
        tokens, labels = random_tokens(job, number)
        with autocast(job):
            loss = chunked_cross_entropy(run(tokens), labels, chunk_size=0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def megalite_step(job: Job) -> Step:
    """megalite's engine, as `megalite train` runs it."""
    from megalite.config.plan import make_plan
    from megalite.config.schema import Config
    from megalite.data.loader import Batch
    from megalite.engine.build import build_engine
    from megalite.model.initialize import FreshWeights
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh

    shape, dp = job.shape, world_size() // (job.tp * job.pp)
    config = Config(
        model={
            "hidden_size": shape.hidden,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "ffn_hidden_size": shape.ffn,
            "vocab_size": shape.vocab,
            "tie_embeddings": True,
        },
        parallel={
            "tp": job.tp,
            "pp": job.pp,
            "zero_stage": job.zero_stage,
            **({"schedule": job.schedule} if job.schedule else {}),
            **({"blocks_per_chunk": job.blocks} if job.blocks else {}),
        },
        batch={
            "micro_batch_size": job.micro_batch_size,
            "global_batch_size": job.micro_batch_size * job.accum * dp,
            "seq_len": shape.seq_len,
        },
        precision={"dtype": "bf16" if job.bf16 else "fp32"},
        train={"steps": 100, "compile": "on" if job.compile else "off"},
    )
    plan = make_plan(config, world_size())
    axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), rank())
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 0))
    num_tokens = job.micro_batch_size * shape.seq_len

    def batch(number: int) -> Batch:
        tokens, labels = random_tokens(job, number, rank=axes.batch.rank)
        borders = torch.arange(0, num_tokens + 1, shape.seq_len, dtype=torch.int32)
        return Batch(
            tokens=tokens.flatten(),
            labels=labels.flatten(),
            loss_mask=torch.ones(num_tokens, dtype=torch.bool),
            positions=torch.arange(shape.seq_len).repeat(job.micro_batch_size),
            cu_seqlens=borders,
            max_seqlen=shape.seq_len,
            keys=torch.arange(num_tokens),
        )

    return lambda number: engine.train_step([batch(number * job.accum + m) for m in range(job.accum)], 3e-4)


CASES: dict[str, Callable[[Job], Step]] = {
    "plain": plain_step,
    "torch-tp": torch_tp_step,
    "megatron-tp": megatron_tp_step,
    "litgpt": litgpt_step,
    "megalite": megalite_step,
}


def autocast(job: Job) -> torch.autocast:
    """bf16 products for a peer, where asked for."""
    return torch.autocast("cpu", torch.bfloat16, enabled=job.bf16)


def random_tokens(job: Job, number: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a micro-batch, other ones on every rank."""
    generator = torch.Generator().manual_seed(number * 1000 + (globals()["rank"]() if rank is None else rank))
    size = (job.micro_batch_size, job.shape.seq_len + 1)
    stream = torch.randint(0, job.vocab, size, generator=generator)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_float32_matmul_precision(job.matmul)
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank(), world_size=world_size())
    step = CASES[job.case](job)
    for number in range(job.warmup):
        step(number)
    start, cpu_start = time.perf_counter(), time.process_time()
    for number in range(job.warmup, job.warmup + job.steps):
        step(number)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    replicas = world_size() if job.case == "plain" else world_size() // (job.tp * job.pp)
    replicas = 1 if job.case in ("torch-tp", "megatron-tp") else replicas
    num_tokens = job.steps * job.accum * job.micro_batch_size * job.shape.seq_len * replicas
    dtype, number = torch.bfloat16 if job.bf16 else torch.float32, job.warmup + job.steps
    if rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        speeds = {"tokens_per_second": num_tokens / seconds, "tokens_per_cpu_second": num_tokens / cpu_seconds}
        found = {**speeds, "peak_rss_mb": peak}
        if job.profile:
            took, flops = seconds / job.steps, job.product_flops * replicas / world_size()
            found["profile"] = profile_step(step, number, dtype, flops=flops, step_seconds=took)
        print(json.dumps(found), flush=True)
    elif job.profile:
        accompany_profile(step, number, dtype)
    os._exit(0)


if __name__ == "__main__":
    main()
