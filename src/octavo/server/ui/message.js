// A message: what it says, and what can be done with it.

import { copyButton, h, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const ENDS = { length: "It ends here because of its length.", stopped: "Stopped.", content_filter: "Filtered." };

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

function speed(stats) {
  if (!stats) return "";
  const parts = [`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`];
  if (stats.rate) parts.push(`${Math.round(stats.rate)} tokens/s`);
  if (stats.first != null) parts.push(`first after ${stats.first < 1000 ? `${Math.round(stats.first)} ms` : `${(stats.first / 1000).toFixed(1)} s`}`);
  return parts.join(" · ");
}

/** actions: {edit, again, fork, select, answer}, each called with the message. */
export class MessageView {
  constructor(message, actions) {
    this.actions = actions;
    this.message = message;
    const name = { user: "You", assistant: "Model", tool: "Tool result" }[message.role];
    this.body = h("div", { class: "text" });
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: `message ${message.role}`, "aria-label": name });
    if (message.role === "assistant") this.#reply();
    else this.#given();
    this.element.append(this.foot);
  }

  #given() {
    const { images = [], role, text } = this.message;
    this.element.append(images.length ? h("div", { class: "images" }, images.map((url, i) => h("img", { src: url, alt: `Image ${i + 1} of the message` }))) : "");
    if (role === "tool") this.element.append(h("div", { class: "label" }, icon("tool"), "Result"));
    this.body.append(text);
    if (text) this.element.append(this.body);
  }

  #reply() {
    this.thoughts = h("div", { class: "thoughts-text" });
    this.folded = h("details", { class: "thoughts", hidden: true }, (this.thinking = h("summary", {}, "Thoughts")), this.thoughts);
    this.calls = h("div", { class: "calls" });
    this.note = h("div", { class: "note" });
    this.markdown = new MarkdownView(this.body);
    this.thoughtsView = new MarkdownView(this.thoughts);
    this.element.append(this.folded, this.body, this.calls, this.note);
  }

  /** Shows the message as it is now. busy: it is still being written. branches: those at its place. */
  update(busy, branches) {
    this.element.classList.toggle("busy", busy);
    this.element.setAttribute("aria-busy", busy);
    if (this.message.role === "assistant") this.#updateReply(busy);
    if (!busy) this.#updateFoot(branches);
    else this.foot.replaceChildren();
  }

  #updateReply(busy) {
    const { text, thoughts, calls, error, finish } = this.message;
    this.folded.hidden = !thoughts;
    this.thinking.textContent = busy && !text ? "Thinking…" : "Thoughts";
    this.thoughtsView.update(thoughts);
    this.markdown.update(text);
    this.element.classList.toggle("empty", !text && !thoughts && !calls.length);
    if (busy && !calls.length) return;
    this.calls.replaceChildren(...calls.map((call) => this.#call(call, busy)));
    const said = error ?? ENDS[finish];
    this.note.classList.toggle("error", Boolean(error));
    this.note.setAttribute("role", error ? "alert" : "note");
    this.note.replaceChildren(...(said ? [h("span", {}, said)] : []));
    if (error) this.note.append(h("button", { class: "plain-button", onclick: () => this.actions.again(this.message) }, "Try again"));
  }

  #call(call, busy) {
    const card = h("div", { class: "call", role: "group", "aria-label": `Call of ${call.name}` },
      h("div", { class: "label" }, icon("tool"), "Calls ", h("code", {}, call.name)),
      h("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, pretty(call.arguments)));
    if (busy || !this.actions.open(this.message, call)) return card;
    const result = h("textarea", { rows: 2, placeholder: "What the function returns", "aria-label": `Result of ${call.name}` });
    card.append(h("form", { class: "answer", onsubmit: (event) => (event.preventDefault(), this.actions.answer(this.message, call, result.value)) }, result, h("button", { class: "plain-button", type: "submit" }, "Send the result")));
    return card;
  }

  #updateFoot(branches) {
    const { message, actions } = this;
    const at = branches.indexOf(message);
    const parts = [];
    if (branches.length > 1) {
      parts.push(h("span", { class: "branches" },
        iconButton("left", "Previous branch", () => actions.select(branches[at - 1]), { disabled: at === 0 }),
        h("span", { "aria-label": `Branch ${at + 1} of ${branches.length}` }, `${at + 1}/${branches.length}`),
        iconButton("right", "Next branch", () => actions.select(branches[at + 1]), { disabled: at === branches.length - 1 })));
    }
    if (message.text) parts.push(copyButton("Copy the message", () => message.text));
    if (message.role === "user") parts.push(iconButton("edit", "Edit", () => this.#edit()));
    if (message.role === "assistant") parts.push(iconButton("again", "Regenerate", () => actions.again(message)));
    parts.push(iconButton("fork", "Branch into a new chat", () => actions.fork(message)));
    if (message.stats) parts.push(h("span", { class: "speed" }, speed(message.stats)));
    this.foot.replaceChildren(...parts);
  }

  #edit() {
    const text = h("textarea", { rows: 3, "aria-label": "Edited message" });
    text.value = this.message.text;
    const close = () => form.replaceWith(this.body);
    const form = h("form", { class: "editing", onsubmit: (event) => (event.preventDefault(), this.actions.edit(this.message, text.value.trim())) },
      text, h("div", { class: "row" }, h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Send")));
    form.addEventListener("keydown", (event) => event.key === "Escape" && (event.stopPropagation(), close()));
    if (this.body.isConnected) this.body.replaceWith(form);
    else this.foot.before(form);
    text.focus();
  }
}
