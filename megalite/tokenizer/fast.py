"""A SentencePiece model as a Hugging Face `tokenizer.json` that gives the same ids.

SentencePiece escapes each blank as U+2581 and then works on the whole text; so the fast tokenizer has that one
replacement as its normaliser and no pre-tokenizer.

    BPE       SentencePiece joins the pair whose joint piece scores best; that equals a list of merges sorted by score,
              with every way to cut each piece in two
    unigram   the same search for the best path; control and byte pieces get a score so low that a text spelling one
              is never read as one. Scores must be multiples of SCORE_STEP (see `round_scores`)

A text that has U+2581 itself gets the same ids in both, those of a blank.
"""

from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]  # made at import
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from megalite.errors import DataError
from megalite.tokenizer.encoders.reference import BLANK, SCORE_STEP

NEVER = -1e4
"""Score of pieces that no text may match: below the sum over any spelling of them, letter by letter."""


def round_scores(model: bytes) -> bytes:
    """A unigram model with its scores rounded to SCORE_STEP: less than 1 % change of any piece's probability."""
    proto = ModelProto.FromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score / SCORE_STEP) * SCORE_STEP
    return proto.SerializeToString()


def add_control_pieces(model: bytes, tokens: list[str]) -> bytes:
    """A model with control pieces at its end.

    Raises:
        DataError: one of them is a piece already.
    """
    proto = ModelProto.FromString(model)
    known = {piece.piece for piece in proto.pieces}
    for token in tokens:
        if token in known:
            raise DataError(f"special token {token!r} is also a piece of this text; spell it otherwise, as <|user|>")
        proto.pieces.add(piece=token, score=0.0, type=proto.SentencePiece.CONTROL)
    proto.trainer_spec.control_symbols.extend(tokens)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString()


def write_fast_tokenizer(model: bytes, path: Path) -> None:
    """Write the `tokenizer.json` of a SentencePiece model trained without normalisation and dummy prefix.

    Args:
        model: contents of a `tokenizer.model`.
        path: file to write.
    """
    proto = ModelProto.FromString(model)
    processor = SentencePieceProcessor(model_proto=model)
    is_bpe = proto.trainer_spec.model_type == TrainerSpec.BPE
    tokenizer = Tokenizer(_bpe(processor) if is_bpe else _unigram(processor))
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [
            AddedToken(processor.id_to_piece(id), normalized=False, special=True)
            for id in range(processor.vocab_size())
            if processor.is_control(id) or processor.is_unknown(id)
        ]
    )
    tokenizer.save(str(path))


def _bpe(processor: SentencePieceProcessor) -> models.BPE:
    vocab = {processor.id_to_piece(id): id for id in range(processor.vocab_size())}
    joinable = {piece for piece, id in vocab.items() if _is_text(processor, id)}
    merges: list[tuple[str, str]] = []
    for piece in sorted(joinable, key=lambda piece: (-processor.get_score(vocab[piece]), vocab[piece])):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in joinable and right in joinable]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    unknown = processor.id_to_piece(processor.unk_id())
    return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _unigram(processor: SentencePieceProcessor) -> models.Unigram:
    """Without the control pieces at its end, which are added behind it with the same ids: one with a character that no
    piece has would cost less than that character, whatever its score."""
    size = processor.vocab_size()
    while processor.is_control(size - 1):
        size -= 1
    scores = [
        (processor.id_to_piece(id), processor.get_score(id) if _is_text(processor, id) else NEVER) for id in range(size)
    ]
    return models.Unigram(scores, unk_id=processor.unk_id(), byte_fallback=True)


def _is_text(processor: SentencePieceProcessor, id: int) -> bool:
    """Whether a piece stands for the text it spells."""
    return not (processor.is_control(id) or processor.is_unknown(id) or processor.is_byte(id))
