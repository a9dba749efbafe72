// The form of a key's policy, and the dialog that shows a new secret once.

import {html, useEffect, useRef, useState} from "../vendor/preact.js";
import {postJson} from "../api.js";
import {Button, Dialog, ErrorText, Field} from "../ui.js";

const SCOPES = {
  "infer": "completions, chats, tokenizing",
  "load": "load and unload adapters by vLLM's routes",
  "admin:read": "read the administration, metrics, all keys and usage",
  "admin": "change everything: keys, canaries, adapters, bases",
};
const NUMBERS = {
  rpm_limit: "Requests per minute",
  tpm_limit: "Tokens per minute",
  max_parallel_requests: "Parallel requests",
  tokens_per_day: "Tokens per day",
  tokens_per_month: "Tokens per month",
  max_tokens: "Most tokens of an answer",
  lowest_priority: "Lowest priority value",
};

// Makes a key, or changes `keyLine`. `done` receives the server's answer.
export function KeyForm({keyLine, close, done}) {
  const before = fieldsOf(keyLine);
  const [fields, setFields] = useState(before);
  const [error, setError] = useState(null);
  const [isSent, setIsSent] = useState(false);
  const field = (name) => ({
    value: fields[name], onInput: (value) => setFields({...fields, [name]: value}),
  });
  const setScope = (scope) => (event) => {
    const others = fields.scopes.filter((one) => one !== scope);
    setFields({...fields, scopes: event.target.checked ? [...others, scope] : others});
  };
  const save = async (event) => {
    event.preventDefault();
    setIsSent(true);
    try {
      const body = changedFields(before, fields);
      done(keyLine
        ? await postJson("/key/update", {...body, key: keyLine.token_id})
        : await postJson("/key/generate", body));
    } catch (failure) {
      setError(failure);
      setIsSent(false);
    }
  };
  const title = keyLine ? `Edit ${keyLine.key_alias ?? keyLine.token_id}` : "Create a key";
  return html`
    <${Dialog} title=${title} onClose=${close}>
      <form class="key-form" onSubmit=${save}>
        <div class="settings">
          <${Field} label="Alias" hint="A name for people, such as ci." maxlength="128"
            ...${field("key_alias")} />
          <${Field} label="Tenant" hint="The owner of its queue and account." maxlength="128"
            ...${field("team_id")} />
          <${Field} label="Expires after" ...${field("duration")} hint=${keyLine
            ? "From now, such as 12h or 90d; empty: as it is." : "Such as 12h or 90d; empty: never."} />
        </div>
        <${Field} label="Models" rows="3" ...${field("models")}
          hint="Globs, each on a line: my-base, my-base:*, an-adapter@3." />
        <fieldset><legend>Scopes</legend>
          ${Object.entries(SCOPES).map(([scope, words]) => html`
            <label class="check" key=${scope}>
              <input type="checkbox" checked=${fields.scopes.includes(scope)}
                onChange=${setScope(scope)} />
              <span><code>${scope}</code> ${words}</span>
            </label>`)}
        </fieldset>
        <fieldset><legend>Limits, empty: none</legend>
          <div class="settings">
            ${Object.entries(NUMBERS).map(([name, words]) => html`
              <${Field} key=${name} label=${words} type="number" step="1"
                min=${name === "lowest_priority" ? undefined : 1} ...${field(name)} />`)}
          </div>
        </fieldset>
        <${ErrorText} error=${error} />
        <div class="buttons">
          <${Button} onClick=${close}>Cancel<//>
          <${Button} type="submit" kind="primary" disabled=${isSent}>${keyLine ? "Save" : "Create"}<//>
        </div>
      </form>
    <//>`;
}

// Shows the whole key of an answer. It exists nowhere else after this dialog.
export function SecretDialog({answer, close}) {
  const [words, setWords] = useState("");
  const holder = useRef(null);
  const select = () => holder.current.querySelector("input").select();
  useEffect(select, []);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(answer.key);
      setWords("Copied.");
    } catch {
      // Browsers allow the clipboard only over TLS and on loopback.
      select();
      setWords("The browser does not allow this page to copy: press Ctrl+C.");
    }
  };
  return html`
    <${Dialog} title=${`The secret of ${answer.key_alias ?? answer.token_id}`} onClose=${close}>
      <p>This is the only time that the whole key is shown. Keep it now.</p>
      <div ref=${holder}>
        <${Field} label="Key" class="secret" readonly value=${answer.key} onInput=${() => {}} />
      </div>
      <div class="buttons">
        <${Button} kind="primary" onClick=${copy}>Copy<//>
        <${Button} onClick=${close}>Close<//>
        <span role="status">${words}</span>
      </div>
    <//>`;
}

function fieldsOf(line) {
  const numbers = Object.keys(NUMBERS).map((name) => [name, line?.[name]?.toString() ?? ""]);
  return {
    key_alias: line?.key_alias ?? "",
    team_id: line?.team_id ?? "",
    models: (line?.models ?? ["*"]).join("\n"),
    scopes: [...(line?.scopes ?? ["infer"])],
    duration: "",
    ...Object.fromEntries(numbers),
  };
}

// The fields that differ, as the API has them: null removes an alias, a tenant or a limit.
function changedFields(before, fields) {
  const body = {};
  for (const [name, value] of Object.entries(fields)) {
    if (JSON.stringify(value) === JSON.stringify(before[name])) continue;
    if (name in NUMBERS) body[name] = value === "" ? null : Number(value);
    else if (name === "models") body.models = lines(value);
    else if (name === "scopes") body.scopes = value;
    else body[name] = value.trim() || null;
  }
  return body;
}

function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}
