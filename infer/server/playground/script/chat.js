// The conversation: exchanges of a prompt and its answer, shown as turns.

const STORE = "headway-chat";
let exchanges = [];
let removed = null; // the exchanges before the last deletion
let following = true; // the end is in view, and stays there

function send(prompt) {
  removed = null;
  exchanges.push({ prompt, answer: newAnswer() });
  return answerLast();
}

// Also once more, for Retry and Regenerate.
function answerLast() {
  return alone(async (signal) => {
    const exchange = exchanges.at(-1), answer = exchange.answer = newAnswer();
    following = true;
    if ($("turns").contains(document.activeElement)) $("turns").focus(); // what was pressed there goes
    showTurns();
    save();
    say("Writing …");
    const messages = messagesFor($("system").value, exchanges, exchanges.length - 1);
    const view = $("turns").lastElementChild;
    view.ariaBusy = "true";
    view.classList.add("live");
    const paint = () => showAnswer(view.querySelector(".body"), exchange);
    await generate({ ...commonFields(), messages }, answer, signal, eachFrame(paint));
    save();
    say(answer.error ? "" : answer.finish === "stopped" ? "Stopped" : "Done");
    $("announcer").textContent = answer.error ? "" : `Answer: ${answer.text}`;
  }).finally(showTurns);
}

function showTurns() {
  $("turns").replaceChildren(...exchanges.flatMap((exchange, index) => {
    const last = index === exchanges.length - 1;
    return [promptTurn(exchange, last), answerTurn(exchange, last)];
  }));
  if (!exchanges.length) $("turns").append(element("p", { className: "empty", textContent: "Ask something." }));
  $("undo").hidden = removed === null;
  $("new-chat").disabled = Boolean(activity) || !exchanges.length;
  follow();
}

const copyButton = (text) => button("Copy", () => copyText(text), { className: "small copy" });

function promptTurn(exchange, last) {
  const body = element("div", { className: "body", textContent: exchange.prompt });
  const tools = element("div", { className: "tools" }, copyButton(exchange.prompt));
  const turn = element("article", { className: "turn prompt", ariaLabel: "You" }, body, tools);
  if (last) {
    const disabled = Boolean(activity);
    tools.append(button("Edit", () => edit(turn, exchange), { disabled }), button("Delete", remove, { disabled }));
  }
  return turn;
}

function answerTurn(exchange, last) {
  const body = element("div", { className: "body" });
  const turn = element("article", { className: "turn answer", ariaLabel: model?.id ?? "Answer" }, body);
  showAnswer(body, exchange);
  if (activity && last) return turn;
  const tools = element("div", { className: "tools" });
  if (exchange.answer?.text) tools.append(copyButton(exchange.answer.text));
  if (last && !exchange.answer?.error) tools.append(button("Regenerate", answerLast));
  turn.append(tools);
  return turn;
}

function showAnswer(body, exchange) {
  const answer = exchange.answer, nodes = [];
  if (answer.reasoning) {
    const open = body.querySelector(".reasoning")?.open ?? false;
    const text = element("div", {}, ...pieceNodes(piecesOf(answer.reasoning, answer.tokens)));
    nodes.push(element("details", { className: "reasoning", open }, element("summary", { textContent: "Reasoning" }), text));
  }
  nodes.push(element("div", { className: "written" }, ...markdownNodes(answer.text, answer.tokens)));
  nodes.push(element("p", { className: "figures", textContent: figures(answer) }));
  if (answer.error) nodes.push(problem(answer.error, exchange === exchanges.at(-1) && answerLast));
  body.replaceChildren(...nodes);
  follow();
}

// In place, so that what stands in the composer stays there.
function edit(turn, exchange) {
  const area = element("textarea", { value: exchange.prompt, ariaLabel: "Edit your message" });
  const form = element("form", { className: "edit" }, area,
    element("div", { className: "tools" },
      element("button", { className: "small", textContent: "Send", type: "submit" }), button("Cancel", showTurns)));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (!area.value.trim() || activity) return;
    exchange.prompt = area.value;
    answerLast();
    $("message").focus();
  };
  area.onkeydown = (event) => {
    sendOnEnter(event);
    if (event.key !== "Escape") return;
    event.stopPropagation();
    showTurns();
    $("message").focus();
  };
  area.oninput = () => fitHeight(area);
  turn.replaceChildren(form);
  fitHeight(area);
  area.focus();
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.stopPropagation();
  event.target.form.requestSubmit();
}

function change(next, message) {
  removed = exchanges;
  exchanges = next;
  showTurns();
  save();
  say(message);
  $("message").focus();
}

const remove = () => change(exchanges.slice(0, -1), "Deleted");
const newChat = () => change([], "New chat");

function undo() {
  exchanges = removed;
  removed = null;
  showTurns();
  save();
  say("Undone");
  $("message").focus();
}

// The end stays in view until the user scrolls away from it, and again from when they come back.
function follow() {
  const turns = $("turns");
  if (following) turns.scrollTop = turns.scrollHeight;
  $("latest").hidden = following;
}

function watchScrolling() {
  const turns = $("turns");
  following = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 24;
  $("latest").hidden = following;
}

function save() {
  try {
    sessionStorage.setItem(STORE, toStore(exchanges, $("system").value, $("message").value, fieldValues()));
  } catch { // full, or not allowed: then a reload forgets
  }
}

function restore() {
  const state = restored(sessionStorage.getItem(STORE) ?? "");
  if (!state) return;
  exchanges = state.exchanges;
  $("system").value = state.system;
  $("system-box").open = state.system !== "";
  $("message").value = state.draft;
  setFieldValues(state.fields);
}

function startChat() {
  showTurns();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = $("message").value;
    if (!prompt.trim() || activity || !model) return;
    $("message").value = "";
    fitHeight($("message"));
    send(prompt);
    $("message").focus();
  });
  $("message").addEventListener("keydown", sendOnEnter);
  $("message").addEventListener("input", () => { fitHeight($("message")); save(); });
  $("system").addEventListener("input", save);
  $("turns").addEventListener("scroll", watchScrolling);
  $("latest").addEventListener("click", () => { following = true; follow(); $("message").focus(); });
  $("new-chat").addEventListener("click", newChat);
  $("undo").addEventListener("click", undo);
}
