// An answer: the events that bring it, its text with the drafts in it, its figures. No DOM, no clock, no network.

// What has come of a stream so far -> the data of its whole events, and the rest: perhaps the beginning of one.
function splitEvents(text) {
  const blocks = text.split("\n\n");
  const rest = blocks.pop();
  const data = (block) => {
    const lines = block.split("\n").filter((line) => line.startsWith("data:"));
    return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
  };
  return { events: blocks.map(data).filter((event) => event !== ""), rest };
}

function newAnswer() {
  return {
    text: "", reasoning: "",
    tokens: [], // [text, depth]; depth 0: no draft
    verifies: 0, verified: 0, // passes of the target after the first token, and the tokens that they brought
    reached: [], // passes that accepted a draft at this depth, or deeper
    firstAt: null, decoded: 0, seconds: 0, // seconds until the first came; how many came later, in how many seconds
    speeds: [],
    drafted: null, // tokens; told at the end
    seed: null,
    finish: null, // stop, length, stopped, ...; null: not finished
    error: null,
  };
}

// Adds one event's document, which came `now` seconds after the request was sent.
function takeChunk(answer, chunk, now) {
  answer.seed = chunk.seed ?? answer.seed;
  answer.drafted = chunk.metrics?.speculative_decoding.num_draft_tokens ?? answer.drafted;
  const choice = chunk.choices[0];
  if (!choice) return;
  answer.text += choice.text ?? choice.delta?.content ?? "";
  answer.reasoning += choice.delta?.reasoning_content ?? "";
  answer.finish = choice.finish_reason ?? answer.finish;
  const tokens = choice.tokens ?? [];
  if (!tokens.length) return;
  if (answer.tokens.length) { // the first comes from the prompt, which verifies nothing
    answer.verifies += 1;
    answer.verified += tokens.length;
    answer.decoded += tokens.length;
    const deepest = Math.max(...tokens.map((token) => token.accepted_depth));
    for (let depth = 0; depth < deepest; depth++) answer.reached[depth] = (answer.reached[depth] ?? 0) + 1;
  } else {
    answer.firstAt = now;
  }
  answer.tokens.push(...tokens.map((token) => [token.text, token.accepted_depth]));
  answer.seconds = now - answer.firstAt;
  if (answer.seconds > 0.1) answer.speeds.push(answer.decoded / answer.seconds);
}

const tauOf = (answer) => (answer.verifies ? answer.verified / answer.verifies : null);
const speedOf = (answer) => (answer.decoded > 0 && answer.seconds > 0 ? answer.decoded / answer.seconds : null);
const rawText = (answer) => answer.tokens.map(([text]) => text).join("");

const ENDINGS = { length: "cut: tokens at most", stopped: "stopped", tool_calls: "a tool call" };

// τ 2.31 · 64.2 tokens/s · 128 tokens · ...
function figures(answer) {
  const tau = tauOf(answer), speed = speedOf(answer), count = answer.tokens.length;
  const parts = [
    tau !== null && `τ ${tau.toFixed(2)}`,
    speed !== null && `${speed.toFixed(1)} tokens/s`,
    count > 0 && `${count} token${count === 1 ? "" : "s"}`,
    answer.seed !== null && answer.finish !== null && `seed ${answer.seed}`,
    ENDINGS[answer.finish],
  ];
  return parts.filter(Boolean).join(" · ");
}

// `text` in pieces [text, depth]. It is a part of the tokens' text: reasoning, its marks and stop strings are cut off.
function piecesOf(text, tokens) {
  const begin = tokens.map(([part]) => part).join("").lastIndexOf(text);
  if (begin < 0) return [[text, 0]];
  return cutPieces(tokens, begin, begin + text.length);
}

// The characters from `start` to `end` of what the pieces hold together.
function cutPieces(pieces, start, end) {
  const cut = [];
  let place = 0;
  for (const [text, depth] of pieces) {
    const part = text.slice(Math.max(start - place, 0), Math.max(end - place, 0));
    if (part) cut.push([part, depth]);
    place += text.length;
    if (place >= end) break;
  }
  return cut;
}
