// Canaries: the arms of each split adapter with their figures, and the operator's orders.

import {html, useState} from "../vendor/preact.js";
import {postJson, usePoll} from "../api.js";
import {Button, Dialog, ErrorText, Field, Table, formatNumber, formatSeconds, has} from "../ui.js";

const POLL_S = 2;

export default function Canaries({session}) {
  const {data, error, reload} = usePoll("/admin/canaries", POLL_S);
  const mayChange = has(session, "admin");
  const canaries = data?.canaries ?? [];
  return html`
    <h1>Canaries</h1>
    <${ErrorText} error=${error} />
    ${!mayChange && html`<p class="hint">Starting, promoting and aborting a canary needs the scope
      <code>admin</code>.</p>`}
    ${data && canaries.length === 0 && html`<p>No adapter is split. A canary sends a share of an
      adapter's requests to another version and compares the two.</p>`}
    ${canaries.map((one) => html`<${Canary} key=${one.name} canary=${one} mayChange=${mayChange}
      reload=${reload} />`)}
    ${mayChange && html`<${Start} reload=${reload} />`}`;
}

function Canary({canary, mayChange, reload}) {
  // The order that waits for its confirmation, about the version that was there when it was asked.
  const [asked, setAsked] = useState(null);
  const {name, verdict, arms, problems, rolled_back: rolledBack, duration_s: duration} = canary;
  const trial = arms.find(({arm}) => arm === "canary");
  const hasSplit = arms.some(({arm}) => arm !== "stable");
  return html`
    <section class="panel canary" aria-label=${`Canary of ${name}`}>
      <h2>${name}</h2>
      <p class=${`verdict verdict-${verdict.split(/[ :]/)[0]}`}>Verdict: ${verdict}${duration !== null
        && duration !== undefined ? `, after ${formatSeconds(duration)}` : ""}</p>
      ${problems.map((text) => html`<p class="problem" key=${text}>${text}</p>`)}
      ${rolledBack && html`<p class="problem">Rolled back: ${shownRollback(rolledBack)}</p>`}
      <${Arms} name=${name} arms=${arms} />
      ${mayChange && hasSplit && html`
        <div class="buttons">
          ${trial && html`
            <${Weight} name=${name} trial=${trial} reload=${reload} />
            <${Button} kind="primary" onClick=${() => setAsked({verb: "promote", version: trial.version})}>Promote version ${trial.version}<//>`}
          <${Button} kind="danger" onClick=${() => setAsked({verb: "abort"})}>Abort<//>
        </div>`}
      ${asked?.verb === "promote" && html`<${Order} title=${`Promote ${name}@${asked.version}?`}
        words=${`The name ${name} means version ${asked.version} for all requests from now on, and
          the split ends.`} verb="Promote" path=${`/admin/canaries/${encodeURIComponent(name)}/promote`}
        body=${{version: asked.version}} close=${() => setAsked(null)} reload=${reload} />`}
      ${asked?.verb === "abort" && html`<${Order} title=${`Abort the canary of ${name}?`}
        words=${`All requests for ${name} go to the stable version from now on. Copies to a shadow
          end, too.`} verb="Abort" kind="danger"
        path=${`/admin/canaries/${encodeURIComponent(name)}/abort`} body=${{}}
        close=${() => setAsked(null)} reload=${reload} />`}
    </section>`;
}

function Arms({name, arms}) {
  const outcomes = [...new Set(arms.flatMap((arm) => Object.keys(arm.outcomes)))];
  const columns = [
    {label: "Arm", render: (arm) => arm.arm},
    {label: "Version", render: (arm) => html`<span title=${arm.digest}>${arm.version}</span>`},
    {label: "Weight", render: (arm) => shownShare(arm.weight), isNumber: true},
    ...outcomes.map((outcome) => ({
      label: shownName(outcome),
      render: (arm) => formatNumber(arm.outcomes[outcome] ?? 0),
      isNumber: true,
    })),
    {label: "Output tokens", render: (arm) => formatNumber(arm.output_tokens), isNumber: true},
    {label: "TTFT p50", render: (arm) => formatSeconds(arm.ttft_p50_ms && arm.ttft_p50_ms / 1000), isNumber: true},
    {label: "TTFT p95", render: (arm) => formatSeconds(arm.ttft_p95_ms && arm.ttft_p95_ms / 1000), isNumber: true},
    {label: "Latency p50", render: (arm) => formatSeconds(arm.latency_p50_ms && arm.latency_p50_ms / 1000), isNumber: true},
    ...(arms.some((arm) => arm.problem) ? [{label: "Problem", render: (arm) => arm.problem}] : []),
  ];
  return html`<${Table} caption=${`Arms of ${name}`} columns=${columns} rows=${arms}
    keyOf=${(arm) => arm.arm} />`;
}

function Weight({name, trial, reload}) {
  const [text, setText] = useState(null); // null: the weight as the server has it
  const [error, setError] = useState(null);
  const shown = text ?? String(Math.round(1000 * trial.weight) / 10);
  const save = async (event) => {
    event.preventDefault();
    const body = {version: trial.version, weight: shareOf(shown)};
    try {
      await postJson(`/admin/canaries/${encodeURIComponent(name)}`, body);
      setError(null);
      setText(null);
      reload();
    } catch (failure) {
      setError(failure);
    }
  };
  return html`
    <form class="buttons" onSubmit=${save}>
      <${Field} label=${`Weight of the canary of ${name}, in %`} type="number" min="0" max="100"
        step="any" required value=${shown} onInput=${setText} />
      <${Button} type="submit" disabled=${text === null}>Set weight<//>
      <${ErrorText} error=${error} />
    </form>`;
}

function Order({title, words, verb, kind = "primary", path, body, close, reload}) {
  const [error, setError] = useState(null);
  const [isSent, setIsSent] = useState(false);
  const send = async () => {
    setIsSent(true);
    try {
      await postJson(path, body);
      close();
      reload();
    } catch (failure) {
      setError(failure);
      setIsSent(false);
    }
  };
  return html`
    <${Dialog} title=${title} onClose=${close}>
      <p>${words}</p>
      <${ErrorText} error=${error} />
      <div class="buttons">
        <${Button} onClick=${close}>Cancel<//>
        <${Button} kind=${kind} disabled=${isSent} onClick=${send}>${verb}<//>
      </div>
    <//>`;
}

function Start({reload}) {
  const empty = {adapter: "", version: "", weight: "5", shadow: ""};
  const [fields, setFields] = useState(empty);
  const [error, setError] = useState(null);
  const [isSent, setIsSent] = useState(false);
  const {data} = usePoll("/admin/adapters", 30);
  const adapters = data?.adapters ?? [];
  const versions = adapters.filter(({name, is_default: isDefault}) =>
    name === fields.adapter && !isDefault);
  const field = (name) => ({
    value: fields[name], onInput: (value) => setFields({...fields, [name]: value}),
  });
  const start = async (event) => {
    event.preventDefault();
    const body = {version: Number(fields.version)};
    if (fields.weight !== "") body.weight = shareOf(fields.weight);
    if (fields.shadow !== "") body.shadow = shareOf(fields.shadow);
    setIsSent(true);
    try {
      await postJson(`/admin/canaries/${encodeURIComponent(fields.adapter)}`, body);
      setError(null);
      setFields(empty);
      reload();
    } catch (failure) {
      setError(failure);
    }
    setIsSent(false);
  };
  return html`
    <section class="panel" aria-labelledby="start-canary">
      <h2 id="start-canary">Start a canary</h2>
      <form class="settings" onSubmit=${start}>
        <datalist id="canary-adapters">${[...new Set(adapters.map(({name}) => name))].map((name) =>
          html`<option key=${name} value=${name} />`)}</datalist>
        <datalist id="canary-versions">${versions.map(({version}) =>
          html`<option key=${version} value=${version} />`)}</datalist>
        <${Field} label="Adapter" list="canary-adapters" required autocomplete="off" ...${field("adapter")} />
        <${Field} label="Version" list="canary-versions" type="number" min="1" step="1" required
          ...${field("version")} />
        <${Field} label="Weight, in %" type="number" min="0" max="100" step="any" ...${field("weight")} />
        <${Field} label="Shadow, in %" type="number" min="0" max="100" step="any" ...${field("shadow")} />
        <${Button} type="submit" disabled=${isSent}>Start<//>
      </form>
      <p class="hint">The weight is the share of requests that the version answers; a shadow
        receives copies, and its answers are thrown away.</p>
      <${ErrorText} error=${error} />
    </section>`;
}

function shownName(outcome) {
  const words = outcome.replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}

function shownShare(share) {
  return `${(100 * share).toFixed(1).replace(/\.0$/, "")} %`;
}

// 33.3 / 100 is 0.33299999999999996, and the registry keeps what it is told.
function shareOf(percent) {
  return Number((Number(percent) / 100).toPrecision(12));
}

// The registry's setting is JSON of version, reason and time; another writer's text is shown as it is.
function shownRollback(setting) {
  try {
    const {version, reason} = JSON.parse(setting);
    return `version ${version}, ${reason}`;
  } catch {
    return setting;
  }
}
