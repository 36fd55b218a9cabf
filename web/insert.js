// "Add Resolute to this workflow": Compile Model before each sampler, Compile VAE Decode before each decode. One Ctrl+Z
// takes all of it back.

import { bringIntoView, GAP, graphsOf, linkOf, newNode, nodesOf, oneStep } from "./graph.js";

const KINDS = {
  MODEL: { type: "ResoluteCompileModel", gives: ["LATENT", "GUIDER"] },
  VAE: { type: "ResoluteCompileVAEDecode", gives: ["IMAGE"] },
};

// Links of this kind into nodes that sample or decode: [{origin, slot, target, input}].
function places(graph, kind) {
  const { gives } = KINDS[kind];
  const found = [];
  for (const target of nodesOf(graph)) {
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

// Links into samplers and decodes: how many there are, and how many of them come from no compile node.
export function placesIn(app) {
  const kinds = (app.graph ? [...graphsOf(app.graph)] : []).flatMap((graph) => Object.keys(KINDS).map((kind) => [graph, kind]));
  const found = kinds.flatMap(([graph, kind]) => places(graph, kind).map((place) => isCompiled(graph, place, kind)));
  return { all: found.length, bare: found.filter((compiled) => !compiled).length };
}

function insert(graph, kind, group) {
  const { origin, slot, target } = group[0];
  const node = newNode(graph, KINDS[kind].type, ([width]) => [target.pos[0] - width - GAP, target.pos[1]]);
  origin.connect(slot, node, node.findInputSlot(kind === "MODEL" ? "model" : "vae"));
  for (const place of group) node.connect(0, place.target, place.input);
  return node;
}

export function addToWorkflow(app, t) {
  const made = { MODEL: [], VAE: [] };
  oneStep(app, () => {
    for (const graph of graphsOf(app.graph)) {
      for (const kind of Object.keys(KINDS)) {
        const groups = new Map(); // one node for all samplers that share a model
        for (const place of places(graph, kind).filter((each) => !isCompiled(graph, each, kind))) {
          const key = `${place.origin.id}:${place.slot}`;
          groups.set(key, [...(groups.get(key) ?? []), place]);
        }
        for (const group of groups.values()) {
          made[kind].push(insert(graph, kind, group));
        }
      }
    }
    return made.MODEL.length + made.VAE.length;
  });
  if (!placesIn(app).all) throw new Error(t("This workflow has no sampler and no decode to compile."));
  const all = [...made.MODEL, ...made.VAE];
  if (!all.length) return t("Resolute is already in this workflow.");
  const shown = all.filter((node) => node.graph === app.canvas.graph);
  bringIntoView(app, shown);
  const elsewhere = all.filter((node) => !shown.includes(node));
  const names = [...new Set(elsewhere.map((node) => node.graph.name))].join(", ");
  return [
    t("Added {models} × Compile Model, {vaes} × Compile VAE Decode. Ctrl+Z takes all back.", {
      models: made.MODEL.length,
      vaes: made.VAE.length,
    }),
    ...(elsewhere.length ? [t("In subgraphs: {count} of them ({names}).", { count: elsewhere.length, names })] : []),
  ].join(" ");
}
