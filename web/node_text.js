// The text on Resolute's nodes: a sentence or two on a compile node, the whole result on a report.
//
// ComfyUI adds such a widget when the first text arrives, and the node grows over its neighbours. Ours is there from the
// start, under the name that ComfyUI looks for, so it gets the same texts and the node keeps its size.

import { nodesById } from "./graph.js";
import { isOff, isSwitched } from "./switch.js";
import { say } from "./words.js";

const NAME = "$$node-text-preview";
const LINE = 16;
const PADDING = 8;
const MARGIN = 4;
const NARROW = 210; // ComfyUI's least width of a node with widgets
const STATUS = 3; // a result and a reason, of which one needs two lines on a node as wide as ComfyUI makes it
const TWO_RESULTS = 4; // of the model and the VAE, or of the encoder and the decoder: each needs two lines

// Lines of text that a node shows without scrolling.
const LINES = {
  ResoluteCompileModel: 4, // what was measured needs two or three lines below a result
  ResoluteCompileVAE: TWO_RESULTS,
  ResoluteCompileVAEDecode: STATUS,
  ResoluteCompileControlNet: STATUS,
  ResoluteLoadCheckpoint: TWO_RESULTS,
  ResoluteDeepCache: STATUS,
  ResoluteResolution: STATUS,
  ResoluteFree: STATUS,
  ResoluteWarmUp: 8,
  ResoluteReport: 12,
  ResoluteCompareImages: 6,
};

const WIDTHS = { ResoluteWarmUp: 540 }; // of a table whose lines are longer

// What other nodes say before their first text: nothing is queued, or their prompt is, and other nodes run first.
const [IDLE, WAITING] = ["Press Run", "Waiting for its turn"];
const BEFORE_A_RUN = {
  ResoluteReport: "The report appears here after a run.",
  ResoluteCompareImages: "The comparison appears here after a run.",
  ResoluteWarmUp: "What was warmed up appears here.",
};

// The nodes of OneDiff's names have as many: which node replaces them, or what they compile.
const ONEDIFF = "Resolute/OneDiff";

export function addText(node, category, translate) {
  const lines = LINES[node.comfyClass] ?? (category === ONEDIFF ? STATUS : 0);
  if (!lines || node.widgets?.some((widget) => widget.name === NAME)) return;
  const element = document.createElement("div");
  element.className = lines > TWO_RESULTS ? "resolute-text resolute-table" : "resolute-text";
  element.tabIndex = lines > TWO_RESULTS ? 0 : -1;
  element.setAttribute("role", "group"); // no live region: the announcer speaks
  element.setAttribute("aria-label", node.title);
  element.textContent = translate(BEFORE_A_RUN[node.comfyClass] ?? IDLE);
  element.addEventListener("wheel", (event) => scroll(element, event), { passive: false });
  const height = lines * LINE + PADDING;
  // A node that a workflow of OneDiff's brings keeps its saved size: its text is there only where there is room.
  const least = category === ONEDIFF ? 0 : height;
  element.style.setProperty("--resolute-lines", lines);
  element.style.minHeight = `${least}px`; // Nodes 2.0 asks the element, the classic canvas the widget
  const widget = node.addDOMWidget(NAME, "resolute-text", element, {
    getValue: () => element.textContent,
    setValue: (text) => show(element, translated(text, translate)),
    getMinHeight: () => (least ? least + 2 * MARGIN : 0),
    getMaxHeight: () => 10_000, // of a node that is taller, as in Nodes 2.0
    margin: MARGIN,
    hideOnZoom: false,
    serialize: false,
  });
  widget.serialize = false;
  widget.afterQueued = () => exchange(element, IDLE, WAITING, translate); // of the workflow that was queued only
  if (!least) {
    node.setSize([node.size[0], node.size[1] + height + 2 * MARGIN]);
    keepSavedWidth(node);
  }
  if (lines > TWO_RESULTS) node.size[0] = Math.max(node.size[0], WIDTHS[node.comfyClass] ?? 420);
}

// Nothing is queued any more: a prompt may end before these nodes have a text, cancelled or failed.
export function endWaiting(app, t) {
  for (const [, node] of nodesById(app.graph)) exchange(textOf(node), WAITING, IDLE, t);
}

function exchange(element, from, to, t) {
  if (element?.textContent === t(from)) show(element, t(to));
}

const textOf = (node) => node.widgets?.find((widget) => widget.name === NAME)?.element;

// ComfyUI widens a loaded node to its title, which is longer here than OneDiff's was.
function keepSavedWidth(node) {
  const compute = node.computeSize;
  node.computeSize = function (...given) {
    const size = compute.apply(this, given);
    size[0] = Math.min(size[0], NARROW);
    return size;
  };
}

export function showResult(node, output, t) {
  const element = textOf(node);
  const words = output?.resolute_words ?? [];
  if (element && output?.text?.length) show(element, output.text.map((text, index) => say(text, words[index], t)).join("\n"));
}

// What the nodes of a workflow show when it is opened, and when its switch is turned: their latest results, which the
// server has, or that Resolute is off. category: of a class of node.
export async function fillTexts(app, live, t, category) {
  const { graph } = app;
  const off = t("Resolute is off: this runs as without it");
  const all = await live.get("/resolute/texts").catch(() => ({}));
  const texts = all[graph.id] ?? {};
  for (const [id, node] of nodesById(graph)) {
    const element = textOf(node);
    if (!element) continue;
    const kept = texts[id] ? say(texts[id].text, texts[id].words, t) : "";
    if (isOff(app) && isSwitched(node.comfyClass, category(node.comfyClass))) {
      if (element.textContent !== off) element.dataset.before = element.textContent;
      show(element, off);
    } else if (kept && kept !== off) show(element, kept);
    else if (element.textContent === off) show(element, element.dataset.before ?? "");
  }
}

const KEPT = 100;
const heard = new Map(); // words of the latest progress texts: ComfyUI's message has room for English only

// A message of kind "text" comes just before ComfyUI's own with the same text.
export function hearWords({ kind, text, words }) {
  if (kind !== "text") return;
  heard.delete(text);
  heard.set(text, words);
  if (heard.size > KEPT) heard.delete(heard.keys().next().value);
}

function translated(text, t) {
  return say(text, heard.get(text), t);
}

export function showError(node, sentence) {
  const element = textOf(node);
  if (!element) return;
  show(element, sentence);
  element.classList.add("resolute-error");
}

function show(element, text) {
  element.classList.remove("resolute-error");
  element.textContent = String(text ?? "");
  element.title = element.textContent;
}

// The wheel scrolls a long text; over a short one it zooms the canvas as everywhere else.
function scroll(element, event) {
  if (element.scrollHeight > element.clientHeight + 1) event.stopPropagation();
}
