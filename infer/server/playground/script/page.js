// The page as a whole: what the server has, the settings, the view that is shown.

const LOADING_MS = 1000; // between two looks at a server that still loads its model
let model = null, chats = false; // the model's card; whether it has a chat template

async function start() {
  restore();
  $("settings").open = matchMedia("(min-width: 761px)").matches;
  startChat();
  startCompletion();
  startCompare();
  document.addEventListener("keydown", onKey);
  for (const node of document.querySelectorAll(".stop")) node.addEventListener("click", () => activity?.abort());
  $("views").addEventListener("change", (event) => show(event.target.value));
  $("tint").addEventListener("change", showTint);
  $("settings-form").addEventListener("submit", (event) => event.preventDefault());
  $("settings-form").addEventListener("input", save);
  $("key").addEventListener("change", () => {
    apiKey = $("key").value;
    if (!model) connect();
  });
  showTint();
  await connect();
}

async function connect() {
  try {
    const [card] = (await (await call("/v1/models")).json()).data;
    const info = await (await call("/tokenizer_info")).json();
    ready(card, Boolean(info.chat_template));
  } catch (error) {
    if (error.status === 401) showKeyField();
    $("model").textContent = error.status === 503 ? "loading the model …" : error.message;
    if (error.status !== 401) setTimeout(connect, LOADING_MS);
  }
}

function ready(card, hasTemplate) {
  model = card;
  chats = hasTemplate;
  $("model").textContent = `${model.id}, context ${model.max_model_len} tokens, proposer ${model.proposer}`;
  const wanted = $("proposer").dataset.wanted, chosen = model.proposers.includes(wanted) ? wanted : model.proposer;
  $("proposer").replaceChildren(...model.proposers.map((name) =>
    new Option(name === model.proposer ? `${name} (default)` : name, name, false, name === chosen)));
  const most = Math.floor(model.max_model_len / 2);
  if (Number($("max_tokens").value) > most) $("max_tokens").value = most;
  $("compared").value ||= chats ? "Write a Python function that reverses a list, and explain it." : "def main(";
  document.querySelector("input[name=view][value=chat]").parentElement.hidden = !chats;
  show(chats ? "chat" : "completion");
  showTurns();
  if (model.learns) followLearning();
}

function show(view) {
  for (const node of document.querySelectorAll(".view")) node.hidden = node.id !== view;
  document.querySelector(`input[name=view][value=${view}]`).checked = true;
  for (const area of document.querySelectorAll(`#${view} textarea`)) fitHeight(area);
  follow();
}

const showTint = () => document.body.classList.toggle("plain", !$("tint").checked);

function showKeyField() {
  $("key-field").hidden = false;
  $("settings").open = true;
  $("key").focus();
}

const settingFields = () => [...$("settings-form").elements].filter((field) => field.id && field.id !== "key");
const fieldValues = () => Object.fromEntries(settingFields().map((field) => [field.id, field.value]));

function setFieldValues(values) {
  for (const field of settingFields()) if (typeof values[field.id] === "string") field.value = values[field.id];
  $("proposer").dataset.wanted = values.proposer ?? ""; // its options come with the model's card
}

const commonFields = () =>
  ({ model: model.id, stream: true, stream_options: { include_usage: true }, ...samplingFields(fieldValues()) });

function onKey(event) {
  if (event.key === "Escape") activity?.abort();
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  document.querySelector(".view:not([hidden]) form:has(.start)")?.requestSubmit();
}

start();
