// From fields and turns to requests, and to what outlives a reload. No DOM, no network.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

// `values`: of the settings' fields, as strings. An empty one leaves the server's default.
function samplingFields(values) {
  const fields = {};
  for (const name of NUMBERS) if (values[name]) fields[name] = Number(values[name]);
  if (values.stop) fields.stop = [values.stop];
  return { ...fields, speculative: { detail: true, ...draftFields(values) } };
}

function draftFields(values) {
  const fields = {};
  if (values.proposer) fields.proposer = values.proposer;
  if (values.max_draft_tokens) fields.max_draft_tokens = Number(values.max_draft_tokens);
  return fields;
}

// The messages that exchange `index` sends. An answer of which nothing came is left out; the two prompts around it are
// then one message, because many templates want turns to alternate.
function messagesFor(system, exchanges, index) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const [place, { prompt, answer }] of exchanges.slice(0, index + 1).entries()) {
    const last = messages.at(-1);
    if (last?.role === "user") last.content += `\n\n${prompt}`;
    else messages.push({ role: "user", content: prompt });
    if (place === index || !(answer?.text || answer?.reasoning)) continue;
    const reasoning = answer.reasoning ? { reasoning_content: answer.reasoning } : {};
    messages.push({ role: "assistant", content: answer.text, ...reasoning });
  }
  return messages;
}

// Why the server refused, in one line: OpenAI's error document, or whatever a proxy on the way wrote instead.
function refusal(status, text) {
  let message = "";
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = text.trim().startsWith("<") ? "" : text.trim().slice(0, 200);
  }
  return message ? `${message} (${status})` : `the server returned ${status}`;
}

// What was stored -> { exchanges, system, draft, fields }; null: nothing, or not of this page. An answer that a reload
// broke off says so.
function restored(text) {
  try {
    const { version, exchanges, system, draft, fields } = JSON.parse(text);
    const whole = version === 1 && exchanges.every((each) => typeof each.prompt === "string");
    if (!whole || typeof system !== "string" || typeof draft !== "string") return null;
    const answered = exchanges.map(({ prompt, answer }) => ({ prompt, answer: { ...newAnswer(), ...answer } }));
    for (const { answer } of answered) {
      if (answer.finish === null && answer.error === null) answer.error = "the page was left before the answer had ended";
    }
    return { exchanges: answered, system, draft, fields: fields ?? {} };
  } catch {
    return null;
  }
}

function toStore(exchanges, system, draft, fields) {
  const kept = exchanges.map(({ prompt, answer }) => ({ prompt, answer: { ...answer, speeds: [] } }));
  return JSON.stringify({ version: 1, exchanges: kept, system, draft, fields });
}
