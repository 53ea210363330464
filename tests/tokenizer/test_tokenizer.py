"""Tokenizers: the ids of the reference library, the same ids in transformers, and no control token out of text."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.corpus import Corpus
from megalite.corpus.recipe import DocumentSource
from megalite.corpus.stations.train_tokenizer import train_tokenizer
from megalite.errors import DataError
from megalite.texts import Texts
from megalite.tokenizer.encoders.reference import SCORE_STEP
from megalite.tokenizer.settings import TokenizerConfig
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.tokenizer.training import CHUNK_CHARS, cut_in_chunks
from tests.kit.data import KINDS, corpus_of, prose, write_json_lines

CONTROL_SPELLINGS = ["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "x<s>y</s>", "</s></s>", "<s", "s>", "< s >"]

TORTURE = [
    "",
    " ",
    "   two  and   three    blanks   ",
    "\n\n\n\t\t a\t\r\n",
    "a" * 500,
    "abab" * 100 + "aba",
    " " * 1000,
    "\n" * 1000,
    "=" * 777,
    "-" * 77 + "\n",
    "1234567890 3.14159 0x1F 1e-5",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "é e\u0301 ﬁ Å ½ ①",
    "日本語のテキスト。 中文 한국어",
    "العربية \u202e עברית",
    "😀👨‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "\x00\x01\x7f\u200b\ufeff",
    "a\u0300\u0301\u0302" * 50,
    "\u3000\u00a0\u2003\u2028",
    "\ud7ff\ue000\uffff\U0010ffff",
    "def f(x):\n        return x  # comment\n\n\n    @property\n",
    "<|endoftext|> [INST] <|im_start|>",
    *CONTROL_SPELLINGS,
]


@pytest.fixture(scope="module")
def library_texts() -> list[str]:
    """Real text that the tokenizers were not trained on."""
    documents = list(Corpus([DocumentSource(kind="python", max_mb=1.5)]).documents())
    return [document.text for document in documents[-20:]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_decodes_to_itself(tokenizer_folders, library_texts, kind):
    """Nothing is normalised, lost or unknown, byte fallback included."""
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    texts = TORTURE + library_texts
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert encoded == [tokenizer.encode(text) for text in texts]
    assert all(0 <= id < tokenizer.vocab_size for ids in encoded for id in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_becomes_a_control_token(tokenizer_folders, kind):
    """Token injection: documents that spell the control tokens are encoded letter by letter."""
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    control = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert len(control) == 3
    for text in CONTROL_SPELLINGS:
        assert not control.intersection(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["sentencepiece-bpe", "sentencepiece-unigram"])
def test_ids_are_sentencepieces_own(tokenizer_folders, library_texts, kind):
    """Against the library itself, one text at a time."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(tokenizer_folders[kind] / "tokenizer.model"))
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    for text in TORTURE + library_texts:
        assert tokenizer.encode(text) == processor.encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert processor.unk_id() == 0
    assert processor.vocab_size() == tokenizer.vocab_size == 800


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", ["PreTrainedTokenizerFast", "AutoTokenizer"])
def test_transformers_gives_the_same_ids(tokenizer_folders, library_texts, kind, loader):
    """A reload of the folder by transformers: equal ids on every text, control spellings too, and equal control ids."""
    import transformers

    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    reloaded = getattr(transformers, loader).from_pretrained(tokenizer_folders[kind])
    for text in TORTURE + library_texts:
        assert reloaded(text)["input_ids"] == tokenizer.encode(text)
    control = (reloaded.bos_token_id, reloaded.eos_token_id, reloaded.pad_token_id)
    assert control == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert len(reloaded) == tokenizer.vocab_size
    assert reloaded.decode(reloaded("a  b\n c")["input_ids"]) == "a  b\n c"


@given(text=st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_both_libraries_agree_on_any_text(tokenizer_folders, text):
    """tokenizer.json against SentencePiece on arbitrary Unicode."""
    from megalite.tokenizer.tokenizer import FastEncoder

    for kind in ("sentencepiece-bpe", "sentencepiece-unigram"):
        folder = tokenizer_folders[kind]
        fast = FastEncoder(folder / "tokenizer.json")
        assert fast.encode_batch([text]) == [Tokenizer.load(folder).encode(text)]


def test_unigram_scores_are_exact_in_both_float_types(tokenizer_folders):
    """Multiples of the step, so that float32 and float64 sums are equal."""
    from sentencepiece import SentencePieceProcessor

    path = tokenizer_folders["sentencepiece-unigram"] / "tokenizer.model"
    processor = SentencePieceProcessor(model_file=str(path))
    scores = [processor.get_score(id) / SCORE_STEP for id in range(processor.vocab_size())]
    assert scores == [round(score) for score in scores]


@pytest.mark.parametrize("kind", KINDS)
def test_digits_are_single_tokens(tokenizer_folders, kind):
    """The default: no token holds two digits."""
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    assert [tokenizer.decode([id]) for id in tokenizer.encode("2024")] == list("2024")


def test_training_is_repeatable_and_says_what_it_used(tmp_path, tokenizer_folder):
    """The same text gives the same fingerprint; half of the text is drawn evenly and counted."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", prose(400)))
    config = TokenizerConfig(vocab_size=420, train_mb=0.05)
    results = [train_tokenizer(corpus, tmp_path / name, config) for name in ("a", "b")]
    first, again = (Tokenizer.load(tmp_path / name).fingerprint for name in ("a", "b"))
    assert first == again != Tokenizer.load(tokenizer_folder).fingerprint
    counts = results[0].manifest.counts
    assert 0.6 * 5e4 < counts["text_bytes"] < 1.4 * 5e4
    assert 0 < counts["documents"] < 400


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_text_for_the_vocabulary(tmp_path, kind):
    """Refused with the number that would do, and no folder is left."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", ["a little text"] * 3))
    with pytest.raises(DataError, match=r"(5000|<= \d+)"):
        train_tokenizer(corpus, tmp_path / "out", TokenizerConfig(kind=kind, vocab_size=5000))
    assert not list(tmp_path.glob("out*"))


def test_no_text_at_all(tmp_path):
    """An input whose every record is blank."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"a\.jsonl: empty: no document is in it"):
        train_tokenizer(corpus_of(path), tmp_path / "out", TokenizerConfig())


def test_control_spellings_stay_text_in_a_vocabulary_without_their_letters(tmp_path):
    """Trained on text that has no `<`: the fast tokenizer must not prefer the control piece to unknown letters."""
    from megalite.tokenizer.tokenizer import FastEncoder

    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", ["abc abd " * 50]))
    config = TokenizerConfig(kind="sentencepiece-unigram", vocab_size=356)
    train_tokenizer(corpus, tmp_path / "out", config)
    reference, fast = Tokenizer.load(tmp_path / "out"), FastEncoder(tmp_path / "out" / "tokenizer.json")
    assert fast.encode_batch(CONTROL_SPELLINGS) == reference.encode_batch(CONTROL_SPELLINGS)


@given(text=st.text(alphabet="ab \n", max_size=4000))
@settings(max_examples=30, deadline=None)
def test_chunks_are_the_text_cut_before_line_ends(text):
    """Nothing is lost, no chunk is too long, and a word is cut only where there is no blank in reach."""
    chunks = list(cut_in_chunks(text))
    assert "".join(chunks) == text
    assert all(len(chunk) <= CHUNK_CHARS for chunk in chunks)
    for chunk in chunks[1:]:
        assert chunk[0] in " \n"


def test_a_word_longer_than_a_chunk_is_cut():
    """Where nothing else is left."""
    assert [len(chunk) for chunk in cut_in_chunks("x" * 2500)] == [1000, 1000, 500]


def test_a_hugging_face_folder_is_a_tokenizer_too(tmp_path, tokenizer_folders):
    """Without our record file, ids come from tokenizer.json and the control tokens from its config."""
    ours = Tokenizer.load(tokenizer_folders["byte-bpe"])
    folder = tmp_path / "foreign"
    shutil.copytree(ours.folder, folder)
    (folder / "megalite_tokenizer.json").unlink()
    foreign = Tokenizer.load(folder)
    assert (foreign.kind, foreign.eos_id, foreign.bos_id) == ("hugging-face", ours.eos_id, ours.bos_id)
    assert foreign.encode("a text </s>") == ours.encode("a text </s>")


def test_a_bare_sentencepiece_model_is_a_tokenizer_too(tmp_path, tokenizer_folder):
    """A folder with nothing but tokenizer.model, as older checkpoints have."""
    shutil.copy(tokenizer_folder / "tokenizer.model", tmp_path)
    bare, ours = Tokenizer.load(tmp_path), Tokenizer.load(tokenizer_folder)
    assert bare.encode("a text </s>") == ours.encode("a text </s>")
    assert bare.eos_id == ours.eos_id


def without_eos(folder):
    (folder / "megalite_tokenizer.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def recorded(**changes):
    """Other values in the record."""

    def change(folder):
        path = folder / "megalite_tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BAD_FOLDERS = {
    "missing": (shutil.rmtree, "no such folder"),
    "empty": (lambda folder: [path.unlink() for path in folder.iterdir()], r"neither tokenizer\.json nor"),
    "changed": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not those that megalite_tokenizer.json"),
    "garbage": (lambda folder: (folder / "megalite_tokenizer.json").write_text("{"), "damaged: not JSON"),
    "no eos": (without_eos, "no end-of-text token"),
    "text for an id": (recorded(eos_id=["</s>"]), "eos_id is .*, expected a valid integer"),
    "a negative id": (recorded(eos_id=-1), "eos_id is -1, expected greater"),
    "an id too large": (recorded(pad_id=800), "pad_id is 800, of a vocabulary of 800; train or copy"),
    "a special token's id too large": (recorded(special_tokens={"<|a|>": 900}), r"<\|a\|> is 900, of a vocabulary"),
    "no id at all": (recorded(eos_id=None), "eos_id is None"),
    "another kind": (recorded(kind="wordpiece"), "kind is 'wordpiece', expected"),
    "an unknown key": (recorded(unk_id=1), "unk_id is unknown here"),
    "other size": (recorded(vocab_size=9), "says vocab_size=9, the vocabulary has 800 entries"),
}


@pytest.mark.parametrize("damage", BAD_FOLDERS)
def test_bad_folders_are_refused(tmp_path, tokenizer_folders, damage):
    """Each with what is wrong."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folders["byte-bpe"], folder)
    apply, message = BAD_FOLDERS[damage]
    apply(folder)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(folder)


SPECIAL = ("<|user|>", "<|assistant|>")
BARS = ("<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>", "<|\u7528\u6237|>")
"""With characters that texts in English have not."""


def test_a_reserved_name_is_taken(tmp_path, library_texts):
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", library_texts))
    config = TokenizerConfig(vocab_size=700, special_tokens=["<|reserved_0|>"], vocab_multiple=64)
    with pytest.raises(DataError, match="is there already"):
        train_tokenizer(corpus, tmp_path / "out", config)


@pytest.mark.parametrize("special", [SPECIAL, BARS])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_end_the_vocabulary(tmp_path, library_texts, kind, special):
    """The user's control tokens and reserved ones have the last ids; text that spells one is text, in all readers."""
    import transformers

    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", [*library_texts, " ".join(SPECIAL) * 500]))
    config = TokenizerConfig(kind=kind, vocab_size=700, special_tokens=special, vocab_multiple=64)
    train_tokenizer(corpus, tmp_path / "out", config)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.vocab_size == 704
    assert tokenizer.special_tokens == {special[0]: 698, special[1]: 699}
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(reloaded) == 704
    assert [reloaded.convert_tokens_to_ids(token) for token in (*special, "<|reserved_3|>")] == [698, 699, 703]
    for text in [*special, f"a{special[0]}b <|reserved_0|>", *TORTURE]:
        ids = tokenizer.encode(text)
        assert reloaded(text)["input_ids"] == ids
        assert max(ids, default=0) < 698
        assert tokenizer.decode(ids) == text
    texts = Texts.of([*special, *library_texts])
    tokens, _ = tokenizer.encode_texts(texts)
    assert tokens.tolist() == [id for text in texts for id in tokenizer.encode(text)]
    assert tokenizer.decode([698, *tokenizer.encode("hello"), 703]) == "hello"


def test_more_special_tokens_leave_the_other_ids_alone(tmp_path, library_texts):
    """Room is reserved at the end: the same text gives the same ids with one more token of one's own."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", library_texts))
    folders = []
    for size, special in ((698, ()), (700, SPECIAL)):
        folders.append(tmp_path / str(size))
        config = TokenizerConfig(vocab_size=size, special_tokens=special)
        train_tokenizer(corpus, folders[-1], config)
    plain, special = map(Tokenizer.load, folders)
    assert plain.encode_batch(library_texts) == special.encode_batch(library_texts)
    assert plain.special_tokens == {}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("<|a b|>",), "without blanks"),
        (("",), "1 to 64 characters"),
        (("x" * 65,), "1 to 64 characters"),
        (("<|a|>", "<|a|>"), "is there already"),
        (("</s>",), "is there already"),
    ],
)
def test_bad_special_tokens_are_refused(tmp_path, tokens, message):
    """Each with what is wrong, before any text is read."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", [""]))
    with pytest.raises(DataError, match=message):
        train_tokenizer(corpus, tmp_path / "out", TokenizerConfig(special_tokens=tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_that_text_has_learned_is_refused(tmp_path, kind):
    """A spelling that is a token of the text as well would let text become a control token."""
    corpus = corpus_of(write_json_lines(tmp_path / "a.jsonl", ["stop to stop the stops\n" * 50]))
    config = TokenizerConfig(kind=kind, vocab_size=365 if kind == "sentencepiece-bpe" else 361)
    if kind == "byte-bpe":
        config = TokenizerConfig(kind=kind, vocab_size=268)
    with pytest.raises(DataError, match="special token 'stop' is also"):
        train_tokenizer(corpus, tmp_path / "out", config.model_copy(update={"special_tokens": ("stop",)}))
    assert not list(tmp_path.glob("out*"))
