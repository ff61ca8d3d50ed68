// Agents, headless and with their own tools: the model runs a command by the agent's shell tool and then says what it has
// learnt to say; then the session is continued. All of them stream. HEADWAY_CLIENT says which agent.
import { spawn, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, unlinkSync, writeFileSync } from "node:fs";
import { homedir, tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { ARGUMENTS, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run } from "./checks.mjs";

const MACHINE = `${process.platform}-${process.arch}`;
const bin = (path) => resolve("node_modules", path);

function configure(path, content) {
  const file = join(homedir(), path);
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, typeof content === "string" ? content : JSON.stringify(content));
}

const SCHEMA = JSON.stringify(PARAMETERS);

// Of each agent: its package; the tool by which it runs commands; by API, the command line without the question; what
// continues the last session; `structured`: what asks for an answer of SCHEMA, which is also in schema.json, with the
// tool that returns it, or none, and where in the last line of the output it is, or the function that returns it.
const agents = {
  "claude-code": {
    package: "@anthropic-ai/claude-code",
    tool: "Bash",
    apis: {
      anthropic: [bin(`@anthropic-ai/claude-code-${MACHINE}/claude`), "-p", "--dangerously-skip-permissions"],
    },
    again: ["--continue"],
    structured: {
      options: ["--output-format", "json", "--json-schema", SCHEMA],
      tool: "StructuredOutput",
      read: (output) => output.structured_output,
    },
    env: {
      ANTHROPIC_BASE_URL: URL,
      ANTHROPIC_AUTH_TOKEN: "none",
      ANTHROPIC_MODEL: MODEL,
      ANTHROPIC_DEFAULT_HAIKU_MODEL: MODEL,
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      IS_SANDBOX: "1", // it may run as root, as in a container
    },
  },
  codex: {
    package: "@openai/codex",
    tool: "exec_command",
    apis: {
      responses: [bin(".bin/codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    },
    again: ["resume", "--last"],
    structured: { options: ["--output-schema", "schema.json"] },
    env: { OPENAI_API_KEY: "none" },
    configure() {
      const provider = `name = "Headway"\nbase_url = "${URL}/v1"\nenv_key = "OPENAI_API_KEY"\n`;
      configure(".codex/config.toml", `model = "${MODEL}"\nmodel_provider = "h"\n[model_providers.h]\n${provider}`);
    },
  },
  opencode: {
    package: "opencode-ai",
    tool: "bash",
    apis: { chat: [bin(`opencode-${MACHINE}/bin/opencode`), "run", "-m", `headway/${MODEL}`] },
    again: ["-c"],
    structured: { tool: "StructuredOutput", ask: askOpencode },
    configure() {
      const provider = { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${URL}/v1` }, models: { [MODEL]: {} } };
      configure(".config/opencode/opencode.json", { provider: { headway: provider }, autoupdate: false });
    },
  },
  pi: {
    package: "@earendil-works/pi-coding-agent",
    tool: "bash",
    apis: Object.fromEntries(
      ["openai-completions", "openai-responses", "anthropic-messages"].map((api) => [
        api,
        [process.execPath, bin("@earendil-works/pi-coding-agent/dist/cli.js"), "-p", "--model", `${api}/${MODEL}`],
      ]),
    ),
    again: ["-c"],
    configure() {
      const providers = Object.keys(this.apis).map((api) => [
        api,
        { baseUrl: api.startsWith("openai") ? `${URL}/v1` : URL, api, apiKey: "none", models: [{ id: MODEL }] },
      ]);
      configure(".pi/agent/models.json", { providers: Object.fromEntries(providers) });
    },
  },
  "qwen-code": {
    package: "@qwen-code/qwen-code",
    tool: "run_shell_command",
    apis: Object.fromEntries(
      ["openai", "anthropic"].map((api) => [
        api,
        [process.execPath, bin("@qwen-code/qwen-code/cli-entry.js"), "--auth-type", api, "-y"],
      ]),
    ),
    again: ["--continue"],
    structured: { options: ["--json-schema", SCHEMA], tool: "structured_output" },
    env: {
      ...{ OPENAI_API_KEY: "none", OPENAI_BASE_URL: `${URL}/v1`, OPENAI_MODEL: MODEL },
      ...{ ANTHROPIC_API_KEY: "none", ANTHROPIC_BASE_URL: URL, ANTHROPIC_MODEL: MODEL },
    },
  },
};

const agent = agents[process.env.HEADWAY_CLIENT];

function ask(cwd, [program, ...options], question) {
  const env = { ...process.env, ...agent.env };
  const settings = { cwd, env, encoding: "utf8", timeout: 240_000, input: "" };
  const done = spawnSync(program, [...options, question], settings);
  if (done.status !== 0) throw new Error((done.stderr || done.stdout || String(done.error)).slice(-800));
  return done.stdout.trim().split("\n").at(-1);
}

// Only its server takes a schema.
async function askOpencode(cwd, [program], question) {
  const server = spawn(program, ["serve"], { cwd });
  try {
    let output = "";
    for await (const part of server.stdout) if ((output += part).includes("listening on")) break;
    const url = output.match(/http:\S+/)[0];
    const post = async (path, body) => {
      const headers = { "content-type": "application/json" };
      const response = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
      return response.json();
    };
    const { id } = await post("/session", {});
    const answer = await post(`/session/${id}/message`, {
      model: { providerID: "headway", modelID: MODEL },
      format: { type: "json_schema", schema: PARAMETERS },
      parts: [{ type: "text", text: question }],
    });
    return answer.info.structured ?? answer;
  } finally {
    server.kill();
  }
}

agent.configure?.();
const checks = {
  // Two turns of one session, each with a call and its result.
  tools() {
    for (const command of Object.values(agent.apis)) {
      const cwd = mkdtempSync(join(tmpdir(), "headway-"));
      for (const again of [[], agent.again]) {
        expect(ask(cwd, [...command, ...again], `Run it by ${agent.tool}.`), SAID);
        unlinkSync(join(cwd, "made")); // which the command has made
      }
    }
  },
};
if (agent.structured) {
  const { options, tool, read = (output) => output, ask: request } = agent.structured;
  checks.structured = async () => {
    const cwd = mkdtempSync(join(tmpdir(), "headway-"));
    writeFileSync(join(cwd, "schema.json"), SCHEMA);
    const question = tool ? `Run it by ${tool}.` : ASKED_JSON;
    for (const command of Object.values(agent.apis)) {
      const answer = request
        ? await request(cwd, command, question)
        : read(JSON.parse(ask(cwd, [...command, ...options], question)));
      expect(answer, ARGUMENTS);
    }
  };
}
await run(agent.package, checks);
