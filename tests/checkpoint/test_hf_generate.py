"""Text from exported models: sampling against transformers' own filters, streams against whole decoding."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typer.testing import CliRunner

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.generate import GenerationSettings, TextModel
from megalite.checkpoint.hf.prompts import Prompt, read_prompts
from megalite.checkpoint.hf.sampling import Sampling, draw, filtered
from megalite.checkpoint.hf.text_stream import TextStream
from megalite.cli.main import app
from megalite.errors import ConversionError, DataError, UserError
from tests.checkpoint.hf_kit import (
    LONGROPE,
    TOKENIZER_SIZE,
    reloading_here,
    tiny_model,
    train_tokenizers,
    write_checkpoint,
)

NUM_DRAWS = 4_000
CHANCE = 5.0
"""Standard deviations; one in a million cases is farther off."""


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.3},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_filters_are_those_of_transformers(given: dict):
    """The same tokens stay, with the same scores, for flat and sharp distributions."""
    sampling = Sampling(**{"temperature": 1.0, **given})
    theirs = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        theirs.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1.0:  # as their generation does
        theirs.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        theirs.append(MinPLogitsWarper(sampling.min_p))
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 5.0, 30.0):
        logits = scale * torch.randn(200, generator=generator)
        assert torch.equal(filtered(logits, sampling), theirs(torch.zeros(1, 0), logits.unsqueeze(0))[0])


def test_draws_have_their_probabilities():
    """Four thousand draws of six tokens, as often as the formula says for those that stay, never for the others."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    sampling, generator = Sampling(temperature=0.7, top_k=5, top_p=0.93), torch.Generator().manual_seed(1)
    shares = (logits / 0.7).softmax(0)[:5]
    shares = shares / shares.sum()
    kept = int((shares.cumsum(0) - shares < 0.93).sum())
    wanted = shares[:kept] / shares[:kept].sum()
    counts = torch.zeros(6)
    for _ in range(NUM_DRAWS):
        counts[draw(logits, sampling, generator)] += 1
    assert kept == 3
    assert not counts[kept:].any()
    spread = (wanted * (1 - wanted) / NUM_DRAWS).sqrt()
    assert ((counts[:kept] / NUM_DRAWS - wanted).abs() < CHANCE * spread).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1.0}, "temperature: found -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top-k: found 0"),
        ({"top_p": 0.0}, "top-p: found 0"),
        ({"top_p": 1.5}, "top-p: found 1.5"),
        ({"min_p": -0.1}, "min-p: found -0.1"),
        ({"temperature": 0.0, "top_k": 3, "min_p": 0.1}, "top-k and min-p: no effect with temperature 0"),
    ],
)
def test_odd_numbers_are_refused(given: dict, said: str):
    with pytest.raises(ConversionError, match=said):
        Sampling(**given)


def bytes_of(ids: list[int]) -> str:
    """A decoder of bytes, as those of byte-level tokenizers: what is no UTF-8 becomes U+FFFD."""
    return bytes(ids).decode("utf-8", errors="replace")


def streamed(text: bytes, stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    stream, pieces = TextStream(bytes_of, stops), []
    for byte in text:
        pieces.append(stream.push(byte))
        if stream.stopped_by is not None:
            return pieces, stream.stopped_by
    return [*pieces, stream.finish()], stream.stopped_by


@pytest.mark.parametrize("stops", [(), ("END",), ("\n\n", "é"), ("abab",), ("b", "abc")])
@pytest.mark.parametrize(
    "text",
    [
        "plain END more",
        "日本語 é and 👩‍👩‍👧 END",
        "a\n\n\nb",
        "ababab abab",
        "xabcx",
        "no EN, no E",
        "EEND",
        "abaabab",
        "",
    ],
)
def test_a_stream_is_the_text_up_to_its_first_stop(text: str, stops: tuple[str, ...]):
    """Byte by byte: pieces, put together, are the whole text up to where a stop string was first whole; no piece has
    half a character in it, and none had to be taken back."""
    pieces, stopped_by = streamed(text.encode(), stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
    assert (stopped_by is not None) == bool(ends)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_stream_of_bytes_that_are_no_text():
    """Is what decoding the whole gives; a character at once when its last byte is there."""
    pieces, _ = streamed(b"a\xff\xfeb\xe6\x97", ())
    assert "".join(pieces) == bytes_of(list(b"a\xff\xfeb\xe6\x97"))
    assert streamed("é!".encode(), ())[0] == ["", "é", "!", ""]


def test_bytes_that_are_decoded_together():
    """As SentencePiece's: a byte behind others can make all of them U+FFFD, so none is handed on before the next
    token that is none."""

    def decode(ids: list[int]) -> str:
        text = ""
        for is_byte, run in itertools.groupby(ids, lambda each: each >= 0):
            kept = list(run)
            if not is_byte:
                text += "".join(chr(-each) for each in kept)
                continue
            try:
                text += bytes(kept).decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(kept)
        return text

    draw = random.Random(3)
    for _ in range(300):
        ids = draw.choices([0xC3, 0xA9, 0xFF, 0x41, -ord("x"), -ord("y")], k=8)
        stream = TextStream(decode, (), lambda each: each >= 0)
        pieces = [stream.push(each) for each in ids]
        assert "".join([*pieces, stream.finish()]) == decode(ids)
    assert pieces != [""] * 8


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = train_tokenizers(folder, ["byte-bpe"]) / "byte-bpe"
    model = tiny_model(vocab_size=TOKENIZER_SIZE, max_positions=64)
    write_checkpoint(folder / "run", model, data={"tokenizer": str(tokenizer)})
    with reloading_here():
        to_hugging_face(folder / "run", folder / "hf")
    return folder / "hf"


def test_texts_are_those_of_transformers(exported: Path):
    """Greedily with the cache: the tokens of transformers' own generation, decoded at once."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = TextModel(exported)
    for prompt in ("def f", "import torch", "日本"):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        text = ours.continue_text(prompt, GenerationSettings(20, Sampling(0.0)))
        assert "".join(text) == tokenizer.decode(wanted, skip_special_tokens=True)
        assert (text.num_tokens, text.ended_by) in ((20, "length"), (len(wanted), "end-of-text"))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 2, "sliding_window": 1},
        {"rope": {"scaling": {**LONGROPE, "original_max_positions": 8, "long_factor": [50.0] * 6}}},
    ],
)
def test_caches_that_would_hold_something_else(fields: dict, tmp_path: Path):
    """All that came before a window of one token; keys turned by longrope's short factors in a text that grew long."""
    tokenizer = train_tokenizers(tmp_path, ["byte-bpe"]) / "byte-bpe"
    model = tiny_model(**fields, vocab_size=TOKENIZER_SIZE, max_positions=64)
    write_checkpoint(tmp_path / "run", model, data={"tokenizer": str(tokenizer)})
    with reloading_here():
        to_hugging_face(tmp_path / "run", tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    words = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = words("def main")["input_ids"]
    begin = len(ids)
    with torch.inference_mode():
        for _ in range(40):
            ids.append(int(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    text = TextModel(tmp_path / "hf").continue_text("def main", GenerationSettings(40, Sampling(0.0)))
    assert words.decode(ids[begin:], skip_special_tokens=True).startswith("".join(text))
    assert text.num_tokens == 40 or text.ended_by == "end-of-text"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.json", {"version": [1]}),
        ("config.json", {"hidden_act": 1}),
        ("config.json", {"num_hidden_layers": "two"}),
    ],
)
def test_damaged_folders(name: str, damage: dict, exported: Path, tmp_path: Path):
    """Whatever transformers makes of them."""
    shutil.copytree(exported, tmp_path / "hf")
    path = tmp_path / "hf" / name
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **damage}), encoding="utf-8")
    with pytest.raises(ConversionError, match="cannot load it"):
        TextModel(tmp_path / "hf")


def test_no_code_of_a_folder_runs(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers would ask on a terminal, and run it; here nobody is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    shutil.copytree(exported, tmp_path / "hf")
    path, ran = tmp_path / "hf" / "config.json", tmp_path / "ran"
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    config = {**json.loads(path.read_text("utf-8")), "model_type": "mine", "auto_map": classes}
    path.write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "hf" / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(ConversionError, match="cannot load it"):
        TextModel(tmp_path / "hf")
    assert not ran.exists()


def test_no_pickle_is_read(exported: Path, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "hf" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConversionError, match=r"cannot load it: .*safetensors"):
        TextModel(tmp_path / "hf")


def test_an_empty_prompt_needs_an_end_of_text(exported: Path, tmp_path: Path):
    """A new document begins behind the end of another, which a tokenizer without one has not."""
    assert "".join(TextModel(exported).continue_text("", GenerationSettings(2))) is not None
    shutil.copytree(exported, tmp_path / "hf")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := tmp_path / "hf" / name).is_file():
            kept = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key != "eos_token"}
            path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(UserError, match="no end-of-text token for a text to begin behind"):
        CliRunner().invoke(app, ["generate", str(tmp_path / "hf"), "--prompt", ""], catch_exceptions=False)


def test_a_text_depends_on_its_own_numbers_alone(exported: Path):
    """The same for the same seed, prompt and sample, whatever else was generated; others differ; a stop string of
    several tokens ends it and is left out."""
    model, settings = TextModel(exported), GenerationSettings(24, Sampling(1.0, top_k=50), seed=7)
    texts = {(n, s): "".join(model.continue_text("def", settings, number=n, sample=s)) for n in (0, 1) for s in (0, 1)}
    assert len(set(texts.values())) == 4
    assert "".join(model.continue_text("def", settings, number=1, sample=1)) == texts[1, 1]
    assert "".join(model.continue_text("def", GenerationSettings(24, settings.sampling, seed=8))) != texts[0, 0]
    whole = texts[0, 0]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    stopped = model.continue_text("def", GenerationSettings(24, settings.sampling, 7, (stop,)))
    assert "".join(stopped) == whole[: whole.index(stop)]
    assert stopped.ended_by == "stop"
    assert stopped.num_tokens < 24


def command(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command(exported: Path, tmp_path: Path):
    """Prompts of both kinds of file, samples, both kinds of output; printed text is the prompt and its continuation."""
    (tmp_path / "p.txt").write_text("def f\nimport os\n", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f", "id": "a"}\n{"prompt": "import os", "id": 2}\n')
    common = ("--max-new-tokens", 8, "--seed", 3, "--top-p", 0.9, "--samples", 2)
    said = command(exported, "--prompts", tmp_path / "p.txt", *common)
    assert said.count("--- prompt ") == 4
    command(exported, "--prompts", tmp_path / "p.jsonl", *common, "--out", tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [(record["id"], record["sample"]) for record in records] == [("a", 0), ("a", 1), (2, 0), (2, 1)]
    for record in records:
        assert f"\n{record['prompt']}{record['text']}\n" in said
        assert record["ended_by"] in ("length", "end-of-text")
    alone = command(exported, "--prompt", "def f", *common[:-2])
    assert alone == f"def f{records[0]['text']}\n"
    assert json.loads(command(exported, "--prompt", "def f", *common[:-2], "--json"))["text"] == records[0]["text"]
    command(exported, "--prompt", "def f", *common[:-2], "--out", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text("utf-8") == alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "a", "--prompts", "p.txt"), "give one of them"),
        (("--samples", "2", "--temperature", "0"), "all are the same"),
        (("--out", "x.csv"), r"\.jsonl or \.txt"),
        (("--out", "x.jsonl", "--json"), "give one of them"),
        (("--stop", ""), "empty text"),
        (("--top-k", "3", "--temperature", "0"), "no effect"),
        (("--prompts", "absent.txt"), "cannot be read"),
        (("--max-new-tokens", "100"), "use --max-new-tokens"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], said: str, exported: Path):
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, ["generate", str(exported), *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"a\n\nb\n", ":2: the line is empty"),
        ("p.txt", b"", "no prompts"),
        ("p.txt", b"\xff", "not UTF-8"),
        ("p.jsonl", b"{", ":1: no JSON"),
        ("p.jsonl", b'{"prompt": 3}', "a text under"),
        ("p.jsonl", b'{"prompt": "a", "text": "b"}', "unknown key 'text'"),
        ("p.jsonl", b'{"prompt": "a", "id": 1.5}', "id must be"),
        ("p.jsonl", b'["a"]', "a text under"),
        ("p.jsonl", rb'{"prompt": "a\ud800"}', "no text"),
    ],
)
def test_files_that_are_no_prompts(name: str, content: bytes, said: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_prompts(tmp_path / name)


def test_prompts_are_read_as_they_are(tmp_path: Path):
    """Blanks at their ends stay, line ends of other systems do not, an empty one can be told."""
    (tmp_path / "p.txt").write_bytes(b"  a \r\nb")
    assert read_prompts(tmp_path / "p.txt") == [Prompt("  a "), Prompt("b")]
    (tmp_path / "p.jsonl").write_text('{"prompt": ""}\n')
    assert read_prompts(tmp_path / "p.jsonl") == [Prompt("")]
