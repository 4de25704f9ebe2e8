// The official TypeScript SDK 2.x as a host of either era.
//
// usage: node eras_client.mjs path/to/@modelcontextprotocol/client < PLAN.json > TRANSCRIPT.json
//
// check_eras.py describes the plan and the transcript; eras_client.py does the
// same with the Python SDK.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const library = (file) => import(pathToFileURL(`${process.argv[2]}/dist/${file}`));
const { Client, StreamableHTTPClientTransport } = await library("index.mjs");
const { StdioClientTransport } = await library("stdio.mjs");

const STEP_LIMIT_MS = 30_000;
// What is sent just before an answer may be told just after it.
const SETTLE_MS = 10;
const LOG_LEVEL = "io.modelcontextprotocol/logLevel";

const CHANGES = [
  "notifications/tools/list_changed",
  "notifications/prompts/list_changed",
  "notifications/resources/list_changed",
  "notifications/resources/updated",
  "notifications/elicitation/complete",
];

const plan = JSON.parse(readFileSync(0, "utf8"));
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let step = {};
let record = {};
let progressed = () => {};
let level = null; // that a modern client has in each request
let listening = null; // a modern client's subscription
let heard = []; // every change that was announced, as "method uri"

const client = new Client(
  { name: "mcpx-conformance", version: "1" },
  {
    capabilities: { sampling: {}, elicitation: { form: {}, url: {} }, roots: { listChanged: true } },
    versionNegotiation: { mode: ["legacy", "auto"].includes(plan.mode) ? plan.mode : { pin: plan.mode } },
  },
);
const isModern = () => client.getProtocolEra() === "modern";

// --- what it answers ---------------------------------------------------------

function note(request) {
  const asked = { method: request.method };
  if (request.params !== undefined) asked.params = request.params;
  record.asked.push(asked);
}

client.setRequestHandler("elicitation/create", (request) => {
  note(request);
  if (["decline", "cancel"].includes(step.refuse)) return { action: step.refuse };
  if (request.params.mode === "url") return { action: "accept" };
  const known = plan.answers.form;
  const fields = Object.keys(request.params.requestedSchema.properties).filter((name) => name in known);
  return { action: "accept", content: Object.fromEntries(fields.map((name) => [name, known[name]])) };
});

client.setRequestHandler("sampling/createMessage", (request) => {
  note(request);
  if (step.refuse === "error") throw Object.assign(new Error("User rejected sampling request"), { code: -1 });
  return plan.answers.sampling;
});

client.setRequestHandler("roots/list", (request) => {
  note({ method: request.method });
  return { roots: plan.answers.roots };
});

// --- what it hears -----------------------------------------------------------

client.setNotificationHandler("notifications/message", (told) => {
  record.logs.push(told.params);
});
for (const method of CHANGES) {
  client.setNotificationHandler(method, (told) => {
    heard.push(`${method} ${told.params?.uri ?? ""}`);
  });
}

// --- what it does ------------------------------------------------------------

function options() {
  if (!step.progress) return {};
  return {
    onprogress: ({ progress, total, message }) => {
      record.progress.push([progress, total ?? null, message ?? null]);
      progressed();
    },
  };
}

function params() {
  const given = { ...step.params };
  if (level && isModern()) given._meta = { [LOG_LEVEL]: level, ...given._meta };
  return given;
}

const REQUESTS = {
  ping: () => client.ping(),
  "tools/call": () => client.callTool(params(), options()),
  "prompts/get": () => client.getPrompt(params(), options()),
  "resources/read": () => client.readResource(params(), { ...options(), cacheMode: "refresh" }),
  "completion/complete": () => client.complete(params(), options()),
};

// All pages of a list; the SDK puts them together.
const LISTS = {
  "tools/list": () => client.listTools({}, { cacheMode: "refresh" }),
  "prompts/list": () => client.listPrompts({}, { cacheMode: "refresh" }),
  "resources/list": () => client.listResources({}, { cacheMode: "refresh" }),
  "resources/templates/list": () => client.listResourceTemplates({}, { cacheMode: "refresh" }),
};

// Begin a call, and give it up once it is plainly under way.
async function cancel() {
  const abort = new AbortController();
  const begun = new Promise((resolve) => (progressed = resolve));
  const given = client.callTool(params(), { ...options(), signal: abort.signal });
  const ended = given.then(
    (result) => ({ "not given up": result }),
    () => ({ "given up": true }),
  );
  await Promise.race([begun, ended]);
  abort.abort();
  return ended;
}

async function setLevel() {
  level = step.level;
  if (!isModern()) await client.setLoggingLevel(level);
  return { level };
}

// Have changes of all lists and of some resources announced.
async function watch() {
  if (!isModern()) {
    for (const uri of step.uris) await client.subscribeResource({ uri });
    return { watching: step.uris };
  }
  listening = await client.listen({
    toolsListChanged: true,
    promptsListChanged: true,
    resourcesListChanged: true,
    resourceSubscriptions: step.uris,
  });
  return { watching: step.uris, honored: listening.honoredFilter };
}

async function unwatch() {
  if (isModern()) await listening.close();
  else for (const uri of step.uris) await client.unsubscribeResource({ uri });
  return {};
}

// Wait until a change of a kind has been announced since the last wait for it.
async function wait() {
  const wanted = `${step.method} ${step.uri ?? ""}`;
  for (const end = Date.now() + step.seconds * 1000; Date.now() < end; await pause(20)) {
    if (heard.includes(wanted)) {
      heard = heard.filter((one) => one !== wanted);
      return { came: true };
    }
  }
  return { came: false };
}

const DEEDS = {
  request: () => REQUESTS[step.method](),
  list: () => LISTS[step.method](),
  cancel,
  level: setLevel,
  watch,
  unwatch,
  wait,
};

const late = () => pause(STEP_LIMIT_MS).then(() => Promise.reject(new Error("no answer in time")));

function shownError(error) {
  if (!Number.isInteger(error.code)) return { message: `${error.name} ${error.code ?? ""}: ${error.message}` };
  const shown = { code: error.code, message: error.message };
  return error.data === undefined ? shown : { ...shown, data: error.data };
}

// The record of one step, whatever happened.
async function perform(one) {
  step = one;
  record = { asked: [], logs: [], progress: [] };
  const mine = record;
  try {
    mine.result = await Promise.race([DEEDS[step.do](), late()]);
  } catch (error) {
    mine.error = shownError(error);
  }
  await pause(SETTLE_MS);
  return mine;
}

// --- the whole of it ---------------------------------------------------------

function transport({ url, headers, ...server }) {
  if (!url) return new StdioClientTransport({ ...server, stderr: "inherit" });
  return new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
}

await client.connect(transport(plan.server));
const greeting = client.getDiscoverResult() ?? {
  capabilities: client.getServerCapabilities(),
  serverInfo: client.getServerVersion(),
  instructions: client.getInstructions(),
};
const steps = [];
for (const one of plan.steps) steps.push(await perform(one));
const version = client.getNegotiatedProtocolVersion();
await client.close();
process.stdout.write(JSON.stringify({ version, greeting, steps }), () => process.exit(0));
