// What the JavaScript programs of this folder share; checks.py says the same for Python's.
import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";

export const URL = process.env.HEADWAY_URL;
export const MODEL = process.env.HEADWAY_MODEL;
export const ASKED = "What is 1+2?";
export const SAID = "It is 3.";
export const ASKED_JSON = "Add 1 and 2, as JSON.";
export const ARGUMENTS = { a: 1, b: 2 };
export const PARAMETERS = {
  type: "object",
  properties: { a: { type: "integer", minimum: 0, maximum: 99 }, b: { enum: [1, 2] } },
  required: ["a", "b"],
  additionalProperties: false,
};

export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  console.log(JSON.stringify({ version }));
  for (const [check, body] of Object.entries(checks)) {
    let error = null;
    try {
      await body();
    } catch (problem) {
      console.error(problem);
      error = String(problem).slice(0, 2000);
    }
    console.log(JSON.stringify({ check, error }));
  }
}

export function expect(value, wanted) {
  if (!isDeepStrictEqual(value, wanted)) {
    throw new Error(`${JSON.stringify(value)}, not ${JSON.stringify(wanted)}`);
  }
}
