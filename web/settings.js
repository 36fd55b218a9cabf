// Resolute in ComfyUI's settings dialog. ComfyUI keeps the values; the server reads them when ComfyUI starts.
//
// An environment variable wins over a setting. Its entry says so, and cannot be changed here.

const CATEGORY = "Resolute";
export const BACKEND = "Resolute.Backend";

const AFTER_A_RESTART = "Used when ComfyUI starts the next time.";
const DEFINITIONS = [
  {
    id: BACKEND,
    name: "Backend of new nodes",
    type: "combo",
    options: ["auto", "inductor", "cudagraph", "oneflow", "eager"],
    defaultValue: "auto",
    tooltip: "What the compile nodes that you add are set to. Nodes that exist stay as they are.",
  },
  {
    id: "Resolute.BudgetMiB",
    name: "Memory for captures in MiB (0: automatic)",
    type: "number",
    defaultValue: 0,
    attrs: { min: 0, max: 1048576, step: 256 },
    tooltip: `GPU memory that captures may hold. Automatic takes a quarter of the GPU, at most 4096 MiB. ${AFTER_A_RESTART}`,
  },
  {
    id: "Resolute.Captures",
    name: "Capture each size as a CUDA graph",
    type: "boolean",
    defaultValue: true,
    tooltip: `Off keeps the compiled blocks and makes no captures: slower, with less memory. ${AFTER_A_RESTART}`,
  },
  {
    id: "Resolute.Remember",
    name: "Remember sizes over restarts",
    type: "boolean",
    defaultValue: true,
    tooltip: `Loads what you used last when ComfyUI starts. ${AFTER_A_RESTART}`,
  },
  {
    id: "Resolute.Workers",
    name: "Processes that compile (-1: automatic)",
    type: "number",
    defaultValue: -1,
    attrs: { min: -1, max: 61, step: 1 },
    tooltip: `Automatic takes all processors but two. 0 compiles one block after the other. ${AFTER_A_RESTART}`,
  },
];

// fixed: setting -> "VARIABLE=value", from GET /resolute/settings.
export function settings(fixed) {
  return DEFINITIONS.map((definition) => {
    const made = { ...definition, category: [CATEGORY, CATEGORY, definition.id.split(".")[1]] };
    const variable = fixed[definition.id];
    if (!variable) return made;
    return {
      ...made,
      name: `${definition.name} · ${variable}`,
      tooltip: `The environment variable ${variable} decides. Remove it to set this here.`,
      attrs: { ...definition.attrs, disabled: true },
    };
  });
}

// New nodes get the backend of the settings; the value in a saved workflow stays.
export function applyDefaultBackend(nodeData, backend) {
  const input = nodeData.input?.required?.backend ?? nodeData.input?.optional?.backend;
  const choices = input?.[1]?.options ?? input?.[0];
  if (backend && Array.isArray(choices) && choices.includes(backend)) input[1] = { ...input[1], default: backend };
}
