// The timeline of the latest prompts: a bar for each run, in pieces, and a sentence for each wait.
import { element, seconds } from "./dom.js";
import { sizeText } from "./sizes.js";
import { ROLES, say } from "./words.js";

export const KINDS = {
  replay: "replay",
  regions: "compiled regions",
  originals: "ComfyUI's own blocks, compiling",
  capture: "capture",
  compile: "compile",
  check: "checking",
  load: "load from disk",
  bypass: "bypass",
  stopped: "stopped",
};
const PROMPTS = 8;

// Of the kinds that these runs have.
export function legend(t, runs) {
  const shown = new Set(runs.flatMap((run) => run.segments ?? []).map((piece) => piece.kind));
  const kinds = Object.entries(KINDS).filter(([kind]) => shown.has(kind));
  const items = kinds.map(([kind, name]) =>
    element("li", {}, element("span", { class: `resolute-swatch resolute-${kind}`, "aria-hidden": "true" }), t(name)),
  );
  return element("ul", { class: "resolute-legend" }, items);
}

// Runs grouped by prompt, the latest prompt first. plain: prompts without a run, each a group of itself.
export function prompts(runs, plain) {
  const groups = new Map(plain.map((prompt) => [prompt.prompt_id, [prompt]]));
  for (const run of runs) {
    if (!groups.has(run.prompt_id)) groups.set(run.prompt_id, []);
    groups.get(run.prompt_id).push(run);
  }
  return [...groups.values()].sort(([one], [other]) => other.started - one.started).slice(0, PROMPTS);
}

export function promptRow(runs, t) {
  const longest = Math.max(...runs.map((run) => run.seconds), 0.001);
  const at = new Date(runs[0].started * 1000).toLocaleTimeString();
  if (!runs[0].role) {
    const why = runs[0].measured ? t("measured without Resolute") : t("nothing ran through Resolute");
    const said = `${why}, ${seconds(runs[0].seconds)}`;
    return element("li", { class: "resolute-prompt resolute-faint" }, element("time", {}, at), ` ${said}`);
  }
  return element(
    "li",
    { class: "resolute-prompt" },
    element("div", { class: "resolute-prompt-head" }, element("time", {}, at), ` ${sizeText(runs[0].size, t)}`, marks(runs, t)),
    runs.map((run) => runRow(run, longest, t)),
  );
}

// Labels of a prompt: a warm-up, a cancel, a wait for the backend. Each once.
function marks(runs, t) {
  const texts = new Set(runs.flatMap((run) => run.marks.map((mark, index) => say(mark, run.words.marks[index], t))));
  return [...texts].map((text) => element("span", { class: "resolute-mark" }, text));
}

function runRow(run, longest, t) {
  const parts = run.segments.map((piece) => `${t(KINDS[piece.kind])} ${seconds(piece.seconds)}`);
  const bar = element(
    "div",
    { class: "resolute-bar", role: "img", "aria-label": parts.join(", "), title: parts.join(", ") },
    run.segments.map((piece) =>
      element("span", {
        class: `resolute-piece resolute-${piece.kind}`,
        style: { width: `${(100 * piece.seconds) / longest}%` },
      }),
    ),
  );
  const all = (name) => run[name].map((text, index) => say(text, run.words[name][index], t));
  return element(
    "div",
    { class: run.stopped ? "resolute-run resolute-stopped" : "resolute-run" },
    element("div", { class: "resolute-run-head" }, `${[t(ROLES[run.role] ?? run.role), run.model, run.file].filter(Boolean).join(" · ")}`),
    bar,
    element("div", { class: "resolute-status" }, all("lines").join(t("; "))),
    run.reasons.length ? element("ul", { class: "resolute-reasons" }, all("reasons").map((why) => element("li", {}, why))) : null,
  );
}
