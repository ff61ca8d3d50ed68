// Vercel's `ai`, with its provider for OpenAI-compatible servers, with OpenAI's own for responses, and with Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run } from "./checks.mjs";

const compatible = createOpenAICompatible({
  name: "headway",
  baseURL: `${URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" });
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
// Nothing is stored, so the provider must send a conversation's items whole.
const models = [
  { model: compatible(MODEL) },
  { model: openai.chat(MODEL) },
  { model: openai.responses(MODEL), providerOptions: { openai: { store: false } } },
  { model: anthropic(MODEL), maxOutputTokens: 1024 },
];
const Sum = z.object({ a: z.number().int().min(0).max(99), b: z.union([z.literal(1), z.literal(2)]) });

function tools(calls) {
  const execute = async (input) => {
    calls.push(input);
    return 3;
  };
  return { add: ai.tool({ description: "Adds two numbers.", inputSchema: Sum, execute }) };
}

await run("ai", {
  async plain() {
    for (const model of models) {
      const answer = await ai.generateText({ ...model, prompt: ASKED });
      expect([answer.text, answer.finishReason], [SAID, "stop"]);
      const messages = [{ role: "user", content: ASKED }, ...answer.response.messages, { role: "user", content: ASKED }];
      expect((await ai.generateText({ ...model, messages })).text, SAID);
    }
  },

  async stream() {
    for (const model of models) {
      const answer = ai.streamText({ ...model, prompt: ASKED });
      let text = "";
      for await (const piece of answer.textStream) text += piece;
      expect([text, await answer.finishReason], [SAID, "stop"]);
      if (!((await answer.usage).outputTokens > 0)) throw new Error("no usage");
    }
  },

  async tools() {
    for (const model of models) {
      const calls = [];
      const request = { ...model, prompt: ASKED, tools: tools(calls), stopWhen: ai.stepCountIs(3) };
      expect((await ai.generateText(request)).text, SAID);
      const streamed = ai.streamText(request);
      await streamed.consumeStream();
      expect(await streamed.text, SAID);
      expect(calls, [ARGUMENTS, ARGUMENTS]);
      const forced = { ...request, toolChoice: { type: "tool", toolName: "add" }, stopWhen: ai.stepCountIs(1) };
      expect((await ai.generateText(forced)).toolCalls.map((call) => call.input), [ARGUMENTS]);
    }
  },

  async structured() {
    for (const [index, model] of models.entries()) {
      const output = ai.Output.object({ schema: Sum });
      const answer = (await ai.generateText({ ...model, prompt: ASKED_JSON, output })).output;
      // Anthropic's provider calls a tool `json`, with a name that the target has not learnt.
      expect(answer, index < 3 ? ARGUMENTS : Sum.parse(answer));
    }
  },
});
