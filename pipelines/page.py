"""The HTML of a run's page: one template, its styles and its one script inside, nothing outside."""

from markupsafe import Markup

from pipelines import page_script, page_style

# Ours, and never a run's: the only texts that go into a page as they are.
STYLE, SCRIPT = Markup(page_style.STYLE), Markup(page_script.SCRIPT)
SCRIPT_HASH = Markup(page_script.SCRIPT_HASH)

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';
 form-action 'none'; script-src '{{ script_hash }}'">
<link rel="icon" href="data:,">
<title>{{ name }}: an Eyas run</title>
<style>{{ style }}</style>
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
{% macro absent(part, words) %}
{% if part in faults %}<p class="bad">Cannot be shown: {{ faults[part][0] }}</p>
{% else %}<p class="dim">Not there yet: {{ words }}</p>{% endif %}
{% endmacro %}
{% macro steps_head(steps) %}
{% for k in steps %}<th class="n">step {{ k }}</th>{% endfor %}
{% endmacro %}
{% macro numbers(cells) %}
{% for one in cells %}<td class="n">{{ one }}</td>{% endfor %}
{% endmacro %}

<header>
<h1>{{ name }}</h1>
<p class="dim">{{ state }}</p>
{% if alarms %}<div class="notice"><b>Alarms</b><ul>
{% for one in alarms %}<li>{{ one }}</li>{% endfor %}</ul></div>{% endif %}
{% if faults %}<div class="notice"><b>Some of this run cannot be read</b>; <code>eyas verify</code>
says what is broken.<ul>{% for part, said in faults.items() %}{% for one in said[:5] %}
<li>{{ part }}: {{ one }}</li>{% endfor %}{% if said|length > 5 %}
<li>{{ part }}: {{ said|length - 5 }} more</li>{% endif %}{% endfor %}</ul></div>{% endif %}
{% if big %}<div class="big">{% for label, value in big %}
<div><b>{{ value }}</b>{{ label }}</div>{% endfor %}</div>{% endif %}
<dl class="what">{% for label, value in what %}<dt>{{ label }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
</header>

<h2>From source rows to training rows</h2>
{% if funnel %}
<div class="steps">{% for step in funnel %}
<div class="step"><div>{{ step.name }}</div>
<div class="track"><div class="fill" style="width: {{ step.percent }}%"></div>
<div class="said">{{ step.said }}</div></div>
{% if step.note %}<div class="why">{{ step.note }}</div>{% endif %}
{% if step.lost %}<div class="why">missing: {% for why, count in step.lost %}
{{ why }} {{ count }}{{ ", " if not loop.last }}{% endfor %}</div>{% endif %}
{% if step.unexplained %}<div class="why bad">missing without a reason on record:
{{ step.unexplained }}</div>{% endif %}</div>
{% endfor %}</div>
{% else %}{{ absent("funnel", "no stage is finished.") }}{% endif %}
{% if sets %}
<div class="wide" tabindex="0" role="region" aria-label="Prompt sets"><table>
<thead><tr><th>set</th><th>domain</th><th>used for</th><th class="n">source rows</th>
<th class="n">prompts</th><th class="n">ok</th><th class="n">rejected</th><th class="n">failed</th>
</tr></thead>
<tbody>{% for one in sets %}<tr><td>{{ one.name }}</td><td>{{ one.domain }}</td>
<td>{{ one.use }}</td>
{{ numbers([one.rows, one.prompts, one.ok, one.rejected, one.failed]) }}</tr>
{% endfor %}</tbody></table></div>
{% endif %}
{% if rejected %}<details><summary>Source rows that became no prompts: examples of each
reason</summary><div class="wide" tabindex="0" role="region" aria-label="Rejected rows"><table>
<thead><tr><th>set</th><th>reason</th><th>where</th><th>what was seen</th></tr></thead>
<tbody>{% for one in rejected %}<tr><td>{{ one.dataset }}</td><td>{{ one.status }}</td>
<td><code>{{ one.file }}:{{ one.line }}</code></td><td class="long">{{ one.detail }}</td></tr>
{% endfor %}</tbody></table></div></details>{% endif %}

<h2>Lengths</h2>
{% if lengths %}
<p class="dim">In tokens. Prompts as the target reads them; of responses that are ok the reasoning,
and the rest of the output.</p>
{% for one in lengths %}
<figure class="set"><figcaption>{{ one.name }} <span class="dim">{{ one.said }}</span>
</figcaption>
<div class="trio">{% for chart in one.charts %}<div><p>{{ chart.name }}: {{ chart.said }}</p>
{{ chart.chart }}</div>{% endfor %}</div></figure>
{% endfor %}
{% else %}{{ absent("lengths", "no prompts are prepared.") }}{% endif %}

<h2>Over time</h2>
{% if timeline %}
<div class="charts">{% for one in timeline.charts %}
<figure><figcaption>{{ one.title }}</figcaption>{{ one.chart }}<p>{{ one.said }}</p></figure>
{% endfor %}</div>
{% if timeline.moments %}
<ol class="moments">{% for one in timeline.moments %}
<li><b>{{ one.number }}</b><span class="when">{{ one.when }}</span>
<span class="words {{ one.kind }}">{{ one.said }}</span></li>{% endfor %}</ol>
{% if timeline.left_out %}<p class="dim">{{ timeline.left_out }} more, between these, are in
events.jsonl.</p>{% endif %}
{% else %}<p class="dim">No restart, no stop, no server that died.</p>{% endif %}
{% if history %}<p class="dim">Mended since: {{ history|join("; ") }}.</p>{% endif %}
{% else %}{{ absent("timeline", "no response came, and nothing happened.") }}{% endif %}

<h2>Training</h2>
{% if training %}
<p>{{ training.said }}</p>
<div class="charts">{% for one in training.charts %}
<figure><figcaption>{{ one.title }}</figcaption>{{ one.chart }}
{% if one.names %}{{ key(one.names) }}{% endif %}</figure>
{% endfor %}</div>
{% if training.heldout %}
<h3>Held-out rows of the training sets</h3>
<div class="wide" tabindex="0" role="region" aria-label="Held-out rows"><table>
<thead><tr><th>domain</th><th class="n">simulated AL</th>{{ steps_head(training.steps) }}</tr>
</thead><tbody>{% for one in training.heldout %}<tr><td>{{ one.name }}</td>
{{ numbers([one.length]) }}{{ numbers(one.rates) }}</tr>{% endfor %}</tbody></table></div>
<p class="dim">Acceptance rate at step k: the share of drafts right at step k, of those that were
right at all steps before.</p>
{% endif %}
{% else %}{{ absent("training", "the draft was not trained.") }}{% endif %}

<h2>Acceptance length</h2>
{% if acceptance %}
<p{% if not acceptance.lossless %} class="bad"{% endif %}>{{ acceptance.said }}</p>
<div class="charts"><figure><figcaption>Acceptance length by domain, with 95% intervals</figcaption>
{{ acceptance.chart }}{{ barkey(acceptance.names) }}</figure>
<figure><figcaption>Acceptance rate at each drafted token</figcaption>
{{ acceptance.rates }}{{ key(acceptance.names) }}
<div class="wide" tabindex="0" role="region" aria-label="Acceptance rate by step"><table>
<thead><tr><th>trained draft</th>{{ steps_head(acceptance.steps) }}</tr></thead>
<tbody>{% for one in acceptance.rows %}<tr><td>{{ one.name }}</td>{{ numbers(one.rates) }}</tr>
{% endfor %}</tbody></table></div></figure></div>
<div class="wide" tabindex="0" role="region" aria-label="Acceptance length by domain"><table>
<thead><tr><th>domain</th><th class="n">prompts</th>
{% for one in acceptance.names %}<th class="n">{{ one }}</th>{% endfor %}</tr></thead>
<tbody>{% for one in acceptance.rows %}<tr><td>{{ one.name }}</td>{{ numbers([one.prompts]) }}
{{ numbers(one.cells) }}</tr>{% endfor %}</tbody></table></div>
<p class="dim">{{ acceptance.method }}</p>
{% else %}{{ absent("acceptance", "the draft was not measured.") }}{% endif %}

<h2 id="samples-head">Samples</h2>
{% if samples %}
<p class="dim">{{ samples.shown|length }} samples, of {{ samples.total }} responses; a page takes
{{ samples.most }} and {{ samples.most_bytes }} kB of text.
{% if samples.left_out %}{{ samples.left_out }} more had no room.{% endif %}
Prompt, reasoning, content and tool calls are told apart by token ids, not by searching text.
{% if "evaluated" in samples.statuses %}In evaluated answers <mark>marked text</mark> was drafted
and accepted; the rest is the target's own.{% endif %}</p>
<div class="browser" id="browser" hidden role="group" aria-labelledby="samples-head">
<button type="button" id="browse-previous" aria-keyshortcuts="ArrowLeft">Previous</button>
<button type="button" id="browse-next" aria-keyshortcuts="ArrowRight">Next</button>
<output id="browse-place" aria-live="polite"></output>
<label>set <select id="browse-set"><option value="">all sets</option>
{% for one in samples.sets %}<option value="{{ one }}">{{ one }}</option>{% endfor %}</select>
</label>
<label>status <select id="browse-status"><option value="">all</option>
{% for one in samples.statuses %}<option value="{{ one }}">{{ one }}</option>{% endfor %}</select>
</label>
</div>
<div id="samples">{% for one in samples.shown %}
<details class="sample" data-set="{{ one.set }}" data-status="{{ one.kind }}">
<summary><code>{{ one.id }}</code>
<span class="{{ "bad" if one.kind in ("rejected", "failed") else "good" }}">{{ one.status }}</span>
<span class="dim">{{ one.said }}</span></summary>
{% if one.detail %}<p class="bad">{{ one.detail }}</p>{% endif %}
{% for part in one.parts %}<div class="part {{ part.kind }}"><b>{{ part.name }}</b>
<pre>{% for kind, text in part.runs %}{% if kind %}<mark>{{ text }}</mark>{% else %}{{ text }}
{%- endif %}{% endfor %}</pre></div>{% endfor %}
</details>{% endfor %}</div>
{% else %}{{ absent("samples", "no response is durable.") }}{% endif %}

<h2>Provenance</h2>
{% if stages %}
<div class="wide" tabindex="0" role="region" aria-label="Stages"><table>
<thead><tr><th>stage</th><th class="n">time</th><th class="n">files</th>
<th class="n">bytes</th><th>recipe part</th><th>result</th></tr></thead>
<tbody>{% for one in stages %}<tr><td>{{ one.name }}</td>
{{ numbers([one.time, one.files, one.bytes]) }}
<td><code>{{ one.fingerprint }}</code></td><td class="long">{{ one.headline }}</td></tr>{% endfor %}
</tbody></table></div>
{% endif %}
{% if facts %}<dl class="what">{% for label, value in facts %}
<dt>{{ label }}</dt><dd><code>{{ value }}</code></dd>{% endfor %}</dl>{% endif %}
{% if checksums and checksums.rows %}<details><summary>Checksums of {{ checksums.rows|length }}
{%- if checksums.total > checksums.rows|length %} of {{ checksums.total }}{% endif %} files; all are
in manifest.json</summary>
<div class="wide" tabindex="0" role="region" aria-label="Checksums"><table>
<tbody>{% for name, sha in checksums.rows %}<tr><td><code>{{ name }}</code></td>
<td><code>{{ sha }}</code></td></tr>{% endfor %}</tbody></table></div></details>{% endif %}
{% if recipe %}<details><summary>The recipe, as it was resolved</summary><pre>{{ recipe }}</pre>
</details>{% endif %}
</main>
<script>{{ script }}</script></body>
</html>
"""
