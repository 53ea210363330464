"""What `from megalite import ...` is called with: paths are text, too, and what cannot be is told as the user's."""

from __future__ import annotations

import pytest
import torch

from megalite import (
    UserError,
    build_model,
    documents_of,
    from_hugging_face,
    load_recipe,
    plan_run,
    run_training,
    to_hugging_face,
)
from tests.checkpoint.hf_kit import reload_here, tiny_model, write_checkpoint  # noqa: F401 (a fixture)
from tests.kit.train import tiny_config


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: plan_run(tiny_config(), 0), "found world_size=0, expected 1 or more"),
        (lambda: plan_run(tiny_config(), -1), "found world_size=-1, expected 1 or more"),
        (lambda: run_training(tiny_config(), stop_after=0), "found stop_after=0, expected a step, from 1, or None"),
        (lambda: run_training(tiny_config(), stop_after=-1), "found stop_after=-1, expected"),
        (lambda: build_model(tiny_config(), device="gpu0"), "found device='gpu0': .*; use cpu"),
        (lambda: build_model(tiny_config(), device="meta"), "found device='meta': megalite computes on none of this"),
    ],
)
def test_what_cannot_be(call, complaint):
    """Before anything is done."""
    with pytest.raises(UserError, match=complaint):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_device():
    """It is not an assertion of torch's."""
    with pytest.raises(UserError, match=r"found device='cuda': .*use cpu, or cuda where it is"):
        build_model(tiny_config(), device="cuda")


@pytest.mark.usefixtures("reload_here")
def test_conversions(tmp_path):
    """Their paths may be text; formats, sizes and numbers of blocks are those that the command takes."""
    write_checkpoint(tmp_path / "run", tiny_model())
    run, hf, out = (str(tmp_path / name) for name in ("run", "hf", "out"))
    for wrong, complaint in (
        ({"dtype": "fp8"}, "found dtype='fp8', expected fp32, bf16, fp16"),
        ({"max_shard_bytes": 0}, "found max_shard_bytes=0, expected 1 or more"),
        ({"verify_blocks": 0}, "found verify_blocks=0, expected 1 or more, or None for all blocks"),
        ({"verify_blocks": -1}, "found verify_blocks=-1"),
    ):
        with pytest.raises(UserError, match=complaint):
            to_hugging_face(run, hf, **wrong)
    assert to_hugging_face(run, hf).folder == tmp_path / "hf"
    with pytest.raises(UserError, match="found verify_blocks=-1"):
        from_hugging_face(hf, out, verify_blocks=-1)
    assert from_hugging_face(hf, out).folder == tmp_path / "out"


def test_a_recipe_by_its_name(tmp_path):
    """Text, as of a config."""
    (tmp_path / "recipe.yaml").write_text(f"out: {tmp_path}/out\nsources: [{{path: {tmp_path}}}]\n")
    assert load_recipe(str(tmp_path / "recipe.yaml")).out == tmp_path / "out"


def test_logits_of_sequences():
    """They lie end to end; a sequence is a document, so others change nothing for it."""
    model = build_model(tiny_config())
    sequences = torch.randint(101, (3, 8), generator=torch.Generator().manual_seed(0))
    logits = model.logits(sequences.flatten(), documents_of(sequences))
    alone = model.logits(sequences[1], documents_of(sequences[1:2]))
    torch.testing.assert_close(logits.view(3, 8, -1)[1], alone)
