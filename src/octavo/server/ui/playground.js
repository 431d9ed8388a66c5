// The playground: a text and how a model goes on, within a schema or a grammar, token by token, beside another model.

import { explain, stream } from "./api.js";
import { copyButton, h, icon } from "./dom.js";
import { fillMenus, ModelMenu } from "./models.js";
import { field, parameterFields, toRequest } from "./parameters.js";
import { recall, remember } from "./store.js";
import { textOf, TokenMap } from "./tokens.js";

const LIMITS = {
  none: { label: "Nothing", help: "The model writes what it likes." },
  schema: { label: "JSON schema", help: "What comes is valid JSON of this schema.", text: '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"},\n    "age": {"type": "integer"}\n  },\n  "required": ["name", "age"]\n}' },
  regex: { label: "Regular expression", help: "All that comes matches this expression.", text: "[A-Z][a-z]+" },
  grammar: { label: "Grammar", help: "What comes can be derived from this grammar, in Lark’s or GBNF’s form.", text: 'root ::= ("yes" | "no") "."' },
};
const FIRST = { prompt: "Once upon a time, there was a lighthouse keeper who", limit: "none", texts: {}, tokens: true, two: false, values: { max_tokens: 80, temperature: 0.8 } };
const ALTERNATIVES = 5;
const NARROW = 820; // pixels, as in the style sheets

/** One model's column: its menu, and what it writes. */
class Column {
  #abort = null;

  constructor(name, choose) {
    this.menu = new ModelMenu(`${name} model`);
    this.text = h("div", { class: "completion", role: "region", tabindex: "0", "aria-label": `Completion of the ${name.toLowerCase()} model` });
    this.foot = h("div", { class: "foot" });
    this.choose = choose;
    this.element = h("section", { class: "result", "aria-label": `${name} model` }, h("div", { class: "row" }, this.menu.element), this.text, this.foot);
  }

  stop() {
    this.#abort?.abort();
  }

  /** Writes on after `body.prompt`. kept: what is shown of it as if it had been written. */
  async run(body, kept) {
    this.stop();
    const { signal } = (this.#abort = new AbortController());
    const began = performance.now();
    const map = body.logprobs == null ? null : new TokenMap((index, name) => this.choose(this, kept + textOf([...map.names.slice(0, index), name])));
    const plain = h("span", {});
    let tokens = 0;
    this.said = kept;
    this.text.replaceChildren(h("span", { class: "kept" }, kept), map?.element ?? plain);
    this.foot.replaceChildren(h("span", { class: "speed" }, "Writing…"));
    try {
      const model = await this.menu.chosen(signal);
      for await (const { choices, usage } of stream("v1/completions", { ...body, model }, signal)) {
        if (usage) tokens = usage.completion_tokens;
        for (const { text, logprobs } of choices) {
          this.said += text;
          if (map && logprobs) map.add(logprobs);
          else if (!map) plain.append(text);
        }
      }
      const seconds = (performance.now() - began) / 1000;
      this.foot.replaceChildren(copyButton("Copy the completion", () => this.said), h("span", { class: "speed" }, `${tokens} tokens in ${seconds.toFixed(1)} s`));
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (signal === this.#abort.signal) this.foot.replaceChildren(h("p", stopped ? { class: "note" } : { class: "note error", role: "alert" }, stopped ? "Stopped." : explain(error)));
    }
  }
}

export class Playground {
  constructor() {
    this.state = { ...FIRST, ...recall("playground", {}) };
    const { state } = this;
    const save = () => remember("playground", state);
    this.prompt = h("textarea", { rows: 6, name: "prompt", oninput: () => ((state.prompt = this.prompt.value), save()) });
    this.prompt.value = state.prompt;
    this.limit = h("select", { onchange: () => ((state.limit = this.limit.value), save(), this.#limited()) }, Object.entries(LIMITS).map(([value, { label }]) => h("option", { value }, label)));
    this.limit.value = state.limit;
    this.rule = h("textarea", { rows: 8, class: "mono", spellcheck: "false", "aria-label": "Schema, expression or grammar", oninput: () => ((state.texts[state.limit] = this.rule.value), save()) });
    this.ruleHelp = h("p", { class: "help" });
    this.columns = [new Column("First", (...given) => this.#from(...given)), new Column("Second", (...given) => this.#from(...given))];
    this.columns.forEach(({ menu }, i) => {
      menu.choose(state.models?.[i] ?? "");
      menu.onchange = () => ((state.models = this.columns.map((column) => column.menu.value)), save());
    });
    const check = (name, label, help, changed = () => {}) => {
      const box = h("input", { type: "checkbox", id: `play-${name}`, checked: state[name], onchange: () => ((state[name] = box.checked), save(), changed()) });
      return h("div", { class: "field" }, h("div", { class: "check" }, box, h("label", { for: box.id }, label)), h("p", { class: "help" }, help));
    };
    this.go = h("button", { class: "primary", type: "submit" }, "Complete");
    this.halt = h("button", { class: "plain-button", type: "button", hidden: true, onclick: () => this.#stop() }, icon("stop"), "Stop");
    const form = h("form", { class: "settings", onsubmit: (event) => (event.preventDefault(), this.#run(this.columns, state.prompt, "")) },
      field("Prompt", this.prompt, "The model goes on from exactly this text. Ctrl + Enter starts."),
      h("div", { class: "row" }, this.go, this.halt),
      field("Keep to", this.limit), this.rule, this.ruleHelp,
      check("tokens", "Show how likely each token was", "The warmer, the more surprising. Click a token to go on from there with another."),
      check("two", "Two models side by side", "Both get the same prompt, parameters and seed.", () => this.#two()),
      h("div", { class: "pair" }, parameterFields(state.values, ["temperature", "max_tokens", "top_p", "seed"], save)));
    form.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && (event.preventDefault(), form.requestSubmit()));
    this.results = h("div", { class: "results" }, this.columns.map((column) => column.element));
    this.element = h("div", { class: "playground" }, h("div", { class: "given" }, form), this.results);
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.#stop());
    this.bar = h("div", { class: "bar-row" }, h("h1", {}, "Playground"));
    for (const { text } of this.columns) text.append(h("p", { class: "help" }, "The completion appears here."));
    this.#limited();
    this.#two();
  }

  show() {
    fillMenus(...this.columns.map((column) => column.menu));
  }

  hide() {
    this.#stop();
  }

  #limited() {
    const { limit, texts } = this.state;
    this.rule.hidden = limit === "none";
    this.rule.value = texts[limit] ?? LIMITS[limit].text ?? "";
    this.ruleHelp.textContent = LIMITS[limit].help;
  }

  #two() {
    this.columns[1].element.hidden = !this.state.two;
    this.results.classList.toggle("two", this.state.two);
  }

  #stop() {
    for (const column of this.columns) column.stop();
  }

  /** What the completion has to keep to. Throws an Error where that is no JSON. */
  #limits() {
    const text = this.rule.value;
    switch (this.state.limit) {
      case "schema":
        return { response_format: { type: "json_schema", json_schema: { name: "schema", schema: JSON.parse(text) } } };
      case "regex":
        return { structured_outputs: { regex: text } };
      case "grammar":
        return { structured_outputs: { grammar: text } };
      default:
        return {};
    }
  }

  /** Goes on in one column after what is kept of its completion. A rule counts from its beginning, so it is left out. */
  #from(column, kept) {
    return this.#run([column], this.state.prompt + kept, kept, {});
  }

  async #run(columns, prompt, kept, limits) {
    let body;
    try {
      body = { prompt, ...toRequest(this.state.values), ...(limits ?? this.#limits()) };
    } catch (error) {
      return columns[0].foot.replaceChildren(h("p", { class: "note error", role: "alert" }, `The schema is no JSON: ${error.message}`));
    }
    if (columns.length > 1) body.seed ??= Math.floor(Math.random() * 1e9);
    if (this.state.tokens) body.logprobs = ALTERNATIVES;
    this.halt.hidden = false;
    if (innerWidth <= NARROW) this.results.scrollIntoView({ behavior: "smooth" });
    await Promise.all(columns.filter(({ element }) => !element.hidden).map((column) => column.run(body, kept)));
    this.halt.hidden = true;
  }
}
