// The box at the bottom of a chat: text and images.

import { h, icon, iconButton, toast } from "./dom.js";

const LARGEST = 1536; // pixels of a side; larger images are made smaller before they are sent
const KEPT = 1_500_000; // bytes of a file that is sent as it is

async function readImage(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  const image = new Image();
  image.src = url;
  await image.decode();
  const scale = LARGEST / Math.max(image.naturalWidth, image.naturalHeight);
  if (scale >= 1 && file.size <= KEPT && /png|jpeg|webp/.test(file.type)) return url;
  const canvas = h("canvas", { width: Math.round(image.naturalWidth * Math.min(1, scale)), height: Math.round(image.naturalHeight * Math.min(1, scale)) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.size <= KEPT ? "image/png" : "image/jpeg", 0.9);
}

/** Calls `send(text, images)` and `stop()`. busy: whether a reply is being written. */
export class Composer {
  #images = [];

  constructor({ send, stop }) {
    this.send = send;
    this.text = h("textarea", { rows: 1, placeholder: "Ask anything", "aria-label": "Message", enterkeyhint: "send" });
    this.files = h("input", { type: "file", accept: "image/*", multiple: true, class: "unseen", tabindex: "-1", "aria-label": "Images" });
    this.thumbs = h("div", { class: "thumbs" });
    this.go = h("button", { type: "submit", class: "primary icon", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
    this.halt = h("button", { type: "button", class: "primary icon", "aria-label": "Stop", title: "Stop (Esc)", onclick: stop, hidden: true }, icon("stop"));
    const attach = iconButton("image", "Add an image", () => this.files.click());
    this.element = h("form", { class: "composer" }, this.thumbs, this.text, h("div", { class: "row" }, attach, this.files, h("span", { class: "hint" }, "Enter sends, Shift + Enter for a new line"), this.go, this.halt));
    this.element.addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
    this.text.addEventListener("input", () => this.#fit());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    this.files.addEventListener("change", () => (this.attach(this.files.files), (this.files.value = "")));
    this.text.addEventListener("paste", (event) => this.attach(event.clipboardData.files));
  }

  /** Adds image files. */
  async attach(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      try {
        this.#images.push(await readImage(file));
      } catch {
        toast(`${file.name} is no image that this browser can read.`);
      }
    }
    this.#draw();
  }

  set busy(busy) {
    this.go.hidden = busy;
    this.halt.hidden = !busy;
  }

  get busy() {
    return this.go.hidden;
  }

  /** Fills in a text, to be changed before it is sent. */
  fill(text) {
    this.text.value = text;
    this.#fit();
    this.text.focus();
  }

  #draw() {
    this.thumbs.replaceChildren(...this.#images.map((url, i) =>
      h("div", { class: "thumb" }, h("img", { src: url, alt: `Image ${i + 1}` }), iconButton("close", `Remove image ${i + 1}`, () => (this.#images.splice(i, 1), this.#draw())))));
  }

  #submit() {
    const text = this.text.value.trim();
    if (this.busy || (!text && !this.#images.length)) return;
    const images = this.#images;
    if (this.send(text, images) === false) return;
    this.#images = [];
    this.text.value = "";
    this.#draw();
    this.#fit();
  }

  #fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
  }
}
