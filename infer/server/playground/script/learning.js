// How the head learns, while the server trains it: a line of figures, and below it τ over time.

const LEARNING_MS = 10000; // between two looks
const LEARNING_PLOT = { left: 30, right: 334, top: 10, bottom: 86 };

async function followLearning() {
  try {
    showLearning(await (await call("/learning")).json());
  } catch { // what was last shown stays
  }
  setTimeout(followLearning, LEARNING_MS);
}

function showLearning(status) {
  const box = $("learning");
  box.hidden = false;
  box.querySelector("summary").textContent = learningLine(status);
  const change = (before, after) => (after === null ? "–" : `${before.toFixed(2)} → ${after.toFixed(2)}`);
  const gain = change(status.tau_before, status.tau_after);
  const replay = change(status.replay_before, status.replay_after);
  const shown = { ...status, gain, replay, tau: status.tau?.toFixed(2) ?? "–" };
  for (const node of box.querySelectorAll("[data-is]")) node.textContent = shown[node.dataset.is].toLocaleString();
  tauOverTime(box.querySelector("svg"), status.history);
}

function tauOverTime(svg, history) {
  const { left, right, top, bottom } = LEARNING_PLOT;
  const label = (x, y, text, anchor) => draw(svg, "text", { x, y, "text-anchor": anchor }, text);
  const clock = ([time]) => new Date(1000 * time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  svg.replaceChildren();
  draw(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
  if (!history.length) return label((left + right) / 2, (top + bottom) / 2, "not judged yet", "middle");
  const { points, marks, edges } = learningPlot(history);
  const places = points.map(([x, y]) => [left + (right - left) * x, bottom - (bottom - top) * y]);
  draw(svg, "polyline", { points: places.map((place) => place.join(",")).join(" ") });
  for (const index of marks) draw(svg, "circle", { cx: places[index][0], cy: places[index][1], r: 3.5 });
  edges.forEach((tau, index) => label(left - 5, (index ? top : bottom) + 3, tau.toFixed(2), "end"));
  label(left, bottom + 14, clock(history[0]), "start");
  if (history.length > 1) label(right, bottom + 14, clock(history.at(-1)), "end");
  const taus = history.map(([, tau]) => tau.toFixed(2));
  svg.setAttribute("aria-label", `τ from ${taus[0]} to ${taus.at(-1)}, ${marks.length} times a head was taken over`);
}
