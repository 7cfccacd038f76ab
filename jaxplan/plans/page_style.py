"""The style of a plan's page: one column, readable tables, light and dark by the reader's own setting."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --text: #1d2126; --soft: #616a75; --line: #e3e5e8; --track: #eceef0;
  --accent: #2f6db5; --warn: #9a5b00; --warn-page: #fff6e5; --good: #1f7a43; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --text: #e6e8ea; --soft: #99a2ad; --line: #2e343a; --track: #2a3036;
  --accent: #7cb0ee; --warn: #f0b95a; --warn-page: #2e2617; --good: #6fcf97; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h1 code { font-size: 0.95em; }
h2 { font-size: 18px; margin: 40px 0 10px; }
.sub, .note { color: var(--soft); margin: 0 0 12px; }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 12px; margin: 20px 0
8px; } .tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px
16px; } .tile b { display: block; font-size: 23px; font-weight: 650; }
.tile span { color: var(--soft); font-size: 13px; }
.tile .name { text-transform: uppercase; letter-spacing: .05em; font-size: 11px; }
.bar { width: 100%; height: 40px; display: block; }
.track { fill: var(--track); } .marker { stroke: var(--text); stroke-width: 2; stroke-dasharray: 4 3;
  vector-effect: non-scaling-stroke; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; font-size: 13px; color: var(--soft);
} .legend b { color: var(--text); font-weight: 600; } .key i { display: inline-block; width: 10px; height:
  10px; border-radius: 2px; margin-right: 6px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; font-size: 12px;
white-space: nowrap; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space:
nowrap; } td.mono { white-space: nowrap; } tr.group td { background: var(--track); font-weight: 600; padding:
4px 12px; } tr.this td { font-weight: 650; }
.mesh { display: block; } .device { fill: var(--accent); stroke: var(--accent); stroke-width: 1; rx: 2px; }
.share { display: inline-block; width: 120px; height: 9px; background: var(--track); border-radius: 3px;
  overflow: hidden; } .share i { display: block; height: 100%; border-radius: 3px; }
.cut { color: var(--accent); font-weight: 650; }
.warnings { background: var(--warn-page); border: 1px solid var(--line); border-left: 4px solid var(--warn);
  border-radius: 8px; padding: 10px 16px 10px 34px; margin: 0; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
.c0 { fill: #4c78a8; background: #4c78a8; } .c1 { fill: #e58b2d; background: #e58b2d; }
.c2 { fill: #5aa157; background: #5aa157; } .c3 { fill: #b07aa1; background: #b07aa1; }
.c4 { fill: #d9605f; background: #d9605f; } .c5 { fill: #6fb3ae; background: #6fb3ae; }
.c6 { fill: #9c755f; background: #9c755f; }
@media print { body { background: none; } .scroll, .tile { break-inside: avoid; } }
""".strip()
