"""The style of the page: one column, both colour schemes, and paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff; --panel: #f4f6f8; --line: #d5dbe1;
  --mark: #111111; --best: #0b6e4f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #a3adb8; --page: #14171a; --panel: #1d2226;
  --line: #343b42; --mark: #ffffff; --best: #58c79a; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 4px; display: flex;
  justify-content: space-between; align-items: baseline; gap: 12px; }
h3 { font: 600 .9rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0 0 4px;
  overflow-wrap: anywhere; }
.kind { margin: 0; color: var(--soft); text-transform: uppercase; letter-spacing: .06em; font-size: .8rem; }
.machine, .note, .under, .files { color: var(--soft); font-size: .9rem; }
.machine { margin: 2px 0 12px; overflow-wrap: anywhere; }
.note { margin: 0 0 10px; }
.under { margin: 0 0 10px; padding-left: 6.5rem; overflow-wrap: anywhere; }
.advice { font-size: 1.12rem; margin: 0; padding: 12px 16px; background: var(--panel);
  border-left: 4px solid var(--best); border-radius: 4px; overflow-wrap: anywhere; }
.files { font-weight: 400; white-space: nowrap; }
.files a { color: inherit; margin-left: 8px; }
section { margin-top: 34px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; background: var(--panel); }
th:first-child { text-align: left; white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
tbody th { font: 600 .88rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
tr.chosen > * { background: color-mix(in srgb, var(--best) 10%, transparent); }
.best { color: var(--best); font: 600 .75rem system-ui, sans-serif; text-transform: uppercase; margin-left: 6px; }
.error { color: var(--bad); font: .85rem/1.4 system-ui, sans-serif; margin: 2px 0 0; white-space: normal; }
.group { margin: 0 0 16px; break-inside: avoid; }
.row { display: grid; grid-template-columns: 6rem minmax(0, 1fr) 9rem; gap: 8px; align-items: center; margin: 2px 0;
  font-size: .88rem; }
.what { color: var(--soft); white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.figure { font-variant-numeric: tabular-nums; white-space: nowrap; }
.track { position: relative; display: flex; height: 20px; background: var(--panel); border-radius: 3px; }
.piece { height: 100%; min-width: 0; flex: none; }
.lane { height: 16px; overflow: hidden; }
.bar { position: absolute; top: 0; bottom: 0; min-width: 1px; border-right: 1px solid var(--page); }
.hatch { background-image: repeating-linear-gradient(135deg, rgba(255,255,255,.45) 0 3px, transparent 3px 7px); }
.mark { position: absolute; top: -3px; bottom: -3px; width: 3px; margin-left: -1px; background: var(--mark); }
.mark.limit { background: var(--bad); width: 2px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 0 0 12px;
  font-size: .88rem; }
.key { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px; vertical-align: -2px; }
.units td.share, .units th:nth-child(2), .units th:nth-child(3) { min-width: 8rem; text-align: left; }
.mini { display: inline-block; height: 10px; border-radius: 2px; margin-right: 6px; max-width: calc(100% - 3.4rem);
  vertical-align: 0; }
.plain { padding-left: 1.2rem; margin: 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) minmax(0, 1fr); gap: 4px 16px; margin: 0 0 10px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 600px) { main { padding: 16px 14px 48px; } h1 { font-size: 1.5rem; }
  .row { grid-template-columns: 4.9rem minmax(0, 1fr); } .figure { grid-column: 2; margin-top: -2px;
  font-size: .82rem; }
  .row:has(.lane) .figure:empty { display: none; } .under { padding-left: 5.4rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; } .units td.share { min-width: 6.5rem; } }
@media print { :root { --ink: #000; --soft: #444; --page: #fff; --panel: #f4f4f4; --line: #bbb; --mark: #000; }
  body { font-size: 11pt; } main { max-width: none; padding: 0; } .scroll { overflow: visible; border: 0; }
  .piece, .bar, .key, .mark, .mini, .track { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .files { display: none; } section { break-inside: auto; } h2, h3 { break-after: avoid; } }
"""
