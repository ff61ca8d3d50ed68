// Agents, headless and with their own tools: the model runs a command by the agent's shell tool and then says what it has
// learnt to say; then the session is continued. All of them stream. HEADWAY_CLIENT says which agent.
import { spawnSync } from "node:child_process";
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

// Of each agent: its package; the tool by which it runs commands; by API, the command line without the question; what
// continues the last session; what makes the last answer follow the schema in a file.
const agents = {
  "claude-code": {
    package: "@anthropic-ai/claude-code",
    tool: "Bash",
    apis: {
      anthropic: [bin(`@anthropic-ai/claude-code-${MACHINE}/claude`), "-p", "--dangerously-skip-permissions"],
    },
    again: ["--continue"],
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
    schema: (file) => ["--output-schema", file],
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
if (agent.schema) {
  checks.structured = () => {
    const cwd = mkdtempSync(join(tmpdir(), "headway-"));
    writeFileSync(join(cwd, "schema.json"), JSON.stringify(PARAMETERS));
    for (const command of Object.values(agent.apis)) {
      const answer = ask(cwd, [...command, ...agent.schema("schema.json")], ASKED_JSON);
      expect(JSON.parse(answer), ARGUMENTS);
    }
  };
}
await run(agent.package, checks);
