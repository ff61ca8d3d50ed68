// The agent Qwen Code, headless, with its own tools: one prompt by OpenAI's API and one by Anthropic's.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { ASKED_FILES, MODEL, SAID, URL, expect, run } from "./checks.mjs";

const program = resolve("node_modules/@qwen-code/qwen-code/cli-entry.js");
const providers = {
  openai: { OPENAI_API_KEY: "none", OPENAI_BASE_URL: `${URL}/v1`, OPENAI_MODEL: MODEL },
  anthropic: { ANTHROPIC_API_KEY: "none", ANTHROPIC_BASE_URL: URL, ANTHROPIC_MODEL: MODEL },
};

function qwen(provider, ...options) {
  const cwd = mkdtempSync(join(tmpdir(), "headway-"));
  writeFileSync(join(cwd, "notes.txt"), "Nothing.\n");
  const command = [program, "--auth-type", provider, ...options, ASKED_FILES];
  const env = { ...process.env, ...providers[provider] };
  const done = spawnSync(process.execPath, command, { cwd, env, encoding: "utf8", timeout: 240_000 });
  if (done.status !== 0) throw new Error((done.stderr || done.stdout).slice(-500));
  return done.stdout.trim();
}

await run("@qwen-code/qwen-code", {
  // Its default: every answer is streamed. The model calls `glob`, and then says what it has learnt to say.
  stream() {
    for (const provider of Object.keys(providers)) expect(qwen(provider), SAID);
  },

  tools() {
    for (const provider of Object.keys(providers)) {
      const messages = JSON.parse(qwen(provider, "--output-format", "json"));
      const blocks = messages.flatMap((message) => message.message?.content ?? []);
      expect(blocks.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]), [
        ["glob", { pattern: "*.txt" }],
      ]);
      expect(messages.at(-1).result, SAID);
    }
  },
});
