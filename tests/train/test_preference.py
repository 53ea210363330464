"""Whole runs that learn from pairs: a fine-tuned model begins them and stays the reference through every restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.corpus.stations.forms import Forms
from megalite.corpus.stations.tokenize import tokenize
from megalite.data.pack import pack
from megalite.data.settings import PackConfig
from megalite.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_REQUEUE, ConfigError, DataError, UserError
from megalite.tokenizer.settings import ChatConfig
from megalite.train.preflight import preflight
from tests.checkpoint.hf_kit import tiny_model, write_checkpoint
from tests.corpus.test_conversations import TEMPLATE
from tests.corpus.test_pairs import corpus_of, pairs, write
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

MODEL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 64, "head_dim": 8}


@pytest.fixture
def world(tmp_path: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """Packed pairs, and a model that begins."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chat = ChatConfig(template=tmp_path / "chat.jinja", max_tokens=128)
    tokenize(
        corpus_of(write(tmp_path / "pairs.jsonl", pairs(80))), tokenizer_folder, tmp_path / "tokens", forms=Forms(chat)
    )
    pack(tmp_path / "tokens", tmp_path / "pairs", PackConfig(seq_len=128))
    model = tiny_model(**MODEL, vocab_size=800, max_positions=128, init_std=0.1, tie_embeddings=False)
    return {"pairs": tmp_path / "pairs", "begin": write_checkpoint(tmp_path / "base", model)}


def config_of(folder: Path, world: dict[str, Any], **more: dict[str, Any]) -> Config:
    sets = [{"path": str(world["pairs"])}]
    sections: dict[str, dict[str, Any]] = {
        "model": {**MODEL, "vocab_size": 800, "max_positions": 128},
        "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
        "batch": {"seq_len": 128},
        "data": {"train": sets, "valid": sets},
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant"},
        "train": {"steps": 6, "init_from": str(world["begin"]), "preference": {"beta": 0.3}, "eval_every": 3},
    }
    for name, values in more.items():
        sections[name] = {**sections.get(name, {}), **values}
    return load_config(write_run(folder, **sections))


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 16.0}], ids=["whole", "adapters"])
def test_a_run_learns_which_is_better(tmp_path, world, lora):
    """It begins at log 2, has no margin at first, ends with the right order of most pairs, also in validation; stopped
    and gone on with, against the same reference, it is the same run bit by bit."""
    whole, parts = (config_of(tmp_path / name, world, model={"lora": lora}) for name in ("whole", "parts"))
    assert launch(whole, 2) == EXIT_DONE
    assert launch(parts, 2, stop_after=2) == EXIT_REQUEUE
    assert launch(parts, 2) == EXIT_DONE
    names = ("loss", "grad_norm", "accuracy", "chosen_reward", "rejected_reward")
    curve, again = ([[each[name] for name in names] for each in metrics(config.run.dir)] for config in (whole, parts))
    assert again == curve
    loss, _, accuracy, chosen, rejected = curve[0]
    assert loss == pytest.approx(np.log(2), abs=1e-6)
    assert (chosen, rejected) == (0.0, 0.0)
    assert accuracy == 0.0
    assert curve[-1][2] > 0.7
    assert curve[-1][3] > curve[-1][4]
    losses = [event["loss"] for event in events(whole.run.dir) if event["event"] == "validation"]
    assert losses[-1] < losses[0] < np.log(2)


def test_the_reference_stays_what_it_was(tmp_path, world):
    """The folder that the run began from has a newer checkpoint when it goes on: the same numbers as undisturbed, for
    it opens the old one; where that has changed, or another folder is named, it is refused."""
    whole, parts = (config_of(tmp_path / name, world) for name in ("whole", "parts"))
    assert launch(whole, 2) == EXIT_DONE
    begin = tmp_path / "base"
    moving = config_of(tmp_path / "parts", {**world, "begin": begin})
    assert launch(moving, 2, stop_after=2) == EXIT_REQUEUE
    newer = begin / "checkpoints" / "step-0000009"
    shutil.copytree(world["begin"], newer)
    manifest = newer / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 7', '"step": 9'))
    other = config_of(tmp_path / "parts", {**world, "begin": newer})
    assert launch(other, 2) == EXIT_BAD_INPUT
    assert launch(moving, 2) == EXIT_DONE
    curve, again = ([each["loss"] for each in metrics(config.run.dir)] for config in (whole, parts))
    assert again == curve


WRONG = {
    "optimizer.groups trains final_norm.weight of it": {
        "model": {"lora": {"rank": 2}},
        "optimizer": {"groups": [{"match": "final_norm.*", "lr_scale": 0.5}]},
    },
    "a branch goes on from weights that are not the reference": {
        "train": {"init_from": None, "branch_from": "runs/other"},
    },
    "use one length": {"batch": {"stages": [{"seq_len": 64, "from_step": 3}]}},
    "train.init_from that knows nothing": {"train": {"init_from": None}},
    "engine=deepspeed cannot hold the reference": {"parallel": {"zero_stage": 2}},
    "measured without dropout": {"model": {"dropout": 0.1}},
    "train.preference: model.z_loss": {"model": {"z_loss": 1e-4}},
    "train.preference: precision.qat": {"precision": {"qat": {"bits": 8, "group_size": None}}},
    "use health.spikes=null": {"health": {"spikes": {}}},
    "use data.document_masks=true": {"data": {"document_masks": False}},
    "only loss=sigmoid has it": {"train": {"preference": {"loss": "ipo", "label_smoothing": 0.1}}},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_go_with_pairs_is_refused(tmp_path, world, words):
    """By name, before anything starts."""
    with pytest.raises(ConfigError, match=words.replace(".", r"\.").replace("that knows", ".*knows")):
        preflight(config_of(tmp_path / "wrong", world, **WRONG[words]), 2)


def test_data_of_the_other_kind_is_refused(tmp_path, world):
    """Tokens where pairs are wanted, and pairs where tokens are learnt."""
    run = write_run(tmp_path / "plain")
    plain = tmp_path / "plain" / "packed"
    with pytest.raises(UserError, match="no pairs of answers, which"):
        preflight(config_of(tmp_path / "a", {**world, "pairs": plain}, batch={"seq_len": 32}), 2)
    with pytest.raises((UserError, DataError), match="of which the second would be learnt as well"):
        preflight(config_of(tmp_path / "b", world, train={"preference": None}), 2)
    assert run.is_file()
