// Nodes. What a model wrote becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);
const say = (text) => { $("status").textContent = text; };

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

const button = (label, act, properties = {}) =>
  element("button", { type: "button", className: "small", textContent: label, onclick: act, ...properties });

// Accepted drafts are spans; the rest is plain text.
function pieceNodes(pieces) {
  return pieces.map(([text, depth]) => {
    if (!depth) return document.createTextNode(text);
    const title = `a draft, accepted at depth ${depth}`;
    return element("span", { className: `token d${Math.min(depth, 6)}`, title, textContent: text });
  });
}

const RUN_TAGS = { bold: "strong", code: "code" };

function markdownNodes(text, tokens) {
  const pieces = piecesOf(text, tokens);
  const part = (start, end) => pieceNodes(cutPieces(pieces, start, end));
  const runNodes = (runs) => runs.flatMap(({ style, start, end }) =>
    style ? [element(RUN_TAGS[style], {}, ...part(start, end))] : part(start, end));
  const nodes = [];
  let list = null; // that the next item goes into
  for (const block of parseMarkdown(text)) {
    if (block.kind === "item") {
      const tag = block.number === null ? "UL" : "OL";
      if (list?.tagName !== tag) nodes.push(list = element(tag));
      const item = element("li", { className: `deep${block.depth}` }, ...runNodes(block.runs));
      if (block.number !== null) item.value = block.number;
      list.append(item);
      continue;
    }
    list = null;
    if (block.kind === "code") nodes.push(codeBlock(text.slice(block.start, block.end), part(block.start, block.end)));
    else nodes.push(element(block.kind === "heading" ? "h3" : "p", {}, ...runNodes(block.runs)));
  }
  return nodes;
}

function codeBlock(text, nodes) {
  const copy = button("Copy", () => copyText(text), { ariaLabel: "Copy code", className: "small copy" });
  return element("div", { className: "code" }, element("pre", { tabIndex: 0 }, element("code", {}, ...nodes)), copy);
}

function problem(message, retry) {
  const node = element("div", { className: "problem", role: "alert" }, element("p", { textContent: message }));
  if (retry) node.append(button("Retry", retry, { className: "small retry" }));
  return node;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context, or not allowed
    const area = element("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied");
}

function fitHeight(area) {
  area.style.blockSize = "auto";
  area.style.blockSize = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

// Calls `paint` once before the next frame, however often it is called until then.
function eachFrame(paint) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paint();
    });
  };
}

function showActivity(on) {
  const focused = document.activeElement;
  for (const node of document.querySelectorAll(".stop")) node.hidden = !on;
  for (const node of document.querySelectorAll(".start")) node.hidden = on;
  const others = "input[name=view], .turn button:not(.copy), #new-chat, #undo";
  for (const node of document.querySelectorAll(others)) node.disabled = on;
  const other = focused?.closest(".start, .stop")?.parentElement.querySelector(on ? ".stop" : ".start");
  other?.focus(); // the button that was pressed is gone
}
