// How replies are drawn: fields with what they do. An empty one leaves the model's own default.

import { h } from "./dom.js";

export const PARAMETERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, help: "How freely words are drawn. 0 always takes the likeliest one, above 1 it gets wild." },
  { name: "max_tokens", label: "Length", min: 1, step: 1, help: "The most tokens that a reply may have. A token is about three quarters of a word." },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01, help: "Draws only from the likeliest words that together hold this share." },
  { name: "top_k", label: "Top k", min: 0, step: 1, help: "Draws only from so many of the likeliest words; 0 from all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, help: "Leaves out words less likely than this share of the likeliest one." },
  { name: "repetition_penalty", label: "Repetition", min: 0.01, max: 10, step: 0.01, help: "Above 1, words that came before, the prompt's too, get less likely." },
  { name: "presence_penalty", label: "Presence", min: -2, max: 2, step: 0.1, help: "Above 0, words that the reply has used once get less likely: new topics." },
  { name: "frequency_penalty", label: "Frequency", min: -2, max: 2, step: 0.1, help: "Above 0, the more often the reply has used a word, the less likely it gets." },
  { name: "seed", label: "Seed", step: 1, help: "The same request with the same seed gives the same reply, to the last token." },
  { name: "stop", label: "Stop at", text: true, help: "The reply ends before this text. \\n stands for a new line." },
];
const EFFORTS = [["", "model’s default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]];

export const DEFAULTS = { model: "", system: "", tools: "", values: {} };

/** A labelled field with its help. */
export function field(label, control, help) {
  const id = `field-${label.toLowerCase().replaceAll(/\W+/g, "-")}-${(field.count = (field.count ?? 0) + 1)}`;
  control.id = id;
  if (help) control.setAttribute("aria-describedby", `${id}-help`);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, help && h("p", { class: "help", id: `${id}-help` }, help));
}

/** Fields for some parameters, which write into `values`. */
export function parameterFields(values, names, changed = () => {}) {
  return PARAMETERS.filter(({ name }) => names.includes(name)).map(({ name, label, help, text, ...limits }) => {
    const input = h("input", { type: text ? "text" : "number", placeholder: "default", value: values[name] ?? "", name, ...limits });
    input.addEventListener("input", () => {
      const given = text ? input.value : input.valueAsNumber;
      if (given === "" || Number.isNaN(given)) delete values[name];
      else values[name] = given;
      changed();
    });
    return field(label, input, help);
  });
}

/** The parameters as the API takes them. */
export function toRequest(values) {
  const { stop, ...rest } = values;
  return stop ? { ...rest, stop: stop.replaceAll("\\n", "\n") } : rest;
}

/** The tools of a JSON text. Throws an Error that says what is wrong. */
export function parseTools(text) {
  if (!text.trim()) return undefined;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are no JSON: ${error.message}`);
  }
  return (Array.isArray(tools) ? tools : [tools]).map((tool) => (tool.type === "function" ? tool : { type: "function", function: tool }));
}

const TOOL = '[{"name": "get_weather",\n  "description": "The weather in a city",\n  "parameters": {"type": "object",\n    "properties": {"city": {"type": "string"}}}}]';

/** All settings of a conversation. */
export function settingsForm(settings, changed) {
  const area = (name, rows, placeholder) => {
    const text = h("textarea", { rows, placeholder, spellcheck: "false", name });
    text.value = settings[name];
    text.addEventListener("input", () => ((settings[name] = text.value), changed()));
    return text;
  };
  const effort = h("select", { name: "reasoning_effort" }, EFFORTS.map(([value, label]) => h("option", { value }, label)));
  effort.value = settings.values.reasoning_effort ?? "";
  effort.addEventListener("change", () => {
    if (effort.value) settings.values.reasoning_effort = effort.value;
    else delete settings.values.reasoning_effort;
    changed();
  });
  const fields = parameterFields(settings.values, PARAMETERS.map(({ name }) => name), changed);
  const more = [
    ...fields.slice(2),
    field("Thinking", effort, "How much the model thinks before it answers, where it can. None turns thoughts off."),
    field("Tools", area("tools", 5, TOOL), "Functions that the model may call, as JSON. Their results are yours to fill in."),
  ];
  return h("form", { class: "settings", onsubmit: (event) => event.preventDefault() },
    field("System prompt", area("system", 4, "You are a helpful assistant."), "What the model is told before the conversation."),
    ...fields.slice(0, 2),
    h("details", {}, h("summary", {}, "More"), ...more));
}
