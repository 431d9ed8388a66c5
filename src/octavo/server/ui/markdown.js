// Markdown of a growing text. What a model writes is shown, never obeyed: HTML in it is text, images are links,
// and what the renderer makes is sanitized again.

import { Marked } from "./vendor/marked/marked.esm.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import { copyButton, h } from "./dom.js";
import { highlight } from "./highlight.js";

const LONG = 20_000; // characters of one block, beyond which it is shown as plain text
const PIECE = 8_000; // of plain text in an element

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const SAFE = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

/** The elements of a block. */
function rendered(token, links) {
  const tokens = Object.assign([token], { links });
  const fragment = DOMPurify.sanitize(marked.parser(tokens), SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) dress(pre);
  return [...fragment.childNodes];
}

/** Puts a header with the language and a copy button over a block of code. */
function dress(pre) {
  const code = pre.firstElementChild;
  const language = code.className.replace("language-", "");
  const text = code.textContent;
  const bar = h("figcaption", {}, h("span", {}, language || "text"), copyButton("Copy the code", () => text));
  const figure = h("figure", { class: "code" }, bar);
  pre.replaceWith(figure);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", `Code, ${language || "text"}`);
  pre.setAttribute("role", "group");
  figure.append(pre);
  code.removeAttribute("class");
  highlight(code, language.toLowerCase());
}

/** Shows a text that grows: blocks that cannot change any more are left alone. */
export class MarkdownView {
  #text = "";
  #settled = 0; // characters of #text that are in blocks which stay
  #tail = []; // elements of the block that still grows
  #plain = false; // the rest is too long to be read as Markdown

  constructor(element) {
    this.element = element;
  }

  update(text) {
    if (!text.startsWith(this.#text)) this.#clear();
    if (text === this.#text) return;
    const added = text.slice(this.#text.length);
    this.#text = text;
    if (this.#plain) return this.#append(added);
    this.#read(text.slice(this.#settled));
  }

  #clear() {
    this.element.replaceChildren();
    [this.#text, this.#settled, this.#tail, this.#plain] = ["", 0, [], false];
  }

  #read(rest) {
    for (const node of this.#tail) node.remove();
    this.#tail = [];
    if (rest.length > LONG && rest.indexOf("\n\n") < 0) return this.#append(rest);
    const tokens = marked.lexer(rest);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    for (const [i, token] of tokens.entries()) {
      if (i >= last && token.raw.length > LONG) return this.#append(rest.slice(rest.length - token.raw.length));
      const nodes = token.raw.length > LONG ? [h("pre", { tabindex: "0" }, token.raw)] : rendered(token, tokens.links);
      this.element.append(...nodes);
      if (i < last) this.#settled += token.raw.length;
      else this.#tail.push(...nodes);
    }
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
