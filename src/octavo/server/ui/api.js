// The server's API, by addresses relative to the page: it may lie under any prefix.

const KEPT = "octavo.key";
let key = localStorage.getItem(KEPT) ?? "";
let asking = null;
let ask = async () => false;

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** `ask` is called when the server wants a key, with whether it refused one; true once there is one. */
export function whenKeyIsWanted(asks) {
  ask = asks;
}

export const hasKey = () => key !== "";

/** The key of all further requests. keep: in this browser, until it is forgotten. */
export function setKey(value, keep) {
  key = value.trim();
  if (keep && key) localStorage.setItem(KEPT, key);
  else localStorage.removeItem(KEPT);
}

async function failure(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(response.status, error.message ?? error, error.code);
  } catch {
    return new ApiError(response.status, text.slice(0, 300) || response.statusText);
  }
}

/** The response of a request. Throws ApiError. A 401 asks for a key, once for all that wait; not with `asks` false. */
export async function request(path, { method, body, signal, asks = true } = {}) {
  for (;;) {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    const given = { method: method ?? (body ? "POST" : "GET"), headers, signal };
    if (body) given.body = JSON.stringify(body);
    const response = await fetch(path, given).catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(0, "The server cannot be reached. Does it still run?");
    });
    if (response.ok) return response;
    if (response.status !== 401 || !asks) throw await failure(response);
    asking ??= ask(key !== "").finally(() => (asking = null));
    if (!(await asking)) throw await failure(response);
  }
}

export const json = async (path, options) => (await request(path, options)).json();

/** The objects of an event stream. Throws ApiError, also for an error within the stream. */
export async function* stream(path, body, signal) {
  const response = await request(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.status ?? 500, event.error.message, event.error.code);
      yield event;
    }
  }
}

/** What a person reads of an error. */
export function explain(error) {
  if (!(error instanceof ApiError)) return String(error.message ?? error);
  if (error.code === "loading") return "The model is being loaded. Try again in a moment.";
  return error.message;
}
