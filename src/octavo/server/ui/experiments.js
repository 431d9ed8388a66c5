// The experiments of a gateway: their variants, and what is known of the differences.

import { confirmed, h } from "./dom.js";
import { act, button, Section, table, told } from "./section.js";

const number = (value) => Number(value.toPrecision(3)).toLocaleString();

function report({ comparisons, mismatch }) {
  const counts = Object.entries(mismatch.counts).map(([name, count]) => `${name} ${count.toLocaleString()}`).join(", ");
  if (mismatch.found) return h("p", { class: "help" }, `Variants do not have the users that they should have (${counts}), so that nothing can be said.`);
  if (!comparisons.length) return h("p", { class: "help" }, `Too few users yet (${counts || "none"}).`);
  const rows = comparisons.map((one) => [`${one.metric} ${one.variant}`, h("code", {}, one.metric), one.variant, number(one.value), number(one.control), `${number(one.difference)} (${number(one.low)} to ${number(one.high)})`, one.units.toLocaleString(), one.decided ? "a difference" : "undecided"]);
  return table(["Metric", "Variant", "Value", "Control", "Difference", "Users", "Verdict"], rows);
}

export class Experiments extends Section {
  #open = new Set(); // ids whose reports are shown

  constructor() {
    super("Experiments");
  }

  async update() {
    const found = await told("v1/experiments");
    this.draw(found?.experiments.length ? await Promise.all(found.experiments.map((one) => this.#card(one))) : null);
  }

  async #card({ id, spec, ended }) {
    const shown = this.#open.has(id);
    const variants = Object.entries(spec.variants).map(([name, { weight }]) => `${name} ${weight} %${name === spec.control ? " (control)" : ""}`);
    const toggle = () => (shown ? this.#open.delete(id) : this.#open.add(id), this.update());
    return h("article", { class: "release", "data-key": id, "aria-label": `Experiment ${id}` },
      h("h3", {}, id, " ", h("span", { class: `state ${ended ? "" : "up"}` }, ended ? "ended" : "running")),
      h("p", {}, h("code", {}, spec.model), `: ${variants.join(", ")}`),
      shown && report(await told(`v1/experiments/${encodeURIComponent(id)}/report`)),
      h("div", { class: "row" }, button(shown ? "Hide the report" : "Report", `of ${id}`, toggle), !ended && button("Stop", id, () => this.#stop(id, spec.control))));
  }

  async #stop(id, control) {
    if (await confirmed(`Stop ${id}?`, `Everybody gets ${control}; the report stays.`, "Stop")) await act(`v1/experiments/${encodeURIComponent(id)}/stop`, undefined, "The experiment has ended.");
  }
}
