// The completion box: a prompt, and the text that goes on from it.

// The box itself would turn the carriage returns of a continued text into line feeds.
function complete(prompt) {
  const answer = newAnswer();
  return alone(async (signal) => {
    const text = element("pre", { className: "text", tabIndex: 0, ariaLabel: "Text" });
    const line = element("p", { className: "figures" });
    const view = element("article", { className: "turn answer live", ariaBusy: "true" }, text, line);
    $("completed").replaceChildren(view);
    say("Writing …");
    const paint = () => {
      text.replaceChildren(...pieceNodes(piecesOf(answer.text, answer.tokens)));
      line.textContent = figures(answer);
    };
    await generate({ ...commonFields(), prompt }, answer, signal, eachFrame(paint));
    paint();
    view.classList.remove("live");
    view.ariaBusy = "false";
    if (answer.error) view.append(problem(answer.error, () => complete(prompt)));
    const goOn = () => {
      $("prompt").value = prompt + answer.text;
      complete(prompt + answer.text);
    };
    if (answer.text) {
      const tools = [copyButton(answer.text), button("Go on from here", goOn)];
      view.append(element("div", { className: "tools" }, ...tools));
    }
    say(answer.error ? "" : answer.finish === "stopped" ? "Stopped" : "Done");
  });
}

function startCompletion() {
  $("completion-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("prompt").value) complete($("prompt").value);
  });
}
