// How each of OneDiff's nodes becomes nodes of ours: docs/onediff.md has the table.
//
// A recipe: {type, inputs, values, after}. type: the node that takes its place. inputs: its input -> the old one. values:
// its input -> value. after: nodes behind an output, [{slot, type, input, values}]. A recipe {passes} has no node: what
// comes into that input goes on; {passes: null} goes without a trace.

export const ONEDIFF = "Resolute/OneDiff"; // the category of OneDiff's types
export const isOneDiff = (node) => node.constructor?.nodeData?.category === ONEDIFF;

const PASSED_ON = {
  BatchSizePatcher: "model",
  ResolutionSpeedupChecker: "samples",
  ModelGraphLoader: "model",
  VaeGraphLoader: "vae",
  ControlNetGraphLoader: "control_net",
  ModelGraphSaver: null,
  VaeGraphSaver: null,
  ControlNetGraphSaver: null,
  Quant8Model: null,
  CompareModel: null,
};
// Passed to a speed-up node, and of no use without it.
export const BOOSTERS = new Set([
  "OneDiffModelBooster",
  "OneFlowDeepcacheBooster",
  "OneDiffNexfortBooster",
  "OneDiffTorchCompileBooster",
  "OneDiffOnlineQuantizationBooster",
]);
const COMPILE_MODEL = "ResoluteCompileModel";
const AUTO = { backend: "auto" };
const MODEL = { type: COMPILE_MODEL, inputs: { model: "model" }, values: AUTO };
const VAE = { type: "ResoluteCompileVAEDecode", inputs: { vae: "vae" }, values: AUTO };
const CONTROL_NET = { type: "ResoluteCompileControlNet", inputs: { control_net: "control_net" }, values: AUTO };
const CHECKPOINT = { type: "ResoluteLoadCheckpoint", inputs: { ckpt_name: "ckpt_name" }, values: { ...AUTO, compile_vae: true } };
const RECIPES = {
  ModelSpeedup: MODEL,
  SVDSpeedup: MODEL,
  ModuleDeepCacheSpeedup: MODEL,
  VaeSpeedup: VAE,
  ControlnetSpeedup: CONTROL_NET,
  ControlNetSpeedup: CONTROL_NET,
  OneDiffCheckpointLoaderSimple: CHECKPOINT,
  OneDiffDeepCacheCheckpointLoaderSimple: CHECKPOINT,
  OneDiffQuantCheckpointLoaderSimple: CHECKPOINT,
  OneDiffQuantCheckpointLoaderSimpleAdvanced: CHECKPOINT,
  OneDiffControlNetLoader: {
    type: "ControlNetLoader",
    inputs: { control_net_name: "control_net_name" },
    after: [{ slot: 0, type: "ResoluteCompileControlNet", input: "control_net", values: AUTO }],
  },
  ImageOnlyOneDiffQuantCheckpointLoaderAdvanced: {
    type: "ImageOnlyCheckpointLoader",
    inputs: { ckpt_name: "ckpt_name" },
    after: [{ slot: 0, type: COMPILE_MODEL, input: "model", values: AUTO }],
  },
  UNETLoaderInt8: {
    type: "ResoluteLoadDiffusionModel",
    inputs: { unet_name: "model_path" }, // of OneDiff's file: the original one is to be chosen
    values: { format: "int8", keep: false },
    after: [{ slot: 0, type: COMPILE_MODEL, input: "model", values: AUTO }],
  },
  ShowImageDiff: {
    type: "ResoluteCompareImages",
    inputs: { image_a: "images1", image_b: "images2" },
    values: { max_error: 255, min_psnr: 0 },
  },
  // Of ComfyUI and KJNodes, with torch.compile. Nothing is wrong with them: only their menu names ours.
  TorchCompileModel: MODEL,
  TorchCompileModelAdvanced: MODEL,
  TorchCompileModelFluxAdvanced: MODEL,
  TorchCompileModelFluxAdvancedV2: MODEL,
  TorchCompileModelWanVideo: MODEL,
  TorchCompileModelWanVideoV2: MODEL,
  TorchCompileModelHyVideo: MODEL,
  TorchCompileModelQwenImage: MODEL,
  TorchCompileLTXModel: MODEL,
  TorchCompileCosmosModel: MODEL,
  TorchCompileVAE: VAE,
  TorchCompileControlNet: { ...CONTROL_NET, inputs: { control_net: "controlnet" } },
};

const value = (node, name) => node.widgets?.find((widget) => widget.name === name)?.value;
const isLinked = (node, name) => node.inputs?.some((input) => input.name === name && input.link != null);

const STEPS = 1000; // OneDiff counts noise levels from 0 (pure noise) to 1000
const BLOCKS = 2; // of a level, in each UNet of SD1.5, SD2, SDXL and SVD
const CACHE = ["cache_interval", "cache_layer_id", "cache_block_id", "start_step", "end_step"];

// DeepCache behind a model, with the inputs of OneDiff's node; nothing where they leave every step full.
function deepCache(node) {
  const [interval, layer, block, start, end] = CACHE.map((name) => Number(value(node, name)));
  if (start >= end) return [];
  const values = {
    interval: Math.max(1, interval),
    depth: BLOCKS * layer + block + 1,
    start_percent: start / STEPS,
    end_percent: end / STEPS,
  };
  return [{ slot: 0, type: "ResoluteDeepCache", input: "model", values }];
}

// source: finds the node at the other end of an input's link. Returns undefined if nothing of ours does what it did.
export function recipeOf(node, source) {
  const type = node.comfyClass;
  if (type === "ControlNetSpeedup" && value(node, "static_mode") === "disable") return { passes: "control_net" };
  if (type in PASSED_ON) return { passes: PASSED_ON[type] };
  const base = RECIPES[type];
  if (!base || CACHE.some((name) => isLinked(node, name))) return undefined;
  const recipe = { inputs: {}, ...base, values: { ...base.values }, after: [...(base.after ?? [])] };
  const vae = value(node, "vae_speedup");
  if (vae !== undefined && "compile_vae" in recipe.values) recipe.values.compile_vae = vae === "enable";
  if (value(node, "cache_interval") !== undefined) recipe.after.push(...deepCache(node));
  return withBooster(recipe, source(node, "custom_booster"), source);
}

function withBooster(recipe, booster, source) {
  if (!booster) return recipe;
  const cache = source(booster, "deepcache_booster");
  const torch = source(booster, "torchcompile_booster");
  const { backend } = recipe.values;
  if (torch && value(torch, "disable") === true && backend) recipe.values.backend = "eager";
  const givesModel = recipe.type === COMPILE_MODEL || "compile_vae" in recipe.values;
  if (cache && givesModel && !CACHE.some((name) => isLinked(cache, name))) recipe.after.push(...deepCache(cache));
  return recipe;
}
