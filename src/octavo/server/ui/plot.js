// A small chart of lines over the last minutes.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { h } from "./dom.js";

const colour = (name) => {
  const probe = h("span", { class: `ink-${name}` });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
};

document.head.append(h("link", { rel: "stylesheet", href: "ui/vendor/uplot/uPlot.min.css" }));

const LEAST = 60; // seconds that are drawn
const clock = (time) => new Date(1000 * time).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const short = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 10_000 ? `${value / 1000}k` : String(Math.round(value * 100) / 100));

/** lines: their names; the first is the strong one. kept: points that are drawn. */
export class Plot {
  constructor(title, lines, kept) {
    this.lines = lines;
    this.kept = kept;
    this.data = [[], ...lines.map(() => [])];
    this.element = h("div", { class: "plot", role: "img", "aria-label": `Chart of ${title.toLowerCase()}: ${lines.join(", ")}` });
    new ResizeObserver(() => this.#fit()).observe(this.element);
    addEventListener("themechange", () => this.show());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
  }

  /** Draws it anew, in the colours of now. */
  show() {
    this.chart?.destroy();
    const [strong, weak, faint, grid] = ["strong", "weak", "faint", "grid"].map(colour);
    const font = "11px system-ui";
    const axis = { stroke: faint, font, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const colours = [strong, weak];
    this.chart = new uPlot({
      width: this.element.clientWidth || 300, height: 110, legend: { show: false }, cursor: { show: false }, padding: [6, 28, 0, 0],
      scales: { x: { range: (_, first, last) => [Math.min(first, last - LEAST), last] }, y: { range: (_, least, most) => [0, Math.max(most, 1) * 1.1] } },
      axes: [{ ...axis, space: 90, size: 20, grid: { show: false }, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 42, space: 34, gap: 4, values: (_, ticks) => ticks.map(short) }],
      series: [{}, ...this.lines.map((label, i) => ({ label, stroke: colours[i], width: i ? 1.25 : 2, points: { show: false }, fill: i ? undefined : strong.replace("rgb(", "rgba(").replace(")", ", 0.09)") }))],
    }, this.data, this.element);
  }

  add(time, values) {
    this.data = [time, ...values].map((value, i) => [...this.data[i].slice(1 - this.kept), value]);
    this.chart?.setData(this.data);
  }

  #fit() {
    if (this.element.clientWidth) this.chart?.setSize({ width: this.element.clientWidth, height: 110 });
  }
}
