// The models of the server, and a menu of them.

import { explain, json } from "./api.js";
import { h, toast } from "./dom.js";

const AGAIN = 1500; // ms between questions while the server loads its model

/** All models that the server has. Waits while it starts, until `signal` ends that. */
export async function listModels(signal) {
  for (;;) {
    try {
      return (await json("v1/models", { signal })).data;
    } catch (error) {
      if (error.code !== "loading") throw error;
      await new Promise((resolve, reject) => {
        setTimeout(resolve, AGAIN);
        signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
      });
    }
  }
}

/** A menu of models. `onchange` is called with the name that is chosen. */
export class ModelMenu {
  #wanted = "";

  constructor(label) {
    this.onchange = () => {};
    this.element = h("select", { class: "models", "aria-label": label, onchange: () => this.#picked() }, h("option", { value: "" }, "Loading…"));
  }

  #picked() {
    this.#wanted = this.element.value;
    this.onchange(this.element.value);
  }

  get value() {
    return this.element.value;
  }

  /** The name that is chosen; asks the server first for its models where the menu has none yet. Throws ApiError. */
  async chosen(signal) {
    if (this.value) return this.value;
    const wanted = this.#wanted; // now: another chat may choose another one meanwhile
    const models = await listModels(signal);
    this.fill(models);
    return (models.find(({ id }) => id === wanted) ?? models[0])?.id ?? ""; // none: the server says so
  }

  /** Chooses a model, as soon as it is known; the first if there is none of that name. */
  choose(name) {
    this.#wanted = name;
    if ([...this.element.options].some((option) => option.value === name)) this.element.value = name;
    else this.element.selectedIndex = 0;
  }

  fill(models) {
    this.element.replaceChildren(...models.map(({ id, state }) => h("option", { value: id }, !state || state === "ready" ? id : `${id} (${state})`)));
    this.choose(this.#wanted);
  }
}

/** Fills menus with the server's models. */
export async function fillMenus(...menus) {
  try {
    const models = await listModels();
    for (const menu of menus) menu.fill(models);
  } catch (error) {
    toast(explain(error));
  }
}
