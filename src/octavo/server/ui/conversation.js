// A conversation: a tree of messages, of which one path is shown. Editing and regenerating add branches.

/** A name that no other has. (`crypto.randomUUID` is only there with TLS.) */
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

/** settings: {model, system, tools, values}, as parameters.js has them. */
export function create(settings) {
  return { id: newId(), title: "", updated: Date.now(), settings: structuredClone(settings), messages: [], leaf: null };
}

/** Adds a message after `parent` (its id, null for the first) and shows it. */
export function add(chat, parent, fields) {
  const message = { id: newId(), parent, ...fields };
  chat.messages.push(message);
  chat.leaf = message.id;
  chat.updated = Date.now();
  if (!chat.title && message.role === "user") chat.title = message.text.trim().replaceAll(/\s+/g, " ").slice(0, 80) || "Image";
  return message;
}

/** The messages that are shown, from the first to the last. */
export function path(chat) {
  const byId = new Map(chat.messages.map((message) => [message.id, message]));
  const found = [];
  for (let one = byId.get(chat.leaf); one; one = byId.get(one.parent)) found.unshift(one);
  return found;
}

/** The branches at a message's place, itself among them. */
export const siblings = (chat, message) => chat.messages.filter((other) => other.parent === message.parent);

/** Shows the branch of a message, to its newest end. */
export function show(chat, message) {
  let leaf = message;
  for (let next = leaf; next; next = chat.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  chat.leaf = leaf.id;
}

/** A new conversation with all that is said until a message. */
export function fork(chat, message) {
  const found = create(chat.settings);
  const said = path(chat);
  found.title = chat.title;
  for (const each of said.slice(0, said.indexOf(message) + 1)) add(found, found.leaf, { ...structuredClone(each), id: newId(), parent: found.leaf });
  return found;
}

function content(message) {
  if (!message.images?.length) return message.text;
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...images, ...(message.text ? [{ type: "text", text: message.text }] : [])];
}

/** The messages as the API takes them. */
export function toApi(messages, system) {
  const told = messages.map((message) => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.text };
    const one = { role: message.role, content: content(message) };
    if (message.calls?.length) {
      one.content = message.text || null;
      one.tool_calls = message.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    }
    return one;
  });
  return system.trim() ? [{ role: "system", content: system }, ...told] : told;
}

/** What is shown, as Markdown. */
export function toMarkdown(chat) {
  const names = { user: "You", assistant: "Model", tool: "Tool" };
  const parts = path(chat).map((message) => {
    const calls = (message.calls ?? []).map((call) => `\`${call.name}(${call.arguments})\``);
    const images = (message.images ?? []).map(() => "*(image)*");
    return [`## ${names[message.role]}`, ...images, message.text, ...calls].filter(Boolean).join("\n\n");
  });
  return [`# ${chat.title}`, ...parts].join("\n\n") + "\n";
}
