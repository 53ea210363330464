"""The share of letters that are capitals: titles, shouting, tables of abbreviations."""

from megalite import extend


@extend.filter_rule("capitals")
def capitals(text: str, *, min_letters: int = 20) -> float:
    letters = [each for each in text if each.isalpha()]
    return sum(map(str.isupper, letters)) / len(letters) if len(letters) >= min_letters else 0.0
