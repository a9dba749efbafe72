// An answer of the playground: its request, its measurements, and the view of its tokens.

import {html, useState} from "../vendor/preact.js";
import {stream} from "../api.js";
import {ErrorText, useId} from "../ui.js";

const REDRAW_MS = 50; // at most 20 drawings a second, however fast the tokens arrive
const TOP = 5;
// The least probability of each colour, the first one the most certain.
export const LEVELS = [0.9, 0.6, 0.3, 0.1, 0];

export const EMPTY = {state: "empty", text: "", reasoning: "", tokens: []};

// Streams the answer of a chat and calls `show(answer)` as it grows. Never throws: a failure is
// part of the answer.
export async function ask(body, headers, signal, show) {
  const answer = {...EMPTY, state: "waiting", tokens: [], begun: performance.now()};
  const decoder = new TextDecoder(); // a character may be spread over several tokens
  let timer = null;
  const draw = () => {
    timer = null;
    show({...answer});
  };
  draw();
  try {
    await stream("/v1/chat/completions", body, (event, response) => {
      if (answer.state === "waiting") Object.assign(answer, readHeaders(response.headers));
      take(answer, event, decoder);
      timer ??= setTimeout(draw, REDRAW_MS);
    }, signal, headers);
    answer.state = "done";
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.error = error;
  }
  answer.ended = performance.now();
  clearTimeout(timer);
  draw();
}

export function chatBody(model, {system, prompt, seed, temperature, maxTokens, probabilities}) {
  const messages = [{role: "user", content: prompt}];
  if (system.trim()) messages.unshift({role: "system", content: system});
  const body = {model, messages, stream: true, stream_options: {include_usage: true}};
  if (seed !== "") body.seed = Number(seed);
  if (temperature !== "") body.temperature = Number(temperature);
  if (maxTokens !== "") body.max_tokens = Number(maxTokens);
  return probabilities ? {...body, logprobs: true, top_logprobs: TOP} : body;
}

function take(answer, event, decoder) {
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices?.[0];
  answer.state = "streaming";
  if (!choice) return;
  const {content, reasoning, tool_calls: calls} = choice.delta ?? {};
  if (content || reasoning || calls) answer.first ??= performance.now();
  answer.text += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const call of calls ?? []) {
    answer.text += `${call.function?.name ?? ""}${call.function?.arguments ?? ""}`;
  }
  for (const one of choice.logprobs?.content ?? []) answer.tokens.push(tokenOf(one, decoder));
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function tokenOf(one, decoder) {
  const bytes = new Uint8Array(one.bytes ?? []);
  const text = one.bytes ? decoder.decode(bytes, {stream: true}) : one.token;
  const top = one.top_logprobs.map(({token, logprob}) => ({token, p: Math.exp(logprob)}));
  return {token: one.token, text, p: Math.exp(one.logprob), top};
}

function readHeaders(headers) {
  const parts = (headers.get("server-timing") ?? "").split(",").filter((part) => part.trim());
  return {
    version: headers.get("x-loraplex-version"),
    arm: headers.get("x-loraplex-arm"),
    replica: headers.get("x-loraplex-replica"),
    router: headers.get("x-loraplex-router"),
    timing: parts.map((part) => {
      const [name, ...values] = part.trim().split(";");
      const duration = values.find((value) => value.trim().startsWith("dur="));
      return {name, ms: duration ? Number(duration.trim().slice(4)) : null};
    }),
  };
}

// The number of the first token in which two answers differ, counted from 1; 0: they agree so far.
export function firstDifference(left, right) {
  const length = Math.min(left.length, right.length);
  for (let at = 0; at < length; at++) if (left[at].token !== right[at].token) return at + 1;
  return left.length === right.length ? 0 : length + 1;
}

export function AnswerView({answer, label}) {
  const words = {
    empty: "No answer yet.",
    waiting: "Waiting for the first token…",
    streaming: "Streaming…",
    done: "Done.",
    stopped: "Stopped.",
    failed: "Failed.",
  };
  const hasTokens = answer.tokens.length > 0;
  return html`
    <div class="answer" aria-busy=${answer.state === "streaming" || answer.state === "waiting"}>
      <p class="answer-state" role="status">${words[answer.state]}</p>
      <${ErrorText} error=${answer.error} />
      ${answer.reasoning && !hasTokens && html`
        <details class="answer-reasoning"><summary>Reasoning</summary>
          <div class="answer-text">${answer.reasoning}</div>
        </details>`}
      ${hasTokens
        ? html`<${Tokens} tokens=${answer.tokens} label=${label} />`
        : html`<div class="answer-text">${answer.text}</div>`}
      <${Measured} answer=${answer} />
    </div>`;
}

// One tab stop; the arrow keys, the pointer and a touch choose the token that is described below.
function Tokens({tokens, label}) {
  const [at, setAt] = useState(-1);
  const id = useId("tokens");
  const chosen = Math.min(at, tokens.length - 1);
  const onKeyDown = (event) => {
    const steps = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1};
    const ends = {Home: 0, End: tokens.length - 1};
    if (event.key in steps) setAt(clamp(chosen + steps[event.key], tokens.length));
    else if (event.key in ends) setAt(ends[event.key]);
    else return;
    event.preventDefault();
  };
  const point = (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) setAt(Number(index));
  };
  return html`
    <div class="answer-text tokens" role="listbox" tabindex="0" aria-label=${`Tokens of ${label}`}
      aria-orientation="horizontal"
      aria-activedescendant=${chosen >= 0 ? `${id}-${chosen}` : undefined}
      onKeyDown=${onKeyDown} onFocus=${() => chosen < 0 && setAt(0)}
      onMouseOver=${point} onClick=${point}>
      ${tokens.map((token, index) => html`<${Token} key=${index} id=${`${id}-${index}`}
        index=${index} token=${token} isChosen=${index === chosen} />`)}
    </div>
    <${Alternatives} token=${tokens[chosen]} number=${chosen + 1} />`;
}

function Token({id, index, token, isChosen}) {
  return html`<span role="option" id=${id} data-index=${index} aria-selected=${isChosen}
    class=${`token token-${levelOf(token.p)}`}
    aria-label=${`${token.token} ${percent(token.p)}`}>${token.text}</span>`;
}

function Alternatives({token, number}) {
  if (!token) {
    return html`<p class="alternatives hint">Point at a token, or focus the answer and use the
      arrow keys, to see its probability.</p>`;
  }
  return html`
    <div class="alternatives">
      <p>Token ${number}, <code>${visible(token.token)}</code>: ${percent(token.p)}</p>
      ${token.top.length > 0 && html`<table><thead><tr><th scope="col">Most likely</th><th scope="col">Probability</th></tr></thead>
        <tbody>${token.top.map((one) => html`<tr>
          <td><code>${visible(one.token)}</code></td>
          <td><meter min="0" max="1" value=${one.p} aria-label=${`Probability of ${visible(one.token)}`}>
            </meter> ${percent(one.p)}</td>
        </tr>`)}</tbody>
      </table>`}
    </div>`;
}

function Measured({answer}) {
  if (answer.state === "empty") return null;
  const {begun, first, ended, usage} = answer;
  const output = usage?.completion_tokens;
  const decode = first && ended && output > 1 ? ((output - 1) * 1000) / (ended - first) : null;
  const rows = [
    ["Answered by", answer.version && `${answer.version}${answer.arm ? ` (${answer.arm})` : ""}`],
    ["Time to first token", first && `${Math.round(first - begun)} ms`],
    ["Tokens per second", decode && Number.isFinite(decode) && decode.toFixed(1)],
    ["Tokens", usage && `${usage.prompt_tokens} prompt, ${output} output`],
    ["Finish reason", answer.finish],
    ["Replica", answer.replica],
    ["Router", answer.router],
  ].filter(([, value]) => value);
  return html`
    <dl class="measured">${rows.map(([name, value]) => html`<div key=${name}>
      <dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${answer.timing?.length > 0 && html`<details class="timing">
      <summary>Parts of the time to first token</summary>
      <dl class="measured">${answer.timing.map(({name, ms}) => html`<div key=${name}>
        <dt>${name}</dt><dd>${ms === null ? "–" : `${ms.toFixed(2)} ms`}</dd></div>`)}</dl>
    </details>`}`;
}

export function Legend() {
  const words = LEVELS.map((level, at) =>
    at === 0 ? `${100 * level} % and more` : `below ${100 * LEVELS[at - 1]} %`);
  return html`<p class="legend">Probability of a token:
    ${words.map((text, at) => html` <span key=${at} class=${`token token-${at}`}>${text}</span>`)}</p>`;
}

function levelOf(p) {
  return LEVELS.findIndex((level) => p >= level);
}

function percent(p) {
  return `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`;
}

function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";
}

function clamp(index, length) {
  return Math.max(0, Math.min(length - 1, index));
}
