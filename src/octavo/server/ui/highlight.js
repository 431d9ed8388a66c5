// Colours code: comments, strings, numbers and words of the language. Enough to read by, in a few lines.

import { h } from "./dom.js";

const WORDS = {
  python: "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield match case self",
  javascript: "async await break case catch class const continue default delete do else export extends false finally for from function if import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void while yield",
  c: "auto bool break case catch char class const continue default delete do double else enum extern false float for fn func go if impl import int interface let long match mod mut namespace new nil null nullptr package pub private protected public return self short signed sizeof static struct super switch template this throw trait true try type typedef union unsigned use using var virtual void where while",
  bash: "case do done echo elif else esac exit export fi for function if in local return set then until while cd sudo",
  sql: "select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order having limit as distinct union null is in like between primary key",
};
const NAMES = { py: "python", js: "javascript", ts: "javascript", typescript: "javascript", jsx: "javascript", tsx: "javascript", json: "javascript", "c++": "c", cpp: "c", rust: "c", rs: "c", go: "c", java: "c", kotlin: "c", swift: "c", cs: "c", csharp: "c", sh: "bash", shell: "bash", zsh: "bash", console: "bash" };
const COMMENTS = { python: "#[^\\n]*", bash: "#[^\\n]*", sql: "--[^\\n]*", javascript: "//[^\\n]*|/\\*[^]*?\\*/", c: "//[^\\n]*|/\\*[^]*?\\*/" };
const STRINGS = `"""[^]*?"""|'''[^]*?'''|"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\``;

const patterns = {};
function pattern(language) {
  const words = WORDS[language].replaceAll(" ", "|");
  const flags = language === "sql" ? "gi" : "g";
  return (patterns[language] ??= new RegExp(`(${COMMENTS[language]})|(${STRINGS})|\\b(\\d[\\w.]*)|\\b(${words})\\b|([A-Za-z_]\\w*)(?=\\()`, flags));
}
const KINDS = ["comment", "string", "number", "word", "call"];

/** Colours an element that holds nothing but text. */
export function highlight(element, name) {
  const language = NAMES[name] ?? name;
  if (!Object.hasOwn(WORDS, language)) return;
  const text = element.textContent;
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(pattern(language))) {
    const kind = KINDS[found.slice(1).findIndex((group) => group !== undefined)];
    parts.push(text.slice(end, found.index), h("span", { class: `hl-${kind}` }, found[0]));
    end = found.index + found[0].length;
  }
  element.replaceChildren(...parts, text.slice(end));
}
