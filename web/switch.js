// The switch "Resolute on/off" of a whole workflow. It is kept in the workflow, and goes into the prompt as one more
// input of our nodes: no node is edited or bypassed, and what is behind them runs again when the switch changes.

import { nodesById, oneStep } from "./graph.js";

const INPUT = "resolute"; // as in nodes/adapters/comfyui/switch.py
const KEY = "resolute"; // in the extra data of a workflow
const CLASSES = new Set([
  "ResoluteCompileModel",
  "ResoluteCompileVAE",
  "ResoluteCompileVAEDecode",
  "ResoluteCompileControlNet",
  "ResoluteLoadCheckpoint",
  "ResoluteDeepCache",
  "ResoluteWarmUp",
]);

export function isOff(app) {
  return Boolean(app.graph?.extra?.[KEY]?.off);
}

// A node that the switch turns off. category: of its class.
export const isSwitched = (type, category) => CLASSES.has(type) || category === "Resolute/OneDiff";

// The open workflow has a node of ours that compiles.
export const isIn = (app, category) =>
  Boolean(app.graph) && [...nodesById(app.graph)].some(([, { comfyClass: type }]) => isSwitched(type, category(type)));

export function turn(app, off) {
  const { graph } = app;
  oneStep(app, () => {
    graph.extra ??= {};
    return (graph.extra[KEY] = { ...graph.extra[KEY], off });
  });
}

// Ids of the nodes of a prompt that the switch turns off. category: of a class of node.
export function switchedNodes(prompt, category) {
  return Object.keys(prompt).filter((id) => isSwitched(prompt[id].class_type, category(prompt[id].class_type)));
}

// value: "off", or "on 3.1" and "off 3.2" of a measure, whose number makes each run new to ComfyUI's cache.
export function setSwitch(prompt, ids, value) {
  for (const id of ids) prompt[id].inputs = { ...prompt[id].inputs, [INPUT]: value };
}

// Every prompt that the front end makes carries the switch.
export function addSwitch(app, category) {
  const original = app.graphToPrompt;
  app.graphToPrompt = async function (...given) {
    const made = await original.apply(this, given);
    const graph = given[0] ?? app.graph;
    if ((graph.rootGraph ?? graph).extra?.[KEY]?.off) setSwitch(made.output, switchedNodes(made.output, category), "off");
    return made;
  };
}
