#!/usr/bin/env bash
# Packages: zod==3.25.76, zod-to-json-schema==3.25.2, ajv==8.17.1, ajv-formats==3.0.1 (of npm)
# Behaviour: the schema of zod 3's `z.string().time()` is `format: time` and nothing else. That format is RFC 3339's
#   full-time, which needs an offset; the type itself refuses every offset. So no text passes both: ajv refuses 12:30:00,
#   zod refuses 12:30:00Z.
# One would have guessed: what keeps the schema of a type parses as the type, as it does for dates and date-times.
# Why it matters: a server that enforces the format makes the model write what the client's own parse then rejects.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent zod@3.25.76 zod-to-json-schema@3.25.2 ajv@8.17.1 ajv-formats@3.0.1
cat > run.mjs <<'JS'
import { z } from "zod";
import { zodToJsonSchema } from "zod-to-json-schema";
import Ajv from "ajv";
import addFormats from "ajv-formats";
const type = z.string().time(), schema = zodToJsonSchema(type), ajv = new Ajv.default();
addFormats.default(ajv);
console.log(JSON.stringify(schema));
let both = 0;
for (const text of ["12:30:00", "12:30:00Z", "12:30:00.5", "12:30:00+02:00"]) {
  const keeps = ajv.validate(schema, text), parses = type.safeParse(text).success;
  console.log(text.padEnd(15), "keeps the schema:", keeps, " parses:", parses);
  both += keeps && parses;
}
if (both || schema.format !== "time") throw new Error("the behaviour has changed");
JS
node run.mjs
