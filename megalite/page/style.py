"""How a page looks: two colours for data, grey for the rest, light or dark as the reader's system is.

On a phone nothing is scaled down and nothing runs off to the side: rows of tables become blocks, and what drawings say
is text beside them, not inside.
"""

from __future__ import annotations

_BASE = """
:root { --page: #ffffff; --box: #f6f7f9; --ink: #1c2330; --faint: #667085; --line: #e3e6eb;
        --a: #3867d6; --b: #f0a53c; --link: #2450b4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --box: #1d2128; --ink: #e6e8ec; --faint: #98a1b0; --line: #2e343d;
          --a: #7b9cf2; --b: #d9933a; --link: #9db7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
main { max-width: 860px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 8px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 6px 0 12px; max-width: 44em; }
.faint, caption { color: var(--faint); }
.tiles { display: grid; gap: 12px; margin: 24px 0 0;
         grid-template-columns: repeat(auto-fit, minmax(min(230px, 42%), 1fr)); }
.tile { background: var(--box); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--faint); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 8px 0; }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: 13px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { unicode-bidi: isolate; }
.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; margin: 12px 0; }
svg.strip { height: 12px; margin: 0; border-radius: 2px; }
.bars { margin: 12px 0; }
.bars > div { display: grid; grid-template-columns: minmax(0, 13em) minmax(0, 1fr) minmax(0, 11em); gap: 2px 12px;
              align-items: center; padding: 3px 0; font-size: 13px; font-variant-numeric: tabular-nums; }
.bars span { display: block; unicode-bidi: isolate; } .bars small { color: var(--faint); font-size: 12px; }
.bars svg + svg { height: 6px; margin-top: 2px; }
.bars.plain > div > :first-child { text-align: right; }
.bars.funnel > div { grid-template-columns: minmax(0, 12em) minmax(0, 1fr) minmax(0, 15em); padding: 6px 0; }
.histogram { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); margin: 12px 0; font-size: 12px;
             color: var(--faint); max-width: 100%; }
.histogram svg { height: 150px; margin: 0; border-bottom: 1px solid var(--line); }
.histogram > :last-child span { margin-left: -4em; text-align: right; }
.histogram span { white-space: nowrap; display: block; height: 1.6em; font-variant-numeric: tabular-nums; }
.a { fill: var(--a); } .b { fill: var(--b); }
.key { color: var(--faint); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 6px -1px 0; }
.key i.a { background: var(--a); } .key i.b { background: var(--b); margin-left: 18px; }
details { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; }
code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
a { color: var(--link); overflow-wrap: anywhere; }
@media screen and (max-width: 600px) {
  main { padding: 22px 14px 60px; }
  h1 { font-size: 24px; } h2 { margin-top: 34px; }
  .tile { padding: 11px 13px; } .tile b { font-size: 21px; }
  .tile:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .bars > div { grid-template-columns: minmax(0, 1fr) auto; padding: 6px 0; }
  .bars.funnel > div { grid-template-columns: minmax(0, 1fr); } .bars.funnel b { margin-right: 6px; }
  .bars.funnel span { display: inline; } .bars.funnel > div > :nth-child(3) { text-align: left; }
  .bars.funnel > div > :nth-child(3) small { display: block; }
  .bars > div > :nth-child(2) { grid-column: 1 / -1; grid-row: 2; }
  .bars > div > :nth-child(3) { text-align: right; } .bars.plain > div > :first-child { text-align: left; }
  .histogram .seldom { visibility: hidden; }
  details { padding: 4px 12px; } summary { padding: 7px 0; } }
@media print { details > * { display: block; } main { padding: 0; } }
"""

_BLOCKS = """
@media screen and (max-width: WIDTH) {
  TABLE, TABLE tbody { display: block; } TABLE thead, TABLE .nothing { display: none; }
  TABLE tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(10em, 45%), 1fr)); gap: 5px 14px;
                padding: 9px 0; border-bottom: 1px solid var(--line); }
  TABLE td { border: 0; padding: 0; text-align: left; white-space: normal; }
  TABLE td:first-child, TABLE td.wide { grid-column: 1 / -1; } TABLE td:first-child { font-weight: 600; }
  TABLE td:first-child div { font-weight: 400; }
  TABLE td[data-label]::before { content: attr(data-label); display: block; color: var(--faint); font-size: 12px; }
}
"""
"""A table whose rows are blocks on a narrow page: the first cell above, the others under it with their titles."""


def _blocks(tables: str, width: int) -> str:
    """Rows as blocks on pages up to a width in pixels."""
    return _BLOCKS.replace("TABLE", tables).replace("WIDTH", f"{width}px")


CSS = _BASE + _blocks(".stacked", 600) + _blocks(".many", 900)
