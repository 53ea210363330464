"""What `megalite.library` refuses, and that its loss is the one that a config trains with."""

from __future__ import annotations

import pytest
import torch

from megalite.config.load import load_config
from megalite.engine.batch_cut import documents_of_batch
from megalite.errors import UserError
from megalite.library import batches, build_model, loss
from tests.kit.batches import micro_batch
from tests.kit.plugins import loaded, sample
from tests.kit.runs import write_run
from tests.kit.train import tiny_config
from tests.model.stages import make_stage, tiny_model

SUMS = 1e-6
"""fp32 sums in another order."""


def test_no_micro_batch_is_refused():
    """A list without a micro-batch is said to be one, not an error of torch's about an int."""
    with pytest.raises(UserError, match="found no micro-batch, expected one or more"):
        loss(make_stage(tiny_model()), [])


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_of_a_pipeline_has_no_loss(stage):
    """Whichever end it lacks."""
    half = make_stage(tiny_model(), pp=2, pp_rank=stage)
    with pytest.raises(UserError, match="found a stage of a pipeline, expected a whole model"):
        loss(half, [micro_batch(range(1), seq_len=16, vocab_size=101)])


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"first_step": 0}, "found first_step=0, expected 1 or more"),
        ({"first_step": 7}, "found first_step=7, but the run ends with step 6"),
        ({"last_step": 7}, r"found last_step=7, expected 1 \(first_step\) to 6 \(the run's last\), or None"),
        ({"last_step": 0}, "found last_step=0, expected 1 "),
        ({"first_step": 3, "last_step": 2}, "found last_step=2, expected 3 "),
        ({"dp_size": 0}, "found dp_size=0, expected 1 or more"),
        ({"dp_rank": 1}, "found dp_rank=1, expected 0 to 0, for dp_size=1"),
        ({"dp_size": 2, "dp_rank": -1}, "found dp_rank=-1, expected 0 to 1, for dp_size=2"),
        (
            {"dp_size": 3},
            r"found dp_size=3, but 3 x batch.micro_batch_size=2 does not divide the 4 .* of step 1; use 1 or 2",
        ),
    ],
)
def test_a_share_that_there_is_not(tmp_path, asked, complaint):
    """Readers and steps are counted as they are told."""
    with pytest.raises(UserError, match=f"batches: {complaint}"):
        next(batches(load_config(write_run(tmp_path)), **asked))


def test_batches_that_do_not_fit_the_model(tmp_path):
    """Their tokens are held against the vocabulary, as training does; the last step is the run's."""
    config = write_run(tmp_path)
    assert len(list(batches(load_config(config), first_step=6))) == 1
    with pytest.raises(UserError, match="vocab_size"):
        next(batches(load_config(config, ["model.vocab_size=8"])))


def test_the_loss_of_the_config():
    """A plug-in's, where the config names one; without gradients the cross-entropy, as in validations."""
    batch = micro_batch(range(2), seq_len=16, vocab_size=101)
    with loaded(sample("losses")):
        config = tiny_config(train={"loss": {"name": "focal", "options": {"gamma": 1.5}}})
        model = build_model(config)
        found = loss(model, [batch])
        with torch.no_grad():
            looked = loss(model, [batch])
            usual = loss(build_model(tiny_config()), [batch])
    log_p = model.logits(batch.tokens, documents_of_batch(batch)).log_softmax(-1)
    log_p = log_p.gather(1, batch.labels[:, None]).squeeze(1)[batch.loss_mask]
    focal = -((1.0 - log_p.exp()) ** 1.5 * log_p).mean()
    torch.testing.assert_close(found, focal, rtol=SUMS, atol=SUMS)
    found.backward()
    assert torch.equal(looked, usual)
    assert looked > found
