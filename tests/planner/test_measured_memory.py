"""The planner's bytes against what real steps of real engines take: every tensor, at the peak of a step."""

from __future__ import annotations

from statistics import median

import pytest

from tests.kit.paths import ROOT
from tests.planner.measured import Case, measure, planned

SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
PIPELINE = {"micro_batch_size": 1, "global_batch_size": 4}
TWO_OF_DP = {"global_batch_size": 8}
FSDP2 = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}
LARGER = {"hidden_size": 384, "num_heads": 6, "ffn_hidden_size": 1024}
MORE_TOKENS = {"seq_len": 512}
LARGER_OF_DP, LARGER_PIPELINE = {**TWO_OF_DP, **MORE_TOKENS}, {**PIPELINE, **MORE_TOKENS}
"""Beside which DeepSpeed's buckets, and the ends of a pipeline, are less."""
WIDE, DEEP = {"hidden_size": 768, "num_heads": 12, "ffn_hidden_size": 2048, "num_layers": 3}, {"num_layers": 12}
LONG = {"seq_len": 8192, "micro_batch_size": 1, "global_batch_size": 2}
SHORT_MODEL = {"hidden_size": 128, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 384}
GPT2 = {"preset": "gpt2", "num_layers": 3, "vocab_size": 4096}
ADAPTERS = {"lora": {"rank": 8, "alpha": 16}}
EXPERTS = {"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 368}}
MANY_WORDS = {"vocab_size": 131072, "hidden_size": 128, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 384}

FEW_TOKENS = {"seq_len": 32, "micro_batch_size": 1, "global_batch_size": 4}
"""Beside which an update takes most."""
SPLIT = {"pp": 2, "schedule": "zb-h1"}
COUPLED = {"decay": {"kind": "coupled"}}


def frozen(*names: str) -> dict:
    """An optimizer's section that leaves weights as they are."""
    return {"groups": [{"match": list(names), "frozen": True}]}


FROZEN = frozen("blocks.0.*", "embedding.*")


def of(name: str, ranks: int = 1, **sections) -> Case:
    """A case, its parallelism among the sections."""
    return Case(name, ranks, sections)


def updating(name: str, ranks: int = 1, optimizer: dict | None = None, **sections) -> Case:
    """A case of which an optimizer's update takes most."""
    of_optimizer = {"name": name.split()[0], **(optimizer or {})}
    if name.startswith("muon"):
        of_optimizer["newton_schulz_steps"] = 2  # each takes as much as the one before
    return of(name, ranks, optimizer=of_optimizer, model=WIDE, batch=FEW_TOKENS, **sections)


def recomputing(kind: str, **others) -> dict:
    return {"train": {"recompute": kind}, **others}


FEW_BITS = {"reduce_bits": 8, "gather_bits": 8}
BF16 = {"precision": {"dtype": "bf16"}}
FP8, ROWWISE = {"backend": "scaled_mm"}, {"backend": "emulate", "recipe": "rowwise"}
QAT = {"bits": 8, "group_size": None}


def rounding(name: str, ranks: int = 1, of_model: dict | None = None, **sections) -> Case:
    """A case whose products are of rounded numbers, some of which are kept for a step."""
    precision = {"dtype": "bf16", **(of_model or {})}
    return of(name, ranks, precision=precision, model=WIDE, batch={**TWO_OF_DP, "seq_len": 64}, **sections)


CASES = (
    of("alone"),
    of("selective", **recomputing("selective")),
    of("full", **recomputing("full")),
    of("bf16", **BF16),
    of("bf16 selective", **recomputing("selective", **BF16)),
    of("bf16 full", **recomputing("full", **BF16)),
    of("ZeRO 0", parallel={"zero_stage": 0}),
    of("wide", model=WIDE, batch=MORE_TOKENS),
    of("deep", model=DEEP),
    of("wide full", model=WIDE, batch=MORE_TOKENS, **recomputing("full")),
    of("tied", model={"tie_embeddings": True}),
    of("groups of heads", model={"num_kv_heads": 2}),
    of("layer norms, GELU, biases", model=GPT2, batch=MORE_TOKENS),
    of("128k words", model=MANY_WORDS, batch={"seq_len": 256}),
    of("128k words bf16", model=MANY_WORDS, batch={"seq_len": 256}, **BF16),
    of("8k tokens", model=SHORT_MODEL, batch=LONG),
    of("8k tokens full", model=SHORT_MODEL, batch=LONG, **recomputing("full")),
    of(
        "latents", model={"mla": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}}
    ),
    of("chunks of MLPs", train={"mlp_chunk_tokens": 128}),
    of("micro-batch of 4", batch={"micro_batch_size": 4}),
    of("dp 2", 2, parallel={"dp": 2}, batch=TWO_OF_DP),
    of("dp 2 bf16", 2, parallel={"dp": 2}, batch=TWO_OF_DP, **BF16),
    of("dp 2 ZeRO 0", 2, parallel={"dp": 2, "zero_stage": 0}, batch=TWO_OF_DP),
    of("dp 2 few tokens bf16", 2, parallel={"dp": 2}, model=WIDE, batch={**TWO_OF_DP, "seq_len": 64}, **BF16),
    of("dp 2 few bits", 2, parallel={"dp": 2}, batch=TWO_OF_DP, precision={"dtype": "fp32", **FEW_BITS}),
    of("dp 4", 4, parallel={"dp": 4}, batch=TWO_OF_DP),
    of("tp 2", 2, parallel={"tp": 2}),
    of("tp 2 bf16", 2, parallel={"tp": 2}, **BF16),
    of("tp 2 sp", 2, parallel=SEQUENCE_PARALLEL),
    of("tp 2 sp full", 2, parallel=SEQUENCE_PARALLEL, **recomputing("full")),
    of("tp 2 dp 2", 4, parallel={"tp": 2, "dp": 2}, batch=TWO_OF_DP),
    of("pp 2", 2, parallel={"pp": 2}, batch=PIPELINE),
    of("pp 2 selective", 2, parallel={"pp": 2}, batch=PIPELINE, **recomputing("selective")),
    of("pp 2 interleaved", 2, parallel={"pp": 2, "schedule": "interleaved", "chunks": 3}, batch=PIPELINE),
    of("pp 2 ZB-V", 2, parallel={"pp": 2, "schedule": "zb-v", "chunks": 2}, model=LARGER, batch=LARGER_PIPELINE),
    of("pp 2 tp 2", 4, parallel={"pp": 2, "tp": 2}, batch=PIPELINE),
    of("cp 2", 2, parallel={"cp": 2}),
    of("FSDP2", 2, parallel=FSDP2, batch=TWO_OF_DP),
    of("FSDP2 one micro-batch", 2, parallel=FSDP2),
    of("FSDP2 bf16", 2, parallel=FSDP2, batch=TWO_OF_DP, **BF16),
    of("FSDP2 hpZ", 4, parallel={**FSDP2, "dp": 4, "hpz_size": 2}, batch=TWO_OF_DP),
    of("FSDP2 few tokens bf16", 2, parallel=FSDP2, model=WIDE, batch={**TWO_OF_DP, "seq_len": 64}, **BF16),
    of("FSDP2 full", 2, parallel=FSDP2, model=WIDE, batch=TWO_OF_DP, **recomputing("full")),
    of("FSDP2 few bits", 2, parallel=FSDP2, batch=TWO_OF_DP, precision={"dtype": "bf16", **FEW_BITS}),
    of("FSDP2 128k words bf16", 2, parallel=FSDP2, model=MANY_WORDS, batch={"seq_len": 256}, **BF16),
    of("adapters selective", model=ADAPTERS, **recomputing("selective", **BF16)),
    of("adapters full, GELU", model={**ADAPTERS, **GPT2}, **recomputing("full")),
    of("FSDP2 adapters", 2, parallel=FSDP2, model=ADAPTERS, batch=TWO_OF_DP),
    of("FSDP2 experts bf16", 2, parallel=FSDP2, model=EXPERTS, batch=TWO_OF_DP, **BF16),
    of("experts over ranks", 2, parallel={"dp": 2, "ep": 2}, model=EXPERTS, batch=TWO_OF_DP),
    of("FSDP2 experts over ranks", 2, parallel={**FSDP2, "ep": 2}, model=EXPERTS, batch=TWO_OF_DP),
    of("frozen weights", optimizer=FROZEN),
    of("FSDP2 frozen weights", 2, parallel=FSDP2, optimizer=FROZEN),
    of("frozen blocks", optimizer=frozen("blocks.*")),
    of("FSDP2 frozen blocks", 2, parallel=FSDP2, batch=TWO_OF_DP, optimizer=frozen("blocks.*")),
    of("pp 2 ZB-H1 frozen blocks", 2, parallel=SPLIT, batch=PIPELINE, optimizer=frozen("blocks.*")),
    of("pp 2 ZB-H1 frozen attention", 2, parallel=SPLIT, batch=PIPELINE, optimizer=frozen("blocks.*.attention.*")),
    of("layer norms, GELU, frozen MLPs", model=GPT2, optimizer=frozen("blocks.*.mlp.*")),
    of("adapters of queries and values", model={"lora": {"rank": 8, "alpha": 16, "targets": ["q", "v"]}}, **BF16),
    updating("lion"),
    updating("sgd"),
    updating("adamw coupled", optimizer=COUPLED),
    updating("muon bf16", **BF16),
    updating("muon coupled", optimizer=COUPLED),
    updating("muon ZeRO 1", 2, parallel={"dp": 2}),
    updating("muon tp 2", 2, parallel={"tp": 2}),
    updating("muon FSDP2 bf16", 2, parallel=FSDP2, **BF16),
    updating("muon8bit ZeRO 1 bf16", 2, parallel={"dp": 2}, **BF16),
    updating("adamw8bit"),
    updating("adafactor FSDP2", 2, parallel=FSDP2),
    rounding("FP8", of_model={"fp8": FP8}),
    rounding("FP8 rowwise tp 2", 2, {"fp8": ROWWISE}, parallel={"tp": 2}),
    rounding("FSDP2 FP8", 2, {"fp8": FP8}, parallel=FSDP2),
    rounding("rounded weights", of_model={"qat": QAT}),
    rounding("FSDP2 rounded weights", 2, {"qat": QAT}, parallel=FSDP2),
    of("DeepSpeed ZeRO 0", 2, parallel={"dp": 2, "zero_stage": 0, "engine": "deepspeed"}, batch=TWO_OF_DP),
    of("DeepSpeed ZeRO 1", 2, parallel={"dp": 2, "engine": "deepspeed"}, batch=TWO_OF_DP),
    of("DeepSpeed ZeRO 1 bf16", 2, parallel={"dp": 2, "engine": "deepspeed"}, batch=TWO_OF_DP, **BF16),
    of("DeepSpeed ZeRO 2", 2, parallel={"dp": 2, "zero_stage": 2}, model=LARGER, batch=LARGER_OF_DP),
    of("DeepSpeed ZeRO 2 few tokens", 2, parallel={"dp": 2, "zero_stage": 2}, model=WIDE, batch={"seq_len": 64}),
    of("DeepSpeed ZeRO 2 bf16", 2, parallel={"dp": 2, "zero_stage": 2}, model=LARGER, batch=LARGER_OF_DP, **BF16),
    of(
        "DeepSpeed ZeRO 3",
        2,
        parallel={"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        model=LARGER,
        batch=LARGER_OF_DP,
    ),
    of(
        "DeepSpeed ZeRO 3 bf16",
        2,
        parallel={"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        model=LARGER,
        batch=LARGER_OF_DP,
        **BF16,
    ),
)

MOST, MEDIAN = 0.05, 0.02

errors: dict[str, float] = {}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_tensors_at_the_peak_are_as_planned(case: Case):
    """Of every rank, within a twentieth."""
    expected = planned(case)
    off = [expected[stage] / taken - 1 for stage, taken in measure(case)]
    errors[case.name] = max(off, key=abs)
    assert min(off) > -MOST
    assert max(off) < MOST


def test_pages_say_how_many_there_are():
    for page in ("plan.md", "config.md", "benchmarks/plan.md"):
        assert f"{len(CASES)} configs" in (ROOT / "docs" / page).read_text("utf-8")


def test_half_of_them_are_within_a_fiftieth():
    if len(errors) < len(CASES):
        pytest.skip("not all cases have run")
    assert median(map(abs, errors.values())) < MEDIAN
