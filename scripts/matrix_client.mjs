// A client on the official TypeScript SDK, of either generation, that does what it is told; scripts/matrix.py starts it.
//
// Its one argument is JSON: `modules` (a node_modules folder), `sdk` (`client` for @modelcontextprotocol/client, `sdk`
// for @modelcontextprotocol/sdk), `mode` (`auto`, `legacy` or a protocol version; `sdk` ignores it), `command` (the
// words of the server) and `env`. It connects and says what it learned of the server, then answers each line of stdin
// with one line of stdout:
//
//   ["list"]
//   ["call", tool, arguments, pin or null, {meta, cancelAt}]    cancelled when it reports this progress
//   ["request", method, params]         any other request; `@task` is the task that was begun last
//   ["notify", method]
//   ["listen", filter], ["unlisten"]    change events of the era of 2026-07-28
//   ["heard", n]                        at least n messages of the server's own accord since this was asked last
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const plan = JSON.parse(process.argv[2]);
const require = createRequire(`${plan.modules}/any.js`);
const isNew = plan.sdk === "client";

const { Client } = require(isNew ? "@modelcontextprotocol/client" : "@modelcontextprotocol/sdk/client/index.js");
const { StdioClientTransport } = require(
  isNew ? "@modelcontextprotocol/client/stdio" : "@modelcontextprotocol/sdk/client/stdio.js",
);
const types = isNew ? {} : require("@modelcontextprotocol/sdk/types.js");
const mode = ["auto", "legacy"].includes(plan.mode) ? plan.mode : { pin: plan.mode };

// What a server may ask of this client, and what it gets.
const answers = {
  "sampling/createMessage": {
    model: "a-model",
    role: "assistant",
    stopReason: "endTurn",
    content: { type: "text", text: "sampled" },
  },
  "elicitation/create": (params) => ({
    action: "accept",
    content: params.requestedSchema.properties.interpretation ? { interpretation: "snake" } : { name: "Ada" },
  }),
  "roots/list": { roots: [{ uri: "file:///a/root", name: "a root" }] },
};
const capabilities = plan.inDepth ? { sampling: {}, elicitation: { form: {} }, roots: { listChanged: true } } : {};

let heard = [];
let wake = () => {};
let onProgress = () => {};
const note = (message) => {
  heard.push(message);
  if (message.method === "notifications/progress") onProgress(message.params.progress);
  wake();
};

const client = new Client(
  { name: "matrix", version: "1" },
  { capabilities, ...(isNew ? { versionNegotiation: { mode } } : {}) },
);
if (plan.inDepth) {
  for (const [method, answer] of Object.entries(answers)) {
    const handle = ({ params }) => {
      note({ method, params });
      return typeof answer === "function" ? answer(params) : answer;
    };
    client.setRequestHandler(isNew ? method : requestSchema(method), handle);
  }
  // The SDK's own handler forgets a progress that comes in one piece with the answer.
  client.setNotificationHandler(isNew ? "notifications/progress" : types.ProgressNotificationSchema, note);
  client.fallbackNotificationHandler = async ({ method, params }) => note({ method, params });
}

function requestSchema(method) {
  const named = ["CreateMessageRequestSchema", "ElicitRequestSchema", "ListRootsRequestSchema"].map((n) => types[n]);
  return named.find((schema) => schema.shape.method.value === method);
}

function call([, name, args, pin, { meta, cancelAt } = {}]) {
  const _meta = { ...meta, ...(pin === null ? {} : { checkpoint_seq: pin }) };
  const params = { name, arguments: args, ...(Object.keys(_meta).length ? { _meta } : {}) };
  const abort = new AbortController();
  onProgress = (progress) => progress === cancelAt && abort.abort("enough");
  const options = { signal: abort.signal };
  return isNew ? client.callTool(params, options) : client.callTool(params, undefined, options);
}

async function enough(least) {
  while (heard.length < least) await new Promise((resolve) => (wake = resolve));
  const messages = heard;
  heard = [];
  return messages;
}

let subscription;
const steps = {
  list: () => client.listTools(),
  call,
  request: ([, method, params]) => client.request({ method, params }, ...(isNew ? [] : [types.ResultSchema])),
  notify: ([, method]) => client.notification({ method }),
  listen: async ([, filter]) => {
    subscription = await client.listen(filter);
    return subscription.honoredFilter;
  },
  unlisten: () => subscription.close(),
  heard: ([, least]) => enough(least),
};

function told(error) {
  const { code, message, data } = error;
  return typeof code === "number" ? { code, message, data } : { kind: error.constructor.name, code, message };
}

const say = (report) => process.stdout.write(`${JSON.stringify(report)}\n`);

const [command, ...args] = plan.command;
try {
  await client.connect(new StdioClientTransport({ command, args, env: plan.env, stderr: "inherit" }));
  say({
    answer: {
      protocolVersion: client.getNegotiatedProtocolVersion?.(),
      serverInfo: client.getServerVersion(),
      capabilities: client.getServerCapabilities(),
      instructions: client.getInstructions(),
    },
  });
} catch (error) {
  say({ error: told(error) });
  process.exit(0);
}
let task;
for await (const line of createInterface({ input: process.stdin })) {
  const step = JSON.parse(line.replaceAll("@task", task));
  try {
    const answer = (await steps[step[0]](step)) ?? null;
    task = answer?.task?.taskId ?? task;
    say({ answer });
  } catch (error) {
    say({ error: told(error) });
  }
}
await client.close();
process.exit(0);
