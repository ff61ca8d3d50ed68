// Anthropic's package for Node, over /v1/messages.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { ARGUMENTS, ASKED, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run } from "./checks.mjs";

const bodies = [];
const record = (url, options) => (bodies.push(JSON.parse(options.body)), fetch(url, options));
const client = new Anthropic({ baseURL: URL, apiKey: "none", fetch: record });
const request = { model: MODEL, max_tokens: 1024, messages: [{ role: "user", content: ASKED }] };
const Sum = z.object({ a: z.number().int().min(0).max(99), b: z.union([z.literal(1), z.literal(2)]) });

await run("@anthropic-ai/sdk", {
  async plain() {
    const message = await client.messages.create(request);
    expect([message.content.map((block) => block.text), message.stop_reason], [[SAID], "end_turn"]);
  },

  async stream() {
    expect(await client.messages.stream(request).finalText(), SAID);
  },

  async tools() {
    const tool = { name: "add", description: "Adds two numbers.", input_schema: PARAMETERS };
    const first = await client.messages.create({ ...request, tools: [tool], tool_choice: { type: "any" } });
    const call = first.content.find((block) => block.type === "tool_use");
    expect([call.name, call.input, first.stop_reason], ["add", ARGUMENTS, "tool_use"]);
    for (const stream of [false, true]) {
      const calls = [];
      const execute = (input) => (calls.push(input), "3");
      const add = betaZodTool({ name: "add", description: "Adds two numbers.", inputSchema: Sum, run: execute });
      const runner = client.beta.messages.toolRunner({ ...request, tools: [add], stream });
      expect((await runner.runUntilDone()).content.map((block) => block.text), [SAID]);
      expect(calls, [ARGUMENTS]);
      // Its default is a thread on the server; refused, it sends the whole conversation.
      expect(bodies.some((body) => body.thread), true);
      expect(bodies.at(-1).messages.map((turn) => turn.role), ["user", "assistant", "user"]);
      expect(bodies.at(-1).thread, undefined);
    }
  },

  async structured() {
    const messages = [{ role: "user", content: ASKED_JSON }];
    const output_config = { format: zodOutputFormat(Sum) };
    expect((await client.messages.parse({ ...request, messages, output_config })).parsed_output, ARGUMENTS);
  },
});
