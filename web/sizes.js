// The table of a model's sizes in the panel: one row for each size, however many shapes (lengths of prompts) it has.
import { element, mebibytes } from "./dom.js";
import { ROLES, say } from "./words.js";

const STATES = { memory: "ready", disk: "on disk", unknown: "not compiled" };
const ORDER = ["memory", "disk", "unknown"]; // of two shapes of a size, the better one is shown
const SIZES = 12; // of one model
const BATCH = ", batch "; // between the sides and the batch of a size

// As the node shows it: pixels and the user's batch. What an earlier version remembered has only the latent's shape.
const sizeOf = (shape) => shape.size || shape.latent_shape.join("x");

// A size with its batch in the language of the settings.
export function sizeText(size, t) {
  const [sides, batch] = size.split(BATCH);
  return batch ? t("{size}, batch {batch}", { size: sides, batch }) : size;
}

function area(size) {
  const [sides, batch] = size.split(BATCH);
  return sides.split("x").reduce((product, side) => product * Number(side), Number(batch ?? 1)) || 0;
}

// Rows of a model: {size, state, bytes, hits, shapes}, the smallest first, always in the same order.
export function rowsOf(shapes) {
  const rows = new Map();
  for (const shape of shapes) {
    const size = sizeOf(shape);
    const row = rows.get(size) ?? { size, state: "unknown", bytes: 0, hits: 0, shapes: [] };
    if (ORDER.indexOf(shape.state) < ORDER.indexOf(row.state)) row.state = shape.state;
    row.bytes += shape.bytes ?? 0;
    row.hits += shape.hits ?? 0;
    row.shapes.push(shape);
    rows.set(size, row);
  }
  return [...rows.values()].sort((one, other) => area(one.size) - area(other.size) || one.size.localeCompare(other.size));
}

function tip(row, t) {
  return row.shapes
    .map((shape) => `${t("{count} in one call", { count: shape.latent_shape[0] })}: ${t(STATES[shape.state] ?? shape.state)}`)
    .join("\n");
}

const opened = new Set(); // models whose table is unfolded

const isDecoder = (model) => model.shapes[0].role.startsWith("vae_");

// The files that a model was seen to come from since ComfyUI started; its name where none is known.
function titleOf(model, runs) {
  const files = new Set(runs.filter((run) => run.structure === model.model && run.file).map((run) => run.file));
  return [...files].join(", ") || model.name;
}

// The models that have sizes, with a title: those of one file together, a model before its decoder.
export function titled(models, runs) {
  const key = ({ title, name, model, shapes }) => `${title === name ? "" : title} ${isDecoder({ shapes })} ${name} ${model}`;
  return models
    .filter((model) => model.shapes.length)
    .map((model) => ({ ...model, title: titleOf(model, runs) }))
    .sort((one, other) => key(one).localeCompare(key(other)));
}

// said: what the panel says already. hasCaptures: false on a device that makes none, where nothing about them is shown.
export function modelTable(model, measurements, said, hasCaptures, t) {
  const rows = rowsOf(model.shapes);
  const names = ["Size", "State", ...(hasCaptures ? ["Memory", "Used"] : [])];
  const head = names.map((name) => element("th", { scope: "col" }, t(name)));
  const body = rows.slice(0, SIZES).map((row) =>
    element(
      "tr",
      { class: `resolute-state-${row.state}`, title: tip(row, t) },
      element("td", {}, sizeText(row.size, t)),
      element("td", {}, t(STATES[row.state] ?? row.state)),
      hasCaptures ? element("td", {}, row.bytes ? mebibytes(row.bytes) : "–") : null,
      hasCaptures ? element("td", {}, t("{count} times", { count: row.hits })) : null,
    ),
  );
  const counts = ORDER.map((state) => [rows.filter((row) => row.state === state).length, t(STATES[state])]);
  const count = counts.filter(([number]) => number).map((pair) => pair.join(" ")).join(t("; "));
  const table = element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
  const folded = element("details", { open: opened.has(model.model) }, element("summary", {}, count), table);
  folded.addEventListener("toggle", () => opened[folded.open ? "add" : "delete"](model.model));
  const more = rows.length > SIZES ? t("and {count} more", { count: rows.length - SIZES }) : "";
  const kind = isDecoder(model) ? ` (${t(ROLES[model.shapes[0].role])})` : "";
  const results = measurements
    .filter((each) => each.structure === model.model)
    .map((each) => [say(each.text, each.words, t), each.date])
    .filter(([text]) => text !== said)
    .map(([figure, date]) => t("{figure}, measured on {date}", { figure, date }));
  return element(
    "div",
    { class: "resolute-model" },
    element("h4", { title: model.name }, `${model.title}${kind}`),
    folded,
    results.map((each) => element("p", { class: "resolute-measured" }, each)),
    more ? element("p", { class: "resolute-faint" }, more) : null,
  );
}
