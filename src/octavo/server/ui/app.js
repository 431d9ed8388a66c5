// The page: its views, the list of conversations, keys and the theme.

import { hasKey, setKey, whenKeyIsWanted } from "./api.js";
import { Chat } from "./chat.js";
import { h, icon, iconButton, styled, toast } from "./dom.js";
import { formatting } from "./markdown.js";
import { fillMenus, ModelMenu } from "./models.js";

const main = document.getElementById("main");
const bar = document.getElementById("bar-view");
const history = document.getElementById("history");
const side = document.getElementById("side");
const models = new ModelMenu("Model");
const chat = new Chat(models, drawHistory);
const views = { chat: async () => chat, playground: load("./playground.js", "Playground"), dashboard: load("./dashboard.js", "Dashboard") };
let shown = null;
let panels;

/** A view that is loaded when it is opened first, with the styles of all but the chat. */
function load(file, name) {
  let made;
  return async () => (made ??= new (await Promise.all([import(file), (panels ??= styled("ui/panels.css"))]))[0][name]());
}

async function route() {
  const name = Object.hasOwn(views, location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const view = await views[name]().catch(() => toast("This view cannot be loaded. Does the server still run?"));
  if (!view || view === shown) return;
  shown?.hide?.();
  shown = view;
  document.title = name === "chat" ? "Octavo" : `${name[0].toUpperCase()}${name.slice(1)} · Octavo`;
  main.replaceChildren(view.element);
  bar.replaceChildren(view.bar);
  view.show?.();
  menu(false);
}

function menu(open) {
  document.body.classList.toggle("menu-open", open);
}

function day(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / 86_400_000);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "This week" : new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

function drawHistory() {
  const groups = Map.groupBy ? Map.groupBy(chat.chats, (each) => day(each.updated)) : new Map([["Chats", chat.chats]]);
  const row = (each) =>
    h("li", {},
      h("a", { href: "#chat", "aria-current": each === chat.chat ? "true" : null, onclick: () => (chat.open(each), menu(false)) }, each.title),
      iconButton("trash", `Delete “${each.title.slice(0, 40)}”`, () => chat.remove(each)));
  const fresh = h("button", { class: "new", onclick: () => ((location.hash = "chat"), chat.fresh(), menu(false)) }, icon("plus"), "New chat");
  history.replaceChildren(fresh, ...[...groups].flatMap(([name, chats]) => [h("h2", {}, name), h("ul", {}, chats.map(row))]));
}

// Keys.

/** Asks for a key. True once there is one. */
function askKey(reason = "This server wants a key.") {
  return new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", id: "key", required: true });
    const keep = h("input", { type: "checkbox", id: "keep" });
    let given = false;
    const dialog = h("dialog", { "aria-labelledby": "key-title", onclose: () => (dialog.remove(), resolve(given)) },
      h("form", { method: "dialog", onsubmit: () => (setKey(input.value, keep.checked), (given = true)) },
        h("h2", { id: "key-title" }, "API key"),
        h("p", { class: "help" }, reason),
        h("div", { class: "field" }, h("label", { for: "key" }, "Key"), input),
        h("div", { class: "check" }, keep, h("label", { for: "keep" }, "Keep it in this browser")),
        h("div", { class: "row" }, h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"), h("button", { class: "primary", type: "submit" }, "Use it"))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function changeKey() {
  if (!hasKey()) return (await askKey("A key for this server, if it wants one.")) && fillMenus(models);
  setKey("", false);
  toast("The key is forgotten.");
}

// The theme: the system's, light, dark.

const THEMES = { auto: ["auto", "Theme: as the system’s"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"] };

function themeButton() {
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  const button = iconButton("auto", "", () => set(names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length]));
  function set(name) {
    if (name === "auto") delete root.dataset.theme, localStorage.removeItem("octavo.theme");
    else localStorage.setItem("octavo.theme", (root.dataset.theme = name));
    label();
    dispatchEvent(new Event("themechange"));
  }
  function label() {
    const [drawing, text] = THEMES[root.dataset.theme ?? "auto"];
    button.replaceChildren(icon(drawing));
    button.title = text;
    button.setAttribute("aria-label", text);
  }
  label();
  return button;
}

// Starts.

document.getElementById("side-open").append(icon("menu"));
document.getElementById("side-close").append(icon("close"));
document.getElementById("side-open").addEventListener("click", () => (menu(true), document.getElementById("side-close").focus()));
for (const id of ["side-close", "scrim"]) document.getElementById(id).addEventListener("click", () => menu(false));
document.getElementById("side-footer").append(themeButton(), iconButton("key", "API key", changeKey), h("a", { class: "quiet icon", href: "docs", title: "API reference", "aria-label": "API reference" }, icon("book")));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") menu(false);
  if (event.key === "O" && event.shiftKey && (event.ctrlKey || event.metaKey)) event.preventDefault(), (location.hash = "chat"), chat.fresh();
  if (event.key === "/" && shown === chat && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) event.preventDefault(), chat.composer.text.focus();
});
addEventListener("hashchange", route);
whenKeyIsWanted((refused) => askKey(refused ? "The server does not know this key." : undefined));
await chat.load();
await route();
document.documentElement.dataset.ready = "";
performance.mark("ready");
fillMenus(models);
(window.requestIdleCallback ?? setTimeout)(formatting); // before it is needed, after all else
