// A part of the dashboard under a heading: what admins are told, in tables, and the buttons that change it.

import { explain, json, request } from "./api.js";
import { h, patch, toast } from "./dom.js";

/** What is told at a path; null where the key may not ask for it. */
export async function told(path) {
  try {
    return await json(path, { asks: false });
  } catch (error) {
    if (error.status === 401 || error.status === 403) return null;
    throw error;
  }
}

/** Does something at the server, and says what became of it. */
export async function act(path, body, done) {
  try {
    await request(path, { method: "POST", body });
    toast(done);
  } catch (error) {
    toast(explain(error));
  }
}

/** A button with a text; `label` says what it is about. */
export const button = (text, label, onclick) => h("button", { type: "button", class: "plain-button", "data-key": `${text} ${label}`, "aria-label": `${text} ${label}`, onclick }, text);

/** columns: their names; one that is not shown is in a list of its own. rows: lists of cells, each after what the row is of. */
export function table(columns, rows) {
  const head = columns.map((name) => h("th", { scope: "col" }, Array.isArray(name) ? h("span", { class: "unseen" }, name[0]) : name));
  const body = rows.map(([key, ...cells]) => h("tr", { "data-key": key }, cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export class Section {
  constructor(title) {
    this.title = title;
    this.element = h("section", { "aria-label": title, hidden: true }, h("h2", {}, title));
  }

  /** Shows these elements; null hides it. */
  draw(elements) {
    this.element.hidden = !elements;
    if (elements) patch(this.element, h("section", { "aria-label": this.title }, h("h2", {}, this.title), elements));
  }
}
