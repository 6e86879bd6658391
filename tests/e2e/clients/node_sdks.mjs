// The `openai` package and the AI SDK in Node: chats and responses, streamed and not, tools and structured output.
import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [url, fields] = [process.argv[2], JSON.parse(process.argv[3])];
const stay = z.strictObject({ city: z.enum(['Rome', 'Oslo']), days: z.int().min(1).max(9) });
const messages = [{ role: 'user', content: 'hello' }];
const texts = new Set();

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 });
const chat = { model: 'tiny', messages, temperature: 0, max_tokens: 200, ...fields };
const response = { model: 'tiny', input: 'hello', temperature: 0, max_output_tokens: 200, ...fields };
texts.add((await client.chat.completions.create(chat)).choices[0].message.content);
let text = '';
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  text += chunk.choices[0].delta.content ?? '';
}
texts.add(text);
texts.add((await client.responses.create(response)).output_text);
const stream = client.responses.stream({ ...response, text: { format: zodTextFormat(stay, 'stay') } });
stay.parse((await stream.finalResponse()).output_parsed);
stay.parse((await client.chat.completions.parse({ ...chat, response_format: zodResponseFormat(stay, 'stay') })).choices[0].message.parsed);

// The AI SDK sends no fields of its own; these go in by the request.
const withFields = (input, init) => fetch(input, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), ...fields }) });
const settings = { baseURL: `${url}/v1`, apiKey: 'unused', fetch: withFields };
const models = [
  createOpenAI(settings).responses('tiny'),
  createOpenAI(settings).chat('tiny'),
  createOpenAICompatible({ name: 'neap', includeUsage: true, supportsStructuredOutputs: true, ...settings })('tiny'),
];
for (const model of models) {
  const asked = { model, prompt: 'hello', temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  texts.add((await generateText(asked)).text);
  const streamed = streamText(asked);
  let whole = '';
  for await (const part of streamed.textStream) whole += part;
  texts.add(whole);
  assert((await streamed.usage).outputTokens > 0);
  stay.parse((await generateText({ ...asked, output: Output.object({ schema: stay }) })).output);
  const booked = [];
  const book = tool({ inputSchema: stay, execute: async (input) => { booked.push(input); return 'booked'; } });
  const called = await generateText({ ...asked, tools: { book }, toolChoice: 'required', stopWhen: stepCountIs(2) });
  assert.equal(called.steps.length, 2);
  assert.equal(booked.length, called.steps.flatMap((step) => step.toolCalls).length);
  const calls = streamText({ ...asked, tools: { book }, toolChoice: 'required' });
  for await (const part of calls.fullStream) assert.notEqual(part.type, 'error', JSON.stringify(part));
  for (const call of await calls.toolCalls) stay.parse(call.input);
}
assert.equal(texts.size, 1, [...texts].join('|'));
