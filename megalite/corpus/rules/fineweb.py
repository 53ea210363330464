"""FineWeb's own rules (Penedo et al. 2024, 3.6): too few sentences, too many short, repeated or single-word lines.

They mean what they mean in datatrove 0.10, which counts only lines that are not blank, but for three things:

1.  Blanks at the end of a line do not hide its punctuation. Repaired text has none.
2.  The end of a sentence is what the settings say: full stop, exclamation and question mark and quotes, as for the
    data set of the paper. datatrove takes the full stops of all scripts, and no quotes.
3.  Line ends are compared with chunks between blanks, of which there are fewer than of datatrove's words, which count
    every punctuation mark: the rule is stricter here.

`compat: datatrove` does all three as datatrove does.
"""

from __future__ import annotations

from megalite.corpus.rules.columns import (
    CHUNKS,
    DUPLICATE_LINE_CHARS,
    FILLED_LINES,
    LINE_CHARS,
    NEWLINES,
    SHORT_LINES,
    TERMINAL_LINES,
    TOKENS,
)
from megalite.corpus.rules.rule import Rule, rules_that_are_on
from megalite.corpus.rules.settings import DATATROVE, FineWebConfig


def fineweb_rules(config: FineWebConfig) -> list[Rule]:
    """FineWeb's rules that are on."""
    repeated = config.max_duplicate_line_char_share
    words = TOKENS if config.compat == DATATROVE else CHUNKS
    return rules_that_are_on(
        ("fineweb: few lines end a sentence", TERMINAL_LINES, FILLED_LINES, ">=", config.min_terminal_line_share),
        ("fineweb: many short lines", SHORT_LINES, FILLED_LINES, "<=", config.max_short_line_share),
        ("fineweb: characters in duplicate lines", DUPLICATE_LINE_CHARS, LINE_CHARS, "<=", repeated),
        ("fineweb: many line ends", NEWLINES, words, "<=", config.max_newlines_per_chunk),
    )
