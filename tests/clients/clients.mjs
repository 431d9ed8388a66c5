// Client libraries for JavaScript: prints what each was answered, as JSON. Arguments: the server's address.
import OpenAI from "openai";
import { Ollama } from "ollama";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const url = process.argv[2];
const text = "Tell me a long story about a king.";
const messages = [{ role: "user", content: text }];
const schema = {
  type: "object", properties: { city: { enum: ["Paris", "Rome"], type: "string" } }, required: ["city"],
  additionalProperties: false,
};
const failed = (promise) => Promise.resolve(promise).then((made) => JSON.stringify(made), (e) => String(e.message));

const openai = () => {
  const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "x", maxRetries: 0 });
  const create = (more) => api.chat.completions.create({ model: "smollm2", messages, max_tokens: 24, temperature: 0, ...more });
  const form = { type: "json_schema", json_schema: { name: "place", schema } };
  const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];
  return {
    chat: async () => (await create({})).choices[0].message.content,
    stream: async () => {
      let said = "";
      for await (const piece of await create({ stream: true })) said += piece.choices[0].delta.content ?? "";
      return said;
    },
    tool: async () => {
      const made = await create({ tools, tool_choice: "required", parallel_tool_calls: false });
      return JSON.parse(made.choices[0].message.tool_calls[0].function.arguments);
    },
    structured: async () => JSON.parse((await create({ response_format: form })).choices[0].message.content),
    embeddings: async () => (await api.embeddings.create({ model: "smollm2", input: "a king" })).data[0].embedding,
    error: () => failed(create({ model: "nobody" })),
    abort: async () => {
      const pieces = await create({ stream: true, max_tokens: 2000 });
      for await (const _ of pieces) break;
    },
  };
};

const ai = () => {
  const provider = createOpenAICompatible({ name: "octavo", baseURL: `${url}/v1`, apiKey: "x", supportsStructuredOutputs: true });
  const model = provider("smollm2");
  const asked = { model, prompt: text, maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const tools = { get_weather: tool({ inputSchema: jsonSchema(schema) }) };
  return {
    chat: async () => (await generateText(asked)).text,
    stream: async () => {
      let said = "";
      for await (const piece of streamText(asked).textStream) said += piece;
      return said;
    },
    tool: async () => (await generateText({ ...asked, maxOutputTokens: 100, tools, toolChoice: "required" })).toolCalls[0].input,
    structured: async () => (await generateObject({ ...asked, schema: jsonSchema(schema) })).object,
    embeddings: async () => (await embed({ model: provider.textEmbeddingModel("smollm2"), value: "a king" })).embedding,
    error: () => failed(generateText({ ...asked, model: provider("nobody") })),
    abort: async () => {
      const leaving = new AbortController();
      const made = streamText({ ...asked, maxOutputTokens: 2000, abortSignal: leaving.signal, onError: () => {} });
      for await (const _ of made.textStream) { leaving.abort(); break; }
    },
  };
};

const ollama = () => {
  const api = new Ollama({ host: url });
  const options = { num_predict: 24, temperature: 0 };
  const create = (more) => api.chat({ model: "smollm2", messages, options, ...more });
  return {
    chat: async () => (await create({})).message.content,
    stream: async () => {
      let said = "";
      for await (const piece of await create({ stream: true })) said += piece.message.content;
      return said;
    },
    structured: async () => JSON.parse((await create({ format: schema })).message.content),
    embeddings: async () => (await api.embed({ model: "smollm2", input: "a king" })).embeddings[0],
    error: () => failed(create({ model: "nobody" })),
    abort: async () => {
      const pieces = await create({ stream: true, options: { num_predict: 2000 } });
      for await (const _ of pieces) { pieces.abort(); break; }
    },
  };
};

const made = {};
for (const [name, client] of Object.entries({ openai: openai(), ai: ai(), ollama: ollama() })) {
  made[name] = {};
  for (const [what, ask] of Object.entries(client)) made[name][what] = (await ask()) ?? null;
}
console.log(JSON.stringify(made));
