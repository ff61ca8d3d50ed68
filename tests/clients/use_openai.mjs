// OpenAI's package for Node: chats and responses.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ARGUMENTS, ASKED, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: ASKED }];
const definition = { name: "add", description: "Adds two numbers.", parameters: PARAMETERS };
const tools = [{ type: "function", function: definition }];
const Sum = z.object({ a: z.number().int().min(0).max(99), b: z.union([z.literal(1), z.literal(2)]) });

await run("openai", {
  async plain() {
    const chat = await client.chat.completions.create({ model: MODEL, messages });
    expect([chat.choices[0].message.content, chat.choices[0].finish_reason], [SAID, "stop"]);
    expect((await client.responses.create({ model: MODEL, input: ASKED })).output_text, SAID);
  },

  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model: MODEL, messages, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    expect(text, SAID);
    expect(await client.chat.completions.stream({ model: MODEL, messages }).finalContent(), SAID);
    let said = "";
    for await (const event of await client.responses.create({ model: MODEL, input: ASKED, stream: true })) {
      if (event.type === "response.output_text.delta") said += event.delta;
    }
    expect(said, SAID);
  },

  async tools() {
    for (const tool_choice of ["auto", "required", { type: "function", function: { name: "add" } }]) {
      const request = { model: MODEL, messages, tools, tool_choice, parallel_tool_calls: false };
      const { message } = (await client.chat.completions.create(request)).choices[0];
      expect(message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]), [
        ["add", ARGUMENTS],
      ]);
      const turn = [...messages, message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "3" }];
      const again = await client.chat.completions.create({ model: MODEL, messages: turn, tools });
      expect(again.choices[0].message.content, SAID);
    }
    const calls = [];
    const add = { ...definition, parse: JSON.parse, function: (input) => (calls.push(input), "3") };
    const runner = client.chat.completions.runTools({
      model: MODEL,
      messages,
      tools: [{ type: "function", function: add }],
      stream: true,
    });
    expect(await runner.finalContent(), SAID);
    expect(calls, [ARGUMENTS]);
  },

  async structured() {
    const turn = [{ role: "user", content: ASKED_JSON }];
    const response_format = zodResponseFormat(Sum, "sum");
    const chat = await client.chat.completions.parse({ model: MODEL, messages: turn, response_format });
    expect(chat.choices[0].message.parsed, ARGUMENTS);
  },
});
