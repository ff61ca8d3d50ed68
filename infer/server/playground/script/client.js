// What the page asks the server, and one answer at a time.

let apiKey = ""; // sent where a person typed it; kept nowhere
let activity = null; // of the answer or comparison in progress

function headers() {
  return { "content-type": "application/json", ...(apiKey && { authorization: `Bearer ${apiKey}` }) };
}

class Refused extends Error {
  constructor(status, text) {
    super(refusal(status, text));
    this.status = status;
  }
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached");
  }
  if (!response.ok) throw new Refused(response.status, await response.text());
  return response;
}

// Reads the answer to `body` into `answer`; `changed` is called after what has come at once. Never throws: what went
// wrong is `answer.error`, and what had come by then stays.
async function generate(body, answer, signal, changed) {
  const began = performance.now();
  try {
    const path = body.messages ? "/v1/chat/completions" : "/v1/completions";
    const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
    await readStream(response.body, answer, began, changed);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message;
    if (error.status === 401) showKeyField();
  }
  changed();
}

async function readStream(stream, answer, began, changed) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the connection was lost");
    });
    if (done) throw new Error("the connection ended before the answer did");
    const parts = splitEvents(rest + value);
    rest = parts.rest;
    for (const event of parts.events) {
      if (event === "[DONE]") return;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new Error(chunk.error.message);
      takeChunk(answer, chunk, (performance.now() - began) / 1000);
    }
    changed();
  }
}

// One thing at a time: `work(signal)` while every Stop button is there.
async function alone(work) {
  if (activity || !model) return;
  activity = new AbortController();
  showActivity(true);
  try {
    await work(activity.signal);
  } finally {
    activity = null;
    showActivity(false);
  }
}
