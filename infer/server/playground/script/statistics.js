// What several answers show: pairs of them without drafts and with them, and how a head learns. No DOM, no clock, no
// network.

const LEAST_DIFFERENCE = 0.03; // two runs alike differ by so much on a quiet machine

// The mode that goes first changes: what drifts, as a machine that warms up, then weighs on both alike.
const pairOrder = (index) => (index % 2 ? ["on", "off"] : ["off", "on"]);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// Of pairs { off, on } of answers -> { headline, evidence }. A ratio compares the two answers of one pair. Half of the
// range of the pairs' ratios is the noise, within which nothing was shown.
function verdict(pairs) {
  const answers = pairs.flatMap((pair) => [pair.off, pair.on]);
  const count = `${pairs.length} pair${pairs.length === 1 ? "" : "s"}`;
  if (new Set(answers.map(rawText)).size > 1) return { headline: "The texts differ", evidence: `Same text: NO, in ${count}` };
  const same = `Same text: yes, ${answers[0].tokens.length} tokens`;
  if (answers.some((answer) => speedOf(answer) === null)) return { headline: "Too few tokens to compare", evidence: same };
  const ratios = pairs.map((pair) => speedOf(pair.on) / speedOf(pair.off));
  const ratio = median(ratios), low = Math.min(...ratios), high = Math.max(...ratios);
  const spread = pairs.length > 1 ? `, ${low.toFixed(2)} to ${high.toFixed(2)}` : "";
  const noise = Math.max(Math.log(1 + LEAST_DIFFERENCE), Math.log(high / low) / 2);
  const undrafted = pairs.every((pair) => pair.on.drafted === 0);
  return {
    headline: headlineOf(ratio, noise, undrafted),
    evidence: `${same} · median ratio of ${count} ${ratio.toFixed(2)}${spread}`,
  };
}

function headlineOf(ratio, noise, undrafted) {
  const times = `${ratio.toFixed(2)}×`, gain = Math.log(ratio);
  if (gain < -noise) return `Slower: ${times} the speed without drafts`;
  if (undrafted) return `Nothing was drafted: it would not have paid (${times})`;
  if (gain > noise) return `${times} as fast`;
  return `No difference: ${times}, within the noise of ${Math.round(100 * (Math.exp(noise) - 1))} %`;
}

const LEAST_RANGE = 0.1; // of τ in a plot, lest noise look like a change

// Judgements [time, τ, heads taken over until then] of a head -> where they lie within 0 to 1 each way, from the lower
// left; the indices of those that took a head over; and the τ of the lower and of the upper edge.
function learningPlot(history) {
  const times = history.map(([time]) => time), taus = history.map(([, tau]) => tau);
  const low = Math.min(...taus), high = Math.max(...taus);
  const margin = Math.max(0, LEAST_RANGE - (high - low)) / 2;
  const edges = [low - margin, high + margin];
  const span = times.at(-1) - times[0];
  return {
    points: history.map(([time, tau]) => [span ? (time - times[0]) / span : 0, (tau - edges[0]) / (edges[1] - edges[0])]),
    marks: history.flatMap(([, , taken], index) => (taken > (index ? history[index - 1][2] : 0) ? [index] : [])),
    edges,
  };
}

// Learning: τ 2.31, 3 heads taken over
function learningLine(status) {
  const heads = `${status.taken_over} head${status.taken_over === 1 ? "" : "s"} taken over`;
  const tau = status.tau === null ? "not judged yet" : `τ ${status.tau.toFixed(2)}`;
  return `${status.running ? "Learning" : "Learnt, its process has ended"}: ${tau}, ${heads}`;
}
