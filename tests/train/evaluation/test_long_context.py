"""Needles lie where they should, and what a model says of them and of far positions is what transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.cli.main import app
from megalite.data.sources import open_tokens
from megalite.errors import DataError, UserError
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.evaluation.long_context import needle_prompts, needles, picture, position_losses
from megalite.train.evaluation.needle import (
    SHORTFALL,
    NeedleTest,
    default_lengths,
    find_needles,
    make_prompts,
    read_haystack,
)
from megalite.train.evaluation.offline import open_model
from megalite.train.evaluation.positions import FIRST_BORDER, in_ranges, long_documents
from tests.checkpoint.hf_kit import reload_here  # noqa: F401 (a fixture)
from tests.kit.data import write_tokens_folder
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

TOLERANCE = 1e-4
"""Of a loss in nats, fp32: sums in another order."""

LENGTHS, DEPTHS = (160, 320), (0.0, 0.3, 1.0)


def save_trained(folder: Path, settings: dict) -> None:
    rank = start_rank(tiny_config(model={"vocab_size": 300, "max_positions": 320, **settings}))
    rank.train(0, 2)
    rank.save(folder, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with a model of 320 positions."""
    folder = tmp_path_factory.mktemp("long") / "run"
    run_ranks(save_trained, 1, folder / "checkpoints", {})
    return folder


@pytest.fixture(scope="module")
def tokenizer(prepared) -> Tokenizer:
    return Tokenizer.load(prepared / "out/tokenizer")


@pytest.mark.parametrize("hay_size", [40, 10**6], ids=["repeated", "long"])
def test_prompts(tokenizer, hay_size):
    """As long as asked but for a word or two, one needle at its depth, its question at the end, its code the answer."""
    haystack, trials = read_haystack(None)[:hay_size], 3
    test = NeedleTest((2000, 400), DEPTHS, trials)
    found = list(make_prompts(test, haystack, tokenizer.encode))
    assert [(length, depth) for length, depth, _ in found] == [(n, d) for n in (400, 2000) for d in DEPTHS]
    names = set()
    for length, depth, requests in found:
        assert len(requests) == trials
        for request in requests:
            assert (1 - SHORTFALL) * length - 1 <= request.length <= length
            text = tokenizer.decode(request.tokens)
            before, _, rest = text.partition("The code of ")
            name, _, rest = rest.partition(" is ")
            code, _, rest = rest.partition(".")
            after, _, end = rest.partition(f"The code of {name} is")
            names.add(name)
            assert end == f" {code}" == tokenizer.decode(request.tokens[-request.num_scored :])
            assert len(before) == pytest.approx(depth * len(before + after), abs=25)
    assert len(names) > len(found), "trials draw other names"


def test_a_text_without_room_is_refused(tokenizer):
    """The question alone takes more than that."""
    with pytest.raises(DataError, match="a text of 8 tokens leaves no room for needle and question"):
        list(make_prompts(NeedleTest((8,)), "some text " * 50, tokenizer.encode))


class KnowsOne:
    """Stands for a model that finds every code but one."""

    def __init__(self, wrong: list[int]):
        self.wrong, self.asked = wrong, 0

    def logits(self, tokens: torch.Tensor, documents: object, last: int) -> torch.Tensor:
        self.asked += 1
        return 10 * torch.nn.functional.one_hot(torch.tensor(self.wrong[-last:]), 300).float()


def test_shares_count_whole_codes(tokenizer):
    """The right code in one trial of four, and its digits in the others: only a whole one is found."""
    prompts = list(make_prompts(NeedleTest((300,), (0.5,), 4), "some text " * 500, tokenizer.encode))
    (known, *_) = prompts[0][2]
    (score,) = find_needles(KnowsOne(list(known.tokens)), prompts, torch.device("cpu"))
    assert score.share == 0.25
    assert score.loss > 1


@pytest.mark.usefixtures("reload_here")
def test_needles_by_transformers(run, prepared, tokenizer, tmp_path):
    """Losses of the codes, and greedy decoding, on the exported model."""
    test = NeedleTest(LENGTHS, DEPTHS, trials=2)
    haystack = read_haystack(None)
    folder = prepared / "out/tokenizer"
    saved = open_model(run, folder)
    scores = list(needles(saved, needle_prompts(saved, test, haystack)))
    exported = to_hugging_face(run, tmp_path / "hf", tokenizer=folder).folder
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    for score, (length, depth, requests) in zip(scores, make_prompts(test, haystack, tokenizer.encode), strict=True):
        assert (score.length, score.depth) == (length, depth)
        losses, found = [], []
        for request in requests:
            tokens, n = torch.tensor([request.tokens]), request.num_scored
            with torch.inference_mode():
                logits = theirs(tokens[:, :-1]).logits[0, -n:]
                written = theirs.generate(tokens[:, :-n], max_new_tokens=n, do_sample=False, pad_token_id=0)
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, -n:]).item())
            found.append(torch.equal(written[0, -n:], tokens[0, -n:]))
        assert score.loss == pytest.approx(np.mean(losses), abs=TOLERANCE)
        assert score.share == np.mean(found)


@pytest.mark.usefixtures("reload_here")
def test_positions_by_transformers(run, prepared, tmp_path):
    """The mean loss of each range of positions over documents that are long enough, others left out."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, size) for size in (40, 400, 301, 300, 500)]
    source = write_tokens_folder(tmp_path / "tokens", documents)
    ranges = position_losses(open_model(run), source, 300, 16)
    exported = to_hugging_face(run, tmp_path / "hf", tokenizer=prepared / "out/tokenizer").folder
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    losses = []
    for document in (documents[1], documents[2], documents[4]):
        tokens = torch.from_numpy(document[:301]).long()
        with torch.inference_mode():
            logits = theirs(tokens[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none"))
    mean = torch.stack(losses).mean(0)
    assert [(each.first, each.stop) for each in ranges] == [(0, 128), (128, 256), (256, 300)]
    for each in ranges:
        assert each.loss == pytest.approx(mean[each.first : each.stop].mean().item(), abs=TOLERANCE)
        assert each.num_tokens == 3 * (each.stop - each.first)


def test_ranges_double():
    """All positions, each once."""
    ranges = in_ranges(torch.arange(1000.0), torch.ones(1000))
    assert [each.first for each in ranges] == [0, 128, 256, 512]
    assert [each.stop for each in ranges] == [128, 256, 512, 1000]
    assert ranges[0].loss == (FIRST_BORDER - 1) / 2
    assert [each.first for each in in_ranges(torch.ones(600), torch.arange(600) >= 300)] == [256, 512]


def test_lengths_by_default():
    """Up to what the model is meant for."""
    assert default_lengths(4096) == (512, 1024, 2048, 4096)
    assert default_lengths(5000) == (512, 1024, 2048, 4096)
    assert default_lengths(100) == (100,)


def test_documents_from_all_over(tmp_path):
    """Those that are long enough, evenly chosen, each from its beginning."""
    documents = [np.full(10 + 10 * (number % 3), number) for number in range(30)]
    source = write_tokens_folder(tmp_path / "tokens", documents)
    found = long_documents(source, 29, 4)
    assert [set(each.tolist()) for each in found] == [{2}, {11}, {20}, {29}]
    assert all(each.size == 30 for each in found)
    assert open_tokens(source).tokens.num_documents == 30
    with pytest.raises(DataError, match=r"no document has more than 30 tokens, the longest has 30"):
        long_documents(source, 30, 4)


def test_a_learned_table_has_an_end(tmp_path):
    """Nothing is read beyond it."""
    run_ranks(save_trained, 1, tmp_path / "checkpoints", {"positions": "learned"})
    with pytest.raises(UserError, match="learned positions up to 320, found a length of 321"):
        position_losses(open_model(tmp_path), tmp_path / "nowhere", 321, 1)


def test_command(run, prepared, tmp_path):
    """Both at once, as JSON and as a picture; the picture says every share."""
    rng = np.random.default_rng(0)
    source = write_tokens_folder(tmp_path / "tokens", [rng.integers(0, 300, 400) for _ in range(3)])
    options = [
        "--tokenizer",
        str(prepared / "out/tokenizer"),
        "--lengths",
        "160,320",
        "--depths",
        "0,1",
        "--trials",
        "1",
    ]
    options += ["--positions", str(source), "--plot", str(tmp_path / "n.svg")]
    done = CliRunner().invoke(app, ["eval", str(run), "--needle", *options, "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.output)
    assert [(each["length"], each["depth"]) for each in record["needles"]] == [(160, 0), (160, 1), (320, 0), (320, 1)]
    assert [each["stop"] for each in record["positions"]] == [128, 256, 320]
    drawn = (tmp_path / "n.svg").read_text()
    assert drawn.startswith("<svg")
    assert drawn.count("%</text>") == 6  # four fields, and two depths


def test_picture_of_shares():
    """Columns are lengths and rows are depths."""
    scores = [
        SimpleNamespace(length=length, depth=depth, share=share)
        for (length, depth), share in {(512, 0.0): 0.25, (512, 1.0): 0.5, (1024, 0.0): 0.75, (1024, 1.0): 1.0}.items()
    ]
    drawn = picture(scores, Path("model"))
    for text in ("25%", "50%", "75%", "100%", "1,024"):
        assert f">{text}<" in drawn


REFUSED = {
    "nothing": ([], "nothing is asked"),
    "plot alone": (["--positions", "x", "--plot", "x.svg"], "give both"),
    "lengths": (["--needle", "--lengths", "1k"], "--lengths: found '1k'"),
    "depths": (["--needle", "--depths", "50"], "--depths: found '50'"),
    "haystack": (["--needle", "--haystack", "nowhere.txt"], "nowhere.txt: cannot be read"),
    "positions": (["--positions", "nowhere"], "nowhere: no such folder"),
    "limit": (["--needle", "--limit", "4"], "--limit: no effect without --tasks"),
    "documents": (["--needle", "--documents", "16"], "--documents: no effect without --positions"),
    "needles": (
        ["--positions", "x", "--depths", "0", "--trials", "4", "--haystack", "x"],
        "--haystack: no effect without --needle; give that too, or leave it out",
    ),
    "depths alone": (["--positions", "x", "--depths", "0"], "--depths: no effect without --needle"),
    "trials alone": (["--positions", "x", "--trials", "4"], "--trials: no effect without --needle"),
    "lengths alone": (["--loss", "x", "--lengths", "512"], "--lengths: no effect without --needle or --positions"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(run, options, words):
    """In words, before weights are read."""
    done = CliRunner().invoke(app, ["eval", str(run), *options])
    assert isinstance(done.exception, UserError)
    assert words in str(done.exception)
