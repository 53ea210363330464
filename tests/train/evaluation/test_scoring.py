"""Scores of choices are those of transformers on the exported model, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.cli.main import app
from megalite.config.schema import TaskConfig
from megalite.data.loader import Batch
from megalite.errors import DataError
from megalite.model.transformer import Stage
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.evaluation import offline
from megalite.train.evaluation.offline import build_stage, open_model, score_all, score_tasks, token_losses
from megalite.train.evaluation.questions import Question, make_requests, read_questions
from megalite.train.evaluation.scoring import Shape, log_likelihoods, score
from megalite.train.evaluation.tasks import Task, open_tasks
from tests.checkpoint.hf_kit import (
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    write_checkpoint,
)
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config
from tests.train.evaluation.conftest import SEQ_LEN, write_questions

TOLERANCE = 1e-4
"""Of a log-likelihood in nats, fp32: sums of some ten terms in another order."""

NUM_QUESTIONS = 40

LAYOUTS = (
    (1, {"zero_stage": 0}),
    (2, {"tp": 2, "zero_stage": 1, "sequence_parallel": True}),
    (2, {"pp": 2, "zero_stage": 1}),
    (2, {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}),
    (2, {"cp": 2, "zero_stage": 3, "engine": "deepspeed"}),
    (2, {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}),
    (4, {"cp": 2, "pp": 2, "zero_stage": 1}),
    (4, {"tp": 2, "pp": 2, "zero_stage": 0}),
    (4, {"dp": 2, "pp": 2, "zero_stage": 1}),
)


def config_of(parallel: dict):
    return tiny_config(
        model={"vocab_size": 300, "max_positions": SEQ_LEN},
        batch={"seq_len": SEQ_LEN, "micro_batch_size": 2, "global_batch_size": 8},
        parallel=parallel,
    )


def open_task(folder: Path, tokenizer: Path) -> Task:
    config = TaskConfig(path=folder / "qa.jsonl")
    (task,) = open_tasks([config], tokenizer, seq_len=SEQ_LEN, vocab_size=300)
    return task


def scores_on(parallel: dict, folder: Path, tokenizer: Path, save_to: Path | None) -> list[float]:
    """Log-likelihoods of every choice on the ranks of the current world, after two steps of training."""
    config = config_of(parallel)
    rank = start_rank(config)
    rank.train(0, 2)
    task = open_task(folder, tokenizer)
    shape = Shape(SEQ_LEN, config.batch.micro_batch_size, batches_at_once=rank.plan.grad_accum_steps)
    found = log_likelihoods(task.requests, rank.engine.token_losses, shape, rank.axes.batch)
    again = log_likelihoods(task.requests, rank.engine.token_losses, shape, rank.axes.batch)
    assert found == again
    if save_to is not None:
        rank.save(save_to, 2)
    curve = rank.train(2, 3)  # training goes on behind it
    assert curve[0][0] > 0
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory, prepared) -> Path:
    """Questions, and a checkpoint after two steps on one rank, with its scores."""
    folder = tmp_path_factory.mktemp("scoring")
    write_questions(folder / "qa.jsonl", NUM_QUESTIONS)
    tokenizer = prepared / "out/tokenizer"
    (found,) = run_ranks(scores_on, 1, LAYOUTS[0][1], folder, tokenizer, folder / "run/checkpoints")
    (folder / "scores.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def tokenizer_folder(prepared) -> Path:
    return prepared / "out/tokenizer"


@torch.inference_mode()
def by_transformers(folder: Path, task: Task) -> list[float]:
    """Log-likelihoods by transformers, one request at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for request in task.requests:
        logits = model(torch.tensor([request.tokens[:-1]])).logits[0].double()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(request.tokens[1:]).unsqueeze(1))
        found.append(float(chosen[-request.num_scored :].sum()))
    return found


@pytest.mark.usefixtures("reload_here")
def test_scores_are_those_of_transformers(world, tokenizer_folder):
    """One rank's, and those of `megalite eval` on the checkpoint and on the exported folder."""
    task = open_task(world, tokenizer_folder)
    hf = to_hugging_face(world / "run", world / "hf", tokenizer=tokenizer_folder).folder
    truth = by_transformers(hf, task)
    assert json.loads((world / "scores.json").read_text()) == pytest.approx(truth, abs=TOLERANCE)
    want = score(task.questions, truth)
    for folder in (world / "run", hf):
        ((name, found),) = score_tasks(open_model(folder, tokenizer_folder), [TaskConfig(path=world / "qa.jsonl")])
        assert name == "qa"
        assert found == want
    assert 0 < want.accuracy < 1
    assert want.accuracy != want.accuracy_norm


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS[1:], ids=lambda value: str(value).replace("'", ""))
def test_every_layout_finds_the_same(world, tokenizer_folder, world_size, parallel):
    """Tensor, pipeline and data parallelism and ZeRO-3: every rank has the log-likelihoods of the run on one."""
    truth = json.loads((world / "scores.json").read_text())
    for found in run_ranks(scores_on, world_size, parallel, world, tokenizer_folder, None):
        assert found == pytest.approx(truth, abs=TOLERANCE)


def test_packing_is_not_seen(world, tokenizer_folder):
    """Scores do not depend on what else lies in a stream, nor on how long it is."""
    task = open_task(world, tokenizer_folder)
    stage = build_stage(open_model(world / "run", tokenizer_folder), torch.device("cpu"))

    def find(requests, micro_batch_size):
        shape = Shape(SEQ_LEN, micro_batch_size)
        return log_likelihoods(requests, lambda batches: [token_losses(stage, each) for each in batches], shape)

    alone = [find([request], 1)[0] for request in task.requests[:30]]
    for micro_batch_size in (1, 5):
        assert find(task.requests[:30], micro_batch_size) == pytest.approx(alone, abs=TOLERANCE)


def test_short_questions_for_a_model_of_many_positions(tmp_path, tokenizer_folder, monkeypatch):
    """The streams are as long as the questions need, not as the model allows: what fills one costs its square."""
    write_checkpoint(tmp_path / "run", tiny_model(vocab_size=300, max_positions=2**17))
    write_questions(tmp_path / "qa.jsonl", 4, seed=1)
    seen: list[Batch] = []

    def note(stage: Stage, batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return torch.zeros(batch.tokens.shape)

    monkeypatch.setattr(offline, "token_losses", note)
    list(score_tasks(open_model(tmp_path / "run", tokenizer_folder), [TaskConfig(path=tmp_path / "qa.jsonl")]))
    assert seen
    assert all(len(batch.tokens) <= offline.LONGEST_STREAM for batch in seen)
    assert all(batch.max_seqlen < 512 for batch in seen)


def test_data_that_is_none_is_told_before_the_first_question(tmp_path, tokenizer_folder, monkeypatch):
    """Of `megalite eval`: a packed set, long documents, and needles for which there is no room, beside tasks."""
    write_checkpoint(tmp_path / "run", tiny_model(vocab_size=300))
    write_questions(tmp_path / "qa.jsonl", 4, seed=1)
    monkeypatch.setattr(offline, "score_all", lambda *_, **__: pytest.fail("scored"))
    call = ["eval", str(tmp_path / "run"), "--tokenizer", str(tokenizer_folder), "--tasks", str(tmp_path / "qa.jsonl")]
    for option in ("--loss", "--positions"):
        with pytest.raises(DataError, match="nosuch"):
            CliRunner().invoke(app, [*call, option, str(tmp_path / "nosuch")], catch_exceptions=False)
    with pytest.raises(DataError, match="no room"):
        CliRunner().invoke(app, [*call, "--needle", "--lengths", "1"], catch_exceptions=False)


def test_two_tasks_of_one_name(tmp_path, monkeypatch):
    """The scores of one would be lost: refused before any is scored, whoever scores."""
    monkeypatch.setattr(offline, "score_tasks", lambda *_: pytest.fail("scored"))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_questions(tmp_path / folder / "qa.jsonl", 4, seed=1)
    (tmp_path / "other.yaml").write_text("task: 'qa'  # of another folder\n")
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    first = tmp_path / "a/qa.jsonl"
    for other in (first, tmp_path / "b/qa.jsonl", tmp_path / "other.yaml"):
        with pytest.raises(DataError, match=f"{other}: its task is called 'qa', as that of {first} is"):
            list(score_all(None, [first, tmp_path / "nameless.yaml", other]))


def test_cut_between_context_and_choice(tokenizer_folder):
    """The scored tokens are the choice's and the space before it; a context's own trailing space goes over to it; a
    long context loses its beginning."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    for context in ("the model reads", "the model reads "):
        question = Question(context, ("a stream", "tokens"), 0, delimiter="" if context.endswith(" ") else " ")
        for request, choice in zip(make_requests(question, tokenizer, SEQ_LEN), question.choices, strict=True):
            assert tokenizer.decode(request.tokens[-request.num_scored :]) == f" {choice}"
            assert tokenizer.decode(request.tokens) == f"the model reads {choice}"
    long = Question("word " * 200, ("a", "b"), 0)
    for request in make_requests(long, tokenizer, SEQ_LEN):
        assert request.length == SEQ_LEN
    empty = make_requests(Question("", ("a", "b"), 0), tokenizer, SEQ_LEN)
    assert [request.tokens[0] for request in empty] == [tokenizer.eos_id] * 2
    with pytest.raises(DataError, match="more than seq_len=64"):
        make_requests(Question("a", ("b", "long " * 100), 0), tokenizer, SEQ_LEN)


def test_ranking():
    """Accuracy takes the likeliest choice, its normalised form the likeliest a character."""
    questions = [Question("c", ("ab", "abcdefgh"), 1), Question("c", ("ab", "cd"), 0)]
    found = score(questions, [-4.0, -8.0, -1.0, -2.0])
    assert (found.accuracy, found.accuracy_norm, found.num_questions) == (0.5, 1.0, 2)


def test_lines_end_where_json_lines_do(tmp_path):
    """Not at what else Unicode takes for the end of a line; half a surrogate pair and what is too deep are named."""
    path = tmp_path / "qa.jsonl"
    path.write_bytes('{"context": "a\u2028b\x85", "choices": ["b\u2029", "c"], "label": 0}\r\n'.encode())
    assert read_questions(path) == [Question("a\u2028b\x85", ("b\u2029", "c"), 0)]
    for line in (r'{"context": "\ud800", "choices": ["b", "c"], "label": 0}', 10**5 * "["):
        path.write_text(line)
        with pytest.raises(DataError, match=":1: "):
            read_questions(path)


def test_files_that_are_not_questions(tmp_path):
    """Every wrong line is named with what was expected; other endings are refused."""
    path = tmp_path / "qa.jsonl"
    good = '{"context": "a", "choices": ["b", "c"], "label": 0}'
    lines = [good, "{", "[]", good.replace("0", "2"), good.replace('"c"', "1"), good.replace("label", "answer")]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        read_questions(path)
    for number, words in ((2, "Expecting"), (3, "found list"), (4, "from 0 to 1, found 2"), (5, "two or more texts")):
        assert f"{path}:{number}: " in str(caught.value)
        assert words in str(caught.value)
    assert f"{path}:6: unknown key 'answer'" in str(caught.value)
    assert read_questions(path, limit=1) == [Question("a", ("b", "c"), 0)]
    path.write_text("\n")
    with pytest.raises(DataError, match="empty"):
        read_questions(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is no file"):
        list(score_all(None, [tmp_path / "none.jsonl"]))
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"ends in \.txt"):
        list(score_all(None, [tmp_path / "a.txt"]))
