// The playground: one prompt, two models side by side, streamed at once with the same settings.

import {html, useEffect, useRef, useState} from "../vendor/preact.js";
import {getJson} from "../api.js";
import {Button, ErrorText, Field, has} from "../ui.js";
import {AnswerView, EMPTY, Legend, ask, chatBody, firstDifference} from "./answer.js";

const SIDES = ["Left", "Right"];
const MAX_NAMES = 2000; // offered in the list of a field; every other name can be typed

export default function Playground({session}) {
  const [names, setNames] = useState([]);
  const [models, setModels] = useState(["", ""]);
  const [fields, setFields] = useState({
    system: "", prompt: "", seed: "1", temperature: "0", maxTokens: "128", probabilities: true,
  });
  const [answers, setAnswers] = useState([EMPTY, EMPTY]);
  const [error, setError] = useState(null);
  const running = useRef(null); // the AbortController of the answers that are streamed

  useEffect(() => {
    modelNames(session).then(
      (found) => {
        setNames(found);
        // A side that has been typed into stays.
        setModels((chosen) => firstPair(found).map((name, at) => chosen[at] || name));
      },
      setError,
    );
    return () => running.current?.abort();
  }, []);

  const isRunning = answers.some(({state}) => state === "waiting" || state === "streaming");
  const maySend = !isRunning && fields.prompt.trim() && models.some((model) => model.trim());
  const send = () => {
    if (!maySend) return;
    running.current?.abort();
    const controller = new AbortController();
    running.current = controller;
    const headers = has(session, "admin:read") ? {"x-loraplex-explain": "1"} : {};
    models.forEach((model, at) => {
      const show = (answer) => {
        // An answer that was left behind does not draw over its successor.
        if (running.current === controller) setAnswers((all) => all.with(at, answer));
      };
      if (model.trim()) ask(chatBody(model.trim(), fields), headers, controller.signal, show);
      else show(EMPTY);
    });
  };
  const stop = () => running.current?.abort();
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      event.currentTarget.requestSubmit(); // the browser names a field that is no number
    } else if (event.key === "Escape" && isRunning) {
      stop();
    }
  };
  const field = (name) => ({
    value: fields[name], onInput: (value) => setFields({...fields, [name]: value}),
  });
  return html`
    <h1>Playground</h1>
    <form class="playground" onKeyDown=${onKeyDown}
      onSubmit=${(event) => { event.preventDefault(); send(); }}>
      <${ErrorText} error=${error} />
      <datalist id="playground-models">
        ${names.slice(0, MAX_NAMES).map((name) => html`<option key=${name} value=${name} />`)}
      </datalist>
      <div class="columns">
        <${Field} label="System text" rows="3" ...${field("system")} />
        <${Field} label="Prompt" rows="3" ...${field("prompt")} />
      </div>
      <div class="settings">
        <${Field} label="Seed" type="number" step="1" ...${field("seed")} />
        <${Field} label="Temperature" type="number" min="0" max="2" step="0.1" ...${field("temperature")} />
        <${Field} label="Max tokens" type="number" min="1" step="1" ...${field("maxTokens")} />
        <label class="check"><input type="checkbox" checked=${fields.probabilities}
          onChange=${(event) => setFields({...fields, probabilities: event.target.checked})} /> Token probabilities</label>
        <span class="buttons">
          <${Button} kind="primary" type="submit" disabled=${!maySend}>Send<//>
          <${Button} type="button" disabled=${!isRunning} onClick=${stop}>Stop<//>
        </span>
      </div>
      <p class="hint">Ctrl+Enter sends, Escape stops. A model is a base, base:adapter, or with
        versions base@1:adapter@2.</p>
      <${Difference} answers=${answers} />
      <div class="columns">
        ${SIDES.map((side, at) => html`
          <section class="panel" key=${side} aria-label=${`${side} answer`}>
            <${Field} label=${`${side} model`} list="playground-models" autocomplete="off"
              spellcheck="false" value=${models[at]}
              onInput=${(value) => setModels(models.with(at, value))} />
            <${AnswerView} answer=${answers[at]} label=${`the ${side.toLowerCase()} answer`} />
          </section>`)}
      </div>
      ${fields.probabilities && html`<${Legend} />`}
    </form>`;
}

function Difference({answers}) {
  const [left, right] = answers;
  if (left.state !== "done" || right.state !== "done") return null;
  if (!left.tokens.length || !right.tokens.length) return null;
  const at = firstDifference(left.tokens, right.tokens);
  const words = at ? `The answers differ from token ${at} on.` : "The answers are the same.";
  return html`<p role="status">${words}</p>`;
}

// The names that the key may call; readers of the administration see the versions, too.
async function modelNames(session) {
  const {data} = await getJson("/v1/models");
  const names = data.map(({id, parent}) => (parent ? `${parent}:${id}` : id));
  if (!has(session, "admin:read")) return names;
  const {adapters} = await getJson("/admin/adapters");
  const versions = adapters.map(({base, name, version}) => `${base}:${name}@${version}`);
  return [...new Set([...names, ...versions])];
}

// A base and the first adapter over it, or whatever there is. A key may lack the adapter's base.
function firstPair(names) {
  const adapter = names.find((name) => name.includes(":"));
  if (!adapter) return [names[0] ?? "", names[1] ?? names[0] ?? ""];
  const base = adapter.split(":")[0];
  return [names.includes(base) ? base : "", adapter];
}
