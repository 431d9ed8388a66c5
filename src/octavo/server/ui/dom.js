// Makes elements. Text is always text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `onclick` and the like are listeners, true and false are attributes without a value. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  image: "M4 6a2 2 0 012-2h12a2 2 0 012 2v12a2 2 0 01-2 2H6a2 2 0 01-2-2zM4 16l4.5-4.5 4 4L15 13l5 5M15.5 9.5h.01",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 10-2.3 6.3M20 5v6h-6",
  fork: "M7 4v9a4 4 0 004 4h6M7 9h6a4 4 0 004-4V4M14 14l3 3-3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  export: "M12 15V4M8 8l4-4 4 4M5 14v5a1 1 0 001 1h12a1 1 0 001-1v-5",
  key: "M14.5 9.5a4 4 0 11-3.9 4.9L4 21M4 21v-3.5M4 21h3.5M15.5 8.5l3.5-3.5",
  sun: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M5.6 18.4l1.1-1.1M17.3 6.7l1.1-1.1",
  moon: "M19.5 14.5A8 8 0 019.5 4.5a8 8 0 1010 10z",
  auto: "M4 5h16v11H4zM9 20h6M12 16v4",
  tool: "M14.5 5.5a4.5 4.5 0 00-5.7 5.7L4 16v4h4l4.8-4.8a4.5 4.5 0 005.7-5.7L15.5 12 12 8.5z",
  book: "M12 6.5C10 5 7 4.5 4 4.5v13c3 0 6 .5 8 2 2-1.5 5-2 8-2v-13c-3 0-6 .5-8 2zM12 6.5v13",
};

/** A drawing for a button, which has a name of its own. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("glyph");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** A button that is a drawing; `label` is what it is called. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "quiet icon", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** Says something at the bottom of the page; `action` undoes it. */
export function toast(text, action) {
  const gone = () => box.remove();
  const box = h("div", { class: "toast" }, h("span", {}, text));
  if (action) box.append(h("button", { class: "quiet", onclick: () => (gone(), action.run()) }, action.label));
  document.getElementById("toasts").replaceChildren(box);
  setTimeout(gone, action ? 8000 : 4000);
}

/** Puts text on the clipboard, also on pages without TLS. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A copy button, which says for a moment that it is done. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** Saves text as a file of this name. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Makes an element look like another, in place where they are alike: what has the focus, or is being pressed, stays. The one that is there then. */
export function patch(old, fresh) {
  if (old.isEqualNode(fresh)) return old;
  if (old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) return old.replaceWith(fresh), fresh;
  if (old.nodeType === Node.TEXT_NODE) return (old.data = fresh.data), old;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [had, has] = [[...old.childNodes], [...fresh.childNodes]];
  has.forEach((child, i) => (i < had.length ? patch(had[i], child) : old.append(child)));
  had.slice(has.length).forEach((child) => child.remove());
  return old;
}

/** A style sheet that only some views need, once it is there or cannot be had. */
export function styled(href) {
  return new Promise((resolve) => document.head.append(h("link", { rel: "stylesheet", href, onload: resolve, onerror: resolve })));
}

/** Asks before something that cannot be undone. True if it is wanted. */
export function confirmed(question, help, action) {
  return new Promise((resolve) => {
    let sure = false;
    const dialog = h("dialog", { "aria-labelledby": "sure-title", onclose: () => (dialog.remove(), resolve(sure)) },
      h("form", { method: "dialog", onsubmit: () => (sure = true) },
        h("h2", { id: "sure-title" }, question),
        h("p", { class: "help" }, help),
        h("div", { class: "row" }, h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"), h("button", { class: "primary", type: "submit" }, action))));
    document.body.append(dialog);
    dialog.showModal();
  });
}
