"""Languages: many of them told apart, on the same scores as the library gives, whatever the text's length."""

from __future__ import annotations

import builtins
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.errors import UnavailableError
from megalite.texts import Texts

pytest.importorskip("py3langid")

from megalite.corpus.language import HEAD_BYTES, MIDDLE_BYTES, UNDETERMINED, identify, load_model

SCORE_TOLERANCE = 1e-4
"""Sums of a few thousand float32, in another order."""

SENTENCES = [
    ("en", "The library opens at nine in the morning and closes late in the evening on most days."),
    ("en", "She asked whether the train had already left, but nobody at the station could tell her."),
    ("de", "Die Bibliothek öffnet morgens um neun und schließt an den meisten Tagen erst spät am Abend."),
    ("de", "Er wollte wissen, ob der Zug schon abgefahren sei, aber niemand konnte es ihm sagen."),
    ("fr", "La bibliothèque ouvre à neuf heures du matin et ferme tard le soir presque tous les jours."),
    ("fr", "Nous avons marché longtemps sous la pluie avant de trouver un petit café encore ouvert."),
    ("es", "La biblioteca abre a las nueve de la mañana y cierra tarde por la noche casi todos los días."),
    ("es", "Mi abuela siempre decía que el pan recién hecho sabe mejor cuando se comparte."),
    ("it", "La biblioteca apre alle nove del mattino e chiude tardi la sera quasi tutti i giorni."),
    ("it", "Abbiamo camminato a lungo sotto la pioggia prima di trovare un piccolo bar ancora aperto."),
    ("pt", "A biblioteca abre às nove da manhã e fecha tarde da noite em quase todos os dias."),
    ("pt", "Não sei se vocês já conhecem a praia onde passávamos as férias quando éramos crianças."),
    ("nl", "De bibliotheek gaat om negen uur 's ochtends open en sluit op de meeste dagen laat in de avond."),
    ("nl", "We hebben lang door de regen gelopen voordat we een klein café vonden dat nog open was."),
    ("sv", "Biblioteket öppnar klockan nio på morgonen och stänger sent på kvällen de flesta dagar."),
    ("sv", "Vi gick länge i regnet innan vi hittade ett litet kafé som fortfarande var öppet."),
    (
        "da",
        "Vi gik længe i regnen, før vi fandt en lille café, der stadig havde åbent.",
    ),
    ("fi", "Kirjasto avataan aamulla yhdeksältä ja se suljetaan useimpina päivinä vasta myöhään illalla."),
    ("fi", "Kävelimme pitkään sateessa ennen kuin löysimme pienen kahvilan, joka oli vielä auki."),
    ("pl", "Biblioteka jest otwierana o dziewiątej rano, a zamykana w większość dni późno wieczorem."),
    ("pl", "Długo szliśmy w deszczu, zanim znaleźliśmy małą kawiarnię, która była jeszcze otwarta."),
    ("cs", "Knihovna se otevírá v devět hodin ráno a většinou se zavírá až pozdě večer."),
    ("cs", "Dlouho jsme šli v dešti, než jsme našli malou kavárnu, která byla ještě otevřená."),
    ("ro", "Biblioteca se deschide la ora nouă dimineața și se închide seara târziu în cele mai multe zile."),
    ("hu", "A könyvtár reggel kilenckor nyit, és a legtöbb napon csak késő este zár be."),
    ("tr", "Kütüphane sabah dokuzda açılır ve çoğu gün akşam geç saatlerde kapanır."),
    ("tr", "Hâlâ açık olan küçük bir kahve bulana kadar yağmurda uzun süre yürüdük."),
    ("ru", "Библиотека открывается в девять часов утра и почти каждый день закрывается поздно вечером."),
    ("ru", "Мы долго шли под дождём, прежде чем нашли маленькое кафе, которое ещё работало."),
    ("uk", "Бібліотека відчиняється о дев'ятій годині ранку і майже щодня зачиняється пізно ввечері."),
    ("uk", "Ми довго йшли під дощем, перш ніж знайшли маленьку кав'ярню, яка ще працювала."),
    ("bg", "Библиотеката отваря в девет часа сутринта и почти всеки ден затваря късно вечерта."),
    ("el", "Η βιβλιοθήκη ανοίγει στις εννέα το πρωί και κλείνει αργά το βράδυ σχεδόν κάθε μέρα."),
    ("ar", "تفتح المكتبة أبوابها في الساعة التاسعة صباحا وتغلق في وقت متأخر من المساء في معظم الأيام."),
    ("he", "הספרייה נפתחת בתשע בבוקר ונסגרת מאוחר בערב ברוב ימי השבוע."),
    ("fa", "کتابخانه ساعت نه صبح باز می‌شود و بیشتر روزها شب دیروقت بسته می‌شود."),
    ("hi", "पुस्तकालय सुबह नौ बजे खुलता है और अधिकतर दिनों में देर शाम को बंद होता है।"),
    ("zh", "图书馆早上九点开门，大多数日子都开到晚上很晚才关门。"),
    ("zh", "我们在雨中走了很久，才找到一家还开着的小咖啡馆。"),
    ("ja", "図書館は朝九時に開いて、ほとんどの日は夜遅くまで開いています。"),
    ("ja", "私たちは雨の中を長いこと歩いて、やっとまだ開いている小さな喫茶店を見つけました。"),
    ("ko", "도서관은 아침 아홉 시에 문을 열고 대부분의 날에는 밤늦게 닫습니다."),
    ("ko", "우리는 아직 문을 연 작은 찻집을 찾을 때까지 빗속을 오래 걸었습니다."),
    ("vi", "Thư viện mở cửa lúc chín giờ sáng và đóng cửa muộn vào buổi tối hầu hết các ngày."),
    ("id", "Perpustakaan dibuka pukul sembilan pagi dan ditutup larut malam hampir setiap hari."),
    ("th", "ห้องสมุดเปิดเวลาเก้าโมงเช้าและปิดดึกเกือบทุกวัน"),
]
"""Two or three of each of the large languages, one of some others; written for this test."""


def languages(*texts: str) -> list[str]:
    return identify(Texts.of(texts))[0]


@lru_cache(maxsize=1)
def library():
    """py3langid itself."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def test_sentences():
    """Every sentence, alone and in one batch, with some confidence."""
    codes, scores = identify(Texts.of([text for _, text in SENTENCES]))
    assert codes == [code for code, _ in SENTENCES]
    assert scores.dtype == np.float32
    assert scores.min() > 0.5
    assert len(set(codes)) >= 25
    assert [languages(text)[0] for _, text in SENTENCES] == codes


def test_scores_are_the_librarys():
    """Codes and probabilities equal those of the library's own walk, also for capitals and decomposed characters."""
    texts = [text for _, text in SENTENCES]
    texts += [text.upper() for text in texts] + ["e\u0301te\u0301 a\u0300 la plage", "def f(x): return x"]
    codes, scores = identify(Texts.of(texts))
    expected = [library().classify(text) for text in texts]
    assert codes == [code for code, _ in expected]
    assert np.allclose(scores, [score for _, score in expected], atol=SCORE_TOLERANCE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=4))
def test_any_text_scores_as_the_library_says(texts):
    """Texts in no language too; a text without a feature has no language."""
    codes, scores = identify(Texts.of(texts))
    for text, code, score in zip(texts, codes, scores.tolist(), strict=True):
        if code == UNDETERMINED:
            assert score == 0
            assert len(set(dict(library().rank(text)).values())) <= 2  # all labels alike; those of two scripts double
        else:
            ranks = dict(library().rank(text))
            assert ranks[code] == pytest.approx(score, abs=SCORE_TOLERANCE)
            assert score >= max(ranks.values()) - SCORE_TOLERANCE


def test_no_language():
    """Empty texts have none, and no text at all is no error."""
    assert languages("", "\n", "ok that is a sentence in English")[:2] == [UNDETERMINED, UNDETERMINED]
    codes, scores = identify(Texts.of([]))
    assert codes == []
    assert scores.shape == (0,)


def test_long_texts_are_sampled():
    """The head and the middle decide: a short foreign head does not, nor does anything behind the middle."""
    english, german = (" ".join(text for code, text in SENTENCES if code == wanted) for wanted in ("en", "de"))
    long_english = f"{english} " * 200
    assert languages(long_english) == ["en"]
    assert languages(f"{german}\n{long_english}") == ["en"]
    assert languages(long_english + f"{german} " * 20) == ["en"]
    assert languages(f"{english[: HEAD_BYTES // 8]} " + f"{german} " * 300) == ["de"]


@pytest.mark.parametrize("shift", range(4))
def test_samples_cut_through_characters(shift):
    """A sample may begin and end inside of a character of several bytes."""
    japanese = next(text for code, text in SENTENCES if code == "ja")
    assert languages("x" * shift + japanese * (3 * (HEAD_BYTES + MIDDLE_BYTES) // len(japanese))) == ["ja"]


def test_batches_change_nothing():
    """A text's score does not depend on its neighbours, nor on where its bytes lie."""
    texts = Texts.of([text for _, text in SENTENCES])
    codes, scores = identify(texts)
    part_codes, part_scores = identify(Texts(texts.buffer, texts.offsets[10:21]))
    assert part_codes == codes[10:20]
    assert np.array_equal(part_scores, scores[10:20])


def test_without_the_library(monkeypatch):
    """What is missing is named, with the way to get it."""
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "py3langid":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    load_model.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnavailableError, match=r"needs py3langid: pip install 'megalite\[data\]'"):
        identify(Texts.of(["text"]))
