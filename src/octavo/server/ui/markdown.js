// Markdown of a growing text. What reads it comes after the page; until then, and if it cannot come, text is plain.

import { h, patch, toast } from "./dom.js";

const LONG = 20_000; // characters of one block, beyond which it is shown as plain text
const PIECE = 8_000; // of plain text in an element

let format = null; // render.js, once it is there
let coming = null; // the promise of it
const waiting = new Set(); // views of plain text until then

/** Loads what reads Markdown, unless it is there. Says so if it cannot be loaded; the next reply tries again. */
export function formatting() {
  return (coming ??= import("./render.js").then(arrived, missing));
}

function arrived(render) {
  format = render;
  for (const view of waiting) view.again();
  waiting.clear();
  dispatchEvent(new Event("formatted"));
}

function missing() {
  coming = null;
  if (waiting.size) toast("Replies are plain text: what formats them could not be loaded.", { label: "Reload", run: () => location.reload() });
}

/** Shows a text that grows: blocks that cannot change any more are left alone. */
export class MarkdownView {
  #text = "";
  #settled = 0; // characters of #text that are in blocks which stay
  #tail = []; // elements of the block that still grows
  #plain = false; // the rest is too long to be read as Markdown, or nothing reads it yet

  constructor(element) {
    this.element = element;
    if (!format) formatting();
  }

  update(text) {
    if (!text.startsWith(this.#text)) this.#clear();
    if (text === this.#text) return;
    if (!format && !this.#plain) {
      waiting.add(this);
      this.#plain = true;
      formatting(); // which may have failed before
    }
    const added = text.slice(this.#text.length);
    this.#text = text;
    if (this.#plain) return this.#append(added);
    this.#read(text.slice(this.#settled));
  }

  /** Reads the text anew. */
  again() {
    const text = this.#text;
    this.#clear();
    this.update(text);
  }

  #clear() {
    this.element.replaceChildren();
    [this.#text, this.#settled, this.#tail, this.#plain] = ["", 0, [], false];
  }

  #read(rest) {
    if (rest.length > LONG && rest.indexOf("\n\n") < 0) return this.#replace([]), this.#append(rest);
    const tokens = format.blocks(rest);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const fresh = [];
    let tail = 0; // elements of `fresh` before those of the last block
    for (const [i, token] of tokens.entries()) {
      if (i >= last && token.raw.length > LONG) return this.#replace(fresh), this.#append(token.raw);
      if (i === last) tail = fresh.length;
      fresh.push(...(token.raw.length > LONG ? [h("pre", { tabindex: "0" }, token.raw)] : format.rendered(token, tokens.links)));
      if (i < last) this.#settled += token.raw.length;
    }
    this.#tail = this.#replace(fresh).slice(tail);
  }

  /** Puts elements in the place of the tail; what is as before stays, so that little is laid out and drawn. */
  #replace(fresh) {
    const old = this.#tail;
    this.#tail = [];
    old.slice(fresh.length).forEach((node) => node.remove());
    this.element.append(...fresh.slice(old.length));
    return fresh.map((node, i) => (i < old.length ? patch(old[i], node) : node));
  }

  /** Adds plain text, in pieces: laying out a line costs what it is long. */
  #append(text) {
    this.#plain = true;
    let piece = this.element.lastElementChild;
    for (let at = 0; at < text.length; ) {
      if (!piece?.classList.contains("plain") || piece.textContent.length >= PIECE) {
        piece = h("div", { class: "plain" }, "");
        this.element.append(piece);
      }
      const size = Math.min(PIECE - piece.textContent.length, text.length - at);
      piece.firstChild ? piece.firstChild.appendData(text.slice(at, at + size)) : piece.append(text.slice(at, at + size));
      at += size;
    }
  }
}
