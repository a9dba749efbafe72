import {usePoll} from "../api.js";
import {Chart} from "../chart.js";
import {Badge, Card, ErrorText, Field, Table, formatNumber, formatSeconds} from "../ui.js";
import {html, useMemo, useState} from "../vendor/preact.js";

const STATES = {running: "good", asleep: "", starting: "warning", draining: "warning", failed: "bad"};
const ALL = "";
const RECENT = 12; // intervals: a minute; an older figure says nothing about now
const SUMMED = ["requests_per_s", "errors_per_s", "refused_per_s", "prompt_tokens_per_s",
  "output_tokens_per_s", "running", "waiting"];
const number = (value) => formatNumber(value, 2);

export default function Page() {
  const series = usePoll("/admin/series", 5);
  const bases = usePoll("/admin/bases", 5);
  const [wanted, setName] = useState(ALL);
  const times = series.data?.times_s ?? [];
  const names = (series.data?.bases ?? []).map((base) => base.name);
  const name = names.includes(wanted) ? wanted : ALL; // a base may go
  const lines = useMemo(() => chartsOf(series.data, name), [series.data, name]);
  const now = (key) => lines[key].slice(-RECENT).findLast((value) => value !== null) ?? null;
  return html`
    <h1>Overview</h1>
    <${ErrorText} error=${series.error ?? bases.error} />
    <${Field} label="Base" value=${name} onInput=${setName}
      options=${[[ALL, "All bases"], ...names.map((one) => [one, one])]} />
    <dl class="cards">
      <${Card} label="Requests per second" value=${number(now("requests_per_s"))} />
      <${Card} label="Output tokens per second" value=${number(now("output_tokens_per_s"))} />
      <${Card} label="Running" value=${number(now("running"))} />
      <${Card} label="Waiting" value=${number(now("waiting"))} />
      <${Card} label="Time to first token, p95" value=${formatSeconds(now("ttft_p95_s"))} />
      <${Card} label="Errors per second" value=${number(now("errors_per_s"))} />
    </dl>
    ${series.data && html`<p class="hint">The last quarter of an hour, in UTC.</p><div class="charts">
      <${Chart} title="Requests per second" times=${times} format=${number} lines=${lines.requests} least=${1} />
      <${Chart} title="Tokens per second" times=${times} format=${number} lines=${lines.tokens} least=${10} />
      <${Chart} title="Time to first token" times=${times} format=${formatSeconds} lines=${lines.ttft} least=${0.1} />
      <${Chart} title="Requests in engines and queues" times=${times} format=${number} lines=${lines.load} least=${4} />
      <${Chart} title="KV cache in use" times=${times} format=${percent} lines=${lines.kv} least=${0.1} />
    </div>`}
    <h2>Bases</h2>
    ${bases.data && html`<${Table} caption="Bases" rows=${bases.data.bases}
      keyOf=${(base) => `${base.name} ${base.version} ${base.application}`} columns=${[
        {key: "name", label: "Base", isHeader: true, render: (base) => `${base.name}${base.version ? `@${base.version}` : ""}`},
        {key: "state", label: "State", render: (base) => html`<${Badge} kind=${STATES[base.state]}>${base.state}</${Badge}> ${base.message}`},
        {key: "replicas", label: "Replicas", isNumber: true, render: (base) => `${base.replicas} of ${base.wanted_replicas}`},
        {key: "limits", label: "Least to most", isNumber: true, render: (base) => `${base.min_replicas} to ${base.max_replicas}`},
        {key: "start_s", label: "Last start", isNumber: true, render: (base) => formatSeconds(base.start_s)},
        {key: "idle_s", label: "Idle", isNumber: true, render: (base) => formatSeconds(base.idle_s)},
      ]} />`}`;
}

const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

// The lines of all charts. Times to a first token and the use of caches have no sum: all bases are
// a line each then, and the card shows the highest.
function chartsOf(data, name) {
  const found = (data?.bases ?? []).filter((base) => name === ALL || base.name === name);
  const sums = Object.fromEntries(SUMMED.map((key) => [key, merged(data, found, key, (a, b) => a + b)]));
  const each = (key, label) => found.map((base) => (
    {label: found.length === 1 ? label : `${base.name} ${label}`, values: base[key]}));
  const p95 = each("ttft_p95_s", "p95");
  return {
    ...sums,
    ttft_p95_s: merged(data, found, "ttft_p95_s", Math.max),
    requests: [
      {label: "finished", values: sums.requests_per_s},
      {label: "errors", values: sums.errors_per_s},
      {label: "refused", values: sums.refused_per_s},
    ],
    tokens: [
      {label: "prompt", values: sums.prompt_tokens_per_s},
      {label: "output", values: sums.output_tokens_per_s},
    ],
    ttft: found.length === 1 ? [...each("ttft_p50_s", "p50"), ...p95] : p95,
    load: [{label: "running", values: sums.running}, {label: "waiting", values: sums.waiting}],
    kv: each("kv_usage", "in use"),
  };
}

function merged(data, bases, key, join) {
  return (data?.times_s ?? []).map((_, index) => {
    const values = bases.map((base) => base[key][index]).filter((value) => value !== null);
    return values.length ? values.reduce((a, b) => join(a, b)) : null;
  });
}
