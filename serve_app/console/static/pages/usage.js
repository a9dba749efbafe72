// The recorded use: a stacked chart over time, a table of sums, and the same as CSV.

import {html, useEffect, useMemo, useRef, useState} from "../vendor/preact.js";
import uPlot from "../vendor/uplot.js";
import {getBlob, getJson} from "../api.js";
import {Button, ErrorText, Field, Table, formatNumber} from "../ui.js";

const STEPS = {day: 86_400, hour: 3600}; // seconds
const GROUPS = {model: "Adapter", key: "Key", tenant: "Tenant", base: "Base", arm: "Arm"};
const SUMS = {
  requests: "Requests",
  prompt_tokens: "Prompt tokens",
  cached_tokens: "Cached tokens",
  output_tokens: "Output tokens",
  engine_ms: "Engine ms",
  cost: "Cost",
};
const MAX_SERIES = 6; // the largest ones; the others are one series
// Days as the fields of dates have them. A date that is being typed is empty or of year 2 at first.
const DAY = /^2[01]\d\d-\d\d-\d\d$/;
const [FIRST_DAY, LAST_DAY] = ["2000-01-01", "2199-12-31"];
const HEIGHT = 220; // pixels

// The page of a key that may not read the administration.
export default function Page() {
  const {key, tenant, ...groups} = GROUPS;
  return html`
    <h1>Usage</h1>
    <${Usage} title="Use of this key" source="/key/usage" groups=${groups} />`;
}

export function Usage({title = "Usage", source = "/admin/usage", groups = GROUPS}) {
  const today = new Date();
  const [query, setQuery] = useState({
    step: "day", group: "model", sum: "output_tokens",
    from: isoDay(new Date(today.getTime() - 6 * 86_400_000)), to: isoDay(today),
  });
  const [typed, setTyped] = useState({from: query.from, to: query.to});
  const [found, setFound] = useState(null); // {lines, asked}: the last answer and its query
  const [error, setError] = useState(null);
  const path = usagePath(source, query);
  useEffect(() => {
    let isCurrent = true; // an answer that comes late does not replace a newer one
    getJson(path).then(({usage}) => {
      if (isCurrent) [setFound({lines: usage, asked: query}), setError(null)];
    }, (failure) => isCurrent && setError(failure));
    return () => (isCurrent = false);
  }, [path]);
  const field = (name) => ({
    value: query[name], onInput: (value) => setQuery({...query, [name]: value}),
  });
  const day = (name) => ({
    type: "date", required: true, value: typed[name],
    onInput: (value) => {
      setTyped({...typed, [name]: value});
      if (DAY.test(value)) setQuery({...query, [name]: value});
    },
  });
  const save = () => getBlob(`${path}&format=csv`).then(
    (blob) => keep(blob, `usage-${query.from}-${query.to}.csv`), setError);
  const {lines = [], asked} = found ?? {};
  const sums = useMemo(() => (found ? sumsOf(lines, asked.group) : []), [found]);
  const columns = [
    {label: GROUPS[asked?.group], render: (line) => line.name || "–", isHeader: true},
    ...Object.entries(SUMS).map(([name, label]) => ({
      label, render: (line) => formatNumber(line[name], name === "cost" ? 4 : 0), isNumber: true,
    })),
  ];
  return html`
    <section class="panel" aria-labelledby="usage-title">
      <h2 id="usage-title">${title}</h2>
      <div class="settings">
        <${Field} label="From" min=${FIRST_DAY} max=${query.to} ...${day("from")} />
        <${Field} label="To" min=${query.from} max=${LAST_DAY} ...${day("to")} />
        <${Field} label="By" options=${Object.entries(groups)} ...${field("group")} />
        <${Field} label="Per" options=${[["day", "Day"], ["hour", "Hour"]]} ...${field("step")} />
        <${Field} label="Chart of" options=${Object.entries(SUMS)} ...${field("sum")} />
        <${Button} onClick=${save}>Download CSV<//>
      </div>
      <p class="hint">Days and hours are UTC. The cost is at today's prices
        (<code>tenancy.prices</code>).</p>
      <${ErrorText} error=${error} />
      ${found && (lines.length === 0
        ? html`<p>No use is recorded in this time.</p>`
        : html`<${Chart} lines=${lines} query=${{...asked, sum: query.sum}} sums=${sums} />
            <${Table} caption=${`Usage by ${GROUPS[asked.group].toLowerCase()}`} columns=${columns}
              rows=${sums} keyOf=${(line) => line.name} />`)}
    </section>`;
}

function Chart({lines, query, sums}) {
  const holder = useRef(null);
  const legend = useRef(null);
  const names = useMemo(() => seriesNames(sums, query.sum), [sums, query.sum]);
  useEffect(() => {
    const draw = () => {
      const style = getComputedStyle(holder.current);
      // The canvas takes its colours from the swatches of the legend, as the scheme has them.
      const colours = [...legend.current.querySelectorAll(".swatch")].map((one) =>
        getComputedStyle(one).backgroundColor);
      const data = stacked(lines, query, names);
      const axis = {
        stroke: style.color, grid: {stroke: style.borderColor, width: 1},
        ticks: {stroke: style.borderColor},
      };
      const series = names.map((name, at) => ({
        label: name || "–",
        fill: colours[at],
        width: 0,
        paths: uPlot.paths.bars({size: [0.7, 48]}),
        points: {show: false},
      }));
      return new uPlot({
        width: holder.current.clientWidth, height: HEIGHT,
        tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
        legend: {show: false}, cursor: {show: false},
        scales: {x: {range: (_, low, high) => [low - STEPS[query.step], high + STEPS[query.step]]},
          y: {range: (_, __, high) => [0, high || 1]}},
        axes: [{...axis, ...timeAxis(query.step)}, {...axis, size: 64, values: (_, ticks) => ticks.map(shortNumber)}],
        series: [{}, ...series],
      }, data, holder.current);
    };
    let plot = draw();
    const redraw = () => {
      plot.destroy();
      plot = draw();
    };
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const sizes = new ResizeObserver(() =>
      plot.setSize({width: holder.current.clientWidth, height: HEIGHT}));
    const theme = new MutationObserver(redraw);
    scheme.addEventListener("change", redraw);
    theme.observe(document.documentElement, {attributeFilter: ["data-theme"]});
    sizes.observe(holder.current);
    return () => {
      theme.disconnect();
      scheme.removeEventListener("change", redraw);
      sizes.disconnect();
      plot.destroy();
    };
  }, [lines, query.sum, names]);
  return html`
    <div class="usage-chart" ref=${holder} role="img"
      aria-label=${`${SUMS[query.sum]} per ${query.step}, the sums are in the table below`}></div>
    <ul class="series" ref=${legend}>${names.map((name, at) => html`<li key=${name}>
      <span class=${`swatch swatch-${at + 1}`}></span> ${name || "–"}</li>`)}</ul>`;
}

function timeAxis(step) {
  const day = STEPS.day;
  const incrs = [...(step === "hour" ? [3600, 3 * 3600, 6 * 3600] : []), day, 2 * day, 7 * day, 28 * day];
  const shown = (time) => {
    const [date, clock] = new Date(1000 * time).toISOString().split("T");
    return time % day ? clock.slice(0, 5) : date.slice(5);
  };
  return {incrs, space: 56, values: (_, ticks) => ticks.map(shown)};
}

// The times in seconds, then each series on top of those that follow it: the first is drawn first
// and highest, and the later ones cover their own part of it.
function stacked(lines, query, names) {
  const step = STEPS[query.step];
  const from = Date.parse(`${query.from}T00:00Z`) / 1000;
  const to = Math.min(Date.parse(`${query.to}T00:00Z`) / 1000 + 86_400, Date.now() / 1000);
  const times = [];
  for (let time = from; time < to; time += step) times.push(time);
  const heights = names.map(() => times.map(() => 0));
  const isNamed = new Map(names.map((name, at) => [name, at]));
  for (const line of lines) {
    const at = isNamed.get(line[query.group] ?? "") ?? names.length - 1;
    const time = Math.floor((Date.parse(line[query.step]) / 1000 - from) / step);
    if (time < times.length) heights[at][time] += line[query.sum];
  }
  for (let at = names.length - 2; at >= 0; at--) {
    heights[at].forEach((_, time) => (heights[at][time] += heights[at + 1][time]));
  }
  return [times, ...heights];
}

function seriesNames(sums, name) {
  const found = [...sums].sort((one, other) => other[name] - one[name]).map((line) => line.name);
  return found.length <= MAX_SERIES ? found : [...found.slice(0, MAX_SERIES - 1), "others"];
}

function sumsOf(lines, group) {
  const sums = new Map();
  for (const line of lines) {
    const name = line[group] ?? "";
    const sum = sums.get(name) ?? {name, ...Object.fromEntries(Object.keys(SUMS).map((one) => [one, 0]))};
    for (const one of Object.keys(SUMS)) sum[one] += line[one];
    sums.set(name, sum);
  }
  return [...sums.values()].sort((one, other) => other.output_tokens - one.output_tokens);
}

function usagePath(source, {step, group, from, to}) {
  // The API's `to` is exclusive, the field's day is inclusive.
  const end = isoDay(new Date(Date.parse(`${to}T00:00Z`) + 86_400_000));
  return `${source}?${new URLSearchParams({by: `${step},${group}`, from, to: end})}`;
}

function keep(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function isoDay(date) {
  return date.toISOString().slice(0, 10);
}

function shortNumber(value) {
  return Intl.NumberFormat("en", {notation: "compact"}).format(value);
}
