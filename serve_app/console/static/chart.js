// A line chart of uPlot, with a table of the newest values for readers without sight.

import {html, useEffect, useRef} from "./vendor/preact.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT_PX = 180;
const clock = (time, end) => new Date(time * 1000).toISOString().slice(11, end); // UTC

// times: Unix seconds. lines: [{label, values}], values may be null. format(value) -> text.
// least: the upper end of the axis while all values are below it.
export function Chart({title, times, lines, format, least}) {
  const place = useRef(null);
  const shown = useRef(null);
  const shape = lines.map((line) => line.label).join("\n");
  useEffect(() => {
    const make = () => {
      shown.current?.destroy();
      // Resolved colours: a canvas knows no light-dark().
      const probe = getComputedStyle(place.current.querySelector(".probe"));
      const axis = {stroke: probe.color, grid: {stroke: probe.borderTopColor, width: 1}, ticks: {show: false}, font: "12px system-ui"};
      shown.current = new uPlot({
        width: place.current.clientWidth, height: HEIGHT_PX,
        cursor: {drag: {x: false, y: false}},
        legend: {live: true},
        scales: {y: {range: (_, low, high) => [Math.min(0, low ?? 0), Math.max((high ?? 0) * 1.1, least)]}},
        axes: [{...axis, values: (_, ticks) => ticks.map((time) => clock(time, 16))}, {...axis, size: 62, values: (_, ticks) => ticks.map(format)}],
        series: [{value: (_, time) => (time ? `${clock(time, 19)} UTC` : "–")},
          ...lines.map((line, index) => ({
            label: line.label,
            stroke: getComputedStyle(place.current.querySelectorAll(".colour")[index % 4]).color,
            dash: [[], [6, 3], [2, 3], [9, 3, 2, 3]][index % 4],
            width: 2,
            value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
          }))],
      }, place.current.latest, place.current.querySelector(".plot"));
    };
    place.current.latest = [times, ...lines.map((line) => line.values)];
    make();
    const resized = new ResizeObserver(() =>
      shown.current.setSize({width: place.current.clientWidth, height: HEIGHT_PX}));
    resized.observe(place.current);
    const theme = new MutationObserver(make);
    theme.observe(document.documentElement, {attributeFilter: ["data-theme"]});
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    return () => {
      resized.disconnect();
      theme.disconnect();
      scheme.removeEventListener("change", make);
      shown.current.destroy();
      shown.current = null;
    };
  }, [shape]);
  useEffect(() => {
    place.current.latest = [times, ...lines.map((line) => line.values)];
    shown.current.setData(place.current.latest);
  }, [times, lines]);
  const newest = lines.map((line) => {
    const value = line.values.findLast((one) => one !== null);
    return `${line.label} ${value === undefined ? "none" : format(value)}`;
  });
  return html`<section class="chart">
    <h2>${title}</h2>
    <p class="visually-hidden">Newest values: ${newest.join(", ")}.</p>
    <div ref=${place} aria-hidden="true">
      <span class="probe"></span>
      ${[1, 2, 3, 4].map((number) => html`<span key=${number} class=${`colour colour-${number}`}></span>`)}
      <div class="plot"></div>
    </div>
  </section>`;
}
