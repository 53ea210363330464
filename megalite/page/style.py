"""How a page looks: two colours for data, grey for the rest, light or dark as the reader's system is."""

from __future__ import annotations

CSS = """
:root { --page: #ffffff; --box: #f6f7f9; --ink: #1c2330; --faint: #667085; --line: #e3e6eb;
        --a: #3867d6; --b: #f0a53c; --link: #2450b4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --box: #1d2128; --ink: #e6e8ec; --faint: #98a1b0; --line: #2e343d;
          --a: #7b9cf2; --b: #d9933a; --link: #9db7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
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
td { overflow-wrap: anywhere; unicode-bidi: isolate; }
td:first-child { min-width: 10em; }
.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; margin: 12px 0; }
svg text { fill: var(--ink); font-size: 13px; font-variant-numeric: tabular-nums; unicode-bidi: isolate; }
svg text.name { font-weight: 600; }
svg text.faint { fill: var(--faint); }
svg text.small { font-size: 11.5px; }
svg .axis { stroke: var(--line); }
.a { fill: var(--a); } .b { fill: var(--b); }
.key { color: var(--faint); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 6px -1px 0; }
.key i.a { background: var(--a); } .key i.b { background: var(--b); margin-left: 18px; }
details { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; }
code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
a { color: var(--link); overflow-wrap: anywhere; }
@media print { details > * { display: block; } main { padding: 0; } }
"""
