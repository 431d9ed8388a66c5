// The requests that compute something, to be cancelled.

import { h, iconButton } from "./dom.js";
import { act, Section, table, told } from "./section.js";

export class Running extends Section {
  constructor() {
    super("Running requests");
  }

  async update() {
    const found = await told("v1/requests");
    this.draw(found && [this.#shown(found.running.filter(({ model }) => model))]);
  }

  #shown(running) {
    if (!running.length) return h("p", { class: "help" }, "Nothing runs.");
    return table(["Model", "Route", "Request", "Time", ["Cancel"]], running.map((one) => [one.id, one.model, one.route.replace("/v1/", ""), h("code", {}, one.id), `${one.seconds.toFixed(1)} s`, iconButton("close", `Cancel ${one.id}`, () => this.#cancel(one.id))]));
  }

  #cancel(id) {
    return act(`v1/requests/${encodeURIComponent(id)}/cancel`, undefined, "The request is cancelled.");
  }
}
