"""The fast ways to encode: each gives the ids of the reference library, or it is not used.

    reference.py     SentencePiece and Hugging Face `tokenizers`: what ids are
    choose.py        which encoder a tokenizer gets: the first that can read it and passes the check
    check.py           the check: texts on which encoders have been seen to differ
    word_cache.py    the tokenizers that we train, compiled: known words are looked up, new ones encoded by
    bpe.py             merging pairs, or
    unigram.py         the best path; where words end say
    cuts.py              for SentencePiece the vocabulary itself, and
    byte_level.py        for byte-level BPE the pattern of GPT-2
    giga.py          byte-level BPE with other patterns, by the optional package `gigatoken`

The rest is between them: sentencepiece_model.py and byte_level_json.py read the arrays of pieces.py from a folder's
files; tables.py and utf8.py are what the compiled parts stand on.
"""
