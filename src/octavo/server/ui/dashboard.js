// The dashboard: what the server or the gateway does now, from /metrics and what admins are told.

import { explain, json, request } from "./api.js";
import { h } from "./dom.js";
import { Experiments } from "./experiments.js";
import { Replicas, Upstreams } from "./fleet.js";
import { parse } from "./metrics.js";
import { Releases } from "./releases.js";
import { Running } from "./running.js";
import { Section, table } from "./section.js";
import { isGateway, tilesOf, WINDOW } from "./tiles.js";

const EVERY = 1000; // ms between looks

class Models extends Section {
  constructor() {
    super("Models");
  }

  async update() {
    const { data } = await json("v1/models");
    this.draw([table(["Model", "State", "Context"], data.map(({ id, state, max_model_len, parent }) => [id, id, parent ? `adapter of ${parent}` : (state ?? "ready"), max_model_len ? `${max_model_len.toLocaleString()} tokens` : ""]))]);
  }
}

const hasReplicas = ({ samples }) => (samples.get("octavo_requests_running") ?? []).some(({ labels }) => labels.replica);

/** Parts with what has to be there for them. */
const PARTS = [[Running, () => true], [Replicas, hasReplicas], [Upstreams, isGateway], [Releases, isGateway], [Experiments, isGateway], [Models, () => true]];

export class Dashboard {
  #looks = [];
  #timer = 0;
  #run = 0; // counts how often it was shown and hidden

  constructor() {
    this.tiles = null; // of what is asked, once that is known
    this.parts = PARTS.map(([Part, wanted]) => ({ part: new Part(), wanted }));
    this.figures = h("div", { class: "tiles" });
    this.element = h("div", { class: "dashboard", tabindex: "0", role: "region", "aria-label": "Dashboard" }, this.figures, this.parts.map(({ part }) => part.element));
    this.state = h("span", { class: "live" }, "Live");
    this.bar = h("div", { class: "bar-row" }, h("h1", {}, "Dashboard"), h("span", { class: "spring" }), this.state);
  }

  show() {
    for (const tile of this.tiles ?? []) tile.plot.show();
    this.#look(++this.#run);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#run++;
  }

  /** Looks, and again a while after that is answered: a slow server is not asked more. */
  async #look(run) {
    try {
      if (!document.hidden) await this.#ask();
    } catch (error) {
      if (run === this.#run) this.#live(false, explain(error));
    }
    if (run === this.#run) this.#timer = setTimeout(() => this.#look(run), EVERY);
  }

  async #ask() {
    const text = await (await request("metrics")).text();
    const now = { time: Date.now() / 1000, samples: parse(text) };
    this.#draw(now);
    await Promise.all(this.parts.filter(({ wanted }) => wanted(now)).map(({ part }) => part.update()));
    this.#live(true, "Live");
  }

  #live(live, text) {
    this.state.classList.toggle("lost", !live);
    this.state.textContent = text;
  }

  #draw(now) {
    if (!this.tiles) {
      this.tiles = tilesOf(now);
      this.figures.replaceChildren(...this.tiles.map((tile) => tile.element));
      for (const tile of this.tiles) tile.plot.show();
    }
    this.#looks = [...this.#looks.slice(-WINDOW), now];
    const before = this.#looks.at(-2) ?? now;
    for (const tile of this.tiles) tile.update(now.time, { now, before, past: this.#looks[0] });
  }
}
