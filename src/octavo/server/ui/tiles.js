// The figures of the dashboard, each with its chart: what they are made of in /metrics.

import { h } from "./dom.js";
import { average, quantile, rate, sum } from "./metrics.js";
import { Plot } from "./plot.js";

const KEPT = 180; // looks that are drawn
export const WINDOW = 30; // looks over which quantiles are taken

const whole = (value) => (value == null ? "–" : value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString() : value.toFixed(1));
const seconds = (value) => (value == null ? ["–", ""] : value < 1 ? [whole(1000 * value), "ms"] : [value.toFixed(1), "s"]);
const share = (value) => (value == null ? ["–", ""] : [(100 * value).toFixed(0), "%"]);
const bytes = (value) => (value == null ? ["–", ""] : value < 1e9 ? [whole(value / 1e6), "MB"] : [(value / 1e9).toFixed(2), "GB"]);
const grown = ({ now, past }, name) => (sum(now, name) ?? 0) - (sum(past, name) ?? 0);

/** The median of a histogram of seconds in the window, and what 95 of 100 keep to. */
const times = (title, name) => ({
  title, lines: ["median", "95 of 100"],
  values: ({ now, past }) => [0.5, 0.95].map((q) => quantile(now, past, name, q)),
  tell: ([median, slow]) => [seconds(median), median == null ? "No request in the last 30 s" : `95 of 100 within ${seconds(slow).join(" ")}`],
  draw: (value) => 1000 * value,
});

const FIRST = times("Time to the first token", "gen_ai_server_time_to_first_token_seconds");

/** Of looks: `now` is the last, `before` the one before, `past` the one at the beginning of the window. */
const OF_SERVERS = [
  {
    title: "Tokens written", lines: ["written", "read"],
    values: ({ now, before }) => [rate(now, before, "octavo_generated_tokens_total"), rate(now, before, "octavo_prompt_tokens_total")],
    tell: ([written, read]) => [[whole(written), "tokens/s"], `${whole(read)} tokens/s of prompts read`],
  },
  FIRST,
  times("Time between tokens", "octavo_inter_token_seconds"),
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
    values: (looks) => {
      const [hits, asked] = ["octavo_cached_tokens_total", "octavo_prompt_tokens_total"].map((name) => grown(looks, name));
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

const OF_GATEWAYS = [
  {
    title: "Tokens written", lines: ["written", "read"],
    values: ({ now, past }) => ["output", "input"].map((direction) => rate(now, past, "octavo_tokens_total", { direction })),
    tell: ([written, read]) => [[whole(written), "tokens/s"], `${whole(read)} tokens/s of prompts, counted as requests end`],
  },
  FIRST,
  times("Time per token", "gen_ai_server_time_per_output_token_seconds"),
  {
    title: "Requests", lines: ["running", "waiting"],
    values: ({ now }) => [sum(now, "octavo_upstream_requests_running"), (sum(now, "octavo_upstream_requests_waiting") ?? 0) + sum(now, "octavo_gateway_waiting")],
    tell: ([running, waiting], { now }) => [[whole(running), "running"], `${whole(waiting)} without a first token, ${whole(sum(now, "octavo_gateway_waiting"))} of them in line here`],
  },
  {
    title: "Sent on to another upstream", lines: ["tried again", "streams that went on"],
    values: (looks) => ["octavo_upstream_retries_total", "octavo_upstream_failovers_total"].map((name) => grown(looks, name)),
    tell: ([retries, streams]) => [[whole(retries + streams), "in 30 s"], `${whole(retries)} tried again, ${whole(streams)} streams went on elsewhere`],
  },
  {
    title: "Memory", lines: ["gateway"],
    values: ({ now }) => [sum(now, "process_resident_memory_bytes")],
    tell: ([gateway]) => [bytes(gateway), "of the gateway's process"],
    draw: (value) => value / 1e6,
  },
];

export const isGateway = ({ samples }) => samples.has("octavo_gateway_waiting");

/** A figure with its chart. */
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

/** The figures of what is asked, a server or a gateway. */
export const tilesOf = (look) => (isGateway(look) ? OF_GATEWAYS : OF_SERVERS).map((kind) => new Tile(kind));
