"""Top domains that e-mail addresses have. Without them, `x@w.shape` and `icon@2x.png` would be addresses.

All countries' are here, and of the general ones those that are in use for mail: a rare one is missed, rather than
program text taken.
"""

from __future__ import annotations

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
