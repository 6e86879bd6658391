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

const request = {
  model_id: model,
  chat: { messages: [{ role: "user", content: prompt }] },
  stopping: { max_tokens: 32 },
  can_resume: true,
};
const deadline = Date.now() + 60_000;
const tokens = [];
let started = null; // of the call that brought the last tokens
let failures = 0; // since the last token

function begin() {
  // An answer that its worker interrupts goes on at another one, after the tokens that have arrived.
  const resumed = started && {
    sampling: { seed: started.seed },
    resume: { token_ids: [...tokens], prompt_digest: started.prompt_digest, numerics_id: started.numerics_id },
  };
  const call = client.Generate({ ...request, ...resumed }, { deadline });
  let own = null;
  call.on("data", (event) => {
    if (event.started) own = event.started;
    if (event.started && (own.num_resumed_tokens ?? 0) !== (resumed?.resume.token_ids.length ?? 0)) {
      failures = 4; // an older worker, which begins anew
      call.cancel();
      return;
    }
    if (event.chunk) {
      started = own;
      failures = 0;
      tokens.push(...event.chunk.tokens.map((token) => token.id));
    }
    process.stdout.write(event.chunk?.text ?? event.finished?.text ?? "");
  });
  call.on("end", () => {});
  call.on("status", (status) => {
    if (status.code === grpc.status.OK) {
      process.stdout.write("\n");
    } else if (status.code === grpc.status.UNAVAILABLE && ++failures < 4) {
      setTimeout(begin, Math.random() * 200 * 2 ** failures);
      return;
    } else {
      // `code` is the gRPC status; the reason is in the ErrorInfo of grpc-status-details-bin.
      console.error(`${grpc.status[status.code]}: ${status.details}`);
      process.exitCode = 1;
    }
    client.close();
  });
  call.on("error", () => {}); // it comes with the status
}
begin();
