"""Packed documents never see each other: changing one leaves the logits of the other bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.plan import make_plan
from megalite.engine.build import build_engine
from megalite.layers.documents import Documents, Targets
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.batches import Batch
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config
from tests.model.stages import GPT_STYLE, LATENTS, SEQ_LEN, VOCAB, make_stage, tensor_axis, tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "sliding window": {"sliding_window": 3},
    "grouped-query": {"num_heads": 8, "num_kv_heads": 4, "qk_norm": True},
    "gpt": GPT_STYLE,
    "latents": LATENTS,
}

LENGTHS = {"unequal": (5, 8, 3), "equal": (8, 8), "one token": (15, 1)}
"""Documents of a stream of 16 tokens; each in turn is the one that changes."""

COUNT = 16

WIDE_VOCAB = 250
"""At tp 4 every rank has true logits."""


def borders_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make_documents(lengths: tuple[int, ...]) -> Documents:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Documents(positions, borders_of(lengths).int(), max(lengths), torch.arange(COUNT))


def make_tokens(lengths: tuple[int, ...], changed: int | None) -> Tensor:
    """Random tokens; those of document `changed` are all others."""
    tokens = torch.randint(VOCAB, (COUNT,), generator=torch.Generator().manual_seed(0))
    if changed is not None:
        start, stop = borders_of(lengths)[changed : changed + 2].tolist()
        tokens[start:stop] = (tokens[start:stop] + 1) % VOCAB
    return tokens


def untouched(lengths: tuple[int, ...], changed: int) -> Tensor:
    """Mask of the tokens outside the changed document."""
    mask = torch.ones(COUNT, dtype=torch.bool)
    start, stop = borders_of(lengths)[changed : changed + 2].tolist()
    mask[start:stop] = False
    return mask


def leaks(logits_of: Any, name: str) -> list[str]:
    """Run a model on every packing with every document changed, and report what moved, or failed to move.

    Args:
        logits_of: from tokens and documents to this rank's logits, or None on a rank that has none.
    """
    wrong = []
    for packing, lengths in LENGTHS.items():
        before = logits_of(make_tokens(lengths, None), make_documents(lengths))
        for changed in range(len(lengths)):
            after = logits_of(make_tokens(lengths, changed), make_documents(lengths))
            if before is None:
                continue
            others = untouched(lengths, changed)
            if not torch.equal(before[others], after[others]):
                wrong.append(f"{name}, {packing}: document {changed} is seen by another")
            if torch.equal(before[~others], after[~others]):
                wrong.append(f"{name}, {packing}: document {changed} has logits that do not depend on it")
    return wrong


def leaks_at_tp(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    tp = tensor_axis()
    wrong = []
    for name, settings in MODELS.items():
        for sequence_parallel in (False, True) if tp.size > 1 else (False,):
            for dtype in dtypes:
                model = tiny_model(**settings, vocab_size=WIDE_VOCAB)
                stage = make_stage(model, tp=tp, dtype=dtype, sequence_parallel=sequence_parallel)
                case = f"{name}, {dtype}, sequence_parallel={sequence_parallel}, tp {tp.size}"
                with torch.no_grad():
                    wrong += leaks(stage.logits, case)
    return wrong


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_documents_do_not_leak_through_tensor_parallel_ranks(tp):
    """With document A changed, the logits of every other document are bit-equal and A's own are not, at tp 1, 2 and
    4, with and without sequence parallelism, whose cuts fall inside documents."""
    dtypes = (torch.float32, torch.bfloat16) if tp < 4 else (torch.float32,)
    wrong = [line for lines in run_ranks(leaks_at_tp, tp, dtypes) for line in lines]
    assert not wrong, "\n".join(wrong)


def pipeline_logits(stage: Any, pp: Axis, tokens: Tensor, documents: Documents) -> Tensor | None:
    """Logits of two stages that hand the stream over, on the last stage."""
    if pp.rank == 0:
        dist.send(stage(tokens, documents), pp.global_ranks[1])
        return None
    stream = torch.empty(COUNT, stage.spec.model.hidden_size)
    dist.recv(stream, pp.global_ranks[0])
    return stage.head.logits(stage(stream, documents))


def leaks_at_pp() -> list[str]:
    axes = connect(Mesh(pp=2, tp=dist.get_world_size() // 2), dist.get_rank())
    wrong = []
    for name, settings in MODELS.items():
        stage = make_stage(tiny_model(**settings), tp=axes.tp, dtype=torch.float32, pp=2, pp_rank=axes.pp.rank)
        with torch.no_grad():
            wrong += leaks(lambda *x, stage=stage: pipeline_logits(stage, axes.pp, *x), f"{name}, pp 2")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_documents_do_not_leak_through_pipeline_stages(world_size):
    """The same for two stages, each knowing the documents, also with tensor parallelism inside them."""
    wrong = [line for lines in run_ranks(leaks_at_pp, world_size) for line in lines]
    assert not wrong, "\n".join(wrong)


def pipeline_losses() -> list[tuple[float, float]]:
    """The pipeline engine's loss over the documents that did not change, before and after another did."""
    config = tiny_config(parallel={"pp": 2}, batch={"micro_batch_size": 1, "global_batch_size": 2})
    plan = make_plan(config, 2)
    axes = connect(Mesh(pp=2), dist.get_rank())
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    pairs = []
    for lengths in LENGTHS.values():
        for changed in range(len(lengths)):
            losses = []
            for tokens in (make_tokens(lengths, None), make_tokens(lengths, changed)):
                documents = make_documents(lengths)
                batch = Batch(
                    tokens=tokens,
                    labels=torch.arange(COUNT),
                    loss_mask=untouched(lengths, changed),
                    positions=documents.positions,
                    cu_seqlens=documents.cu_seqlens,
                    max_seqlen=SEQ_LEN,
                    keys=documents.keys,
                )
                losses.append(engine.eval_step([batch, batch])[0])
            pairs.append(tuple(losses))
    engine.close()
    return pairs


def test_documents_do_not_leak_through_the_pipeline_engine():
    """The pipeline engine, which pads and sends the borders itself, gives the unchanged documents the same loss."""
    for pairs in run_ranks(pipeline_losses, 2):
        assert all(before == after for before, after in pairs), pairs


def test_gradients_do_not_leak():
    """A loss over document B alone has no gradient for any token that only document A holds."""
    lengths = (9, 7)
    stage = make_stage(tiny_model())
    tokens = torch.cat((torch.arange(0, 9), torch.arange(50, 57)))
    weights = torch.cat((torch.zeros(9), torch.ones(7)))
    stage(tokens, make_documents(lengths), Targets(torch.full((COUNT,), 90), weights)).backward()
    assert stage.embedding.weight.grad[:9].count_nonzero() == 0
    assert bool((stage.embedding.weight.grad[50:57].abs().sum(dim=1) > 0).all())
