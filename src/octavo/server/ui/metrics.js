// Reads Prometheus text, and makes rates and quantiles of two looks ({time, samples}) at it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples by name: lists of {labels, value}. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found || line.startsWith("#")) continue;
    const [, name, labels = "", value] = found;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, text]) => [key, text])), value: Number(value.replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The sum of a metric over all that has these labels; null if there is none. */
export function sum({ samples }, name, labels = {}) {
  const found = samples.get(name)?.filter((one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value));
  return found?.length ? found.reduce((total, { value }) => total + value, 0) : null;
}

/** How much a counter grew a second. An engine that was restarted counts from 0 again, as one does that is new. */
export function rate(now, before, name, labels = {}) {
  const [to, from] = [sum(now, name, labels), sum(before, name, labels)];
  if (to == null || now.time === before.time) return null;
  return Math.max(0, to - (from ?? 0)) / (now.time - before.time);
}

/** The mean of what a histogram took in between. */
export function average(now, past, name) {
  const count = sum(now, `${name}_count`) - sum(past, `${name}_count`);
  return count > 0 ? (sum(now, `${name}_sum`) - sum(past, `${name}_sum`)) / count : null;
}

function buckets({ samples }, name) {
  const found = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const le = Number(labels.le.replace("Inf", "Infinity"));
    found.set(le, (found.get(le) ?? 0) + value);
  }
  return found;
}

/** A quantile of what a histogram took in between, as Prometheus estimates it; null if that is nothing. */
export function quantile(now, past, name, q) {
  const before = buckets(past, name);
  const grown = [...buckets(now, name)].map(([le, count]) => [le, count - (before.get(le) ?? 0)]).sort((a, b) => a[0] - b[0]);
  const all = grown.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let [below, least] = [0, 0];
  for (const [le, count] of grown) {
    if (count >= q * all) return le === Infinity ? least : least + ((le - least) * (q * all - below)) / (count - below || 1);
    [below, least] = [count, le];
  }
  return least;
}
