"""Redaction: what is taken, what only looks like it, and what becomes of the text around."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.privacy.candidates import find_candidates
from megalite.corpus.privacy.payment import CARD_FORMS, IBAN_LENGTHS
from megalite.corpus.privacy.redact import redact
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.privacy.window import ASSIGNMENT
from megalite.texts import Texts

KINDS = (
    *("email", "ip_address", "phone", "iban", "card", "us_ssn", "address", "name", "api_key", "jwt", "private_key"),
    "password",
)

MARKS = {kind: f"<{kind}>" for kind in KINDS}

GUESSES = ("us_ssn", "address", "name", "password")

WITHOUT_GUESSES = PrivacyConfig(**{**MARKS, **dict.fromkeys(GUESSES)})

ALL = PrivacyConfig(**MARKS)


def key_of(prefix: str, length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """A key that no one has: put together here, so that no scanner of repositories stumbles over this file."""
    rng = np.random.default_rng(length)
    return prefix + "".join(rng.choice([*alphabet], length))


def part_of_jwt(content: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


AWS_ID = key_of("AKIA", 16, string.ascii_uppercase + "234567")
AWS_SECRET = key_of("", 40, string.ascii_letters + string.digits + "+/")
GITHUB = key_of("ghp_", 36)
GITHUB_FINE = key_of("github_pat_", 22) + key_of("_", 59)
GITLAB = key_of("glpat-", 20)
SLACK = "xoxb-" + "-".join(key_of("", size, string.digits) for size in (12, 13)) + key_of("-", 24)
OPENAI = key_of("sk-proj-", 48)
ANTHROPIC = key_of("sk-ant-api03-", 60)
HUGGING_FACE = key_of("hf_", 34)
GOOGLE = key_of("AIza", 35)
JWT = ".".join((part_of_jwt({"alg": "HS256", "typ": "JWT"}), part_of_jwt({"sub": "1234567890"}), key_of("", 43)))
NO_JWT = ".".join((part_of_jwt({"name": "a long enough value"}), part_of_jwt({"sub": "1234567890"}), key_of("", 43)))
DASHES = "-" * 5
PEM = (
    f"{DASHES}BEGIN RSA PRIVATE KEY{DASHES}\n{key_of('', 64)}\n{key_of('', 30)}==\n{DASHES}END RSA PRIVATE KEY{DASHES}"
)

TAKEN = [
    ("email", "write to {} soon", "bob@corp.com"),
    ("email", "<{}>", "first.last+tag@mail.example-shop.co.uk"),
    ("email", "mailto:{}?subject=x", "a_b-c@uni-bonn.de"),
    ("email", "{}", "x@y.io"),
    ("email", "({}).", "JOHN@ACME.COM"),
    ("email", "'{}'", "o'neil@corp.ie"),
    ("email", "Bob <{}>, Ann", "bob@sub.sub.corp.org"),
    ("email", "mail {}.\nNext", "John.Doe@Gmail.Com"),
    ("email", "邮箱{}。", "tom@web.de"),
    ("email", "{},x", "1234@qq.com"),
    ("ip_address", "from {} port 22", "93.184.215.14"),
    ("ip_address", "http://{}:8080/x", "52.84.150.39"),
    ("ip_address", "({}/24)", "185.199.108.0"),
    ("ip_address", "host {}.", "8.18.80.18"),
    ("ip_address", "DNS {} and", "2001:4860:4860::8888"),
    ("ip_address", "[{}]:443", "2a00:1450:4001:830::200e"),
    ("ip_address", "{}", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"),
    ("ip_address", "{}/32", "2620:fe::fe"),
    ("phone", "call {} now", "212-555-1234"),
    ("phone", "call {}.", "(212) 555-1234"),
    ("phone", "fax {}", "(212)555-1234"),
    ("phone", "{}", "1-800-234-5678"),
    ("phone", "{} x", "212.555.1234"),
    ("phone", "Tel. {},", "+1 212 555 1234"),
    ("phone", "Tel {}", "+1 (212) 555-1234"),
    ("phone", "{}", "+442079460958"),
    ("phone", "{};", "+44 20 7946 0958"),
    ("phone", "{}", "+44 (0)20 7946 0958"),
    ("phone", "{}", "+49 30 1234567"),
    ("phone", "{}", "+49 (0) 30 901820"),
    ("phone", "{}", "+33 1 23 45 67 89"),
    ("phone", "{}", "+86 138 0013 8000"),
    ("phone", "{}", "+91 98765 43210"),
    ("phone", "{}", "+7 495 123-45-67"),
    ("phone", "Phones\n{}\nno more", "+7 495 123-45-67"),
    ("phone", "{}", "+55 11 91234-5678"),
    ("phone", "{}\nx", "01 42 68 53 00"),
    ("phone", "{}", "06.12.34.56.78"),
    ("phone", "{}", "020 7946 0958"),
    ("phone", "{}", "07700 900 123"),
    ("phone", "{}", "01632 960123"),
    ("phone", "{}", "030/1234567"),
    ("phone", "{}", "089 / 1234567"),
    ("phone", "{}", "(089) 1234567"),
    ("phone", "{}", "0412 345 678"),
    ("phone", "{}", "03-1234-5678"),
    ("iban", "to {}.", "DE89370400440532013000"),
    ("iban", "to {},", "DE89 3704 0044 0532 0130 00"),
    ("iban", "{}", "GB82 WEST 1234 5698 7654 32"),
    ("iban", "{} BIC", "FR14 2004 1010 0505 0001 3M02 606"),
    ("iban", "{}", "NO9386011117947"),
    ("iban", "{}", "MT84MALT011000012345MTLCAST001S"),
    ("card", "card {} exp", "4111 1111 1111 1111"),
    ("card", "{}", "4111-1111-1111-1111"),
    ("card", "no. {}.", "5500005555555559"),
    ("card", "{}", "3782 822463 10005"),
    ("card", "{}", "378282246310005"),
    ("card", "{}", "6011111111111117"),
    ("card", "{}", "3530111333300000"),
    ("card", "{}", "30569309025904"),
    ("card", "{}", "2223003122003222"),
    ("us_ssn", "SSN {}.", "123-45-6789"),
    ("us_ssn", "{}", "899-99-9999"),
    ("us_ssn", "SSN: {}", "123 45 6788"),
    ("us_ssn", "social security number is {}", "001 01 0001"),
    ("address", "at {}.", "1600 Amphitheatre Parkway, Mountain View, CA 94043"),
    ("address", "{}", "350 5th Ave Apt 4B\nNew York, NY 10118-0110"),
    ("address", "{}, UK", "Flat 2, 10 Downing Street, London SW1A 2AA"),
    ("address", "in der {},", "Hauptstraße 5a"),
    ("address", "({})", "Unter den Linden 77, 10117 Berlin"),
    ("address", "{}", "P.O. Box 123, Springfield, IL 62704"),
    ("address", "{}", "Postfach 10 20 30, 50667 Köln"),
    ("name", "said Mr. {}.", "Okonkwo"),
    ("name", "Dear {},", "Ngozi"),
    ("name", "by {}'s", "Marie Curie"),
    ("name", "{} wrote", "John F. Kennedy"),
    ("name", "{},", "Ludwig van Beethoven"),
    ("name", "Frau {} ist", "Müller-Lüdenscheidt"),
    ("name", "Name: {}\n", "Xiuying O'Brien"),
    ("api_key", "id = {}", AWS_ID),
    ("api_key", "aws_secret_access_key = {}", AWS_SECRET),
    ("api_key", '"AWS_SECRET_ACCESS_KEY": "{}"', AWS_SECRET),
    ("api_key", "token={}", GITHUB),
    ("api_key", "https://{}@github.com/x", GITHUB),
    ("api_key", "{}", GITHUB_FINE),
    ("api_key", "'{}'", GITLAB),
    ("api_key", "{}\n", SLACK),
    ("api_key", 'OPENAI = "{}"', OPENAI),
    ("api_key", "{}", ANTHROPIC),
    ("api_key", "{}", HUGGING_FACE),
    ("api_key", "?key={}&x", GOOGLE),
    ("jwt", "Bearer {}", JWT),
    ("private_key", "x\n{}\ny", PEM),
    ("private_key", '"{}"', PEM.replace("\n", "\\n")),
    ("private_key", "{}", PEM.replace("RSA ", "")),
    ("private_key", "{}", PEM.replace("RSA ", "OPENSSH ")),
    ("password", 'password = "{}"', "hunter2!"),
    ("password", "PASSWORD={}\n", "s3cret/pass"),
    ("password", "'db_passwd': '{}'", "q9$kk-2a"),
    ("password", "api-key: {}", "9f8e7d6c5b4a"),
    ("password", 'token := "{}"', "tok_12345"),
]
"""Kind, the text around, what is taken out of it."""

LEFT = [
    *("@property\ndef f(self): ...", "user@host is a login", "x = a @ b.T", "x@w.shape", "q@k.mT", "(a@b).sum()"),
    *("a@b.to(device)", "icon@2x.png", "lodash@4.17.21", "git@github.com:user/repo.git", "@user@mastodon.social"),
    *("bob@example.com", "ann@mail.example.org", "me@localhost", "x@y", "foo@bar..com", "@media screen", "a@.com"),
    *("name@server.internal-only", "uses: actions/checkout@v4.1.2", "bob at corp dot com", "é@é.fr", "@b.com"),
    *("127.0.0.1", "192.168.1.10", "10.0.0.255", "0.0.0.0", "255.255.255.255", "172.16.5.4", "169.254.1.1"),
    *("version 4.18.20.1", "v1.22.33.44", "Chrome/91.0.44.124", "pkg==1.20.30.40", "1.2.3.4", "999.1.1.1"),
    *("1.3.6.1.4.1.311", "12.34.56.78.90", "01.02.03.04", "192.0.2.1", "203.0.113.77", "section 10.11.12.13"),
    *("update V8 to 9.5.172.19", "Released 3.6.11.1", "dpkg 1.15.7.2", "224.0.0.251", "1.0.99.1", "[22.2.6.4]"),
    *("std::x", "a::b", "dead::beef", "::", "::1", "fe80::1", "fc00::1", "2001:db8::1", "std::vector<int>::iterator"),
    *(
        "12:34:56",
        "aa:bb:cc:dd:ee:ff",
        "x[::2]",
        "x[1::2]",
        "key: value",
        "1:2:3:4:5:6:7",
        "cafe::f(x)",
        "ab:cd::ef::1",
    ),
    *("2024-01-31", "31.12.2024", "01/02/2020", "2024-01-31T23:59:59Z", "20240131 235959", "01.02.03.04.05"),
    *(
        "978-3-16-148410-0",
        "0-306-40615-2",
        "ISSN 0378-5955",
        "doi:10.1000/182",
        "90210-1234",
        "555-1234",
        "5551234567",
    ),
    *("+12345678", "a+442079460958", "x+442079460958", "3.14159265358979", "-212.555.1234.5", "212-555-12345"),
    *("112-555-1234", "211-555-1234", "212-155-1234", "234 567 8901", "00 01 02 03 04 05 06 07", "01 02 03 04 05"),
    *(
        "0a 01 22 33 44 55 ff",
        "+0000 UTC",
        "+999 12345678",
        "@@ -1,2 +3,4 @@",
        "-49 12\n+49 12 34 56 78 90",
        "@@ @@\n+49 12 34 56 78\n+x",
        "+49 12 34 56 78\n+x",
        "0123456789",
    ),
    *("id 212-555-1234-99", "$234.567.8901", "1,234,567,890", "12-34-56-78-90", "2019-2020", "2010-2015, 2017-2020"),
    *("DE89370400440532013001", "GB82 WEST 1234 5698 7654 33", "DE8937040044053201300", "XX89370400440532013000"),
    *("DE89 37040044 0532 0130 00", "ABCD1234EFGH5678", "AB12", "DE89370400440532013000X", "xDE89370400440532013000"),
    *("4111 1111 1111 1112", "1234 5678 9012 3456", "4111111111111112", "0000 0000 0000 0000", "/4111111111111111"),
    *("0.4111111111111111", "4111 1111 1111 1111 1", "41111111111111111", "4111-1111 1111-1111", "1600000000000"),
    *(
        "d41d8cd98f00b204e9800998ecf8427e",
        "9e1c070c5d6f4e8a1b2c3d4e5f60718293a4b5c6",
        "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    ),
    *("ghp_" + "x" * 36, "AKIA" + "A" * 16, "sk-fading-circle-container-element", "AKIASHORT", "eyJhbGciOi", NO_JWT),
    *(f"x{GITHUB}", f"{AWS_ID}9", f"a-{OPENAI}", "risk-" + "a1B" * 12, "hf_model", "xoxb-short", "sk-learn"),
    *(f"{DASHES}BEGIN CERTIFICATE{DASHES}\nabc\n{DASHES}END CERTIFICATE{DASHES}", f"{DASHES}BEGIN PRIVATE KEY{DASHES}"),
    *(PEM.replace("RSA", "PUBLIC", 1), PEM.replace("END", "EN"), "BEGIN RSA PRIVATE KEY", "-" * 80),
    *("000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000", "#123-45-6789", "123-45-67890"),
    *("078-05-1120", "219-09-9999", "123 45 6789", "SSN 123 45-6789", "SSN\n123 45 6789", "SSN 078 05 1120"),
    *("In 2019 Wall Street fell", "Bundesstraße 12", "12 angry men", "5 Main", "$5 Main Street", "Figure 3 Road"),
    *("Elizabeth Street", "Dear Sir", "Mr. President's 5", "John Said", "Name: Value", "JohnSmith", "John_Smith Xa"),
    *("/home/John Smith", "John Smith()", "Anna", "Mary and Paul", "Die Straße 5", "a box 7", "10115 Berlin"),
    *(
        'password = os.environ["DB"]',
        "password: str = None",
        "password=password",
        "password = $PASSWORD1",
        "token == abcdef12",
    ),
    *(
        "password = getpass()",
        'secret = "<your secret 1>"',
        "token: Token1",
        "max_tokens = 4096",
        "token = a1.b2c3d4e5",
    ),
    *(
        "aws_secret_access_key = " + "A" * 40,
        f"commit_key = {AWS_SECRET}9",
        "",
        " ",
        "@",
        "+",
        ":",
        "-----",
        "1",
        "::" * 9,
    ),
]
"""What looks like something to take, and is not."""


def redacted(*texts: str, config: PrivacyConfig = ALL) -> tuple[list[str], dict[str, int]]:
    found, counts = redact(Texts.of(texts), config)
    return list(found), counts


@pytest.mark.parametrize(("kind", "around", "taken"), TAKEN, ids=[f"{kind}-{text[:24]!r}" for kind, _, text in TAKEN])
def test_taken(kind, around, taken):
    """Alone, between other documents, and again in its own result."""
    raw, expected = around.format(taken), around.format(f"<{kind}>")
    assert redacted(raw) == ([expected], {kind: 1})
    assert redacted("1", raw, "a@b", raw) == (["1", expected, "a@b", expected], {kind: 2})
    assert redacted(expected) == ([expected], {})
    assert redacted(raw, config=PrivacyConfig(**{**MARKS, kind: None}))[1].get(kind) is None


@pytest.mark.parametrize("text", LEFT, ids=repr)
def test_left(text):
    """Nothing is taken, and the texts come back as they are, not copied."""
    texts = Texts.of(["before 1", text, "2 after"])
    found, counts = redact(texts, ALL)
    assert (list(found), counts) == (list(texts), {})
    assert found is texts


def test_there_are_enough_cases():
    """The tables are what shows that redaction can be trusted; every kind has cases."""
    assert len(TAKEN) >= 80
    assert len(LEFT) >= 120
    assert {kind for kind, _, _ in TAKEN} == set(KINDS)


def test_borders_of_documents():
    """What two documents make together is no address, number or key of either."""
    texts = [
        "bob@corp",
        ".com",
        "ann",
        "@corp.com",
        "4111 1111 ",
        "1111 1111",
        "DE8937040044",
        "0532013000",
        "pass",
        "word='a1b2c3d4'",
    ]
    assert redacted(*texts) == (texts, {})
    assert redacted("x" * 5, "212-555-1234", "9") == (["x" * 5, "<phone>", "9"], {"phone": 1})
    assert redacted("+", "212-555-1234", "-") == (["+", "<phone>", "-"], {"phone": 1})


def test_private_addresses_when_asked():
    """Loopback, private networks and examples; still no versions, and no program text."""
    config = PrivacyConfig(**MARKS, private_ip_addresses=True)
    for text in (
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.10",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "2001:db8::1",
        "fc00::12",
    ):
        assert redacted(text, config=config) == (["<ip_address>"], {"ip_address": 1})
    for text in ("1.2.3.4", "x[::1]", "version 10.0.0.255", "a::b", "::", "x[::2]"):
        assert redacted(text, config=config)[1] == {}


def test_replacements():
    """A mark, a fake, and nothing at all; a fake under example.com is not redacted again."""
    fake = "firstname.lastname@example.com"
    config = PrivacyConfig(email=fake, phone="")
    once, counts = redacted("a bob@corp.com b", "tel 212-555-1234!", config=config)
    assert (once, counts) == ([f"a {fake} b", "tel !"], {"email": 1, "phone": 1})
    assert redacted(*once, config=config) == (once, {})


def test_all_off():
    """Without any kind nothing is looked for."""
    texts = Texts.of([taken for _, _, taken in TAKEN])
    found, counts = redact(texts, PrivacyConfig(**dict.fromkeys(KINDS)))
    assert found is texts
    assert counts == {}


def test_guesses_are_off_by_default():
    """What has no form of its own is redacted only when asked."""
    defaults = PrivacyConfig()
    assert [getattr(defaults, kind) for kind in GUESSES] == [None] * len(GUESSES)
    assert redacted("123-45-6789", 'password = "hunter2!"', config=defaults)[1] == {}


def test_of_two_that_overlap_one_is_taken():
    """A key in an assignment is a key; an address inside of a private key's block is a part of it."""
    assert redacted(f"token={GITHUB}")[1] == {"api_key": 1}
    assert redacted(PEM.replace("==", "== bob@corp.com"))[1] == {"private_key": 1}
    assert redacted("bob@corp.com,ann@corp.com;+1 212 555 1234")[1] == {"email": 2, "phone": 1}


def test_all_at_once():
    """All cases in one document: every one is found in company too."""
    lines = [around.format(taken) for _, around, taken in TAKEN]
    expected = [around.format(f"<{kind}>") for kind, around, _ in TAKEN]
    text, counts = redacted("\n\n".join(lines))
    assert text == ["\n\n".join(expected)]
    assert sum(counts.values()) == len(TAKEN)
    assert list(counts) == sorted(KINDS)


def test_lists_of_numbers_are_no_patches():
    """Line after line begins with a plus sign; each is a number."""
    assert redacted("+49 30 1234567\n+49 30 7654321\n+1 212 555 1234") == (["<phone>\n<phone>\n<phone>"], {"phone": 3})


def test_texts_that_do_not_begin_at_zero():
    """A slice of a column, as Arrow gives it."""
    whole = Texts.of(["bob@corp.com", "ann@corp.com!", "x"])
    found, counts = redact(Texts(whole.buffer, whole.offsets[1:3]), ALL)
    assert (list(found), counts) == (["<email>!"], {"email": 1})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("a1@.:-+=()/ \n\"'EéYJ_DxX0", max_size=40) | st.text(max_size=30), max_size=4))
def test_any_text_survives(texts):
    """No text breaks it, and what is around the marks is untouched."""
    texts = [text.encode(errors="ignore").decode() for text in texts]
    found, counts = redacted(*texts)
    assert sum(counts.values()) == sum(text.count("<") for text in found) - sum(text.count("<") for text in texts)
    for before, after in zip(texts, found, strict=True):
        pieces = re.split("<(?:" + "|".join(KINDS) + ")>", after)
        place = 0
        for piece in pieces:
            place = before.index(piece, place) + len(piece)


@settings(max_examples=300, deadline=None)
@given(st.ip_addresses(v=6), st.booleans())
def test_ipv6_against_the_standard_library(address, exploded):
    """Global unicast addresses are found in every way of writing them, others are left."""
    text = f"at {address.exploded if exploded else address} now"
    public = address.is_global and address in ipaddress.ip_network("2000::/3")
    assert redacted(text)[1] == ({"ip_address": 1} if public else {})


@settings(max_examples=300, deadline=None)
@given(st.ip_addresses(v=4))
def test_ipv4_against_the_standard_library(address):
    """Public addresses are found, others are left; so are those that look like versions."""
    first, second, *_ = address.packed
    looks_like_version = len(str(address)) <= 9 or (first < 10 and second < 10)
    public = address.is_global and not address.is_multicast
    assert redacted(f"at {address} now")[1] == ({"ip_address": 1} if public and not looks_like_version else {})


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(IBAN_LENGTHS)), st.randoms(use_true_random=False))
def test_ibans_against_their_definition(country, random):
    """Check digits by the definition make an account of any country; any other two do not."""
    body = "".join(random.choices(string.digits + string.ascii_uppercase, k=IBAN_LENGTHS[country] - 4))
    digits = "".join(str(string.digits.index(c) if c.isdigit() else ord(c) - 55) for c in body + country.decode())
    check = 98 - int(digits + "00") % 97
    for number in (check, (check + random.randint(1, 95)) % 97 + 2 if check > 97 else (check + 1) % 97):
        is_right = int(digits + f"{number:02d}") % 97 == 1
        found = redacted(f"pay {country.decode()}{number:02d}{body} now", config=WITHOUT_GUESSES)[1]
        assert found.get("iban", 0) == is_right


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["4", "51", "2221", "34", "6011", "3528", "300", "62"]), st.randoms(use_true_random=False))
def test_cards_against_luhn(prefix, random):
    """Exactly one last digit makes a card."""
    size = {"34": 15, "300": 14}.get(prefix, 16)
    number = prefix + "".join(random.choices(string.digits, k=size - len(prefix) - 1))
    right = []
    for digit in string.digits:
        doubled = [int(d) * 2 if place % 2 else int(d) for place, d in enumerate(reversed(number + digit))]
        right.append(sum(n // 10 + n % 10 for n in doubled) % 10 == 0)
        assert CARD_FORMS.match((number + digit).encode())
        assert redacted(f"no {number}{digit}.")[1] == ({"card": 1} if right[-1] else {})
    assert sum(right) == 1


def test_the_scan_grows_and_keeps_order():
    """Many candidates, over the first size of its arrays, come in order of place with their documents."""
    texts = Texts.of(["a@b.cc 4111111111111111 " * 50] * 9)
    codes, places, documents = find_candidates(texts.buffer, texts.offsets, (2 << ASSIGNMENT) - 1)
    assert codes.size == 900
    assert np.all(np.diff(places) > 0)
    assert np.array_equal(documents, np.searchsorted(texts.offsets, places, side="right") - 1)
