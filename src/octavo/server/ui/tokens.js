// Tokens with their likelihoods: a heat map whose tokens tell what else could have come.

import { h } from "./dom.js";

const encoder = new TextEncoder();

/** The bytes of a token as /v1/completions names it. */
function bytesOf(name) {
  if (!name.startsWith("bytes:")) return encoder.encode(name);
  return Uint8Array.from(name.slice(6).split("\\x").slice(1), (hex) => parseInt(hex, 16));
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 10 ? `${share.toFixed(0)} %` : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

/** Five steps from certain to surprising. */
const heat = (logprob) => [0.9, 0.6, 0.3, 0.1, 0].findIndex((least) => Math.exp(logprob) >= least);

/** What tokens say together: a character may have several of them. */
export function textOf(names) {
  const parts = names.map(bytesOf);
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
  return new TextDecoder().decode(whole);
}

/** Shows tokens as they come. `choose(index, name)` is called with what should have come instead. */
export class TokenMap {
  #tokens = []; // {name, logprob, top}
  #decoder = new TextDecoder();

  constructor(choose) {
    this.choose = choose;
    this.element = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the completion" });
    this.card = h("div", { class: "alternatives", popover: "auto", role: "dialog", "aria-label": "What else could have come" });
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  get names() {
    return this.#tokens.map(({ name }) => name);
  }

  add({ tokens, token_logprobs, top_logprobs }) {
    for (const [i, name] of tokens.entries()) {
      const index = this.#tokens.push({ name, logprob: token_logprobs[i], top: top_logprobs[i] }) - 1;
      const text = this.#decoder.decode(bytesOf(name), { stream: true });
      const button = h("button", { type: "button", class: `token heat-${heat(token_logprobs[i])}`, tabindex: index ? "-1" : "0", title: percent(token_logprobs[i]), onclick: () => this.#open(index, button) }, text || "\u200b");
      this.element.append(button);
    }
  }

  /** Arrow keys go from token to token. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = [...this.element.children];
    const next = all[all.indexOf(document.activeElement) + step];
    if (!step || !next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #open(index, button) {
    const { name, top } = this.#tokens[index];
    const all = Object.entries(top).sort((a, b) => b[1] - a[1]);
    const row = ([other, logprob]) => {
      const meter = h("span", { class: "bar" });
      meter.style.setProperty("--share", Math.exp(logprob));
      return h("button", { type: "button", class: "alternative", "aria-current": other === name ? "true" : null, onclick: () => (this.card.hidePopover(), this.choose(index, other)) },
        h("code", {}, visible(textOf([other]))), meter, h("span", { class: "share" }, percent(logprob)));
    };
    this.card.replaceChildren(h("p", { class: "help" }, "Continue from here with"), ...all.map(row));
    document.body.append(this.card);
    this.card.showPopover();
    const at = button.getBoundingClientRect();
    const { width, height } = this.card.getBoundingClientRect();
    const below = at.bottom + 6 + height < innerHeight;
    this.card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
    this.card.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - 6 - height)}px`;
    this.card.querySelector("button").focus();
    this.card.ontoggle = ({ newState }) => newState === "closed" && (this.card.remove(), button.focus());
  }
}
