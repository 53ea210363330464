"""Whether a candidate is an e-mail address or an IP address."""

from __future__ import annotations

import ipaddress
import re

from megalite.corpus.privacy.window import Span, Window

_GENERAL = """
academy aero agency app art arpa asia bank biz blog business care cat center church city cloud club co codes com
community company consulting coop design dev digital edu education email energy engineering events expert finance
foundation fund gallery global gmbh gov group guru health help host hosting inc info institute int international
jobs law legal life link live lol ltd management market marketing me media men mil mobi money museum name net
network news ngo ninja one online ong org page partners photo photos plus post press pro productions pub racing
school science services shop site social software solutions space store studio support systems team tech
technology tel today tools top tours training travel tv uno ventures video vip website wiki work works world
wtf xxx xyz yoga zone berlin london paris nyc tokyo wien hamburg koeln bayern swiss africa google amazon
"""

_COUNTRIES = """
ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd
cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge
gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh
ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw
mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb
sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk
us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw
"""

TOP_DOMAINS = frozenset((_GENERAL + _COUNTRIES).encode().split())
"""In small letters."""


LOCAL_CHARACTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-'"

MAX_LOCAL = 64
"""Bytes before the @ (RFC 5321)."""

LABEL = rb"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

DOMAIN = re.compile(rb"(?:%b\.){1,127}([a-z]{2,18}|[A-Z]{2,18}|[A-Z][a-z]{2,17})(?!-?[A-Za-z0-9_(@])" % LABEL)
"""So many labels that no address of more fits in 255 bytes (RFC 1035)."""

RESERVED_ENDS = (b".example.com", b".example.org", b".example.net", b".example", b".test", b".invalid", b".localhost")
"""Set aside for examples (RFC 2606)."""

DOTTED_QUAD = re.compile(rb"\d{1,3}(?:\.\d{1,3}){3}(?![0-9A-Za-z_]|[.-][0-9A-Za-z])")

VERSION_BEFORE = re.compile(
    rb"(?:\b(?:v|ver|version|release|rev|revision|build|firmware|section|sec|chapter|figure|table|clause)\.?[ :=]*"
    rb"|==|>=|<=|~=|!=|[0-9A-Za-z)]/|[A-Za-z]-)\Z",
    re.IGNORECASE,
)
"""What stands before a version or a section number, and before no address."""

MAX_BEFORE = 16

MAX_VERSION_DIGITS = 6
"""Four numbers of so few digits together are a version: 1.15.7.2."""

HEX_RUN = re.compile(rb"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}(?:(?<=:)\d{1,3}(?:\.\d{1,3}){3})?(?![0-9A-Za-z_:])")


GIVEN_OUT = ipaddress.IPv6Network("2000::/3")

SLICE_BEFORE = re.compile(rb"[0-9A-Za-z_\])]\[\Z")


def find_email(window: Window) -> Span | None:
    """The address around an @.

    Left alone: names of examples, handles (`@user@server.org`), the git user of a clone address, unknown top domains.
    """
    before = window.before(MAX_LOCAL + 2)
    local = before[len(before.rstrip(LOCAL_CHARACTERS)) :]
    kept = local.lstrip(b"._%+-'")
    if not 0 < len(kept) <= MAX_LOCAL or kept.endswith((b".", b"'")):
        return None
    if before[: -len(local)].endswith(b"@"):
        return None
    domain = window.match(DOMAIN, shift=1)
    if domain is None or domain[1].lower() not in TOP_DOMAINS or len(domain[0]) > 255:
        return None
    if (b"." + domain[0].lower()).endswith(RESERVED_ENDS):
        return None
    if kept == b"git" and window.byte_at(domain.end()) in b":/":
        return None
    return window.place - len(kept), domain.end()


def find_ipv4(window: Window, *, private: bool) -> Span | None:
    """The address that begins here.

    Left alone: versions, by what stands before them, or by their small numbers. Of all public addresses about one in
    300 looks like that.
    """
    match = window.match(DOTTED_QUAD)
    if match is None or VERSION_BEFORE.search(window.before(MAX_BEFORE)):
        return None
    try:
        address = ipaddress.IPv4Address(match[0].decode())
    except ValueError:  # a number over 255, or with a leading zero
        return None
    if not address.is_global or address.is_multicast:
        return match.span() if private else None
    first, second = address.packed[:2]
    looks_like_version = len(match[0]) - 3 <= MAX_VERSION_DIGITS or (first < 10 and second < 10)
    return None if looks_like_version else match.span()


def find_ipv6(window: Window, *, private: bool) -> Span | None:
    """The address around its first colon.

    Left alone: what lies in no part of the space that is used, as `dead::beef` and `a::b`, and slices `x[::1]`.
    """
    before = window.before(4)
    match = window.match(HEX_RUN, shift=len(before.rstrip(b"0123456789abcdefABCDEF")) - len(before))
    if match is None:
        return None
    try:
        address = ipaddress.IPv6Address(match[0].decode())
    except ValueError:
        return None
    if address.is_global:
        return match.span() if address in GIVEN_OUT else None
    is_slice = match[0].startswith(b"::") and SLICE_BEFORE.search(window.before(MAX_BEFORE))
    return match.span() if private and address.is_private and int(address) and not is_slice else None
