import {postJson, usePoll} from "../api.js";
import {Badge, Button, Dialog, ErrorText, Field, Table, formatBytes, formatSeconds, has} from "../ui.js";
import {html, useState} from "../vendor/preact.js";

const DONE = {pin: "Pinned", unpin: "Unpinned", preload: "Preloaded", evict: "Evicted"};
const TIERS = {device: "good", host: "warning", disk: "", registry: ""};

export default function Page({session}) {
  const {data, error, reload} = usePoll("/admin/adapters", 5);
  const [filter, setFilter] = useState("");
  const [wanted, setWanted] = useState("");
  const [failure, setFailure] = useState(null);
  const [message, setMessage] = useState("");
  const [evicted, setEvicted] = useState(null);
  const all = data?.adapters ?? [];
  const bases = [...new Set(all.map((one) => one.base))].sort();
  const base = bases.includes(wanted) ? wanted : ""; // a base may go
  const shown = all.filter((one) => (!base || one.base === base)
    && nameOf(one).toLowerCase().includes(filter.toLowerCase()));
  const engines = [...new Set(shown.flatMap((one) => one.engines.map((each) => each.engine)))].sort();
  const order = async (kind, name) => {
    setFailure(null);
    setMessage("");
    try {
      await postJson(`/admin/adapters/${encodeURIComponent(name)}/${kind}`);
      setMessage(`${DONE[kind]} ${name}.`);
    } catch (one) {
      setFailure(one);
    }
    reload();
  };
  const acts = (one) => html`<div class="buttons">
    ${one.is_default && html`<${Button} label=${`${one.pin ? "Unpin" : "Pin"} ${one.name}`}
      onClick=${() => order(one.pin ? "unpin" : "pin", one.name)}>${one.pin ? "Unpin" : "Pin"}</${Button}>`}
    <${Button} label=${`Preload ${nameOf(one)}`} onClick=${() => order("preload", nameOf(one))}>Preload</${Button}>
    <${Button} kind="danger" label=${`Evict ${nameOf(one)}`} onClick=${() => setEvicted(one)}>Evict</${Button}>
  </div>`;
  const columns = [
    {key: "name", label: "Adapter", isHeader: true, render: (one) => html`${nameOf(one)}
      <span class="badges">${one.is_default && html`<${Badge}>default</${Badge}>`}
      ${one.pin && one.is_default && html`<${Badge} kind="good">pinned</${Badge}>`}
      ${one.aliases.map((alias) => html`<${Badge} key=${alias}>${alias}</${Badge}>`)}</span>`},
    {key: "base", label: "Base"},
    ...engines.map((engine, index) => ({
      key: engine, label: html`<span title=${engine}>Replica ${index + 1} <code>${engine.slice(-6)}</code></span>`,
      render: (one) => html`<${Residency} residency=${one.engines.find((each) => each.engine === engine)} />`,
    })),
    ...(has(session, "admin") ? [{key: "acts", label: "Orders", render: acts}] : []),
  ];
  return html`
    <h1>Adapters</h1>
    <${ErrorText} error=${failure ?? error} />
    <p role="status" class="hint">${message}</p>
    <div class="row">
      <${Field} label="Name contains" type="search" value=${filter} onInput=${setFilter} />
      <${Field} label="Base" value=${base} onInput=${setWanted}
        options=${[["", "All bases"], ...bases.map((one) => [one, one])]} />
    </div>
    ${data ? html`<${Table} caption="Adapters by replica" rows=${shown} keyOf=${nameOf} columns=${columns}
      empty="No running base has such an adapter." />` : !error && html`<p class="hint">Loading…</p>`}
    ${evicted && html`<${Dialog} title=${`Evict ${nameOf(evicted)}?`} onClose=${() => setEvicted(null)}>
      <p>Every replica drops it from device and host memory. The next request loads it again.</p>
      <div class="buttons">
        <${Button} onClick=${() => setEvicted(null)}>Cancel</${Button}>
        <${Button} kind="danger" onClick=${async () => {
          const name = nameOf(evicted);
          setEvicted(null);
          await order("evict", name);
        }}>Evict</${Button}>
      </div>
    </${Dialog}>`}`;
}

const nameOf = (one) => `${one.name}@${one.version}`;

function Residency({residency}) {
  if (!residency) return html`<span class="hint">other base</span>`;
  const details = [
    residency.bytes > 0 && formatBytes(residency.bytes),
    residency.references > 0 && `${residency.references} in use`,
    residency.pinned && "pinned",
    residency.is_leaving && "leaving",
    residency.used_s > 0 && residency.references === 0
      && `idle ${formatSeconds(Math.max(0, Date.now() / 1000 - residency.used_s))}`,
    residency.why_not_pinned,
  ].filter(Boolean);
  return html`<${Badge} kind=${TIERS[residency.tier] ?? ""}>${residency.tier}</${Badge}>
    <span class="detail block">${details.join(", ")}</span>`;
}
