
"use strict";
const $ = (id) => document.getElementById(id);
const numbers = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];
let model = null, abort = null;

async function start() {
  try {
    const cards = await get("/v1/models");
    model = cards.data[0];
    const info = await get("/tokenizer_info");
    $("model").textContent = `${model.id}, context ${model.max_model_len} tokens, proposer ${model.proposer}`;
    for (const name of model.proposers) {
      const label = name === model.proposer ? `${name} (default)` : name;
      $("proposer").append(new Option(label, name, name === model.proposer, name === model.proposer));
    }
    if (!info.chat_template) setMode("completion");
  } catch (error) {
    $("model").textContent = "no answer from the server";
    say(error.message);
  }
  showMode();
}

async function get(path) {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  return body;
}

const mode = () => document.querySelector("input[name=mode]:checked").value;
const setMode = (value) => { document.querySelector(`input[name=mode][value=${value}]`).checked = true; };
const showMode = () => { $("system-field").hidden = mode() !== "chat"; };
const say = (text) => { $("status").textContent = text; };

function requestBody(seed, speculative) {
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, seed };
  for (const name of numbers) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("stop").value) body.stop = [$("stop").value];
  body.speculative = { detail: true, ...speculative };
  if (mode() === "completion") return { ...body, prompt: $("prompt").value };
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return { ...body, messages: [...system, { role: "user", content: $("prompt").value }] };
}

function chosenDrafts() {
  const drafts = { proposer: $("proposer").value || null };
  if ($("max_draft_tokens").value) drafts.max_draft_tokens = Number($("max_draft_tokens").value);
  return drafts;
}

async function generate() {
  if (!model || abort) return;
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
  const drafts = chosenDrafts(), compare = $("compare").checked;
  const modes = compare ? [["Speculation off", { enabled: false }]] : [];
  modes.push([`Speculation: ${drafts.proposer}`, drafts]);
  abort = new AbortController();
  $("run").disabled = true;
  $("cancel").disabled = false;
  $("runs").replaceChildren();
  $("clocks").replaceChildren();
  $("verdict").textContent = "One prompt, one seed …";
  $("empty").hidden = true;
  $("race").hidden = !compare;
  const runs = [];
  for (const [title] of modes) runs.push(new Run(title, runs));
  if (matchMedia("(max-width: 760px)").matches) $("stage").scrollIntoView();
  try {
    if (compare) await warmUp(modes, seed);
    for (const index of compare ? ORDER : [0]) {
      const [title, speculative] = modes[index];
      say(`${title}: generating with seed ${seed}`);
      await runs[index].read({ ...requestBody(seed, speculative), ...(compare && unshared()) }, abort.signal);
    }
    for (const run of runs) run.settle();
    if (compare) $("verdict").textContent = verdict(...runs.map((run) => run.reads));
    say(`done: ${compare ? `${sameText(runs)}, ` : ""}${runs.at(-1).tokens} tokens, seed ${seed}`);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message);
    $("verdict").textContent = "";
  }
  abort = null;
  $("run").disabled = false;
  $("cancel").disabled = true;
}

// A comparison: off, on, on, off. What drifts, as a machine that warms up, then weighs on both alike.
const ORDER = [0, 1, 1, 0];
const WARM_UP_TOKENS = 16;
const LEAST_NOISE = Math.log(1.03); // two runs alike differ by so much on a quiet machine

// A cache salt of its own: no request finds the prompt's KV, or an earlier answer to draft from, in the server's caches.
const unshared = () => ({ cache_salt: `compare-${crypto.getRandomValues(new Uint32Array(4)).join("-")}` });

async function warmUp(modes, seed) {
  for (const [title, speculative] of modes) {
    say(`${title}: warming up`);
    const body = { ...requestBody(seed, speculative), ...unshared() };
    body.max_tokens = Math.min(WARM_UP_TOKENS, body.max_tokens ?? WARM_UP_TOKENS);
    const answer = await post(body, abort.signal);
    await answer.text();
  }
}

async function post(body, signal) {
  const path = body.messages ? "/v1/chat/completions" : "/v1/completions";
  const headers = { "content-type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

const sameText = (runs) => {
  const texts = new Set(runs.flatMap((run) => run.reads.map((read) => read.text)));
  return texts.size === 1 ? "the same text" : "DIFFERENT TEXTS";
};

// Of the reads of either mode, { text, tokens, decoded, seconds, drafted }: `decoded` tokens came in `seconds` after the
// first; `tokens` counts that too. Speeds of one mode that lie apart show the noise, within which there is no verdict.
function verdict(off, on) {
  const reads = [...off, ...on];
  if (new Set(reads.map((read) => read.text)).size > 1) return "The texts differ";
  if (reads.some((read) => read.decoded < 1 || !(read.seconds > 0))) return "Too few tokens to compare";
  const logs = [off, on].map((mode) => mode.map((read) => Math.log(read.decoded / read.seconds)));
  const [plain, drafting] = logs.map((values) => values.reduce((sum, value) => sum + value, 0) / values.length);
  const apart = logs.map((values) => Math.max(...values) - Math.min(...values));
  const gain = drafting - plain, noise = Math.max(LEAST_NOISE, (apart[0] + apart[1]) / 2);
  const ratio = `${Math.exp(gain).toFixed(2)}×`, same = `the same ${on[0].tokens} tokens`;
  if (gain < -noise) return `Slower: ${ratio} the speed without, ${same}`;
  if (on.every((read) => read.drafted === 0)) return `Nothing was drafted: it would not have paid (${ratio}, ${same})`;
  if (gain > noise) return `${ratio} as fast, ${same}`;
  return `No difference: ${ratio}, within the noise of ${Math.round(100 * (Math.exp(noise) - 1))} %, ${same}`;
}

class Run {
  constructor(title, all) {
    this.all = all; // and those beside it, whose scales it shares
    this.view = $("run-template").content.firstElementChild.cloneNode(true);
    this.view.querySelector("h2").textContent = title;
    this.pre = this.view.querySelector(".text");
    $("runs").append(this.view);
    const row = document.createElement("div"), name = document.createElement("dt"), clock = document.createElement("dd");
    name.textContent = title;
    this.bar = document.createElement("span");
    this.time = document.createElement("span");
    this.bar.className = "bar";
    clock.append(this.bar, this.time);
    row.append(name, clock);
    $("clocks").append(row);
    this.reads = []; // finished ones
    this.begin();
    bars(this.view.querySelector(".bars"), null);
    line(this.view.querySelector(".line"), this.speeds, 1);
  }

  begin() {
    this.tokens = 0; this.decoded = 0; this.seconds = 0; this.verifies = 0; this.verified = 0; this.firstAt = null;
    this.reached = []; // verifies that accepted a draft at this depth, or deeper
    this.speeds = [];
    this.drafted = null; // told at the end
    this.pre.replaceChildren();
  }

  async read(body, signal) {
    this.begin();
    this.began = performance.now();
    const answer = await post(body, signal);
    this.view.classList.add("live");
    try {
      await this.readEvents(answer.body);
    } finally {
      this.view.classList.remove("live");
    }
    const { tokens, decoded, seconds, drafted, firstAt } = this;
    this.reads.push({ text: this.pre.textContent, tokens, decoded, seconds, drafted, firstAt });
  }

  settle() { // shows the mean of its reads
    const mean = (key) => this.reads.reduce((sum, read) => sum + read[key], 0) / this.reads.length;
    this.seconds = mean("seconds");
    this.firstAt = this.firstAt === null ? null : mean("firstAt");
    if (this.seconds > 0) this.speeds.push(mean("decoded") / this.seconds);
    this.show();
  }

  async readEvents(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.take(event.replace(/^data: /, ""));
      this.show();
    }
  }

  take(data) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    this.drafted = chunk.metrics?.speculative_decoding.num_draft_tokens ?? this.drafted;
    const tokens = chunk.choices[0]?.tokens ?? [];
    if (!tokens.length) return;
    if (this.tokens) { // the first comes from the prompt, which verifies nothing
      this.verifies += 1;
      this.verified += tokens.length;
      const deepest = Math.max(...tokens.map((token) => token.accepted_depth));
      for (let depth = 0; depth < deepest; depth++) this.reached[depth] = (this.reached[depth] ?? 0) + 1;
    }
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = `token d${Math.min(token.accepted_depth, 6)}`;
      if (token.accepted_depth) span.title = `draft, accepted at depth ${token.accepted_depth}`;
      span.textContent = token.text;
      this.pre.append(span);
    }
    const now = (performance.now() - this.began) / 1000;
    if (this.tokens) this.decoded += tokens.length; else this.firstAt = now;
    this.tokens += tokens.length;
    this.seconds = now - this.firstAt;
    if (this.seconds > 0.1) this.speeds.push(this.decoded / this.seconds);
  }

  show() {
    const set = (name, text) => { this.view.querySelector(`[data-is=${name}]`).textContent = text; };
    set("tau", this.verifies ? (this.verified / this.verifies).toFixed(2) : "–");
    set("speed", this.speeds.length ? this.speeds.at(-1).toFixed(1) : "–");
    set("tokens", this.tokens);
    set("clock", this.seconds.toFixed(2));
    set("first", this.firstAt === null ? "–" : `${this.firstAt.toFixed(2)} s`);
    this.pre.scrollTop = this.pre.scrollHeight;
    bars(this.view.querySelector(".bars"), this.reached.map((count) => count / this.verifies));
    const longest = Math.max(...this.all.map((run) => run.seconds));
    const fastest = Math.max(...this.all.flatMap((run) => run.speeds), 0);
    for (const run of this.all) {
      run.bar.style.inlineSize = `${(100 * run.seconds) / (longest || 1)}%`;
      run.time.textContent = run.seconds ? `${run.seconds.toFixed(2)} s` : "";
      line(run.view.querySelector(".line"), run.speeds, fastest);
    }
  }
}

function draw(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
}

function bars(svg, shares) {
  svg.replaceChildren();
  draw(svg, "line", { class: "axis", x1: 0, x2: 240, y1: 74, y2: 74 });
  if (!shares) return;
  const width = 240 / Math.max(shares.length, 4);
  shares.forEach((share, index) => {
    const height = 60 * share, x = index * width;
    const color = `s${Math.min(index + 1, 6)}`;
    draw(svg, "rect", { class: color, x: x + 4, y: 74 - height, width: width - 8, height, rx: 2 });
    draw(svg, "text", { x: x + width / 2, y: 86, "text-anchor": "middle" }, index + 1);
    draw(svg, "text", { x: x + width / 2, y: 71 - height, "text-anchor": "middle" }, `${Math.round(100 * share)}%`);
  });
  if (!shares.length) draw(svg, "text", { x: 120, y: 44, "text-anchor": "middle" }, "no draft accepted");
  const words = shares.map((share, index) => `${index + 1}: ${Math.round(100 * share)}%`).join(", ");
  svg.setAttribute("aria-label", words || "no draft was accepted");
}

function line(svg, speeds, most) {
  svg.replaceChildren();
  draw(svg, "line", { class: "axis", x1: 0, x2: 240, y1: 74, y2: 74 });
  if (speeds.length < 2) return;
  const place = (speed, index) => `${(240 * index) / (speeds.length - 1)},${74 - (62 * speed) / most}`;
  draw(svg, "polyline", { points: speeds.map(place).join(" ") });
  const level = 74 - (62 * speeds.at(-1)) / most;
  draw(svg, "text", { x: 240, y: Math.max(9, level - 4), "text-anchor": "end" }, speeds.at(-1).toFixed(0));
  svg.setAttribute("aria-label", `now ${speeds.at(-1).toFixed(1)}, at most ${Math.max(...speeds).toFixed(1)}`);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("form").addEventListener("change", showMode);
$("cancel").addEventListener("click", () => abort?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  if (event.key === "Escape") abort?.abort();
});
start();
