"""The styles of a run's page: light and dark, wide and narrow, and on paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --dim: #556070; --paper: #fbfaf7;
 --card: #ffffff; --edge: #dcd9d0; --mark: #f1eee6; --bad: #b3261e; --good: #1c7044;
 --c0: #1f5fbf; --c1: #8a93a0; --c2: #c26a00; --c3: #7a4bb3; --c4: #2f7d6b; --c5: #a83a5c;
 --c6: #6b6f1d; --drafted: #cfe6d8; }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e6e9ee; --dim: #a3aebc; --paper: #14181e; --card: #1b2129; --edge: #313a46;
  --mark: #242c36; --bad: #ff8a80; --good: #6fd09c; --c0: #74a9ff; --c1: #8b95a3; --c2: #f0a44b;
  --c3: #bb9af0; --c4: #66c7b0; --c5: #f08aa8; --c6: #c4c95f; --drafted: #1f5138; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 40px 0 10px; padding-bottom: 4px;
 border-bottom: 1px solid var(--edge); }
h3 { font-size: 1rem; margin: 18px 0 4px; }
p { margin: 8px 0; max-width: 72ch; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .bad { color: var(--bad); } .good { color: var(--good); }
.notice { border: 1px solid var(--bad); border-left-width: 6px; border-radius: 8px;
 background: var(--card); padding: 8px 14px; margin: 12px 0; overflow-wrap: anywhere; }
.notice ul { margin: 4px 0; padding-left: 20px; }
.big { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
 margin: 18px 0 4px; }
.big div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 10px 14px; }
.big b { display: block; font-size: 1.6rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
dl.what { display: grid; grid-template-columns: 9.5rem minmax(0, 1fr); gap: 2px 12px;
 margin: 14px 0; }
dl.what dt { color: var(--dim); } dl.what dd { margin: 0; }
dl.what dt, dl.what dd { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr));
 gap: 16px; }
.trio { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 8px 20px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 12px 14px; min-width: 0; }
figure + figure.set { margin-top: 12px; }
figcaption { font-weight: 600; margin-bottom: 6px; overflow-wrap: anywhere; }
figure p { font-size: .85rem; color: var(--dim); margin: 4px 0 0; }
svg { width: 100%; height: auto; display: block; max-width: 560px; }
svg text { fill: var(--dim); font-size: 12px; font-family: inherit; }
.rule { stroke: var(--edge); stroke-width: 1; }
.whisker { stroke: var(--ink); stroke-width: 2; }
.mark { stroke: var(--c1); stroke-width: 1.5; stroke-dasharray: 4 3; }
.mark.stop, .mark.alarm { stroke: var(--bad); } .mark.restart { stroke: var(--c2); }
.mark.wait { stroke-dasharray: 1 3; }
.line { fill: none; stroke-width: 2; }
.bar.s0, .dot.s0 { fill: var(--c0); } .bar.s1, .dot.s1 { fill: var(--c2); }
.bar.s2, .dot.s2 { fill: var(--c3); } .dot.s3 { fill: var(--c4); } .dot.s4 { fill: var(--c5); }
.dot.s5 { fill: var(--c6); } .bar.s6, .dot.s6 { fill: var(--c1); }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c2); stroke-dasharray: 7 3; }
.line.s2 { stroke: var(--c3); stroke-dasharray: 2 3; }
.line.s3 { stroke: var(--c4); stroke-dasharray: 10 3 2 3; }
.line.s4 { stroke: var(--c5); stroke-dasharray: 4 2; }
.line.s5 { stroke: var(--c6); stroke-dasharray: 12 4; }
.line.s6 { stroke: var(--c1); stroke-dasharray: 1 2; }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; color: var(--dim);
 margin: 6px 0 0; list-style: none; padding: 0; }
.key svg { display: inline-block; width: 26px; height: 10px; vertical-align: middle; }
.moments { margin: 10px 0; padding: 0; list-style: none; font-size: .92rem; }
.moments li { display: grid; grid-template-columns: 2.2rem 11rem minmax(0, 1fr); gap: 2px 8px;
 padding: 3px 0; border-bottom: 1px solid var(--edge); overflow-wrap: anywhere; }
.moments b, .moments .when { color: var(--dim); font-variant-numeric: tabular-nums; }
.moments .stop, .moments .alarm { color: var(--bad); }
.wide { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; font-size: .92rem; width: 100%;
 font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--edge);
 vertical-align: top; }
th { font-weight: 600; color: var(--dim); }
td.n, th.n { text-align: right; white-space: nowrap; }
td.n + td:not(.n), th.n + th:not(.n) { padding-left: 12px; }
.wide td code { white-space: nowrap; }
td.long { min-width: 16rem; overflow-wrap: anywhere; }
.steps { display: grid; gap: 8px; margin: 8px 0; }
.step { display: grid; grid-template-columns: 9.5rem minmax(0, 1fr); gap: 4px 12px;
 align-items: center; }
.step .track { background: var(--mark); border-radius: 4px; position: relative; height: 24px; }
.step .fill { background: var(--c0); opacity: .32; height: 100%; border-radius: 4px; }
.step .said { position: absolute; left: 8px; top: 0; line-height: 24px; font-size: .9rem;
 white-space: nowrap; font-variant-numeric: tabular-nums; }
.step .why { grid-column: 2; font-size: .85rem; color: var(--dim); overflow-wrap: anywhere; }
.step .why.bad { color: var(--bad); }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 8px 14px; margin: 8px 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 10px; padding: 8px 10px;
 background: var(--mark); border-radius: 6px; font: .85rem/1.45 ui-monospace, monospace; }
.part { border-left: 4px solid var(--edge); padding-left: 10px; margin: 10px 0; }
.part.prompt, .part.tools { border-color: var(--c1); } .part.reasoning { border-color: var(--c3); }
.part.content { border-color: var(--c0); } .part.call { border-color: var(--c2); }
.part > b { font-size: .8rem; letter-spacing: .04em; text-transform: uppercase; color: var(--dim);
 overflow-wrap: anywhere; }
#samples { touch-action: pan-y pinch-zoom; }
mark { background: var(--drafted); color: var(--ink); border-bottom: 2px solid var(--good); }
.browser { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 10px 0;
 position: sticky; top: 0; background: var(--paper); padding: 8px 0; z-index: 1; }
.browser[hidden] { display: none; }
.browser label { font-size: .85rem; color: var(--dim); max-width: 100%; }
.browser select, .browser button { font: inherit; color: var(--ink); background: var(--card);
 border: 1px solid var(--edge); border-radius: 6px; min-height: 40px; padding: 4px 12px;
 max-width: 100%; }
.browser select { font-size: 1rem; }
.browser button { cursor: pointer; }
.browser output { font-variant-numeric: tabular-nums; color: var(--dim); }
:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
code { font-family: ui-monospace, monospace; font-size: .88em; overflow-wrap: anywhere; }
@media (max-width: 560px) {
 .trio { grid-template-columns: minmax(0, 1fr); }
 .step, dl.what { grid-template-columns: minmax(0, 1fr); } .step .why { grid-column: 1; }
 dl.what dd { margin-bottom: 6px; }
 .moments li { grid-template-columns: 2.2rem minmax(0, 1fr); }
 .moments .words { grid-column: 2; } }
@media print { .browser { display: none; } details.sample { display: block; } }
"""
