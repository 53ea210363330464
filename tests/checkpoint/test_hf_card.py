"""What an export says of the model: its card, made of what the run left; alarms; tokenizers that do not belong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from megalite.checkpoint.format import read_manifest
from megalite.checkpoint.hf import exporter
from megalite.checkpoint.hf.alarms import find_alarms
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.provenance import Losses, licence_of, trace
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.config.load import dump_config
from megalite.config.schema import Config
from megalite.errors import CheckpointError, ConversionError
from megalite.tokenizer.tokenizer import Tokenizer
from tests.checkpoint.hf_kit import (
    TOKENIZER_SIZE,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    train_tokenizers,
    write_checkpoint,
)
from tests.kit.data import random_documents, write_packed_folder

VOCAB_SIZE = 101
CHANCE = math.log(VOCAB_SIZE)


def write_run(run: Path, losses: list[float], *, total_steps: int | None = None, **sections: dict) -> Path:
    """A checkpoint at the last step of a run with these losses, its config and what it wrote down."""
    sections = {"train": {"steps": total_steps or len(losses)}, "run": {"dir": run}, **sections}
    folder = write_checkpoint(run, tiny_model(num_kv_heads=2), step=len(losses))
    (folder / "config.yaml").write_text(dump_config(Config.model_validate(sections)))
    steps = [{"step": number, "loss": loss, "skipped": False} for number, loss in enumerate(losses, 1)]
    lines = [json.dumps(each) for each in [*steps, {"step": len(losses) + 1, "loss": 9.9, "skipped": True}]]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "lo']))
    validation = {"event": "validation", "step": len(losses), "loss": 2.5}
    (run / "events.jsonl").write_text(json.dumps(validation) + "\n")
    return folder


def alarms(folder: Path) -> list[str]:
    """The alarms of a checkpoint."""
    manifest = read_manifest(folder)
    return find_alarms(manifest, tiny_model(num_kv_heads=2), trace(folder, manifest))


FALLING = [CHANCE - 0.1 * step for step in range(30)]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (FALLING, None),
        ([*FALLING, *[2.2] * 20], None),
        ([*FALLING, *[3.4] * 20], "was 2.65 at step 33: training had diverged"),
        ([*FALLING, float("nan")], "is nan: training had diverged"),
        ([*FALLING, float("inf")], "is inf: training had diverged"),
        ([CHANCE + 0.1] * 30, "guessing among 101 tokens gives 4.62: this model has learned nothing"),
    ],
)
def test_losses_that_say_the_model_is_broken(losses: list[float], words: str | None, tmp_path: Path):
    """A loss that is not finite, no better than chance, or far above its best is an alarm; a small rise is none."""
    found = alarms(write_run(tmp_path, losses))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_unfinished_runs(tmp_path: Path):
    """A checkpoint in the middle of a run says so, by steps or by tokens, and is silent where the run ended."""
    folder = write_run(tmp_path / "steps", FALLING, total_steps=1000)
    assert alarms(folder) == ["This is step 30 of a run that goes to step 1,000: training is not finished."]
    batch = {"global_batch_size": 4, "seq_len": 10}
    folder = write_run(tmp_path / "tokens", FALLING, batch=batch, train={"tokens": 1201})
    assert alarms(folder) == ["This is step 30 of a run that goes to step 31: training is not finished."]


@pytest.mark.parametrize(("later", "is_over"), [([], True), ([{"event": "validation", "step": 40}], False)])
def test_a_run_that_early_stopping_has_ended(later: list[dict], is_over: bool, tmp_path: Path):
    """It is finished, unless it was gone on with."""
    folder = write_run(tmp_path, FALLING, total_steps=1000)
    ended = [{"event": "early_stop", "step": 30}, {"event": "done", "step": 30}, {"event": "start", "step": 30}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*ended, *later]))
    assert (alarms(folder) == []) == is_over


def test_weights_that_no_step_changed(tmp_path: Path):
    """Steps that were all skipped leave an untrained model, and one that began as another is that one still."""
    fresh = write_checkpoint(tmp_path / "fresh", tiny_model(), step=4, num_updates=0)
    assert "has not been trained" in alarms(fresh)[0]
    assert "All of its 4 steps were skipped" in alarms(fresh)[0]
    config = Config.model_validate({"train": {"steps": 9, "init_from": "/models/Llama-X"}})
    (fresh / "config.yaml").write_text(dump_config(config))
    assert alarms(fresh) == ["This model has not been trained further: its weights are those of Llama-X."]


def test_losses_up_to_the_checkpoint(tmp_path: Path):
    """Later steps, damaged lines and validations without a loss do not count; without the run's folder nothing is
    said."""
    folder = write_run(tmp_path / "run", [4.0, 3.0])
    found = trace(folder, read_manifest(folder))
    assert found.losses == Losses(last=3.0, mean=3.5, best=3.5, best_step=2, num_skipped=0)
    assert found.validation == (2, 2.5)
    validations = ({"step": 1, "loss": 2.25}, {"step": 2, "tasks": {}}, {"step": 2, "loss": None})
    told = [json.dumps({"event": "validation", **each}).encode() for each in validations]
    damage = b'null\n{}\n\xff\n{"step": "2"}\n\0\0\n{"step": 2, "loss": "3"}\n'
    (tmp_path / "run" / "events.jsonl").write_bytes(b"\n".join([*told, damage]))
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b"\n" + damage)
    assert trace(folder, read_manifest(folder)).losses == found.losses
    assert trace(folder, read_manifest(folder)).validation == (1, 2.25)
    moved = folder.rename(tmp_path / "step-0000002")
    alone = trace(moved, read_manifest(moved))
    assert (alone.losses, alone.validation, alone.total_steps) == (None, None, 2)


ODD_CONFIGS = [
    "a: " + "[" * 1000,
    "train: 3\ndata: []",
    "train: {steps: [1], tokens: y, init_from: 3}",
    "train: {tokens: 100}",
    "train: {tokens: 100}\nbatch: {global_batch_size: x}",
    "train: {tokens: .inf, init_from: 2020-01-01}\nbatch: {}",
    "data: {train: 3}",
    "data: {train: [3, {weight: 3}, {path: 3}]}",
]
"""As another version, or a hand, may have written them."""


@pytest.mark.parametrize("text", ODD_CONFIGS)
def test_configs_that_say_nothing(text: str, tmp_path: Path):
    """What is not understood is not there, as in a checkpoint without a run."""
    folder = write_checkpoint(tmp_path / "run", tiny_model(), step=4)
    (folder / "config.yaml").write_text(f"optimizer: {{}}\n{text}\n")
    found = trace(folder, read_manifest(folder))
    assert (found.total_steps, found.origin, found.data, found.tokenizers) == (None, None, (), frozenset())


def test_odd_entries_of_data(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "run", tiny_model(), step=4)
    (folder / "config.yaml").write_text("optimizer: {}\ndata: {train: [{path: /x/web, name: [1], weight: y}]}\n")
    assert [(each.name, each.weight) for each in trace(folder, read_manifest(folder)).data] == [("web", 1.0)]


@pytest.mark.parametrize("odd", [3, ["a"], {"a": "b"}, ""])
def test_manifests_that_say_nothing(odd: object, tmp_path: Path):
    """The same of what another writer put under our keys; a tokenizer is asked for."""
    keys = ("tokenizer", "tokenizer_fingerprint", "imported_from", "license", "upcycled_from")
    folder = write_checkpoint(tmp_path / "run", tiny_model(), data=dict.fromkeys(keys, odd))
    found = trace(folder, read_manifest(folder))
    assert (found.origin, found.tokenizers) == (None, frozenset())
    if odd:
        with pytest.raises(ConversionError, match="which is not there; give its folder with --tokenizer"):
            to_hugging_face(tmp_path / "run", tmp_path / "hf")


DATA_CARD = {
    "name": "stories",
    "sources": [
        {
            "name": "a|b",
            "description": "Two\nlines.",
            "license": "CC0-1.0",
            "url": "https://example.org/",
            "kept": {"documents": 1234, "text_bytes": 5_000_000},
        },
        {"name": "c", "description": None, "license": None, "url": None, "kept": {"documents": 7, "text_bytes": None}},
    ],
}


@pytest.mark.usefixtures("reload_here")
def test_card_of_a_run(tmp_path: Path):
    """Settings, tokens, losses, layout, data and licences stand on the card; paths of the machine do not."""
    packed = tmp_path / "data" / "packed" / "train"
    packed.mkdir(parents=True)
    (tmp_path / "data" / "card.json").write_text(json.dumps(DATA_CARD))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    sections = {
        "data": {"train": [{"path": packed, "weight": 2.0}, {"path": tmp_path / "other", "name": "plain"}]},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 1000},
        "batch": {"global_batch_size": 8, "seq_len": 512},
        "train": {"steps": 30, "init_from": tmp_path / "base"},
    }
    write_run(tmp_path / "run", FALLING, **sections)
    done = to_hugging_face(tmp_path / "run", tmp_path / "hf", dtype="bf16")
    assert done.alarms == ()
    card = (tmp_path / "hf" / "README.md").read_text()
    for line in (
        "| training step | 30 of 30 |",
        "| tokens trained on | 30,000 |",
        "| training loss | 2.6651, mean of the last steps |",
        "| validation loss | 2.5000 at step 30 |",
        "| began as | base, licence apache-2.0 |",
        "| batch | 8 sequences of 512 tokens, 4,096 tokens |",
        "| optimizer | adamw, betas 0.9 and 0.95, eps 1e-08, weight decay 0.1 |",
        "| learning rate | 0.001, cosine to 0, 1,000 steps of warm-up |",
        "| layout | pp=2, tp=2 |",
        "| number format | bf16 |",
        "| stories | 2 | [a\\|b](https://example.org/) | Two lines. | CC0-1.0 | 1,234 | 5.0 |",
        "| stories | 2 | c |  | not stated | 7 |  |",
        "| plain | 1 | not described |  |  |  |  |",
    ):
        assert line in card.splitlines(), line
    assert str(tmp_path) not in card
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"


@pytest.mark.usefixtures("reload_here")
def test_alarms_stand_at_the_top(tmp_path: Path):
    """An alarm is printed and comes before everything else on the card."""
    write_run(tmp_path, [*FALLING, float("nan")])
    done = to_hugging_face(tmp_path, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text().split("# hf\n")[1]
    assert card.strip().startswith(f"> **{done.alarms[0]}**")


@pytest.mark.usefixtures("reload_here")
def test_licence_travels_with_an_import(tmp_path: Path):
    """What a folder's README names as its licence stands on the card of what was made from it."""
    write_checkpoint(tmp_path / "run", tiny_model(num_kv_heads=2))
    to_hugging_face(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "hf" / "README.md").write_text("---\nlicense: other\nlicense_name: llama3.2\n---\n")
    from_hugging_face(tmp_path / "hf", tmp_path / "base")
    config = {"train": {"steps": 30, "init_from": tmp_path / "base"}}
    write_run(tmp_path / "more", FALLING, **config)
    to_hugging_face(tmp_path / "more", tmp_path / "out")
    assert "| began as | hf, licence llama3.2 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    ["", "no front", f"---\na: {'[' * 1000}\n---\n", "---\nlicense: [a]\n---\n", "---\n: :\n---\n", "---\n- 1\n---\n"],
)
def test_readmes_without_a_licence(text: str, tmp_path: Path):
    """Whatever else a README.md holds is no licence and no error."""
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(text)
    assert licence_of(tmp_path) is None


@pytest.mark.usefixtures("reload_here")
def test_tokenizer_of_other_data(tmp_path: Path):
    """A recorded folder that now holds another tokenizer is refused; one that the user names is noted."""
    tokenizer = train_tokenizers(tmp_path / "tokenizers", ["byte-bpe"]) / "byte-bpe"
    model = tiny_model(vocab_size=TOKENIZER_SIZE)
    right, wrong = Tokenizer.load(tokenizer).fingerprint, "of another one"
    for name, fingerprint in (("right", right), ("wrong", wrong)):
        data = {"tokenizer": str(tokenizer), "tokenizer_fingerprint": fingerprint}
        write_checkpoint(tmp_path / name, model, data=data)
    assert to_hugging_face(tmp_path / "right", tmp_path / "hf").notes == ()
    with pytest.raises(ConversionError, match="another tokenizer than the one"):
        to_hugging_face(tmp_path / "wrong", tmp_path / "hf2")
    done = to_hugging_face(tmp_path / "wrong", tmp_path / "hf2", tokenizer=tokenizer)
    assert "the model's text will be random" in done.notes[0]


def test_tokenizer_told_by_the_data(tmp_path: Path):
    """Where the checkpoint does not say which tokenizer its data was made with, the data's own manifests do."""
    packed = tmp_path / "packed"
    write_packed_folder(packed, random_documents(20), seq_len=32)
    folder = write_run(tmp_path / "run", FALLING, data={"train": [{"path": packed}, {"path": tmp_path / "gone"}]})
    assert trace(folder, read_manifest(folder)).tokenizers == {"a tokenizer"}


def test_checkpoint_that_the_run_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that goes on may drop a checkpoint while it is exported; that is said, and nothing is left behind."""
    folder = write_checkpoint(tmp_path, tiny_model())
    write = exporter.write_weights

    def write_after_removal(*args, **options):
        shutil.rmtree(folder)
        return write(*args, **options)

    monkeypatch.setattr(exporter, "write_weights", write_after_removal)
    with pytest.raises(CheckpointError, match="removed it in the meantime"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


def test_damage_names_an_older_checkpoint(tmp_path: Path):
    """A damaged checkpoint is refused with the newest older one that could be exported instead."""
    for step in (3, 5, 9):
        folder = write_checkpoint(tmp_path, tiny_model(), step=step)
    next(folder.glob("rank-*")).unlink()
    with pytest.raises(CheckpointError, match=r"missing; export an older checkpoint, step-0000005,"):
        to_hugging_face(tmp_path, tmp_path / "hf")
