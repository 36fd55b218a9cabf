// A menu entry on nodes that one of Resolute's nodes can replace: OneDiff's, and suggestions for torch.compile's.
//
// ComfyUI's front end offers the replacements that a pack registers only for nodes whose type is missing. OneDiff's types
// are not missing, because Resolute registers them, so this offers them on the node. Nothing is replaced without a click.
// The panel's *Convert all OneDiff nodes* replaces all of OneDiff's at once.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { noteState } from "./undo.js";

const ONEDIFF = "Resolute/OneDiff"; // the category of OneDiff's types

const offers = new Map(); // old type -> the pair that the server offers

async function loadOffers() {
  const response = await api.fetchApi("/node_replacements");
  if (!response.ok) return; // ComfyUI 0.8 has no migration of nodes
  for (const [type, pairs] of Object.entries(await response.json())) {
    const ours = pairs.find((pair) => pair.new_node_id.startsWith("Resolute"));
    if (ours) offers.set(type, ours);
  }
}

const linkOf = (graph, id) => graph.getLink?.(id) ?? graph.links.get?.(id) ?? graph.links[id];

// [node, slot] at the other end of each link; undefined if one ends at the border of a subgraph.
function ends(graph, ids, side) {
  const found = ids.map((id) => {
    const link = linkOf(graph, id);
    return [graph.getNodeById(link?.[`${side}_id`]), link?.[`${side}_slot`]];
  });
  return found.every(([node]) => node) ? found : undefined;
}

function connections(node) {
  const graph = node.graph;
  const into = new Map();
  for (const input of node.inputs ?? []) {
    if (input.link == null) continue;
    const [from] = ends(graph, [input.link], "origin") ?? [];
    if (!from) return undefined;
    into.set(input.name, from);
  }
  const outOf = (node.outputs ?? []).map((output) => ends(graph, output.links ?? [], "target"));
  return outOf.every(Boolean) ? { into, outOf } : undefined;
}

function setWidget(node, name, value) {
  const widget = node.widgets?.find((each) => each.name === name);
  if (!widget) return;
  widget.value = value;
  widget.callback?.(value);
}

function replace(node, offer) {
  const graph = node.graph;
  const linked = connections(node);
  if (!linked) return false;
  graph.beforeChange();
  try {
    const fresh = window.LiteGraph.createNode(offer.new_node_id);
    fresh.pos = [...node.pos];
    fresh.mode = node.mode;
    graph.add(fresh);
    for (const step of offer.input_mapping ?? []) {
      const from = linked.into.get(step.old_id);
      if ("set_value" in step) setWidget(fresh, step.new_id, step.set_value);
      else if (from) from[0].connect(from[1], fresh, fresh.findInputSlot(step.new_id));
      else setWidget(fresh, step.new_id, node.widgets?.find((each) => each.name === step.old_id)?.value);
    }
    // ComfyUI's migration copies values and cannot compute this one.
    const vae = node.widgets?.find((each) => each.name === "vae_speedup");
    if (vae) setWidget(fresh, "compile_vae", vae.value === "enable");
    for (const { old_idx, new_idx } of offer.output_mapping ?? []) {
      for (const [target, slot] of linked.outOf[old_idx] ?? []) fresh.connect(new_idx, target, slot);
    }
    graph.remove(node);
  } finally {
    graph.afterChange();
  }
  return true;
}

function* nodesOf(graph) {
  for (const node of [...(graph.nodes ?? graph._nodes)]) {
    yield node;
    if (node.subgraph) yield* nodesOf(node.subgraph);
  }
}

const isOneDiff = (node) => node.constructor?.nodeData?.category === ONEDIFF;

export function hasOneDiff() {
  for (const node of nodesOf(app.graph)) if (isOneDiff(node)) return true;
  return false;
}

// Replaces each of OneDiff's nodes that one of ours can replace. Returns a sentence; throws one if there is no such node.
export function convertOneDiff(t) {
  const old = [...nodesOf(app.graph)].filter(isOneDiff);
  if (!old.length) throw new Error(t("This workflow has no OneDiff node."));
  noteState(app); // so that what was changed before is a step of its own
  app.canvas?.emitBeforeChange?.();
  let count = 0;
  try {
    for (const node of old) {
      const offer = offers.get(node.comfyClass);
      if (offer && replace(node, offer)) count += 1;
    }
    app.graph.updateExecutionOrder?.(); // now: a prompt would do it, and that would be a step of its own for Ctrl+Z
  } finally {
    app.canvas?.emitAfterChange?.();
    app.graph.setDirtyCanvas?.(true, true);
  }
  if (count) noteState(app);
  const left = old.length - count;
  const done = t("Converted {count} OneDiff nodes. Ctrl+Z takes all back.", { count });
  const rest = t("{count} OneDiff nodes have no single node in their place and run as they are.", { count: left });
  if (!count) return rest;
  return left ? `${done} ${rest}` : done;
}

function menu(node) {
  const offer = offers.get(node.comfyClass);
  if (!offer || !connections(node)) return [];
  const title = window.LiteGraph.registered_node_types[offer.new_node_id]?.title ?? offer.new_node_id;
  return [null, { content: `Replace with ${title}`, callback: () => replace(node, offer) }];
}

app.registerExtension({
  name: "resolute.replaceNodes",
  setup: loadOffers,
  getNodeMenuItems: menu,
});
