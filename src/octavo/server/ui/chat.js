// The chat: conversations, and replies as they come.

import { explain, stream } from "./api.js";
import { Composer } from "./composer.js";
import * as conversation from "./conversation.js";
import { download, h, icon, iconButton, toast } from "./dom.js";
import { formatting } from "./markdown.js";
import { MessageView } from "./message.js";
import { DEFAULTS, parseTools, settingsForm, toRequest } from "./parameters.js";
import * as store from "./store.js";

const NEAR = 60; // pixels from the end within which the view follows it
const SHARE = 4; // times as long as a draw takes until the next
const IDEAS = ["What is the capital of France?", "Explain how a sailing boat can go against the wind.", "Write a Python function that reverses a list.", "Write a short poem about the sea."];

export class Chat {
  #views = new Map(); // of the messages that are shown, by their ids
  #running = new Map(); // AbortControllers of replies, by the ids of their conversations
  #follow = true;

  /** models: what can be chosen. changed: called when the list of conversations has changed. */
  constructor(models, changed) {
    this.models = models;
    this.changed = changed;
    this.chats = [];
    this.composer = new Composer({ send: (text, images) => this.#send(text, images), stop: () => this.stop() });
    this.log = h("div", { class: "log" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Conversation" }, this.log);
    this.jump = iconButton("down", "Go to the end", () => this.#end(true), { class: "jump icon", hidden: true });
    this.drawer = h("section", { class: "drawer", "aria-label": "Settings of this chat", hidden: !store.recall("drawer", false) });
    this.status = h("div", { class: "unseen", role: "status" });
    this.element = h("div", { class: "chat" }, h("div", { class: "column" }, this.scroller, h("div", { class: "foot-bar" }, this.jump, this.composer.element), this.status), this.drawer);
    this.bar = h("div", { class: "bar-row" }, models.element,
      h("span", { class: "spring" }),
      iconButton("export", "Export this chat", () => this.#export()),
      (this.toggle = iconButton("sliders", "Settings of this chat", () => this.#drawer(), { "aria-expanded": String(!this.drawer.hidden) })));
    this.scroller.addEventListener("scroll", () => this.#scrolled());
    addEventListener("formatted", () => this.#follow && this.#end());
    this.element.addEventListener("dragover", (event) => event.preventDefault());
    this.element.addEventListener("drop", (event) => (event.preventDefault(), this.composer.attach(event.dataTransfer.files)));
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    models.onchange = (name) => ((this.chat.settings.model = name), this.#remember());
  }

  /** Opens what was open last. If that was nothing, it waits for nothing: to make a database takes a browser long. */
  async load() {
    const last = store.recall("chat", "");
    const history = this.#history();
    if (!last) return this.fresh();
    await Promise.all([history, formatting()]);
    const chat = this.chats.find(({ id }) => id === last);
    chat ? this.open(chat) : this.fresh();
  }

  async #history() {
    const kept = await store.all().catch(() => (toast("This browser keeps no history here."), []));
    for (const message of kept.flatMap((chat) => chat.messages)) {
      if (message.busy) delete message.busy, (message.finish = "stopped"); // the page was left meanwhile
    }
    const begun = new Set(this.chats.map(({ id }) => id)); // meanwhile
    this.chats.push(...kept.filter(({ id }) => !begun.has(id)));
    if (this.chat) this.changed();
  }

  /** Starts a new conversation, with the settings of the last one. */
  fresh() {
    this.open(conversation.create({ ...structuredClone(DEFAULTS), ...store.recall("settings", {}) }));
    this.composer.text.focus();
  }

  open(chat) {
    this.chat = chat;
    store.remember("chat", this.chats.includes(chat) ? chat.id : "");
    this.models.choose(chat.settings.model);
    this.drawer.replaceChildren(h("h2", {}, "Settings"), settingsForm(chat.settings, () => this.#remember()));
    this.composer.busy = this.#running.has(chat.id);
    this.#draw();
    this.#end();
    this.changed();
  }

  remove(chat) {
    this.#running.get(chat.id)?.abort();
    this.chats = this.chats.filter((other) => other !== chat);
    store.remove(chat);
    if (chat === this.chat) this.fresh();
    this.changed();
    toast("The chat is deleted.", { label: "Undo", run: () => (this.#keep(chat), this.changed()) });
  }

  stop() {
    this.#running.get(this.chat.id)?.abort();
  }

  #remember() {
    store.remember("settings", this.chat.settings);
    if (this.chats.includes(this.chat)) store.save(this.chat);
  }

  #keep(chat) {
    this.chats = [chat, ...this.chats.filter((other) => other !== chat)].sort((a, b) => b.updated - a.updated);
    if (chat === this.chat) store.remember("chat", chat.id);
    store.save(chat).catch(() => {});
  }

  // What is shown.

  #actions = {
    edit: (message, text) => this.#after(message.parent, { role: "user", text, images: message.images }),
    again: (message) => this.#reply(message.parent),
    select: (message) => (conversation.show(this.chat, message), this.#keep(this.chat), this.#draw()),
    fork: (message) => {
      const forked = conversation.fork(this.chat, message);
      this.#keep(forked);
      this.open(forked);
      toast("This is a new chat; the old one is in the list.");
    },
    open: (message, call) => !conversation.path(this.chat).some((other) => other.role === "tool" && other.call === call.id),
    answer: (message, call, text) => this.#answer(message, call, text),
  };

  #draw() {
    const shown = conversation.path(this.chat);
    this.#views = new Map(shown.map((message) => [message.id, new MessageView(message, this.#actions)]));
    this.log.replaceChildren(...[...this.#views.values()].map((view) => view.element));
    for (const message of shown) this.#update(message);
    if (!shown.length) this.log.append(this.#welcome());
  }

  #welcome() {
    const ideas = IDEAS.map((text) => h("button", { class: "idea", onclick: () => this.composer.fill(text) }, text));
    return h("div", { class: "welcome" }, h("h1", {}, "What would you like to know?"), h("p", {}, "Everything stays between this browser and your server."), h("div", { class: "ideas" }, ideas));
  }

  #update(message) {
    this.#views.get(message.id)?.update(Boolean(message.busy), conversation.siblings(this.chat, message));
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.#follow = scrollHeight - scrollTop - clientHeight < NEAR;
    this.jump.hidden = this.#follow;
  }

  #end(smooth) {
    this.#follow = true;
    this.scroller.scrollTo({ top: this.scroller.scrollHeight, behavior: smooth ? "smooth" : "instant" });
  }

  #drawer() {
    this.drawer.hidden = !this.drawer.hidden;
    this.toggle.setAttribute("aria-expanded", String(!this.drawer.hidden));
    store.remember("drawer", !this.drawer.hidden);
    if (!this.drawer.hidden) this.drawer.querySelector("textarea").focus();
  }

  #export() {
    if (!this.chat.messages.length) return toast("There is nothing to export yet.");
    const name = this.chat.title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
    const close = () => dialog.close();
    const save = (ending, text, type) => () => (download(`${name}.${ending}`, text(), type), close());
    const dialog = h("dialog", { "aria-label": "Export this chat", onclose: () => dialog.remove() }, h("h2", {}, "Export this chat"),
      h("p", { class: "help" }, "Markdown has what is shown; JSON has all branches, images and settings."),
      h("div", { class: "row" },
        h("button", { class: "quiet", onclick: close }, "Cancel"),
        h("button", { class: "plain-button", onclick: save("json", () => JSON.stringify(this.chat, null, 2), "application/json") }, "JSON"),
        h("button", { class: "primary", onclick: save("md", () => conversation.toMarkdown(this.chat), "text/markdown") }, "Markdown")));
    document.body.append(dialog);
    dialog.showModal();
  }

  // What is said.

  #send(text, images) {
    return this.#after(this.chat.leaf, { role: "user", text, images });
  }

  #after(parent, fields) {
    try {
      parseTools(this.chat.settings.tools);
    } catch (error) {
      toast(error.message);
      return false;
    }
    return this.#reply(conversation.add(this.chat, parent, fields).id);
  }

  #answer(message, call, text) {
    const result = conversation.add(this.chat, this.chat.leaf, { role: "tool", call: call.id, text });
    if (message.calls.some((each) => this.#actions.open(message, each))) {
      this.#keep(this.chat);
      return this.#draw();
    }
    return this.#reply(result.id);
  }

  async #body(chat, parent, signal) {
    const said = conversation.path(chat);
    const { model, system, tools, values } = chat.settings;
    const messages = conversation.toApi(said.slice(0, said.findIndex(({ id }) => id === parent) + 1), system);
    return { model: model || (await this.models.chosen(signal)), messages, tools: parseTools(tools), ...toRequest(values) };
  }

  async #reply(parent) {
    const chat = this.chat;
    if (this.#running.has(chat.id)) return;
    const message = conversation.add(chat, parent, { role: "assistant", text: "", thoughts: "", calls: [], busy: true });
    const abort = new AbortController();
    this.#running.set(chat.id, abort);
    this.#keep(chat);
    this.composer.busy = true;
    this.#draw();
    this.#end();
    this.changed();
    await this.#receive(chat, message, abort.signal);
    this.#running.delete(chat.id);
    delete message.busy;
    this.#keep(chat);
    if (chat !== this.chat) return;
    this.composer.busy = false;
    this.#update(message);
    if (this.#follow) this.#end();
    this.status.textContent = message.error ?? "The reply is complete.";
  }

  /** Fills in a message as its reply comes. */
  async #receive(chat, message, signal) {
    const began = performance.now();
    const drawing = new Pace(() => {
      this.#update(message);
      if (this.#follow && chat === this.chat) this.#end();
    });
    let [first, last, tokens] = [null, null, 0];
    try {
      for await (const { choices, usage } of stream("v1/chat/completions", await this.#body(chat, message.parent, signal), signal)) {
        if (usage) tokens = usage.completion_tokens;
        if (!choices.length) continue;
        take(message, choices[0]);
        const { content, reasoning_content, tool_calls } = choices[0].delta;
        if (!content && !reasoning_content && !tool_calls) continue;
        last = performance.now();
        first ??= last;
        drawing.ask();
      }
      message.stats = { tokens, first: first && first - began, rate: last && (1000 * tokens) / (last - began) };
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = explain(error);
    }
    drawing.stop();
  }
}

/** Draws at most once a frame, and less often where that takes long: the page stays quick under any text. */
class Pace {
  #timer = 0;
  #frame = 0;
  #due = 0;

  constructor(draw) {
    this.draw = draw;
  }

  ask() {
    if (this.#timer) return;
    this.#timer = setTimeout(() => (this.#frame = requestAnimationFrame(() => this.#run())), this.#due - performance.now());
  }

  #run() {
    const began = performance.now();
    this.#timer = 0;
    this.draw();
    this.#due = began + SHARE * (performance.now() - began);
  }

  stop() {
    clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
  }
}

/** Adds what a chunk brings to a message. */
function take(message, { delta, finish_reason }) {
  message.text += (delta.content ?? "").replaceAll("\r", "");
  message.thoughts += (delta.reasoning_content ?? "").replaceAll("\r", "");
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    message.calls[index] ??= { id, name: called.name, arguments: "" };
    message.calls[index].arguments += called.arguments ?? "";
  }
  if (finish_reason) message.finish = finish_reason;
}
