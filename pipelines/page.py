"""The HTML of a run's page: one template, its styles inside, no script, nothing from outside."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{{ name }}: an Eyas run</title>
<style>
:root { color-scheme: light dark; --ink: #1b2430; --dim: #5b6675; --paper: #fbfaf7;
 --card: #ffffff; --edge: #dcd9d0; --mark: #f1eee6; --bad: #b3261e; --good: #1c7044;
 --c0: #1f5fbf; --c1: #8a93a0; --c2: #c26a00; --c3: #7a4bb3; --c4: #2f7d6b; --c5: #a83a5c;
 --c6: #6b6f1d; }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e6e9ee; --dim: #9aa5b4; --paper: #14181e; --card: #1b2129; --edge: #313a46;
  --mark: #242c36; --bad: #ff8a80; --good: #6fd09c; --c0: #74a9ff; --c1: #8b95a3; --c2: #f0a44b;
  --c3: #bb9af0; --c4: #66c7b0; --c5: #f08aa8; --c6: #c4c95f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 40px 0 10px; padding-bottom: 4px;
 border-bottom: 1px solid var(--edge); }
h3 { font-size: 1rem; margin: 18px 0 4px; }
p { margin: 8px 0; max-width: 72ch; }
.dim { color: var(--dim); } .bad { color: var(--bad); } .good { color: var(--good); }
.big { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
 margin: 18px 0 4px; }
.big div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 10px 14px; }
.big b { display: block; font-size: 1.6rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(360px, 100%), 1fr));
 gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 12px 14px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 6px; }
svg { width: 100%; height: auto; display: block; max-width: 540px; }
svg text { fill: var(--dim); font-size: 12px; font-family: inherit; }
.rule { stroke: var(--edge); stroke-width: 1; }
.whisker { stroke: var(--ink); stroke-width: 2; }
.line { fill: none; stroke-width: 2; }
.bar.s0, .dot.s0 { fill: var(--c0); } .bar.s1 { fill: var(--c1); }
.bar.s2, .dot.s1 { fill: var(--c2); } .dot.s2 { fill: var(--c3); } .dot.s3 { fill: var(--c4); }
.dot.s4 { fill: var(--c5); }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c2); stroke-dasharray: 7 3; }
.line.s2 { stroke: var(--c3); stroke-dasharray: 2 3; }
.line.s3 { stroke: var(--c4); stroke-dasharray: 10 3 2 3; }
.line.s4 { stroke: var(--c5); stroke-dasharray: 4 2; }
.line.s5 { stroke: var(--c6); stroke-dasharray: 12 4; }
.line.s6 { stroke: var(--c1); stroke-dasharray: 1 2; }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: .85rem; color: var(--dim);
 margin-top: 6px; list-style: none; padding: 0; }
.key svg { display: inline-block; width: 26px; height: 10px; vertical-align: middle; }
.wide { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; font-size: .92rem; width: 100%;
 font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--edge);
 vertical-align: top; }
th { font-weight: 600; color: var(--dim); }
td.n, th.n { text-align: right; white-space: nowrap; }
.steps { display: grid; gap: 6px; margin: 8px 0; }
.step { display: grid; grid-template-columns: 9.5rem 1fr; gap: 4px 12px; align-items: center; }
.step .track { background: var(--mark); border-radius: 4px; position: relative; height: 24px; }
.step .fill { background: var(--c0); opacity: .32; height: 100%; border-radius: 4px; }
.step .said { position: absolute; left: 8px; top: 0; line-height: 24px; font-size: .9rem;
 white-space: nowrap; }
.step .why { grid-column: 2; font-size: .85rem; color: var(--dim); }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
 padding: 8px 14px; margin: 8px 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 10px; padding: 8px 10px;
 background: var(--mark); border-radius: 6px; font: .85rem/1.45 ui-monospace, monospace; }
.part { border-left: 4px solid var(--edge); padding-left: 10px; margin: 10px 0; }
.part.prompt { border-color: var(--c1); } .part.reasoning { border-color: var(--c3); }
.part.content { border-color: var(--c0); }
.part > b { font-size: .8rem; letter-spacing: .04em; text-transform: uppercase;
 color: var(--dim); }
code { font-family: ui-monospace, monospace; font-size: .88em; overflow-wrap: anywhere; }
@media (max-width: 520px) { .step { grid-template-columns: 1fr; } .step .why { grid-column: 1; } }
</style>
</head>
<body><main>
{% macro key(names) %}
<ul class="key">{% for one in names %}<li><svg viewBox="0 0 26 10" aria-hidden="true">
<line class="line s{{ loop.index0 }}" x1="0" y1="5" x2="26" y2="5"/></svg> {{ one }}</li>
{% endfor %}</ul>
{% endmacro %}
{% macro barkey(names) %}
<ul class="key">{% for one in names %}<li><svg viewBox="0 0 26 10" aria-hidden="true">
<rect class="bar s{{ loop.index0 }}" width="26" height="10"/></svg> {{ one }}</li>
{% endfor %}</ul>
{% endmacro %}

<header>
<h1>{{ name }}</h1>
<p class="dim">{{ lead }}</p>
{% if big %}<div class="big">{% for label, value in big %}
<div><b>{{ value }}</b>{{ label }}</div>{% endfor %}</div>{% endif %}
</header>

<h2>From prompts to training rows</h2>
{% if funnel %}
<div class="steps">{% for step in funnel %}
<div class="step"><div>{{ step.name }}</div>
<div class="track"><div class="fill" style="width: {{ step.percent }}%"></div>
<div class="said">{{ step.said }}</div></div>
{% if step.why %}<div class="why">{{ step.why }}</div>{% endif %}</div>
{% endfor %}</div>
{% else %}<p class="dim">Not there yet: no stage is finished.</p>{% endif %}

{% if sets %}
<h2>Prompt sets</h2>
<div class="wide"><table>
<thead><tr><th>set</th><th>domain</th><th>used for</th><th class="n">prompts</th>
<th class="n">ok</th><th class="n">rejected</th><th class="n">failed</th>
<th class="n">median prompt</th><th class="n">median answer</th></tr></thead>
<tbody>{% for one in sets %}<tr><td>{{ one.name }}</td><td>{{ one.domain }}</td>
<td>{{ one.use }}</td><td class="n">{{ one.prompts }}</td><td class="n">{{ one.ok }}</td>
<td class="n">{{ one.rejected }}</td><td class="n">{{ one.failed }}</td>
<td class="n">{{ one.prompt_median }}</td><td class="n">{{ one.answer_median }}</td></tr>
{% endfor %}</tbody></table></div>
<p class="dim">Lengths in tokens: prompts as the target reads them, and answers that are ok.</p>
{% if lengths %}<div class="charts">{% for one in lengths %}
<figure><figcaption>{{ one.title }}</figcaption>{{ one.chart }}</figure>
{% endfor %}</div>{% endif %}
{% endif %}

<h2>Training</h2>
{% if training %}
<p>{{ training.said }}</p>
<div class="charts">{% for one in training.charts %}
<figure><figcaption>{{ one.title }}</figcaption>{{ one.chart }}{{ key(one.names) }}</figure>
{% endfor %}</div>
{% if training.heldout %}
<h3>Held-out rows of the training sets</h3>
<div class="wide"><table><thead><tr><th>domain</th><th class="n">simulated AL</th>
{% for k in training.steps %}<th class="n">step {{ k }}</th>{% endfor %}</tr></thead>
<tbody>{% for one in training.heldout %}<tr><td>{{ one.name }}</td><td class="n">{{ one.length }}
</td>{% for rate in one.rates %}<td class="n">{{ rate }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
<p class="dim">Acceptance rate at step k: the share of drafts right at step k, of those that were
right at all steps before.</p>
{% endif %}
{% else %}<p class="dim">Not there yet: the draft was not trained.</p>{% endif %}

<h2>Acceptance length</h2>
{% if acceptance %}
<p>{{ acceptance.said }}</p>
<div class="charts"><figure><figcaption>Acceptance length by domain, with 95% intervals</figcaption>
{{ acceptance.chart }}{{ barkey(acceptance.names) }}</figure></div>
<div class="wide"><table><thead><tr><th>domain</th><th class="n">prompts</th>
{% for one in acceptance.names %}<th class="n">{{ one }}</th>{% endfor %}</tr></thead>
<tbody>{% for one in acceptance.rows %}<tr><td>{{ one.name }}</td><td class="n">{{ one.prompts }}
</td>{% for cell in one.cells %}<td class="n">{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
<p class="dim">{{ acceptance.method }}</p>
{% else %}<p class="dim">Not there yet: the draft was not measured.</p>{% endif %}

<h2>Samples</h2>
{% if samples %}
<p class="dim">{{ samples|length }} responses, spread over the sets. Prompt, reasoning and content
are told apart by token ids, not by searching text.</p>
{% for one in samples %}
<details><summary><code>{{ one.sample_id }}</code>
{% if one.status == "ok" %}<span class="good">ok</span>
{% else %}<span class="bad">{{ one.status }}</span>
{% endif %}
<span class="dim">{{ one.said }}</span></summary>
{% for message in one.messages %}<div class="part prompt"><b>prompt: {{ message.role }}</b>
<pre>{{ message.text }}</pre></div>{% endfor %}
{% if one.reasoning %}<div class="part reasoning"><b>reasoning</b><pre>{{ one.reasoning }}</pre>
</div>{% endif %}
{% if one.content %}<div class="part content"><b>content</b><pre>{{ one.content }}</pre></div>
{% else %}<p class="dim">No content. {{ one.detail }}</p>{% endif %}
</details>{% endfor %}
{% else %}<p class="dim">Not there yet: no response is committed.</p>{% endif %}

<h2>Provenance</h2>
{% if stages %}
<div class="wide"><table><thead><tr><th>stage</th><th class="n">time</th><th class="n">files</th>
<th class="n">bytes</th><th>recipe part</th><th>result</th></tr></thead>
<tbody>{% for one in stages %}<tr><td>{{ one.name }}</td><td class="n">{{ one.time }}</td>
<td class="n">{{ one.files }}</td><td class="n">{{ one.bytes }}</td>
<td><code>{{ one.fingerprint }}</code></td><td>{{ one.headline }}</td></tr>{% endfor %}
</tbody></table></div>
{% endif %}
{% if facts %}<div class="wide"><table><tbody>{% for name, value in facts %}
<tr><th>{{ name }}</th><td><code>{{ value }}</code></td></tr>{% endfor %}</tbody></table></div>
{% endif %}
{% if checksums %}<details><summary>Checksums of all {{ checksums|length }} files</summary>
<div class="wide"><table><tbody>{% for name, sha in checksums %}<tr><td><code>{{ name }}</code></td>
<td><code>{{ sha }}</code></td></tr>{% endfor %}</tbody></table></div></details>{% endif %}
{% if recipe %}<details><summary>The recipe, as it was resolved</summary><pre>{{ recipe }}</pre>
</details>{% endif %}
</main></body>
</html>
"""
