// The same prompt without drafts and with them: two modes, several pairs of answers, one verdict.

const WARM_UP_TOKENS = 16;

// A cache salt of its own: no request finds the prompt's KV, or an earlier answer to draft from, in the server's caches.
const unshared = () => ({ cache_salt: `compare-${crypto.getRandomValues(new Uint32Array(4)).join("-")}` });

function compare() {
  return alone(async (signal) => {
    const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
    const prompt = $("compared").value;
    const input = chats ? { messages: messagesFor($("system").value, [{ prompt }], 0) } : { prompt };
    const body = { ...commonFields(), ...input, seed };
    const modes = { off: { detail: true, enabled: false }, on: body.speculative };
    $("race").hidden = false;
    for (const id of ["runs", "clocks", "compare-error", "verdict", "evidence"]) $(id).replaceChildren();
    const runs = {};
    for (const [mode, title] of [["off", "Without drafts"], ["on", `Drafts: ${body.speculative.proposer}`]]) {
      runs[mode] = new Run(title, runs);
    }
    const request = (mode) => ({ ...body, speculative: modes[mode], ...unshared() });
    const pairs = [], count = Number($("pairs").value);
    try {
      for (const mode of pairOrder(0)) {
        say(`${runs[mode].title}: warming up`);
        const most = Math.min(WARM_UP_TOKENS, body.max_tokens ?? WARM_UP_TOKENS);
        await answered({ ...request(mode), max_tokens: most }, signal, () => {});
      }
      for (let index = 0; index < count; index++) {
        const pair = {};
        for (const mode of pairOrder(index)) {
          say(`Pair ${index + 1} of ${count}, ${runs[mode].title}`);
          pair[mode] = await runs[mode].read(request(mode), signal);
        }
        pairs.push(pair);
      }
    } catch (error) {
      if (error.name === "AbortError") say("Stopped");
      else $("compare-error").replaceChildren(problem(error.message, compare));
    }
    if (pairs.length) { // of a comparison that was stopped, those that were whole
      for (const [mode, run] of Object.entries(runs)) run.settle(pairs.map((pair) => pair[mode]));
      const { headline, evidence } = verdict(pairs);
      $("verdict").textContent = headline;
      $("evidence").textContent = `${evidence} · seed ${seed}`;
    }
    if (pairs.length === count) say(`Done, ${count} pairs`);
  });
}

// A whole answer. Throws where there is none.
async function answered(body, signal, changed, answer = newAnswer()) {
  await generate(body, answer, signal, changed);
  if (answer.error) throw new Error(answer.error);
  if (answer.finish === "stopped") throw new DOMException("stopped", "AbortError");
  return answer;
}

class Run {
  constructor(title, all) {
    this.title = title;
    this.all = all; // and that beside it, whose scales it shares
    this.view = $("run-template").content.firstElementChild.cloneNode(true);
    this.view.querySelector("h2").textContent = title;
    this.pre = this.view.querySelector(".text");
    $("runs").append(this.view);
    this.bar = element("span", { className: "bar" });
    this.time = element("span");
    $("clocks").append(element("div", {}, element("dt", { textContent: title }), element("dd", {}, this.bar, this.time)));
    this.answer = newAnswer();
    bars(this.view.querySelector(".bars"), null);
    line(this.view.querySelector(".line"), [], 1);
  }

  async read(body, signal) {
    this.answer = newAnswer();
    this.view.classList.add("live");
    try {
      return await answered(body, signal, eachFrame(() => this.show()), this.answer);
    } finally {
      this.view.classList.remove("live");
      this.show();
    }
  }

  settle(answers) { // the last of them, with the medians of all
    const middle = (key) => median(answers.map((answer) => answer[key]));
    this.answer = { ...answers.at(-1), firstAt: middle("firstAt"), seconds: middle("seconds"), decoded: middle("decoded") };
    this.show();
  }

  show() {
    const { answer } = this;
    const set = (name, text) => { this.view.querySelector(`[data-is=${name}]`).textContent = text; };
    set("tau", tauOf(answer)?.toFixed(2) ?? "–");
    set("speed", speedOf(answer)?.toFixed(1) ?? "–");
    set("tokens", answer.tokens.length);
    set("clock", answer.seconds.toFixed(2));
    set("first", answer.firstAt === null ? "–" : `${answer.firstAt.toFixed(2)} s`);
    this.pre.replaceChildren(...pieceNodes(answer.tokens));
    this.pre.scrollTop = this.pre.scrollHeight;
    bars(this.view.querySelector(".bars"), answer.reached.map((passes) => passes / answer.verifies));
    const runs = Object.values(this.all);
    const longest = Math.max(...runs.map((run) => run.answer.seconds));
    const fastest = Math.max(...runs.flatMap((run) => run.answer.speeds), 0);
    for (const run of runs) {
      run.bar.style.inlineSize = `${(100 * run.answer.seconds) / (longest || 1)}%`;
      run.time.textContent = run.answer.seconds ? `${run.answer.seconds.toFixed(2)} s` : "";
      line(run.view.querySelector(".line"), run.answer.speeds, fastest);
    }
  }
}

function startCompare() {
  $("compare-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("compared").value.trim()) compare();
  });
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
