// "Add Resolute to this workflow": Compile Model before each sampler, Compile VAE Decode before each decode. One Ctrl+Z
// takes all of it back.

import { noteState } from "./undo.js";

const KINDS = {
  MODEL: { type: "ResoluteCompileModel", gives: ["LATENT", "GUIDER"] },
  VAE: { type: "ResoluteCompileVAEDecode", gives: ["IMAGE"] },
};
const GAP = 40;
const TITLE = 30;

const linkOf = (graph, id) => graph.getLink?.(id) ?? graph.links.get?.(id) ?? graph.links[id];

function* graphs(graph) {
  yield graph;
  for (const node of graph.nodes ?? graph._nodes) if (node.subgraph) yield* graphs(node.subgraph);
}

// Links of this kind into nodes that sample or decode: [{origin, slot, target, input}].
function places(graph, kind) {
  const { gives } = KINDS[kind];
  const found = [];
  for (const target of graph.nodes ?? graph._nodes) {
    if (!target.outputs?.some((output) => gives.includes(output.type))) continue;
    target.inputs?.forEach((input, index) => {
      if (input.type !== kind || input.link == null) return;
      const link = linkOf(graph, input.link);
      const origin = link && graph.getNodeById(link.origin_id);
      if (origin) found.push({ origin, slot: link.origin_slot, target, input: index });
    });
  }
  return found;
}

// What comes from one of Resolute's compile nodes, here or before, is compiled already.
function isCompiled(graph, { origin, slot }, kind) {
  for (let node = origin, index = slot; node; ) {
    const type = node.comfyClass ?? node.type;
    if (type === KINDS[kind].type || (node.constructor?.nodeData?.category ?? "") === "Resolute/OneDiff") return true;
    if (type === "ResoluteLoadCheckpoint" || (kind === "VAE" && type === "ResoluteCompileVAE")) return true;
    const input = node.inputs?.find((each) => each.type === node.outputs?.[index]?.type && each.link != null);
    const link = input && linkOf(graph, input.link);
    node = link && graph.getNodeById(link.origin_id);
    index = link?.origin_slot;
  }
  return false;
}

function boxes(graph, without) {
  const others = (graph.nodes ?? graph._nodes).filter((node) => !without.includes(node));
  return others.map((node) => [node.pos[0], node.pos[1] - TITLE, node.size[0], node.size[1] + TITLE]);
}

// The nearest free place for a node at this x: at y, or further up or down. old: a node that it replaces.
export function freePlace(graph, node, [x, y], old) {
  const [width, height] = node.size;
  const taken = boxes(graph, [node, old]);
  const covered = (top) =>
    taken.find(
      ([left, above, wide, tall]) =>
        x < left + wide + GAP / 2 && x + width + GAP / 2 > left && top - TITLE < above + tall && top + height + GAP / 2 > above,
    );
  let down = y;
  for (let hit = covered(down); hit; hit = covered(down)) down = hit[1] + hit[3] + TITLE + GAP / 2;
  let up = y;
  for (let hit = covered(up); hit; hit = covered(up)) up = hit[1] - height - GAP / 2;
  return [x, y - up < down - y ? up : down];
}

function insert(graph, kind, group) {
  const { origin, slot } = group[0];
  const node = window.LiteGraph.createNode(KINDS[kind].type);
  const defaults = (node.widgets ?? []).map((widget) => [widget, widget.value]);
  graph.add(node);
  // The front end keeps values by the number of a node, also of one that is gone and had the same number.
  for (const [widget, value] of defaults) if (widget.value !== value) widget.value = value;
  // Its final size at once: growing when it is drawn would be a step of its own for Ctrl+Z.
  const [width, height] = [0, 1].map((axis) => Math.max(node.size[axis], node.computeSize()[axis]));
  node.setSize([width, height]);
  const { target } = group[0];
  node.pos = freePlace(graph, node, [target.pos[0] - width - GAP, target.pos[1]]);
  origin.connect(slot, node, node.findInputSlot(kind === "MODEL" ? "model" : "vae"));
  for (const place of group) node.connect(0, place.target, place.input);
}

export function addToWorkflow(app, t) {
  const counts = { MODEL: 0, VAE: 0 };
  let found = 0;
  noteState(app); // so that what was changed before is a step of its own
  app.graph.beforeChange?.();
  app.canvas?.emitBeforeChange?.();
  try {
    for (const graph of graphs(app.graph)) {
      for (const kind of Object.keys(KINDS)) {
        const all = places(graph, kind);
        found += all.length;
        const groups = new Map(); // one node for all samplers that share a model
        for (const place of all.filter((each) => !isCompiled(graph, each, kind))) {
          const key = `${place.origin.id}:${place.slot}`;
          groups.set(key, [...(groups.get(key) ?? []), place]);
        }
        for (const group of groups.values()) {
          insert(graph, kind, group);
          counts[kind] += 1;
        }
      }
      graph.updateExecutionOrder?.(); // now: a prompt would do it, and that would be a step of its own for Ctrl+Z
    }
  } finally {
    app.canvas?.emitAfterChange?.();
    app.graph.afterChange?.();
    app.graph.setDirtyCanvas?.(true, true);
  }
  if (counts.MODEL || counts.VAE) noteState(app);
  if (!found) throw new Error(t("This workflow has no sampler and no decode to compile."));
  if (!counts.MODEL && !counts.VAE) return t("Every sampler and decode of this workflow is compiled already.");
  return t("Added {models} × Compile Model, {vaes} × Compile VAE Decode. Ctrl+Z takes all back.", {
    models: counts.MODEL,
    vaes: counts.VAE,
  });
}
