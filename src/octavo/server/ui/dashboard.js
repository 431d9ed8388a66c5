// The dashboard: what the server does now, from /metrics and /v1/requests.

import { explain, json, request } from "./api.js";
import { h, iconButton, toast } from "./dom.js";
import { average, parse, quantile, rate, sum } from "./metrics.js";
import { Plot } from "./plot.js";

const EVERY = 1000; // ms between looks
const KEPT = 180; // looks that are drawn
const WINDOW = 30; // looks over which quantiles are taken

const whole = (value) => (value == null ? "–" : value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toFixed(1));
const seconds = (value) => (value == null ? ["–", ""] : value < 1 ? [whole(1000 * value), "ms"] : [value.toFixed(1), "s"]);
const share = (value) => (value == null ? ["–", ""] : [(100 * value).toFixed(0), "%"]);
const bytes = (value) => (value == null ? ["–", ""] : value < 1e9 ? [whole(value / 1e6), "MB"] : [(value / 1e9).toFixed(2), "GB"]);
const milliseconds = (value) => (value == null ? null : 1000 * value);

/** Of two looks: the last, and the one before; `past` is the one at the beginning of the window. */
const TILES = [
  {
    title: "Tokens written", lines: ["written", "read"],
    values: ({ now, before }) => [rate(now, before, "octavo_generated_tokens_total"), rate(now, before, "octavo_prompt_tokens_total")],
    tell: ([written, read]) => [[whole(written), "tokens/s"], `${whole(read)} tokens/s of prompts read`],
  },
  {
    title: "Time to the first token", lines: ["median", "95 of 100"],
    values: ({ now, past }) => [0.5, 0.95].map((q) => quantile(now, past, "gen_ai_server_time_to_first_token_seconds", q)),
    tell: ([median, slow]) => [seconds(median), median == null ? "No request in the last 30 s" : `95 of 100 within ${seconds(slow).join(" ")}`],
    draw: milliseconds,
  },
  {
    title: "Time between tokens", lines: ["median", "95 of 100"],
    values: ({ now, past }) => [0.5, 0.95].map((q) => quantile(now, past, "octavo_inter_token_seconds", q)),
    tell: ([median, slow]) => [seconds(median), median == null ? "No request in the last 30 s" : `95 of 100 within ${seconds(slow).join(" ")}`],
    draw: milliseconds,
  },
  {
    title: "Requests", lines: ["running", "waiting"],
    values: ({ now }) => [sum(now, "octavo_requests_running"), sum(now, "octavo_requests_waiting")],
    tell: ([running, waiting], { now, past }) => {
      const queued = average(now, past, "octavo_request_queue_time_seconds");
      return [[whole(running), "running"], `${whole(waiting)} waiting${queued == null ? "" : `, ${seconds(queued).join(" ")} in the queue on average`}`];
    },
  },
  {
    title: "KV cache", lines: ["in use", "kept for later"],
    values: ({ now }) => {
      const [held, cached, free] = ["held", "cached", "free"].map((state) => sum(now, "octavo_kv_blocks", { state }) ?? 0);
      const all = held + cached + free;
      return all ? [held / all, (held + cached) / all] : [null, null];
    },
    tell: ([used], { now }) => [share(used), `${whole(sum(now, "octavo_kv_blocks", { state: "cached" }))} blocks kept for later, ${whole(sum(now, "octavo_kv_blocks", { state: "free" }))} free`],
    draw: (value) => 100 * value,
  },
  {
    title: "Prompt tokens from the cache", lines: ["from the cache"],
    values: ({ now, past }) => {
      const [hits, asked] = ["octavo_cached_tokens_total", "octavo_prompt_tokens_total"].map((name) => sum(now, name) - sum(past, name));
      return [asked > 0 ? hits / asked : null];
    },
    tell: ([hits], { now }) => [share(hits), `${whole(sum(now, "octavo_cached_tokens_total"))} of ${whole(sum(now, "octavo_prompt_tokens_total"))} since the start`],
    draw: (value) => 100 * value,
  },
  {
    title: "Memory", lines: ["engines", "server"],
    values: ({ now }) => [sum(now, "octavo_engine_process_resident_memory_bytes"), sum(now, "process_resident_memory_bytes")],
    tell: ([engines, server]) => [bytes((engines ?? 0) + server), `${bytes(engines).join(" ")} engines, ${bytes(server).join(" ")} server`],
    draw: (value) => value / 1e6,
  },
];

/** The requests that compute something; null where the key may not ask for them. */
async function running() {
  try {
    return (await json("v1/requests", { asks: false })).running.filter(({ model }) => model);
  } catch (error) {
    if (error.status === 401 || error.status === 403) return null;
    throw error;
  }
}

class Tile {
  constructor(kind) {
    this.kind = kind;
    this.now = h("div", { class: "now" }, "–");
    this.more = h("div", { class: "more" });
    this.plot = new Plot(kind.title, kind.lines, KEPT);
    this.element = h("article", { class: "tile", "aria-label": kind.title }, h("h2", {}, kind.title), this.now, this.more, this.plot.element);
  }

  update(time, looks) {
    const values = this.kind.values(looks);
    const [[value, unit], more] = this.kind.tell(values, looks);
    this.now.replaceChildren(value, h("small", {}, unit));
    this.more.textContent = more;
    this.plot.add(time, values.map((each) => (each == null ? null : (this.kind.draw ?? Number)(each))));
  }
}

export class Dashboard {
  #looks = [];
  #timer = 0;
  #run = 0; // counts how often it was shown and hidden

  constructor() {
    this.tiles = TILES.map((kind) => new Tile(kind));
    this.requests = h("section", { "aria-label": "Running requests" });
    this.models = h("section", { "aria-label": "Models" });
    this.element = h("div", { class: "dashboard", tabindex: "0", role: "region", "aria-label": "Dashboard" }, h("div", { class: "tiles" }, this.tiles.map((tile) => tile.element)), this.requests, this.models);
    this.state = h("span", { class: "live" }, "Live");
    this.bar = h("div", { class: "bar-row" }, h("h1", {}, "Dashboard"), h("span", { class: "spring" }), this.state);
  }

  show() {
    for (const tile of this.tiles) tile.plot.show();
    this.#look(++this.#run);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#run++;
  }

  /** Looks, and again a while after that is answered: a slow server is not asked more. */
  async #look(run) {
    try {
      if (!document.hidden) await this.#ask();
    } catch (error) {
      if (run === this.#run) this.#live(false, explain(error));
    }
    if (run === this.#run) this.#timer = setTimeout(() => this.#look(run), EVERY);
  }

  async #ask() {
    const [text, models, requests] = await Promise.all([request("metrics").then((r) => r.text()), json("v1/models"), running()]);
    this.#live(true, "Live");
    this.#update(text);
    this.#table(requests);
    this.#list(models.data);
  }

  #live(live, text) {
    this.state.classList.toggle("lost", !live);
    this.state.textContent = text;
  }

  #update(text) {
    const now = { time: Date.now() / 1000, samples: parse(text) };
    this.#looks = [...this.#looks.slice(-WINDOW), now];
    const before = this.#looks.at(-2) ?? now;
    for (const tile of this.tiles) tile.update(now.time, { now, before, past: this.#looks[0] });
  }

  #table(running) {
    this.requests.hidden = !running;
    if (!running) return;
    const rows = running.map((one) => h("tr", {}, h("td", {}, one.model), h("td", {}, one.route.replace("/v1/", "")), h("td", {}, h("code", {}, one.id)), h("td", {}, `${one.seconds.toFixed(1)} s`), h("td", {}, iconButton("close", `Cancel ${one.id}`, () => this.#cancel(one)))));
    const head = h("tr", {}, ["Model", "Route", "Request", "Time", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "Cancel"))));
    const shown = rows.length ? h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows))) : h("p", { class: "help" }, "Nothing runs.");
    if (this.requests.contains(document.activeElement) && rows.length) return; // a button that is about to be pressed stays
    this.requests.replaceChildren(h("h2", {}, "Running requests"), shown);
  }

  #list(models) {
    const rows = models.map(({ id, state, max_model_len, parent }) => h("tr", {}, h("td", {}, id), h("td", {}, parent ? `adapter of ${parent}` : state), h("td", {}, max_model_len ? `${max_model_len.toLocaleString()} tokens` : "")));
    const head = h("tr", {}, ["Model", "State", "Context"].map((name) => h("th", { scope: "col" }, name)));
    this.models.replaceChildren(h("h2", {}, "Models"), h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }

  async #cancel({ id }) {
    document.activeElement.blur();
    try {
      await request(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
      toast("The request is cancelled.");
    } catch (error) {
      toast(explain(error));
    }
  }
}
