// Resolute in ComfyUI's settings dialog. ComfyUI keeps the values; the server reads them when ComfyUI starts.
//
// An environment variable wins over a setting: its entry shows the variable in place of a control.

import { element } from "./dom.js";

const CATEGORY = "Resolute";
export const BACKEND = "Resolute.Backend";

const COMPILE = "Resolute.Compile";
const WHEN = "behind"; // the default, as in compile_cache/config.py

const PRESET = "Resolute.Preset";
const USUAL = { [BACKEND]: "auto", [COMPILE]: WHEN };
// What a preset sets; the settings that it changes can be seen below it, and changed again.
const PRESETS = {
  fast: { ...USUAL, "Resolute.Captures": true, "Resolute.BudgetMiB": 0, "Resolute.Workers": -1, "Resolute.Remember": true },
  "small card": { ...USUAL, "Resolute.Captures": true, "Resolute.BudgetMiB": 1024, "Resolute.Workers": 2, "Resolute.Remember": true },
  safe: { ...USUAL, [COMPILE]: "before", "Resolute.Captures": false, "Resolute.BudgetMiB": 0, "Resolute.Workers": 0, "Resolute.Remember": false },
};

const CHANGED = ", changed"; // after the name of a preset of which a setting was changed

const AFTER_A_RESTART = "Used after a restart of ComfyUI"; // the heading of all others
const AT_ONCE = [PRESET, BACKEND];
const DEFINITIONS = [
  {
    id: PRESET,
    name: "Preset",
    type: "combo",
    defaultValue: "fast",
    tooltip:
      "Sets those below: fast as it comes; small card with little memory for captures and two processes; safe without captures, one compile after the other.",
  },
  {
    id: BACKEND,
    name: "Backend of new nodes (after a reload of the page)",
    type: "combo",
    options: ["auto", "inductor", "cudagraph", "oneflow", "eager"],
    defaultValue: "auto",
    tooltip: "What the compile nodes that you add are set to. Nodes that exist stay as they are.",
  },
  {
    id: COMPILE,
    name: "Compile behind or before the picture",
    type: "combo",
    options: ["behind", "before"],
    defaultValue: WHEN,
    tooltip: "Behind: a first prompt samples at once as ComfyUI does, and compiled blocks come in when they are ready. Before: it waits for them.",
  },
  {
    id: "Resolute.Captures",
    name: "Capture each size as a CUDA graph",
    type: "boolean",
    defaultValue: true,
    tooltip: "Off keeps the compiled blocks and makes no captures: slower, with less memory.",
  },
  {
    id: "Resolute.BudgetMiB",
    name: "Memory for captures in MiB (0: automatic)",
    type: "number",
    defaultValue: 0,
    attrs: { min: 0, max: 1048576, step: 256 },
    tooltip: "GPU memory that captures may hold. Automatic takes a quarter of the GPU, at most 4096 MiB.",
  },
  {
    id: "Resolute.Workers",
    name: "Processes that compile (-1: automatic)",
    type: "number",
    defaultValue: -1,
    attrs: { min: -1, max: 61, step: 1 },
    tooltip: "Automatic takes all processors but two. 0: ComfyUI's own process compiles, while no prompt runs.",
  },
  {
    id: "Resolute.Remember",
    name: "Remember sizes over restarts",
    type: "boolean",
    defaultValue: true,
    tooltip: "Loads what you used last when ComfyUI starts.",
  },
];

// fixed: setting -> "VARIABLE=value", from GET /resolute/settings. get and set: read and change a setting of ComfyUI's dialog.
export function settings(fixed, get, set) {
  return DEFINITIONS.map((definition, index) => {
    const category = [CATEGORY, AT_ONCE.includes(definition.id) ? CATEGORY : AFTER_A_RESTART, definition.id.split(".")[1]];
    const made = { ...definition, category, sortOrder: DEFINITIONS.length - index };
    if (definition.id === PRESET) {
      made.options = () => [...new Set([...Object.keys(PRESETS), get(PRESET)])].map((name) => ({ text: name, value: name }));
      made.onChange = (value, before) => applyPreset(value, before, fixed, set);
    } else if (definition.id in PRESETS.fast) {
      made.onChange = (value, before) => notePreset(definition.id, value, before, get, set);
    }
    const variable = fixed[definition.id];
    if (!variable) return made;
    const tooltip = `The environment variable ${variable} decides. Remove it to set this here.`;
    return { ...made, tooltip, type: () => element("code", {}, variable) };
  });
}

// New nodes get the backend of the settings; the value in a saved workflow stays.
export function applyDefaultBackend(nodeData, backend) {
  const input = nodeData.input?.required?.backend ?? nodeData.input?.optional?.backend;
  const choices = input?.[1]?.options ?? input?.[0];
  if (backend && Array.isArray(choices) && choices.includes(backend)) input[1] = { ...input[1], default: backend };
}

// ComfyUI calls this when the page loads, too, without a value before.
async function applyPreset(value, before, fixed, set) {
  if (before === undefined || value === before) return;
  await null; // ComfyUI calls this before it keeps the value
  for (const [name, each] of Object.entries(PRESETS[value] ?? {})) if (!fixed[name]) await set(name, each);
}

// The preset whose values all settings have now, or the last one, changed.
function notePreset(id, value, before, get, set) {
  if (before === undefined || PRESETS[get(PRESET)]?.[id] === value) return;
  const has = ([name, each]) => (name === id ? value : get(name)) === each;
  const name = Object.keys(PRESETS).find((each) => Object.entries(PRESETS[each]).every(has));
  set(PRESET, name ?? `${get(PRESET).replace(CHANGED, "")}${CHANGED}`);
}
