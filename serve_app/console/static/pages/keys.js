// Keys and usage: the keys of clients, their policies, and the recorded use of the server.

import {html, useEffect, useRef, useState} from "../vendor/preact.js";
import {getJson, postJson} from "../api.js";
import {Button, Dialog, ErrorText, Field, Table, formatTime, has} from "../ui.js";
import {KeyForm, SecretDialog} from "./key_forms.js";
import {Usage} from "./usage.js";

const PAGE = 100;

export default function Keys({session}) {
  if (!session.tenancy_enabled) {
    return html`
      <h1>Keys and usage</h1>
      <p>Keys are off: requests need none, and no use is recorded. To switch them on, set
        <code>tenancy.enabled: true</code> in the <code>args</code> of the config file, restart
        the server, and make the first key here or with <code>loraplex keys create</code>, which
        uses the admin token.</p>`;
  }
  return html`
    <h1>Keys and usage</h1>
    <${KeyList} mayChange=${has(session, "admin")} />
    <${Usage} />`;
}

function KeyList({mayChange}) {
  const [page, setPage] = useState(1);
  const [list, setList] = useState(null);
  const [error, setError] = useState(null);
  const [open, setOpen] = useState(null); // {kind, key}: the dialog that is open
  const wanted = useRef(page); // an answer that comes late does not replace a newer page
  wanted.current = page;
  const read = () =>
    getJson(`/key/list?return_full_object=true&size=${PAGE}&page=${page}`).then((found) => {
      const last = Math.max(1, found.total_pages);
      if (wanted.current !== page) return;
      if (page > last) return setPage(last); // the keys of this page are revoked
      setList(found);
      setError(null);
    }, setError);
  useEffect(() => void read(), [page]);
  const close = () => setOpen(null);
  const done = (answer) => {
    setOpen(answer?.key ? {kind: "secret", key: answer} : null);
    // After a rotation of the user's own key the list would ask for a login, before its secret
    // is kept.
    if (!answer?.key) read();
  };
  const closeSecret = () => {
    close();
    read();
  };
  const columns = [
    {label: "Key", render: (key) => html`<strong>${key.key_alias ?? key.token_id}</strong>
      ${key.key_alias && html`<br /><code class="hint">${key.token_id}</code>`}`},
    {label: "Tenant", render: (key) => key.team_id || "–"},
    {label: "Models", render: (key) => shownGlobs(key.models)},
    {label: "Scopes", render: (key) => key.scopes.join(", ") || "–"},
    {label: "Limits", render: (key) => shownLimits(key)},
    {label: "Expires", render: (key) => shownExpiry(key)},
    ...(mayChange ? [{label: "Orders", render: (key) => html`<${Orders} keyLine=${key} open=${setOpen} />`}] : []),
  ];
  return html`
    <section class="panel" aria-labelledby="keys-title">
      <div class="panel-head">
        <h2 id="keys-title">Keys</h2>
        ${mayChange && html`<${Button} kind="primary" onClick=${() => setOpen({kind: "create"})}>Create a key<//>`}
      </div>
      <${ErrorText} error=${error} />
      ${list && (list.total_count === 0
        ? html`<p>There is no key yet: only the admin token has access.</p>`
        : html`<${Table} caption="List of keys" columns=${columns} rows=${list.keys}
            keyOf=${(key) => key.token_id} />`)}
      ${list && list.total_pages > 1 && html`
        <div class="pager">
          <${Button} disabled=${page <= 1} onClick=${() => setPage(page - 1)}>Previous page<//>
          <span>Page ${page} of ${list.total_pages}, ${list.total_count} keys</span>
          <${Button} disabled=${page >= list.total_pages} onClick=${() => setPage(page + 1)}>Next page<//>
        </div>`}
    </section>
    ${open?.kind === "create" && html`<${KeyForm} close=${close} done=${done} />`}
    ${open?.kind === "edit" && html`<${KeyForm} keyLine=${open.key} close=${close} done=${done} />`}
    ${open?.kind === "rotate" && html`<${Rotate} keyLine=${open.key} close=${close} done=${done} />`}
    ${open?.kind === "revoke" && html`<${Revoke} keyLine=${open.key} close=${close} done=${done} />`}
    ${open?.kind === "secret" && html`<${SecretDialog} answer=${open.key} close=${closeSecret} />`}`;
}

function Orders({keyLine, open}) {
  const name = nameOf(keyLine);
  const button = (kind, verb) => html`<${Button} kind=${kind === "revoke" ? "danger" : undefined}
    label=${`${verb} ${name}`} onClick=${() => open({kind, key: keyLine})}>${verb}<//>`;
  return html`<span class="buttons">${button("edit", "Edit")}${button("rotate", "Rotate")}
    ${button("revoke", "Revoke")}</span>`;
}

function Revoke({keyLine, close, done}) {
  return html`<${Confirmed} title=${`Revoke ${nameOf(keyLine)}?`} verb="Revoke" kind="danger"
    close=${close} send=${() => postJson("/key/delete", {keys: [keyLine.token_id]}).then(() => done())}>
    <p>Requests with this key are refused within a second or two. A revoked key never works
      again; its recorded use stays.</p>
  <//>`;
}

function Rotate({keyLine, close, done}) {
  const [grace, setGrace] = useState("24h");
  const body = {key: keyLine.token_id, ...(grace.trim() && {grace_period: grace.trim()})};
  return html`<${Confirmed} title=${`Rotate ${nameOf(keyLine)}?`} verb="Rotate" kind="primary"
    close=${close} send=${() => postJson("/key/regenerate", body).then(done)}>
    <p>The key receives a new secret, which is shown once.</p>
    <${Field} label="The former secret counts for" value=${grace} onInput=${setGrace}
      hint="For example 30m, 24h or 7d; empty: not at all." />
  <//>`;
}

// A dialog whose order closes it, or fails and shows why.
function Confirmed({title, verb, kind, close, send, children}) {
  const [error, setError] = useState(null);
  const [isSent, setIsSent] = useState(false);
  const order = async (event) => {
    event.preventDefault();
    setIsSent(true);
    try {
      await send();
    } catch (failure) {
      setError(failure);
      setIsSent(false);
    }
  };
  return html`
    <${Dialog} title=${title} onClose=${close}>
      <form onSubmit=${order}>
        ${children}
        <${ErrorText} error=${error} />
        <div class="buttons">
          <${Button} onClick=${close}>Cancel<//>
          <${Button} type="submit" kind=${kind} disabled=${isSent}>${verb}<//>
        </div>
      </form>
    <//>`;
}

function nameOf(key) {
  return key.key_alias ?? key.token_id;
}

function shownGlobs(models) {
  const shown = models.slice(0, 4).join(", ");
  return models.length > 4 ? `${shown} and ${models.length - 4} more` : shown || "none";
}

function shownLimits(key) {
  const names = {
    rpm_limit: "requests/min", tpm_limit: "tokens/min", max_parallel_requests: "parallel",
    tokens_per_day: "tokens/day", tokens_per_month: "tokens/month", max_tokens: "tokens/answer",
    lowest_priority: "priority at least",
  };
  const found = Object.entries(names).filter(([name]) => key[name] !== null);
  return found.map(([name, words]) => name === "lowest_priority"
    ? `${words} ${key[name]}` : `${key[name].toLocaleString("en")} ${words}`).join(", ") || "–";
}

function shownExpiry(key) {
  const shown = (text) => formatTime(Date.parse(text) / 1000);
  const words = key.expires ? shown(key.expires) : "never";
  const former = key.previous_secret_until;
  return Date.parse(former) > Date.now() ? `${words}; former secret until ${shown(former)}` : words;
}
