// Requests to the server. The header tells it that a page of the console asks: only then does the
// cookie of the login count.

import {useCallback, useEffect, useState} from "./vendor/preact.js";

// This file is at ROOT/console/assets/HASH/api.js.
const ROOT = new URL("../../../", import.meta.url);
const HEADER = {"x-loraplex-console": "1"};
const SILENT_MS = 30_000; // a server that takes longer to answer a page's question is away
export const LOGGED_OUT = "loraplex-logged-out"; // an event of the window; its detail is the error

export async function getJson(path) {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), SILENT_MS);
  try {
    return await (await send("GET", path, undefined, controller.signal)).json();
  } catch (error) {
    throw error.status === undefined ? unreachable() : error;
  } finally {
    clearTimeout(timer);
  }
}
export const postJson = (path, body = {}) => requestJson("POST", path, body);
export const getBlob = async (path) => (await send("GET", path)).blob();

// Streams an OpenAI response. onEvent(event, response) receives each parsed event, in order; the
// promise resolves with the response after the last. Throws as getJson does, also for an error
// within the stream or its early end; AbortError after signal. headers: further ones of the request.
export async function stream(path, body, onEvent, signal, headers = {}) {
  const response = await send("POST", path, body, signal, headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : brokenOff();
    });
    rest += value ?? "";
    const events = rest.split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return response;
      if (!data) continue;
      const parsed = JSON.parse(data);
      if (parsed.error) throw failure(response.status, parsed);
      onEvent(parsed, response);
    }
    if (done) throw brokenOff();
  }
}

// Returns {data, error, reload} of a path that is asked every so many seconds while the tab is
// visible. The last data stay after an error. A null path asks nothing.
export function usePoll(path, seconds) {
  const [state, setState] = useState({path, data: null, error: null});
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let timer = null;
    let ended = false;
    const ask = async () => {
      clearTimeout(timer);
      if (document.hidden || path === null) return;
      try {
        const data = await getJson(path);
        if (!ended) setState({path, data, error: null});
      } catch (error) {
        if (!ended) setState((old) => ({path, data: old.path === path ? old.data : null, error}));
      }
      clearTimeout(timer);
      if (!ended) timer = setTimeout(ask, seconds * 1000);
    };
    ask();
    document.addEventListener("visibilitychange", ask);
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", ask);
    };
  }, [path, seconds, turn]);
  const reload = useCallback(() => setTurn((old) => old + 1), []);
  return {data: state.path === path ? state.data : null, error: state.error, reload};
}

async function requestJson(method, path, body) {
  const response = await send(method, path, body);
  return await response.json();
}

async function send(method, path, body, signal, further = {}) {
  const headers = {...further, ...HEADER};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), ROOT), {
      method, headers, signal, credentials: "same-origin",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const error = failure(response.status, answer);
  if (error.status === 401 && !path.startsWith("/console/")) {
    window.dispatchEvent(new CustomEvent(LOGGED_OUT, {detail: error}));
  }
  throw error;
}

const unreachable = () => failure(0, {error: {message: "The server does not answer.", code: "unreachable"}});
const brokenOff = () => failure(0, {error: {message: "The answer broke off.", code: "broken_off"}});

// The server's error shape: {"error": {"message", "code", ...}}.
function failure(status, answer) {
  const {message, code} = answer.error ?? {};
  const error = new Error(message ?? `The server answered with the status ${status}.`);
  return Object.assign(error, {status, code: code ?? null});
}
