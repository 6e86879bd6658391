// An answer under a JSON Schema and a call of a tool, streamed from the HTTP gateway with nothing but Node:
// node fetch.mjs http://127.0.0.1:8080 MODEL PROMPT [TOKEN] [MORE FIELDS OF THE BODY, AS JSON]
const [url, model, prompt, token = "unused", fields = "{}"] = process.argv.slice(2);

const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

async function* choices(wanted) {
  const body = { model, messages: [{ role: "user", content: prompt }], stream: true, ...JSON.parse(fields), ...wanted };
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${token}` },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + text).split("\n\n");
    rest = events.pop(); // not whole yet
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield* chunk.choices;
    }
  }
  throw new Error("the stream broke off");
}

let text = "";
const response_format = { type: "json_schema", json_schema: { name: "stay", schema } };
for await (const { delta } of choices({ response_format })) text += delta.content ?? "";
console.log("answer", JSON.stringify(JSON.parse(text)));

const calls = [];
const tools = [{ type: "function", function: { name: "book", description: "Book a stay.", parameters: schema } }];
for await (const { delta, finish_reason } of choices({ tools, tool_choice: "required", parallel_tool_calls: false })) {
  for (const { index, function: piece } of delta.tool_calls ?? []) {
    calls[index] ??= { name: piece.name, arguments: "" }; // only the first piece has the name
    calls[index].arguments += piece.arguments;
  }
  if (finish_reason) console.log("ended", finish_reason);
}
for (const call of calls) console.log("call", call.name, JSON.stringify(JSON.parse(call.arguments)));
