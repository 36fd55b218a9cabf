// A menu entry on nodes that Resolute's nodes can replace: OneDiff's, and suggestions for torch.compile's.
//
// ComfyUI's front end offers replacements only for nodes whose type is missing. OneDiff's types are not missing, because
// Resolute registers them, so this offers them on the node. Nothing is replaced without a click.
// The panel's *Convert all OneDiff nodes* replaces all of OneDiff's at once.
import { app } from "../../scripts/app.js";
import { GAP, graphsOf, linkOf, newNode, nodesOf, oneStep, setWidget } from "./graph.js";
import { BOOSTERS, isOneDiff, recipeOf } from "./onediff.js";
import { translator } from "./strings.js";

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

// The node at the other end of an input's link.
function source(node, name) {
  const link = node.inputs?.find((input) => input.name === name)?.link;
  return link == null ? undefined : node.graph.getNodeById(linkOf(node.graph, link)?.origin_id);
}

function replace(node) {
  const graph = node.graph;
  const linked = connections(node);
  const recipe = recipeOf(node, source);
  if (!linked || !recipe) return false;
  graph.beforeChange();
  try {
    if (recipe.type) putInPlace(graph, node, recipe, linked);
    else passOn(recipe, linked);
    graph.remove(node);
  } finally {
    graph.afterChange();
  }
  return true;
}

function putInPlace(graph, node, recipe, linked) {
  const fresh = newNode(graph, recipe.type, () => node.pos, recipe.values, node);
  for (const [name, old] of Object.entries(recipe.inputs)) {
    const from = linked.into.get(old);
    if (from) from[0].connect(from[1], fresh, fresh.findInputSlot(name));
    else setWidget(fresh, name, node.widgets?.find((each) => each.name === old)?.value);
  }
  const gives = fresh.outputs.map((_, slot) => [fresh, slot]); // where each output comes from now
  let right = fresh;
  for (const { slot, type, input, values } of recipe.after) {
    const place = [right.pos[0] + right.size[0] + GAP, right.pos[1]];
    const next = newNode(graph, type, () => place, values, node);
    gives[slot][0].connect(gives[slot][1], next, next.findInputSlot(input));
    gives[slot] = [next, 0];
    right = next;
  }
  linked.outOf.forEach((targets, slot) => {
    const [from, output] = gives[slot] ?? [];
    for (const [target, into] of targets) from?.connect(output, target, into);
  });
}

function passOn(recipe, linked) {
  const from = recipe.passes && linked.into.get(recipe.passes);
  if (from) for (const [target, into] of linked.outOf[0] ?? []) from[0].connect(from[1], target, into);
}

const oneDiffNodes = () => [...graphsOf(app.graph)].flatMap((graph) => nodesOf(graph).filter(isOneDiff));

// Boosters that nothing takes any more.
function removeBoosters() {
  const isFree = (node) => BOOSTERS.has(node.comfyClass) && !node.outputs?.some((output) => output.links?.length);
  const free = oneDiffNodes().filter(isFree);
  for (const node of free) node.graph.remove(node);
  return free.length && free.length + removeBoosters();
}

export const hasOneDiff = () => oneDiffNodes().length > 0;

// Replaces each of OneDiff's nodes that ours can replace. Returns a sentence; throws one if there is no such node.
export function convertOneDiff(t) {
  const old = oneDiffNodes();
  if (!old.length) throw new Error(t("This workflow has no OneDiff node."));
  const count = oneStep(app, () => {
    const replaced = old.filter((node) => !BOOSTERS.has(node.comfyClass) && replace(node));
    return replaced.length + removeBoosters();
  });
  const left = old.length - count;
  const done = t("Converted {count} OneDiff nodes. Ctrl+Z takes all back.", { count });
  const rest = t("Not converted: {count} OneDiff nodes without a counterpart.", { count: left });
  if (!count) return rest;
  return left ? `${done} ${rest}` : done;
}

const t = translator(() => app.extensionManager?.setting?.get("Comfy.Locale"));

function menu(node) {
  const recipe = recipeOf(node, source);
  if (!recipe?.type || !connections(node)) return [];
  const title = (type) => window.LiteGraph.registered_node_types[type]?.title ?? type;
  const titles = [recipe, ...recipe.after].map(({ type }) => title(type)).join(t(" and "));
  return [null, { content: t("Replace with {title}", { title: titles }), callback: () => replace(node) }];
}

app.registerExtension({
  name: "resolute.replaceNodes",
  getNodeMenuItems: menu,
});
