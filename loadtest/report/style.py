"""
How the pages look: one sheet, light and dark by the reader's own setting, light on paper.

Colours are told apart by people who see fewer (Okabe and Ito's set, darkened for text), and
nothing is said by colour alone.
"""

KIND_COLOURS = ("blue", "orange", "green", "red", "grey", "ink")
"""Of kinds of work that share a chart."""

_LIGHT = """
  --ground: #ffffff; --panel: #f5f6f8; --ink: #1c2128; --soft: #57606a; --rule: #d0d7de;
  --fine: #e6e9ed; --blue: #0b5cad; --blue-1: #5794d0; --blue-2: #2f7fcb; --blue-3: #0b5cad;
  --blue-4: #07386b; --orange: #b45309; --green: #1a7f5a; --grey: #8b949e; --red: #b3261e;
  --haze: #eef0f3; --good: #176f4d; --bad: #a3401a;
  --queue: #e69f00; --assembly: #cc79a7; --compute: #0b5cad; --encode: #3aa889; --rest: #b4bcc5;
  --other: #56b4e9; --network: #b4bcc5; --waiting: #f0e442;
  --refused: #e69f00; --failed: #b3261e; --a: #0b5cad; --b: #b45309;
  --on-light: #16191d; --on-dark: #ffffff;
"""

_DARK = """
  --ground: #12161b; --panel: #1b2027; --ink: #e6eaef; --soft: #a3adb8; --rule: #3b434d;
  --fine: #272e37; --blue: #7cb7f2; --blue-1: #3f74a8; --blue-2: #5c9bd8; --blue-3: #8cc2f7;
  --blue-4: #c9e3ff; --orange: #f0a860; --green: #5cc8a3; --grey: #8b949e; --red: #ff8a80;
  --haze: #1d232b; --good: #5cc8a3; --bad: #f0a860;
  --queue: #e69f00; --assembly: #cc79a7; --compute: #7cb7f2; --encode: #3aa889; --rest: #8a95a1;
  --other: #56b4e9; --network: #8a95a1; --waiting: #f0e442;
  --refused: #e69f00; --failed: #ff8a80; --a: #7cb7f2; --b: #f0a860;
  --on-light: #16191d; --on-dark: #16191d;
"""

_COLOURS = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
"""

_PAGE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main, header, footer { max-width: 1184px; margin: 0 auto; padding: 0 32px; }
header { padding-top: 40px; }
footer { padding-bottom: 48px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 8px; font-weight: 650; }
h2 { font-size: 19px; line-height: 1.3; margin: 48px 0 4px; font-weight: 650; }
h3 { font-size: 14px; line-height: 1.4; margin: 0 0 10px; font-weight: 600; }
p { margin: 0 0 12px; max-width: 88ch; }
.soft, figcaption, caption { color: var(--soft); font-size: 13px; }
a { color: var(--blue); text-underline-offset: 2px; }
a:focus-visible, [tabindex]:focus-visible {
  outline: 2px solid var(--blue); outline-offset: 3px; border-radius: 2px;
}
nav { margin: 20px 0 0; font-size: 14px; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 0; }
.verdict {
  margin: 20px 0 0; padding: 12px 16px; background: var(--panel); border-radius: 6px;
  border-left: 4px solid var(--good);
}
.verdict.doubtful { border-left-color: var(--bad); }
.verdict p { margin: 0; }
.verdict strong { color: var(--good); }
.verdict.doubtful strong { color: var(--bad); }
.verdict ul { margin: 8px 0 0; padding-left: 20px; }
dl.findings {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(230px, 100%), 1fr));
  gap: 16px 32px; margin: 28px 0 0;
}
dl.findings dt { color: var(--soft); font-size: 13px; }
dl.findings dd { margin: 0; }
dl.findings > div { min-width: 0; }
dl.findings .value {
  font-size: 25px; line-height: 1.35; font-weight: 600; font-variant-numeric: tabular-nums;
}
.charts {
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 36px 40px;
  margin-top: 20px;
}
figure { margin: 0; break-inside: avoid; min-width: 0; }
figcaption { margin-top: 6px; max-width: 68ch; }
svg { display: block; width: 100%; height: auto; overflow: hidden; }
.narrow { display: none; }
@media screen and (max-width: 899px) {
  .charts { grid-template-columns: minmax(0, 1fr); }
}
@media screen and (max-width: 619px) {
  main, header, footer { padding-left: 16px; padding-right: 16px; }
  header { padding-top: 24px; }
  .wide { display: none; } .narrow { display: block; }
  h1 { font-size: 23px; } dl.findings { gap: 14px 20px; }
}
.scroll { overflow-x: auto; margin-top: 16px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
caption { text-align: left; padding-bottom: 8px; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--rule); color: var(--soft); font-weight: 500;
  vertical-align: bottom; }
tbody th { text-align: left; font-weight: 500; }
tbody tr + tr > * { border-top: 1px solid var(--fine); }
th:first-child, td:first-child { padding-left: 0; }
.figures { min-width: min(100%, 440px); }
.figures thead th { white-space: normal; overflow-wrap: normal; }
.figures thead th:first-child { text-align: left; }
.figures th:first-child { position: sticky; left: 0; background: var(--ground); }
.figures tr.saturated td, .figures tr.saturated th { background: var(--haze); }
.figures tr.saturated th:first-child { padding-left: 6px; }
.pick { font-weight: 650; }
.figures td.thin { color: var(--soft); font-weight: 400; }
.heat { table-layout: fixed; }
.heat td { text-align: center; min-width: 64px; padding: 9px 8px; border: 2px solid var(--ground); }
.heat tbody tr + tr > * { border-top: 2px solid var(--ground); }
.heat thead th { text-align: center; border: 0; }
.heat tbody th { color: var(--soft); text-align: right; padding-right: 10px; }
.heat .none { color: var(--soft); }
.q0 { background: #e7f0fa; color: #16191d; } .q1 { background: #c9def3; color: #16191d; }
.q2 { background: #a3c7ea; color: #16191d; } .q3 { background: #7aaede; color: #16191d; }
.q4 { background: #2a72b8; color: #ffffff; } .q5 { background: #135a9e; color: #ffffff; }
.q6 { background: #0b4580; color: #ffffff; } .q7 { background: #07305c; color: #ffffff; }
.sides { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 28px 40px;
  margin-top: 16px; align-items: start; }
@media screen and (max-width: 899px) { .sides { grid-template-columns: minmax(0, 1fr); } }
.facts { width: 100%; }
.facts th { color: var(--soft); font-weight: 400; vertical-align: top; white-space: normal;
  width: 42%; text-align: left; padding-left: 0; }
.facts td { text-align: left; white-space: normal; vertical-align: top; overflow-wrap: anywhere; }
pre {
  background: var(--panel); padding: 12px 16px; border-radius: 6px; margin: 12px 0;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
ul.points { margin: 0 0 12px; padding-left: 20px; }
"""

_CHARTS = (
    """text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  fill: var(--ink); font-variant-numeric: tabular-nums; }
text.tick, text.title, text.key, text.saturated-label { fill: var(--soft); }
text.name { font-weight: 600; }
text.halo { paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }
.grid { stroke: var(--fine); stroke-width: 1; } .axis { stroke: var(--rule); stroke-width: 1; }
rect.saturated { fill: var(--haze); }
.limit { stroke: var(--red); stroke-width: 1.5; stroke-dasharray: 5 4; }
text.limit-label { fill: var(--red); font-weight: 600; }
path.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dot { stroke: var(--ground); stroke-width: 1; }
.mark { stroke: var(--ink); stroke-width: 1.5; } .span { stroke: var(--rule); stroke-width: 2; }
"""
    + "\n".join(
        f"path.{look} {{ stroke: var(--{colour}); }} .dot.{look} {{ fill: var(--{colour}); }}"
        f" rect.{look} {{ fill: var(--{colour}); }}"
        for look, colour in (
            ("c1", "blue-1"),
            ("c2", "blue-2"),
            ("c3", "blue-3"),
            ("c4", "blue-4"),
            ("slowest", "grey"),
            ("queue", "queue"),
            ("assembly", "assembly"),
            ("compute", "compute"),
            ("encode", "encode"),
            ("rest", "rest"),
            ("other", "other"),
            ("network", "network"),
            ("waiting", "waiting"),
            ("good", "compute"),
            ("refused", "refused"),
            ("failed", "failed"),
            ("a", "a"),
            ("b", "b"),
            ("a2", "a"),
            ("b2", "b"),
            *((f"k{i + 1}", colour) for i, colour in enumerate(KIND_COLOURS)),
        )
    )
    + """
path.slowest { stroke-dasharray: 2 4; stroke-linecap: round; }
path.b { stroke-dasharray: 6 4; }
text.on-queue, text.on-assembly, text.on-encode, text.on-rest, text.on-refused,
text.on-other, text.on-network, text.on-waiting {
  fill: var(--on-light); }
text.on-compute, text.on-good, text.on-failed { fill: var(--on-dark); }
"""
)

_PRINT = """@media print {
  :root { color-scheme: light; LIGHT }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size: 10.5pt; } nav { display: none; }
  main, header, footer { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  .figures { font-size: 7pt; min-width: 0; }
  .figures th, .figures td { padding: 2px 3px; white-space: normal; }
  .figures th:first-child { position: static; overflow-wrap: normal; }
  .wide { display: none; } .narrow { display: block; }
  h2, h3 { break-after: avoid; } tr { break-inside: avoid; }
  a { color: inherit; text-decoration: none; }
}
""".replace("LIGHT", _LIGHT)

STYLE = _COLOURS + _PAGE + _CHARTS + _PRINT
"""The sheet of a page; it refers to nothing outside itself."""

DRAWING_STYLE = _COLOURS + "svg { background: var(--ground); }\n" + _CHARTS
"""The sheet of a drawing that is a file of its own."""
