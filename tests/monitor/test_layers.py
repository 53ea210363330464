"""What a look into the layers shows, against plain formulas in one process, in every layout."""

from __future__ import annotations

import pytest
import torch

from megalite.config.plan import make_plan
from megalite.engine.batch_cut import documents_of_batch, with_ahead
from megalite.engine.build import build_stage
from megalite.engine.steps import targets_of_batch
from megalite.layers.mlp import MLP
from megalite.model.initialize import FreshWeights, local_weights
from megalite.monitor.activations import DEAD, Activations, sample_queries
from megalite.monitor.layers import LayerStatistics, Record
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from tests.kit.batches import micro_batch
from tests.kit.plugins import loaded, sample
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, step_batches, tiny_config

LR = 2e-3
SAME = 2e-4
"""Relative, fp32: sums in another order, and Adam's first update, which divides small numbers by their size."""

SECTIONS = {"optimizer": {"weight_decay": 0.0}, "monitor": {"layers_every": 1}}

CASES = {
    1: [{"zero_stage": 0}, {"zero_stage": 1}],
    2: [
        *({"dp": 2, "zero_stage": stage} for stage in (0, 1, 2, 3)),
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "zero_stage": 0},
        {"pp": 2},
        {"pp": 2, "zero_stage": 0},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses", "zero_stage": 3, "engine": "deepspeed"},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    ],
    4: [
        {"pp": 2, "tp": 2, "sequence_parallel": True},
        {"dp": 2, "tp": 2, "zero_stage": 3, "engine": "deepspeed"},
    ],
}


CASES_OF_LATENTS = {
    1: [{"zero_stage": 0}],
    2: [
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses", "zero_stage": 3, "engine": "deepspeed"},
        {"dp": 2, "ep": 2, "zero_stage": 3, "engine": "fsdp2"},
    ],
}

CASES_OF_SINKS = {
    1: [{"zero_stage": 0}],
    2: [
        {"tp": 2},
        {"cp": 2},
        {"cp": 2, "cp_kind": "ulysses"},
        {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    ],
}

CASES_OF_EXPERTS = {
    1: [{"zero_stage": 0}],
    2: [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "zero_stage": 0},
        {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"cp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "zero_stage": 3, "engine": "fsdp2"},
    ],
    4: [{"dp": 2, "ep": 2, "tp": 2}, {"dp": 4, "ep": 2, "zero_stage": 0}],
}


def config_of(parallel: dict, **more: dict):
    return tiny_config(parallel=parallel, **SECTIONS, **more)


def own_batches(rank: Rank) -> list:
    batch = rank.config.batch
    return step_batches(
        0,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        dp=rank.plan.dp,
        dp_rank=rank.axes.batch.rank,
        seq_len=batch.seq_len,
        vocab_size=rank.plan.model.vocab_size,
    )


def statistics_of(rank: Rank) -> LayerStatistics:
    return LayerStatistics(
        rank.engine, rank.plan.model, rank.axes, rank.config.batch.seq_len, rank.config.monitor.attention_queries
    )


def looks(cases: list[dict], model: dict) -> list[Record]:
    """For each layout the record of the first step."""
    records = []
    for parallel in cases:
        rank = start_rank(config_of(parallel, model=model))
        statistics, batches = statistics_of(rank), own_batches(rank)
        statistics.begin(batches)
        record = statistics.end(rank.engine.train_step(batches, LR))
        rank.engine.close()
        records.append(record)
    return records


def truth(model: dict) -> Record:
    """The same by plain autograd and dense attention, of the whole batch at once."""
    config = config_of({}, model=model)
    plan = make_plan(config, 1)
    source = FreshWeights(plan.model, config.run.seed)
    stage = build_stage(config, plan, connect(Mesh(), 0), torch.device("cpu"), source)
    batch = micro_batch(range(8), seq_len=config.batch.seq_len, vocab_size=plan.model.vocab_size)
    documents = documents_of_batch(batch)
    ahead = with_ahead(batch, plan.model.num_predictions)
    stage(batch.tokens, documents, targets_of_batch(ahead, 1 / batch.loss_mask.sum())).backward()
    parameters = dict(stage.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    layers, head = blocks_of(stage, batch, documents), head_of(stage, batch, documents)
    torch.nn.utils.clip_grad_norm_(stage.parameters(), config.optimizer.clip_grad_norm)
    torch.optim.AdamW(
        stage.parameters(), lr=LR, betas=config.optimizer.betas, eps=config.optimizer.eps, weight_decay=0
    ).step()
    found = {}
    for local in local_weights(stage):
        name = local.parameter_name
        gradient, weight, after = (local.view(x[name].detach()) for x in (gradients, before, parameters))
        found[local.weight.name] = {
            "grad_norm": gradient.norm().item(),
            "weight_norm": weight.norm().item(),
            "update_ratio": ((after - weight).norm() / weight.norm()).item() if weight.norm() > 0 else 0.0,
        }
    return {"weights": found, "layers": {**layers, "head": head}}


@torch.no_grad()
def blocks_of(stage, batch, documents) -> dict[str, dict[str, float]]:
    """Statistics of every block from whole tensors and a dense mask."""
    x = stage.embedding(batch.tokens, documents)
    place = torch.arange(x.shape[0])
    start = place - batch.positions
    seen = (start.unsqueeze(1) == start.unsqueeze(0)) & (place.unsqueeze(1) >= place.unsqueeze(0))
    found = {}
    for name, block in stage.blocks.items():
        q, k, _ = block.attention.project(block.attention_norm(x), documents)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        if (bound := stage.spec.model.attention_soft_cap) is not None:
            scores = bound * torch.tanh(scores / bound)
        window = place.shape[0] if block.attention.window is None else block.attention.window
        in_window = place.unsqueeze(1) - place.unsqueeze(0) < window
        scores = scores.masked_fill(~(seen & in_window), -torch.inf)
        sinks = getattr(block.attention, "sinks", None)
        beside = [] if sinks is None else [sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)]
        p = torch.cat((scores, *beside), dim=2).softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        middle = x + block.attention(block.attention_norm(x), documents)
        of_mlp = in_mlp(block.mlp, block.mlp_norm(middle), batch.loss_mask)
        x = block(x, documents)
        found[f"blocks.{name}"] = {
            "rms": x.square().mean().sqrt().item(),
            "max": x.abs().max().item(),
            "kurtosis": (x**4).mean().item() / x.square().mean().item() ** 2,
            "attention_queries": 1.0,
            "attention_entropy": entropy.mean().item(),
            "attention_entropy_min": entropy.mean(1).min().item(),
            "attention_logit_max": scores.max().item(),
            **of_mlp,
        }
    return found


def in_mlp(mlp, x, counted) -> dict[str, float]:
    """Of units, or of experts."""
    if isinstance(mlp, MLP):
        units = mlp.activation(mlp.expand(x))
        return {"dead_units": (units.abs().amax(0) < DEAD * units.square().mean().sqrt()).float().mean().item()}
    scores = (x[counted] @ mlp.router.weight.t()).softmax(-1)
    counts = torch.bincount(scores.topk(2).indices.flatten(), minlength=4).double()
    shares = counts / counts.sum()
    return {
        "load_max": (counts.max() / counts.mean()).item(),
        "load_min": (counts.min() / counts.mean()).item(),
        "load_entropy": (torch.special.entr(shares).sum() / torch.tensor(4.0).log()).item(),
        "dead_experts": (counts == 0).double().mean().item(),
        "router_entropy": (torch.special.entr(scores).sum(-1).mean() / torch.tensor(4.0).log()).item(),
    }


@torch.no_grad()
def head_of(stage, batch, documents) -> dict[str, float]:
    """The logarithm of softmax's sum on every token that counts."""
    log_z = stage.logits(batch.tokens, documents).logsumexp(-1)[batch.loss_mask]
    square = log_z.square().mean().item()
    z_loss = stage.spec.model.z_loss
    found = {"log_z_rms": square**0.5, "log_z_max": log_z.abs().max().item()}
    return {**found, "z_loss": z_loss * square} if z_loss else found


def test_a_sample_of_queries_is_a_fair_one():
    """Of long sequences one query of each few is looked at, anywhere among them, so that the mean of what rises with
    the position comes out as over all of them; of short ones every query is."""
    keys = torch.arange(256 * 1024)
    assert torch.equal(sample_queries(keys, 1), keys)
    rising = torch.log1p((keys % 1024).double())
    for stride in (2, 4, 16, 100):
        chosen = sample_queries(keys, stride)
        assert chosen.numel() == pytest.approx(keys.numel() / stride, abs=1)
        assert torch.equal((chosen % stride).unique(), torch.arange(stride))
        assert rising[chosen].mean().item() == pytest.approx(rising.mean().item(), rel=2e-3)
        parts = [sample_queries(part, stride) + part[0] for part in keys.split(1000)]
        assert torch.equal(torch.cat(parts), chosen), "it must not matter how ranks cut the batch"


@pytest.mark.parametrize(
    ("seq_len", "most", "share"),
    [(16, 512, 1.0), (512, 512, 1.0), (2048, 512, 0.25), (2048, None, 1.0), (2048, 1000, 1 / 3)],
)
def test_what_share_of_the_queries_is_looked_at(seq_len, most, share):
    """It stands beside the entropies, so that a sample is never taken for the whole."""
    config = config_of({})
    plan = make_plan(config, 1)
    axes = connect(Mesh(), 0)
    stage = build_stage(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    batch = micro_batch(range(2), seq_len=16, vocab_size=plan.model.vocab_size)
    found = Activations(stage, axes, seq_len, most).measure(
        lambda: stage.logits(batch.tokens, documents_of_batch(batch))
    )
    assert found["blocks.0"]["attention_queries"] == share


def look_at(model: dict) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """What a look at a model in this process shows, and the truth."""
    plan, axes = make_plan(config_of({}, model=model), 1), connect(Mesh(), 0)
    stage = build_stage(config_of({}, model=model), plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    batch = micro_batch(range(2), seq_len=16, vocab_size=plan.model.vocab_size)
    documents = documents_of_batch(batch)
    found = Activations(stage, axes, seq_len=16, most_queries=None).measure(
        lambda: stage.logits(batch.tokens, documents)
    )
    del found["head"]
    return found, blocks_of(stage, batch, documents)


def test_bounded_scores_are_shown_as_they_are_bounded():
    """Far below what the model would have without a bound."""
    found, wanted = look_at({"attention_soft_cap": 0.5, "init_std": 1.0})
    for block, values in found.items():
        assert values == pytest.approx(wanted[block], rel=SAME, abs=1e-6)
        assert values["attention_logit_max"] == pytest.approx(0.5)


def test_a_plugins_attention_has_no_softmax():
    """What is said of one is left out; the rest is shown."""
    with loaded(sample("attentions")):
        found, wanted = look_at({"attention": "softmax_one"})
    for block, values in found.items():
        rest = {key: value for key, value in wanted[block].items() if not key.startswith("attention_")}
        assert values == pytest.approx(rest, rel=SAME, abs=1e-6)


MODELS = {
    "llama": {"num_kv_heads": 2, "z_loss": 1e-3},
    "experts": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "every": 2}},
    "latents": {
        "mla": {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, "first_dense": 1},
        "mtp": {"num_layers": 1},
    },
    "sinks": {"num_kv_heads": 2, "attention_sinks": True, "sliding_window": 5},
    "gpt": {"norm": "layernorm", "activation": "gelu", "bias": "all", "positions": "learned", "tie_embeddings": True},
}


OWN_CASES = {"experts": CASES_OF_EXPERTS, "latents": CASES_OF_LATENTS, "sinks": CASES_OF_SINKS}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, size) for name in MODELS for size in OWN_CASES.get(name, CASES) if (name, size) != ("gpt", 4)],
)
def test_every_layout_shows_the_truth(name, world_size):
    """Norms of gradients, weights and updates by weight, and what the blocks do, at every ZeRO stage, under tp with and
    without sequence parallelism and under pp: the numbers of plain formulas in one process."""
    cases = OWN_CASES.get(name, CASES)[world_size]
    (wanted,) = run_ranks(truth, 1, MODELS[name])
    for rank, records in enumerate(run_ranks(looks, world_size, cases, MODELS[name])):
        for case, record in zip(cases, records, strict=True):
            where = f"{case} rank {rank}"
            assert record["weights"].keys() == wanted["weights"].keys(), where
            for weight, values in wanted["weights"].items():
                assert record["weights"][weight] == pytest.approx(values, rel=SAME, abs=1e-6), f"{where} {weight}"
            for block, values in wanted["layers"].items():
                shown = {key: record["layers"][block].get(key) for key in values}
                assert shown == pytest.approx(values, rel=SAME, abs=1e-6), f"{where} {block}"
            of_block = [v["grad_norm"] for key, v in wanted["weights"].items() if key.startswith("blocks.1.")]
            norm = sum(value**2 for value in of_block) ** 0.5
            assert record["layers"]["blocks.1"]["grad_norm"] == pytest.approx(norm, rel=SAME)


def look_or_not(every: int | None) -> list[tuple[float, float]]:
    rank = start_rank(tiny_config(parallel={"dp": 2}, monitor={"layers_every": every}))
    statistics, curve = statistics_of(rank), []
    for step in (1, 2, 3):
        batches = own_batches(rank)
        is_measured = every is not None and step % every == 0
        if is_measured:
            statistics.begin(batches)
        result = rank.engine.train_step(batches, LR)
        if is_measured:
            assert statistics.end(result)["weights"]
        curve.append((result.loss, result.grad_norm))
    rank.engine.close()
    return curve


def test_looking_changes_nothing():
    """Losses and norms with and without looks are equal to the last bit."""
    assert run_ranks(look_or_not, 2, 2) == run_ranks(look_or_not, 2, None)
