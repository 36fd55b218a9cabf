// The table of a model's sizes in the panel: one row for each size, however many shapes (lengths of prompts) it has.
import { element, mebibytes } from "./dom.js";
import { ROLES, say } from "./words.js";

const STATES = { memory: "ready", disk: "on disk", unknown: "to compile" };
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

// hasCaptures: false on a device that makes none, where nothing about them is shown.
export function modelTable(model, measurements, hasCaptures, t) {
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
  const more = rows.length > SIZES ? t("and {count} more", { count: rows.length - SIZES }) : "";
  const { role } = model.shapes[0];
  const kind = role.startsWith("vae_") ? ` (${t(ROLES[role])})` : "";
  const measured = measurements.filter((each) => each.structure === model.model);
  return element(
    "div",
    { class: "resolute-model" },
    element("h4", {}, `${model.name}${kind}`),
    element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)),
    measured.map((each) => element("p", { class: "resolute-measured" }, `${say(each.text, each.words, t)} (${each.date})`)),
    more ? element("p", { class: "resolute-faint" }, more) : null,
  );
}
