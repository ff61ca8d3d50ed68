// A little Markdown: code blocks, headings, lists, bold, code. What else there is stays the text that it is.
// Blocks and runs name places in the source, so that tints can be laid over them. No DOM.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^(#{1,6})[ \t]+(?=\S)/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const DEEPEST_ITEM = 3;

// Text -> blocks: { kind: "code", language, start, end } or { kind: "text" | "heading" | "item", runs, ... }; an item
// has `depth` and `number` (null: a bullet).
function parseMarkdown(text) {
  const blocks = [], lines = linesOf(text);
  let open = null; // the text or item that the next line may go on with
  const close = () => { if (open) blocks.push({ ...open, runs: parseRuns(text, open.start, open.end) }); open = null; };
  for (let index = 0; index < lines.length; index++) {
    const { start, end } = lines[index], line = text.slice(start, end);
    const fence = FENCE.exec(line), heading = HEADING.exec(line), item = ITEM.exec(line);
    if (fence) {
      close();
      const last = closingFence(text, lines, index + 1, fence[1]);
      const inside = lines.slice(index + 1, last);
      blocks.push({ kind: "code", language: fence[2], start: inside[0]?.start ?? end, end: inside.at(-1)?.end ?? end });
      index = last;
    } else if (line.trim() === "") {
      close();
    } else if (heading) {
      close();
      open = { kind: "heading", level: heading[1].length, start: start + heading[0].length, end };
      close();
    } else if (item) {
      close();
      const depth = Math.min(item[1].replaceAll("\t", "    ").length >> 1, DEEPEST_ITEM);
      const number = /\d/.test(item[2]) ? parseInt(item[2], 10) : null;
      open = { kind: "item", depth, number, start: start + item[0].length, end };
    } else if (open) {
      open.end = end;
    } else {
      open = { kind: "text", start, end };
    }
  }
  close();
  return blocks;
}

function linesOf(text) {
  const lines = [];
  let start = 0;
  for (const line of text.split("\n")) {
    lines.push({ start, end: start + line.length });
    start += line.length + 1;
  }
  return lines;
}

// The line that closes the block; the number of lines while none does.
function closingFence(text, lines, from, mark) {
  for (let index = from; index < lines.length; index++) {
    const line = text.slice(lines[index].start, lines[index].end).trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return index;
  }
  return lines.length;
}

// The characters from `start` to `end` -> runs { style: "" | "bold" | "code", start, end }, without the marks.
function parseRuns(text, start, end) {
  const runs = [], marks = /(`+)(?!`)([^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*/g, inside = text.slice(start, end);
  let place = 0;
  for (const match of inside.matchAll(marks)) {
    if (match.index > place) runs.push({ style: "", start: start + place, end: start + match.index });
    const width = match[1]?.length ?? 2, begin = start + match.index + width;
    runs.push({ style: match[1] ? "code" : "bold", start: begin, end: begin + match[0].length - 2 * width });
    place = match.index + match[0].length;
  }
  if (place < inside.length) runs.push({ style: "", start: start + place, end });
  return runs;
}
