// What computes: the replicas of a server's models, the upstreams of a gateway.

import { h } from "./dom.js";
import { act, button, Section, table, told } from "./section.js";

const milliseconds = (seconds) => (seconds ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : "–");
const speed = (seconds) => (seconds ? `${Math.round(1 / seconds).toLocaleString()}/s` : "–");

/** A state, with the reason for it where there is one. */
const state = (name, reason) => [h("span", { class: `state ${name}` }, name), reason && h("span", { class: "help" }, ` ${reason}`)];

const drains = (one, name, draining, act) => (draining ? button("Resume", name, () => act("resume", one, `${name} gets requests again.`)) : button("Drain", name, () => act("drain", one, `${name} gets nothing new.`)));

/** The engines of models that have several. */
export class Replicas extends Section {
  constructor() {
    super("Replicas");
  }

  async update() {
    const found = await told("v1/replicas");
    this.draw(found && [table(["Model", "Replica", "State", "Running", "Waiting", "Restarts", "Process", ["Change"]], found.data.filter(({ replica }) => replica).map((one) => this.#row(one)))]);
  }

  #row(one) {
    const name = `replica ${one.replica} of ${one.model}`;
    const buttons = h("div", { class: "row" }, drains(one, name, one.state === "draining", this.#act), button("Restart", name, () => this.#act("restart", one, `${name} has a new engine.`)));
    return [name, one.model, one.replica, h("span", {}, state(one.state)), String(one.running), String(one.waiting), String(one.restarts), String(one.pid ?? "–"), buttons];
  }

  #act(action, { model, replica }, done) {
    return act(`v1/replicas/${action}`, { model, replica }, done[0].toUpperCase() + done.slice(1));
  }
}

/** The servers behind a gateway. */
export class Upstreams extends Section {
  constructor() {
    super("Upstreams");
  }

  async update() {
    const found = await told("v1/upstreams");
    const rows = found?.upstreams.map((one) => this.#row(one));
    this.draw(found && [rows.length ? table(["Upstream", "Pool", "State", "Models", "Running", "Waiting", "Prompts", "A step", ["Change"]], rows) : h("p", { class: "help" }, "There are none.")]);
  }

  #row(one) {
    const now = one.state === "up" && one.breaker !== "closed" ? [h("span", { class: "state down" }, "failing"), h("span", { class: "help" }, ` breaker ${one.breaker.replace("_", " ")}`)] : state(one.state, one.state !== "up" && one.reason);
    const change = drains(one, one.id, one.state === "draining", (action, { id }, done) => act(`v1/upstreams/${action}`, { upstream: id }, done));
    return [one.id, h("code", {}, one.id), one.pool, h("span", {}, now), one.models.join(", "), String(one.running), String(one.waiting), speed(one.prompt_token_seconds), milliseconds(one.step_seconds), change];
  }
}
