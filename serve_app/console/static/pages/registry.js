import {usePoll} from "../api.js";
import {Badge, ErrorText, Field, Table, formatBytes, formatNumber, formatSeconds, formatTime} from "../ui.js";
import {html, useState} from "../vendor/preact.js";

const VERDICTS = {changes: "good", none: "warning", unprobed: "", non_finite: "bad", refused: "bad"};

export default function Page() {
  const {data, error} = usePoll("/admin/registry", 10);
  const [filter, setFilter] = useState("");
  const adapters = (data?.adapters ?? [])
    .filter((one) => `${one.name}@${one.version}`.toLowerCase().includes(filter.toLowerCase()))
    .sort((a, b) => (a.name === b.name ? b.version - a.version : a.name < b.name ? -1 : 1));
  const problems = [...(data?.rejected ?? []).map((one) => `${one.name}@${one.version} cannot be served: ${one.reason}`), ...(data?.dangling ?? [])];
  const figure = (name, format) => (one) => (
    name in one.effect_figures ? format(one.effect_figures[name]) : "–");
  const small = (value) => value.toPrecision(3);
  return html`
    <h1>Registry</h1>
    <${ErrorText} error=${error} />
    ${data?.error && html`<p class="error" role="alert">The registry is away, this is its last good state: ${data.error}</p>`}
    ${!data && !error && html`<p class="hint">Loading…</p>`}
    ${data && html`
      <h2>Bases</h2>
      <${Table} caption="Bases" rows=${data.bases} keyOf=${(one) => `${one.name}@${one.version}`} columns=${[
        {key: "name", label: "Base", isHeader: true, render: named},
        {key: "architecture", label: "Architecture"},
        {key: "num_parameters", label: "Parameters", isNumber: true, render: (one) => formatNumber(one.num_parameters || null)},
        {key: "max_model_len", label: "Context", isNumber: true, render: (one) => formatNumber(one.max_model_len)},
        {key: "created_s", label: "Registered", render: (one) => formatTime(one.created_s)},
        {key: "digest", label: "Digest", render: (one) => html`<code title=${one.digest}>${one.digest.slice(0, 12)}</code>`},
      ]} />
      <h2>Adapters</h2>
      <${Field} label="Name contains" type="search" value=${filter} onInput=${setFilter} />
      <${Table} caption="Adapters" rows=${adapters} keyOf=${(one) => `${one.name}@${one.version}`} columns=${[
        {key: "name", label: "Adapter", isHeader: true, render: named},
        {key: "base", label: "Base"},
        {key: "rank", label: "Rank", isNumber: true},
        {key: "effect", label: "Effect", render: (one) => html`
          <${Badge} kind=${VERDICTS[one.effect] ?? ""}>${one.effect || "not checked"}</${Badge}>
          ${one.refused && html`<span class="detail block">${one.refused}</span>`}`},
        {key: "mean_kl", label: "Mean KL (nats)", isNumber: true, render: figure("mean_kl", small)},
        {key: "argmax_changed", label: "Changed choices", isNumber: true, render: figure("argmax_changed", (value) => `${(value * 100).toFixed(1)} %`)},
        {key: "max_logit_change", label: "Largest logit change", isNumber: true, render: figure("max_logit_change", small)},
        {key: "device_bytes", label: "Device memory", isNumber: true, render: figure("device_bytes", formatBytes)},
        {key: "load_s", label: "Load", isNumber: true, render: figure("load_s", formatSeconds)},
        {key: "settings", label: "Settings", render: (one) => Object.entries(one.settings).map(([key, value]) => html`
          <span key=${key} class="block"><code>${key}=${value}</code></span>`)},
        {key: "created_s", label: "Registered", render: (one) => formatTime(one.created_s)},
      ]} empty="There is no such adapter." />
      ${problems.length > 0 && html`<h2>Not served</h2><ul>${problems.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}`}`;
}

const named = (one) => html`${one.name}@${one.version}
  <span class="badges">${one.is_default && html`<${Badge} kind="good">default</${Badge}>`}
  ${one.aliases.map((alias) => html`<${Badge} key=${alias}>${alias}</${Badge}>`)}</span>`;
