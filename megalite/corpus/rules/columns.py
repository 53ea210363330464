"""The numbers taken of each document: a column each in one table, int64 [documents, columns].

A *line* stands between "\\n"s, a *chunk* between blanks (what `str.split()` gives); a *word* is a chunk without the
punctuation and symbols at its ends, if anything is left. A *paragraph* is a run of lines that are not blank.

The columns of `compat: datatrove` count *tokens*: the words and marks that spaCy's English tokenizer cuts. They, and
where these rules are on the paragraphs, are filled by `datatrove.py`. Those from `letters` on are filled by
`code_scan.py`, where the rules for source code are on.
"""

from __future__ import annotations

COLUMNS = (
    "code_points",
    "alphanumerics",
    "digits",
    "chunks",
    "letter_chunks",
    "words",
    "word_chars",
    "stop_words",
    "hash_signs",
    "ellipses",
    "lines",
    "newlines",
    "line_chars",
    "bullet_lines",
    "ellipsis_lines",
    "terminal_lines",
    "short_lines",
    "filled_lines",
    "repeated_lines",
    "duplicate_lines",
    "duplicate_line_chars",
    "paragraphs",
    "duplicate_paragraphs",
    "duplicate_paragraph_chars",
    "sentences",
    "lorem_ipsum_lines",
    "curly_bracket_lines",
    "bad_words",
    "top_2gram_chars",
    "top_3gram_chars",
    "top_4gram_chars",
    "duplicate_5gram_chars",
    "duplicate_6gram_chars",
    "duplicate_7gram_chars",
    "duplicate_8gram_chars",
    "duplicate_9gram_chars",
    "duplicate_10gram_chars",
    "tokens",
    "tokens_with_letter",
    "word_tokens",
    "word_token_chars",
    "word_token_stop_words",
    "split_lines",
    "duplicate_split_lines",
    "duplicate_split_line_chars",
    "letters",
    "code_lines",
    "longest_line_chars",
    "encoded_chars",
    "longest_encoded_chars",
    "generated_marks",
    "xml_declarations",
    "is_html",
    "html_chars",
    "visible_chars",
)
NUM_COLUMNS = len(COLUMNS)

CODE_POINTS = COLUMNS.index("code_points")
"""Characters, line ends included."""
ALPHANUMERICS = COLUMNS.index("alphanumerics")
DIGITS = COLUMNS.index("digits")

CHUNKS = COLUMNS.index("chunks")
LETTER_CHUNKS = COLUMNS.index("letter_chunks")
"""Chunks with a letter."""
WORDS = COLUMNS.index("words")
WORD_CHARS = COLUMNS.index("word_chars")
"""Characters of all words."""
STOP_WORDS = COLUMNS.index("stop_words")
"""Different stop words among the words."""
HASH_SIGNS = COLUMNS.index("hash_signs")
"""The character "#"."""
ELLIPSES = COLUMNS.index("ellipses")
"""U+2026, and threes of dots in a row."""

LINES = COLUMNS.index("lines")
"""All lines, blank ones too: newlines + 1."""
NEWLINES = COLUMNS.index("newlines")
LINE_CHARS = COLUMNS.index("line_chars")
"""Characters of all lines: code_points - newlines."""
BULLET_LINES = COLUMNS.index("bullet_lines")
"""Lines whose first character that is not blank is a bullet."""
ELLIPSIS_LINES = COLUMNS.index("ellipsis_lines")
"""Lines that end in an ellipsis, blanks at the end not counted."""
TERMINAL_LINES = COLUMNS.index("terminal_lines")
"""Lines that end in a terminal character, blanks at the end not counted."""
SHORT_LINES = COLUMNS.index("short_lines")
"""Lines that are not blank, of at most so many characters as the settings say."""

FILLED_LINES = COLUMNS.index("filled_lines")
"""Lines that are not blank. Only they can be duplicates."""
REPEATED_LINES = COLUMNS.index("repeated_lines")
"""Lines that equal an earlier one but for the blanks at both ends."""
DUPLICATE_LINES = COLUMNS.index("duplicate_lines")
"""Lines that equal an earlier one, character for character."""
DUPLICATE_LINE_CHARS = COLUMNS.index("duplicate_line_chars")
PARAGRAPHS = COLUMNS.index("paragraphs")
DUPLICATE_PARAGRAPHS = COLUMNS.index("duplicate_paragraphs")
DUPLICATE_PARAGRAPH_CHARS = COLUMNS.index("duplicate_paragraph_chars")
"""Characters of repeated paragraphs, the line ends inside them included."""

SENTENCES = COLUMNS.index("sentences")
"""Sentences in the lines that C4's rules leave."""
LOREM_IPSUM_LINES = COLUMNS.index("lorem_ipsum_lines")
CURLY_BRACKET_LINES = COLUMNS.index("curly_bracket_lines")
BAD_WORDS = COLUMNS.index("bad_words")
"""Occurrences of listed words and phrases."""

TOP_2GRAM_CHARS = COLUMNS.index("top_2gram_chars")
"""Characters of all occurrences of the most frequent 2-gram of words; 3 and 4 follow."""
DUPLICATE_5GRAM_CHARS = COLUMNS.index("duplicate_5gram_chars")
"""Characters of words in repeated 5-grams; 6 to 10 follow."""

TOKENS = COLUMNS.index("tokens")
TOKENS_WITH_LETTER = COLUMNS.index("tokens_with_letter")
WORD_TOKENS = COLUMNS.index("word_tokens")
"""Tokens with anything but punctuation, by datatrove's list of it."""
WORD_TOKEN_CHARS = COLUMNS.index("word_token_chars")
WORD_TOKEN_STOP_WORDS = COLUMNS.index("word_token_stop_words")
"""Different stop words among the tokens."""
SPLIT_LINES = COLUMNS.index("split_lines")
"""What stands between runs of line ends; of blanks too, and an empty one before the first and behind the last."""
DUPLICATE_SPLIT_LINES = COLUMNS.index("duplicate_split_lines")
DUPLICATE_SPLIT_LINE_CHARS = COLUMNS.index("duplicate_split_line_chars")

LETTERS = COLUMNS.index("letters")
CODE_LINES = COLUMNS.index("code_lines")
"""Lines, without the empty one behind a line end that closes the text: what `str.splitlines()` gives."""
LONGEST_LINE_CHARS = COLUMNS.index("longest_line_chars")
ENCODED_CHARS = COLUMNS.index("encoded_chars")
"""Characters of all runs that look like data in letters: base64, hexadecimal bytes, escapes."""
LONGEST_ENCODED_CHARS = COLUMNS.index("longest_encoded_chars")
GENERATED_MARKS = COLUMNS.index("generated_marks")
"""Phrases in the first lines that say that a program wrote the file."""
XML_DECLARATIONS = COLUMNS.index("xml_declarations")
"""1 where an XML declaration stands in the first characters, else 0."""
IS_HTML = COLUMNS.index("is_html")
"""1 for a page of HTML, else 0."""
HTML_CHARS = COLUMNS.index("html_chars")
"""Characters of a page of HTML; 0 for other documents."""
VISIBLE_CHARS = COLUMNS.index("visible_chars")
"""Characters of a page of HTML outside of tags, comments, scripts and styles, a run of blanks as one."""
