"""Quality rules: measure every document in one pass over its bytes, then compare the measures with thresholds.

    settings.py     what a recipe may say: thresholds, with the paper each comes from
    rule.py         a rule is one line: a reason, a statistic, a threshold
    basic.py  gopher.py  c4.py  fineweb.py  bad_words.py  code.py
                    the rules themselves, and C4's repair of the text
    apply.py        the one door: apply_rules(texts, config) -> texts, reasons
    statistics.py   the measures of a batch, of which columns.py has the names
    scan.py  duplicates.py  repetition.py  c4_lines.py  phrases.py  characters.py  code_scan.py  encoded.py
                    the compiled kernels
    datatrove.py    the measures again as datatrove takes them: english.py cuts words by spaCy's tables, lexicon.py
                    remembers them, datatrove_scan.py counts, punctuation.py lists what is no word

`settings` is light; the rest needs numba, which takes a second to import.
"""
