// "Measure against stock": the workflow runs twice with Resolute and twice without it, and the second run of each counts.
//
// The prompts come from the front end. Nothing is written: the nodes that save are left out, and Measure takes the
// pictures. What is before our nodes stays in ComfyUI's cache.
import { showResult } from "./node_text.js";
import { setSwitch, switchedNodes } from "./switch.js";

const LOADER = "ResoluteLoadCheckpoint";
const MODELS = new Set(["ResoluteCompileModel", LOADER]);
const ARMS = ["on", "on", "off", "off"];


const inputTypes = (node) => Object.values({ ...node?.input?.required, ...node?.input?.optional }).map((each) => each[0]);
const isLink = (value) => Array.isArray(value) && value.length === 2 && typeof value[1] === "number";
const sources = (node) => Object.values(node.inputs).filter(isLink).map((link) => String(link[0]));
const definition = (type) => window.LiteGraph.registered_node_types[type]?.nodeData;

// A sampler or a decode: what it takes and gives says so, whatever pack it is from.
function isTimed(type) {
  const about = definition(type);
  const takes = inputTypes(about);
  const gives = about?.output ?? [];
  const samples = takes.some((kind) => ["MODEL", "GUIDER"].includes(kind)) && gives.includes("LATENT");
  return samples || (takes.includes("VAE") && gives.includes("IMAGE"));
}

function reach(prompt, starts, next) {
  const found = new Set(starts);
  for (const id of found) for (const each of next(id)) if (prompt[each]) found.add(each);
  return found;
}

// Load Checkpoint (Compiled) as three nodes, so that the file is loaded once for all runs.
function splitLoaders(prompt) {
  for (const id of Object.keys(prompt).filter((each) => prompt[each].class_type === LOADER)) {
    const { ckpt_name: name, backend, compile_vae: withVae } = prompt[id].inputs;
    const moved = { 0: `${id}-resolute-model`, ...(withVae ? { 2: `${id}-resolute-vae` } : {}) };
    for (const node of Object.values(prompt))
      for (const [key, value] of Object.entries(node.inputs))
        if (isLink(value) && String(value[0]) === id && moved[value[1]]) node.inputs[key] = [moved[value[1]], 0];
    prompt[id] = { class_type: "CheckpointLoaderSimple", inputs: { ckpt_name: name } };
    prompt[moved[0]] = { class_type: "ResoluteCompileModel", inputs: { model: [id, 0], backend } };
    if (moved[2]) prompt[moved[2]] = { class_type: "ResoluteCompileVAEDecode", inputs: { vae: [id, 2], backend } };
  }
}

// {prompt, ours, timed}: what is needed for the samplers and decodes behind our nodes, and nothing that saves. Throws a
// sentence for a workflow that cannot be measured.
export function measuredPrompt(output, category, t) {
  const whole = structuredClone(output);
  splitLoaders(whole);
  const switched = switchedNodes(whole, category);
  if (!switched.length) throw new Error(t("This workflow has no compile node. Add Resolute to this workflow first."));
  const users = new Map(Object.keys(whole).map((id) => [id, []]));
  for (const [id, node] of Object.entries(whole)) for (const source of sources(node)) users.get(source)?.push(id);
  const behind = reach(whole, switched, (id) => users.get(id) ?? []);
  const timed = [...behind].filter((id) => isTimed(whole[id].class_type));
  if (!timed.length) throw new Error(t("There is no sampler and no decode behind a compile node."));
  const needed = reach(whole, timed, (id) => sources(whole[id]));
  for (const id of needed) {
    const type = whole[id].class_type;
    if (definition(type)?.output_node && !type.startsWith("Resolute"))
      throw new Error(t("{node} may write files, so this workflow is not measured.", { node: definition(type).display_name }));
  }
  const prompt = Object.fromEntries([...needed].map((id) => [id, whole[id]]));
  const decoded = timed.filter((id) => definition(whole[id].class_type).output.includes("IMAGE"));
  const last = (decoded.length ? decoded : timed).at(-1);
  const slot = Math.max(definition(whole[last].class_type).output.indexOf("IMAGE"), 0);
  return { prompt, ours: switched.filter((id) => needed.has(id)), timed, picture: [last, slot] };
}

export class Measure {
  constructor(app, live, t, category) {
    Object.assign(this, { app, live, t, category });
    this.promptId = null;
    this.cancelled = false;
  }

  get isRunning() {
    return this.number !== undefined;
  }

  // Runs the prompts. say: shows a sentence. Returns what the server keeps: {text, words, ...}.
  async run(say) {
    const { t } = this;
    const { output } = await this.app.graphToPrompt();
    const made = measuredPrompt(output, this.category, t);
    this.number = String(Date.now());
    this.cancelled = false;
    try {
      const took = [];
      for (const [index, arm] of ARMS.entries()) {
        const name = arm === "on" ? t("with Resolute") : t("without Resolute");
        say(t("Measuring: prompt {number} of {count}, {name}.", { number: index + 1, count: ARMS.length, name }));
        took.push(await this.once(made, arm, index));
      }
      const [ours, stock] = [took[1], took[3]];
      const body = { measure: this.number, prompt_id: ours.id, seconds: ours.seconds, stock_seconds: stock.seconds };
      const found = await this.live.post("/resolute/measurements", body);
      this.show(found, switchedNodes(output, this.category));
      return found;
    } catch (error) {
      await this.live.post("/resolute/measurements", { measure: this.number }).catch(() => null); // forget the pictures
      throw error;
    } finally {
      this.number = undefined;
    }
  }

  // On the nodes that compile a model. ids: of a prompt.
  show(found, ids) {
    for (const node of ids.map((id) => this.app.graph.getNodeById(Number(id))).filter(Boolean))
      if (MODELS.has(node.comfyClass)) showResult(node, { text: [found.text], resolute_words: [found.words] }, this.t);
  }

  async cancel() {
    this.cancelled = true;
    const id = this.promptId;
    if (!id) return;
    await this.live.api.fetchApi("/queue", { method: "POST", body: JSON.stringify({ delete: [id] }) });
    if (this.hasStarted) await this.live.api.fetchApi("/interrupt", { method: "POST", body: JSON.stringify({ prompt_id: id }) });
    this.stop?.(new Error(this.t("The measurement was cancelled.")));
  }

  async once(made, arm, index) {
    const stopped = () => new Error(this.t("The measurement was cancelled."));
    if (this.cancelled) throw stopped();
    const prompt = structuredClone(made.prompt);
    setSwitch(prompt, made.ours, `${arm} ${this.number}.${index}`);
    const taken = { any: made.picture, measure: this.number, arm };
    prompt["resolute-measure"] = { class_type: "ResoluteMeasure", inputs: taken };
    const watched = this.watch(new Set(made.timed));
    try {
      // An id of our own: the first messages may come before the answer.
      const id = (watched.id = crypto.randomUUID?.() ?? null);
      const answer = await this.live.post("/prompt", { prompt, ...(id ? { prompt_id: id } : {}), client_id: this.live.api.clientId });
      this.promptId = watched.id = answer.prompt_id;
      if (this.cancelled) await this.cancel();
      return { id: answer.prompt_id, seconds: await watched.seconds };
    } finally {
      this.promptId = null;
      watched.end();
    }
  }

  // The seconds of some nodes of the next prompt: from the moment that a node begins until the next one does.
  watch(timed) {
    const { api } = this.live;
    const watched = { id: null };
    const listeners = [];
    const listen = (name, act) => {
      const heard = ({ detail }) => act(detail);
      api.addEventListener(name, heard);
      listeners.push([name, heard]);
    };
    let total = 0;
    let current = null;
    const next = (node) => {
      const now = performance.now();
      if (current && timed.has(current.node)) total += (now - current.at) / 1000;
      current = node ? { node, at: now } : null;
    };
    this.hasStarted = false;
    watched.seconds = new Promise((resolve, reject) => {
      this.stop = reject;
      listen("execution_start", (detail) => {
        this.hasStarted = detail.prompt_id === watched.id;
        total = 0;
        current = null;
      });
      listen("executing", (detail) => next(detail && typeof detail === "object" ? detail.node : detail));
      listen("execution_success", (detail) => {
        next(null);
        if (detail.prompt_id === watched.id) resolve(total);
      });
      listen("execution_error", (detail) => {
        if (detail.prompt_id === watched.id) reject(new Error(String(detail.exception_message ?? "").trim()));
      });
      listen("execution_interrupted", (detail) => {
        if (detail.prompt_id === watched.id) reject(new Error(this.t("The measurement was cancelled.")));
      });
    });
    watched.seconds.catch(() => null); // awaited later
    watched.end = () => listeners.forEach(([name, heard]) => api.removeEventListener(name, heard));
    return watched;
  }
}
