"""The kinds of places that the scan names, and the beginnings of words that it knows."""

from __future__ import annotations

AT, DOTTED, COLONS, PHONE, PLUS, IBAN, CARD, SSN, KEY, JWT, PEM, ASSIGNMENT = range(12)
"""Codes of candidates: an @, four groups of digits with dots, colons between hexadecimal digits, groups of digits like
a national telephone number's, a plus sign before digits, and so on."""

KEY_PREFIXES = (
    *(b"AKIA", b"ASIA"),  # AWS, permanent and temporary
    *(b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
    *(b"glpat-", b"gldt-", b"glrt-"),
    *(b"xoxb-", b"xoxp-", b"xoxa-", b"xoxr-", b"xoxs-", b"xoxe-", b"xapp-"),  # Slack
    *(b"sk-", b"sk_live_", b"rk_live_"),  # OpenAI and Anthropic; Stripe
    *(b"hf_", b"AIza", b"npm_", b"pypi-"),  # Hugging Face, Google
)

NUM_CODES = 12

PREFIXES = (*((prefix, KEY) for prefix in KEY_PREFIXES), (b"eyJ", JWT), (b"BEGIN ", PEM))
"""A JSON object in base64 begins with eyJ; the first line of a PEM block with five hyphens before BEGIN."""

ASSIGNED_NAMES = (
    *(b"password", b"passwd", b"pwd", b"passphrase", b"secret", b"token"),
    *(b"api_key", b"apikey", b"api-key", b"access_key", b"accesskey", b"access-key", b"secret_key", b"secretkey"),
)
"""Ends of names, in small letters, whose value is a secret."""
