// Small components that the pages share. All values become text nodes or attributes.

import {html, useEffect, useLayoutEffect, useRef, useState} from "./vendor/preact.js";

let lastId = 0;
export function useId(prefix) {
  return useState(() => `${prefix}-${++lastId}`)[0];
}

// columns: [{key, label, render(row), isNumber, isHeader}]; without `render` the value at row[key].
export function Table({caption, columns, rows, keyOf, empty = "There are none."}) {
  const cell = (column, row) => (column.render ? column.render(row) : row[column.key]);
  const kind = (column) => (column.isNumber ? "number" : "");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="visually-hidden">${caption}</caption>
      <thead><tr>${columns.map((column) => html`
        <th key=${column.key} scope="col" class=${kind(column)}>${column.label}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${keyOf(row)}>${columns.map((column) => column.isHeader
          ? html`<th key=${column.key} scope="row">${cell(column, row)}</th>`
          : html`<td key=${column.key} class=${kind(column)}>${cell(column, row)}</td>`)}</tr>`)}
        ${rows.length === 0 && html`<tr><td class="empty" colspan=${columns.length}>${empty}</td></tr>`}
      </tbody>
    </table>
  </div>`;
}

// onClick may return a promise: the button is busy until then. kind: "", "primary" or "danger".
export function Button({onClick, kind = "", type = "button", disabled = false, label, children}) {
  const [isBusy, setBusy] = useState(false);
  const isGone = useRef(false);
  useEffect(() => () => { isGone.current = true; }, []);
  const click = async (event) => {
    if (isBusy) return;
    setBusy(true);
    try {
      await onClick?.(event);
    } finally {
      if (!isGone.current) setBusy(false);
    }
  };
  // aria-disabled keeps the focus of the keyboard where it is; `disabled` would lose it.
  return html`<button type=${type} class=${`button ${kind}`} disabled=${disabled} aria-label=${label}
    aria-disabled=${isBusy ? "true" : undefined} aria-busy=${isBusy ? "true" : undefined}
    onClick=${onClick && click}>${children}</button>`;
}

// A modal dialog that is open while it is rendered. Escape calls onClose.
export function Dialog({title, onClose, children}) {
  const element = useRef(null);
  const id = useId("dialog");
  // Before the browser draws: what is typed in between must not go to the page behind.
  useLayoutEffect(() => {
    const opener = document.activeElement;
    const dialog = element.current;
    dialog.showModal();
    return () => {
      dialog.close(); // else the rest of the page is inert and takes no focus
      opener?.focus?.();
    };
  }, []);
  return html`<dialog ref=${element} aria-labelledby=${id}
    onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <h2 id=${id}>${title}</h2>
    ${children}
  </dialog>`;
}

// A labelled input. options: [[value, text]] makes a selection, rows a text area; all other
// properties go to the element.
export function Field({label, hint, options, rows, onInput, value, ...rest}) {
  const id = useId("field");
  const shared = {
    id, ...rest, "aria-describedby": hint ? `${id}-hint` : undefined,
    onInput: (event) => onInput(event.target.value),
  };
  let input;
  if (options) {
    input = html`<select ...${shared}>${options.map(([key, text]) => html`
      <option key=${key} value=${key} selected=${key === value}>${text}</option>`)}</select>`;
  } else if (rows) {
    input = html`<textarea ...${shared} rows=${rows} value=${value}></textarea>`;
  } else {
    input = html`<input ...${shared} value=${value} />`;
  }
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${input}
    ${hint && html`<p class="hint" id=${`${id}-hint`}>${hint}</p>`}
  </div>`;
}

// The message of an error; nothing without one.
export function ErrorText({error}) {
  return error ? html`<p class="error" role="alert">${error.message}</p>` : null;
}

// kind: "good", "warning", "bad" or "".
export function Badge({kind = "", children}) {
  return html`<span class=${`badge ${kind}`}>${children}</span>`;
}

// A figure with a name.
export function Card({label, value, detail}) {
  return html`<div class="card">
    <dt>${label}</dt>
    <dd><span class="figure">${value}</span>${detail && html`<span class="detail">${detail}</span>`}</dd>
  </div>`;
}

export const has = (session, scope) => session.scopes.includes(scope);

export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1)} ${units[0]}`;
}

// Seconds in the unit that suits them.
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function formatNumber(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", {maximumFractionDigits: digits});
}

export function formatTime(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
}
