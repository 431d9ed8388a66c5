// The last release of each model: how far it is, what its guards say, and what may be done with it.

import { confirmed, h } from "./dom.js";
import { act, button, Section, table, told } from "./section.js";

const PHASES = { running: "running", paused: "paused", promoted: "promoted", rolled_back: "rolled back" };
const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)} %`;

/** What a guard has seen, in the unit of its metric. */
function figure(guard, value, count) {
  if (value == null) return "–";
  const shown = /^\w+_mean/.test(guard) ? `${(1000 * value).toFixed(1)} ms` : guard.startsWith("shadow_kl") ? value.toFixed(3) : percent(value, 2);
  return `${shown} of ${count.toLocaleString()}`;
}

function verdict({ fired, watched, count }) {
  const [name, text] = fired ? ["down", "worse"] : watched ? ["draining", "watched"] : count ? ["up", "nothing against it"] : ["", "nothing seen yet"];
  return h("span", { class: `state ${name}` }, text);
}

function guards(release) {
  const rows = release.guards.map((one) => [one.guard, h("code", {}, one.guard), figure(one.guard, one.value, one.count), figure(one.guard, one.other, one.other_count), h("progress", { max: "1", value: String(Math.min(1, Math.max(0, one.evidence / one.needed))), "aria-label": `Evidence by ${one.guard}` }), verdict(one)]);
  return table(["Guard", "New", "Old", "Evidence against it", "Verdict"], rows);
}

/** Each model's last release, with its details. */
async function latest() {
  const found = await told("v1/releases");
  return found && Promise.all(found.releases.map(({ model }) => told(`v1/releases?model=${encodeURIComponent(model)}`)));
}

export class Releases extends Section {
  constructor() {
    super("Releases");
  }

  async update() {
    const releases = await latest();
    this.draw(releases?.length ? releases.map((one) => this.#card(one)) : null);
  }

  #card(release) {
    const { model, phase, spec, step, reason, shares } = release;
    const open = phase === "running" || phase === "paused";
    const where = open ? `step ${step + 1} of ${spec.steps.length}` : new Date(1000 * release.since).toLocaleString();
    return h("article", { class: "release", "data-key": release.id, "aria-label": `Release of ${model}` },
      h("h3", {}, model, " ", h("span", { class: `state ${open ? "" : phase === "promoted" ? "up" : "down"}` }, PHASES[phase])),
      h("p", {}, h("code", {}, spec.canary), ` in place of `, h("code", {}, spec.stable), ` has ${percent(shares.canary ?? 0)} of the requests (${where}): ${reason}`),
      h("progress", { max: "1", value: String(shares.canary ?? 0), "aria-label": `Share of the new version of ${model}` }),
      guards(release),
      open && this.#buttons(model, phase === "paused"));
  }

  #buttons(model, paused) {
    const does = (action, done) => act(`v1/releases/${action}`, { model }, done);
    const asks = async (question, help, text, action, done) => (await confirmed(question, help, text)) && does(action, done);
    return h("div", { class: "row" },
      button("Next step", `of ${model}`, () => does("promote", "The release goes on to its next step.")),
      paused ? button("Resume", `the release of ${model}`, () => does("resume", "The release goes on.")) : button("Pause", `the release of ${model}`, () => does("pause", "The release stays at its step; its guards go on.")),
      button("Promote", model, () => asks(`All requests for ${model} to the new version?`, "The release ends, and its guards with it.", "Promote", "finish", "The new version has all requests.")),
      button("Roll back", model, () => asks(`Roll ${model} back?`, "The release ends; the old version gets all requests.", "Roll back", "rollback", "The old version has all requests.")));
  }
}
