// Elements of Markdown. What a model writes is shown, never obeyed: HTML in it is text, images are links, and what
// the renderer makes is sanitized again: this file is not there without its sanitizer. markdown.js loads it.

import { Marked } from "./vendor/marked/marked.esm.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import { copyButton, h } from "./dom.js";
import { highlight } from "./highlight.js";

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

/** The blocks of a text, as tokens with what they were (`raw`). */
export const blocks = (text) => marked.lexer(text);

/** The elements of a block. */
export function rendered(token, links) {
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
  const bar = h("figcaption", {}, h("span", {}, language || "text"), copyButton("Copy the code", () => code.textContent));
  const figure = h("figure", { class: "code" }, bar);
  pre.replaceWith(figure);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", `Code, ${language || "text"}`);
  pre.setAttribute("role", "group");
  figure.append(pre);
  code.removeAttribute("class");
  highlight(code, language.toLowerCase());
}

// Once, so that the first reply does not wait until its ways are compiled.
for (const token of blocks("# A\n\nb **c** `d` [e](https://e.example)\n\n- f\n\n```python\nif g: # h\n```\n\n|i|\n|-|\n|j|\n")) rendered(token, {});
