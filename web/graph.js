// Changes of a workflow's graph: nodes of all its subgraphs, a place for a new node, and steps for Ctrl+Z.

export const GAP = 40;
const CYAN = { color: "#233", bgcolor: "#355" }; // as in the bundled workflows
const TITLE = 30;
const BAR = 100; // ComfyUI's buttons over the canvas

export const nodesOf = (graph) => graph.nodes ?? graph._nodes;
export const linkOf = (graph, id) => graph.getLink?.(id) ?? graph.links.get?.(id) ?? graph.links[id];

// A graph and its subgraphs.
export function* graphsOf(graph) {
  yield graph;
  for (const node of [...nodesOf(graph)]) if (node.subgraph) yield* graphsOf(node.subgraph);
}

// [id, node] of each node, by the id that it has in a prompt: "7", or "12:7" in the subgraph of node 12.
export function* nodesById(graph, before = "") {
  for (const node of nodesOf(graph)) {
    yield [`${before}${node.id}`, node];
    if (node.subgraph) yield* nodesById(node.subgraph, `${before}${node.id}:`);
  }
}

const trackerOf = (app) => app.extensionManager?.workflow?.activeWorkflow?.changeTracker;

// The latest step that Ctrl+Z takes back, and whether it still would.
export const latestStep = (app) => trackerOf(app)?.undoQueue?.at(-1);
export const isUndone = (app, step) => !trackerOf(app)?.undoQueue?.includes(step);

function noteState(app) {
  const tracker = trackerOf(app);
  if (tracker?.captureCanvasState) tracker.captureCanvasState();
  else tracker?.checkState?.();
}

// Change the graph as one step for Ctrl+Z. change: returns what it changed; nothing or 0 is no step. Returns that.
export function oneStep(app, change) {
  noteState(app); // so that what was changed before is a step of its own
  app.graph.beforeChange?.();
  app.canvas?.emitBeforeChange?.();
  let changed;
  try {
    changed = change();
    // Now: a prompt would do it, and that would be a step of its own for Ctrl+Z.
    for (const graph of graphsOf(app.graph)) graph.updateExecutionOrder?.();
  } finally {
    app.canvas?.emitAfterChange?.();
    app.graph.afterChange?.();
    app.graph.setDirtyCanvas?.(true, true);
  }
  if (changed) noteState(app);
  return changed;
}

export function setWidget(node, name, value) {
  const widget = node.widgets?.find((each) => each.name === name);
  if (!widget || widget.value === value) return;
  widget.value = value;
  widget.callback?.(value);
}

// A new node at the nearest free place. place: its position, by its size. values: of its widgets. old: a node that it
// replaces.
export function newNode(graph, type, place, values = {}, old = undefined) {
  const node = window.LiteGraph.createNode(type);
  // The front end keeps values by the number of a node, also of one that is gone and had the same number.
  const defaults = Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value]));
  Object.assign(node, CYAN);
  graph.add(node);
  for (const [name, value] of Object.entries({ ...defaults, ...values })) setWidget(node, name, value);
  // Its final size at once: growing when it is drawn would be a step of its own for Ctrl+Z.
  const least = node.computeSize();
  node.setSize([0, 1].map((axis) => Math.max(node.size[axis], least[axis])));
  node.pos = freePlace(graph, node, place(node.size), old);
  if (old) node.mode = old.mode;
  return node;
}

function boxes(graph, without) {
  const others = nodesOf(graph).filter((node) => !without.includes(node));
  return others.map((node) => [node.pos[0], node.pos[1] - TITLE, node.size[0], node.size[1] + TITLE]);
}

// The nearest free place for a node at this x: at y, or further up or down. old: a node that it replaces.
function freePlace(graph, node, [x, y], old) {
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

// Move the view so that it shows these nodes beside the panel, no larger than now.
export function bringIntoView(app, nodes) {
  if (!nodes.length) return;
  const { ds, canvas } = app.canvas;
  const view = canvas.getBoundingClientRect();
  const panel = document.querySelector(".resolute-panel")?.getBoundingClientRect();
  const isLeft = panel && panel.left < view.left + view.width / 2;
  const from = isLeft ? Math.max(view.left, panel.right) : view.left;
  const to = panel && !isLeft ? Math.min(view.right, panel.left) : view.right;
  const [left, top] = [0, 1].map((axis) => Math.min(...nodes.map((node) => node.pos[axis])) - GAP);
  const [right, bottom] = [0, 1].map((axis) => Math.max(...nodes.map((node) => node.pos[axis] + node.size[axis])) + GAP);
  ds.scale = Math.min(ds.scale, (to - from) / (right - left), (view.height - 2 * BAR) / (bottom - top));
  ds.offset[0] = ((from + to) / 2 - view.left) / ds.scale - (left + right) / 2;
  ds.offset[1] = view.height / 2 / ds.scale - (top + bottom) / 2;
  app.canvas.setDirty(true, true);
}
