// Streams one answer from the HTTP gateway: npm install && node openai.mjs http://127.0.0.1:8080 MODEL PROMPT [TOKEN]
import OpenAI from "openai";

const [url, model, prompt, token = "unused"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: token });

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: prompt }],
  max_tokens: 32,
  temperature: 0,
  stream: true,
  neap: { policy: "exact" }, // not OpenAI's: how deep the model runs
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
process.stdout.write("\n");
