// Streams one answer: npm install && node generate.mjs 127.0.0.1:7071 MODEL PROMPT [FOLDER OF PROTOS]
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const [target, model, prompt, protos = "../../../protos"] = process.argv.slice(2);
const definition = loadSync("neap/inference/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).neap.inference.v1;
const client = new InferenceService(`dns:///${target}`, grpc.credentials.createInsecure(), {
  // Calls go to all addresses of a name in turn.
  "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
});

const call = client.Generate(
  {
    model_id: model,
    chat: { messages: [{ role: "user", content: prompt }] },
    stopping: { max_tokens: 32 },
  },
  { deadline: Date.now() + 60_000 },
);
call.on("data", (event) => process.stdout.write(event.chunk?.text ?? event.finished?.text ?? ""));
call.on("end", () => process.stdout.write("\n"));
call.on("error", (error) => {
  // `code` is the gRPC status; the reason is in the ErrorInfo of grpc-status-details-bin.
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("close", () => client.close());
