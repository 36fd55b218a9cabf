// "Measure against stock": the workflow runs with Resolute and without it, in turn, and the medians are compared.
//
// A prompt counts if the one before it ran the same way: the first of each compiles, loads, or moves weights. Short prompts
// are repeated, because a busy machine slows a single one by more than the difference. The prompts come from the front end.
// Nothing is written: the nodes that save are left out, and Measure takes the pictures. What is before our nodes stays in
// ComfyUI's cache.
import { nodesById } from "./graph.js";
import { showResult } from "./node_text.js";
import { setSwitch, switchedNodes } from "./switch.js";

const LOADER = "ResoluteLoadCheckpoint";
const MODELS = new Set(["ResoluteCompileModel", LOADER]);
const ON = "on";
const OFF = "off";
const ENOUGH_SECONDS = 10; // of prompts that count
const MOST_PAIRS = 8;
const FIRST = 2; // prompts, of which the second one counts
const MOST_WAITS = 5; // for the code of a model and of its decoder, which is asked for later
const LOOK_MS = 1000; // the server tells twice a second what is being compiled

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

// How many pairs of prompts are measured. seconds: of a pair.
export function pairsFor(seconds) {
  return Math.max(1, Math.min(MOST_PAIRS, Math.ceil(ENOUGH_SECONDS / seconds)));
}

// [{arm, counts}] of so many pairs. Every second pair is turned around, so that a machine that gets slower or faster
// meanwhile favours none, and one prompt in three is spared.
export function schedule(pairs) {
  const runs = [];
  for (let pair = 0; pair < pairs; pair += 1)
    for (const arm of pair % 2 ? [OFF, ON] : [ON, OFF]) {
      if (runs.at(-1)?.arm !== arm) runs.push({ arm, counts: false });
      runs.push({ arm, counts: true });
    }
  return runs;
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
    const { id: workflow } = this.app.graph;
    const { output } = await this.app.graphToPrompt();
    const made = { ...measuredPrompt(output, this.category, t), workflow };
    this.number = String(Date.now());
    this.cancelled = false;
    try {
      const took = { [ON]: [], [OFF]: [] };
      let runs = schedule(1);
      let promptId;
      for (let index = 0; index < runs.length; index += 1) {
        const { arm, counts } = runs[index];
        say(this.progress(index, runs.length, arm));
        let { id, seconds } = await this.once(made, arm, index);
        for (let wait = 1; !counts && wait <= MOST_WAITS && (await this.waited(id, say)); wait += 1)
          ({ id, seconds } = await this.once(made, arm, `${index}.${wait}`));
        if (counts) took[arm].push(seconds);
        if (arm === ON) promptId = id;
        if (index === FIRST - 1) runs = schedule(pairsFor(2 * took[ON][0]));
      }
      const nodes = Object.keys(output).filter((id) => MODELS.has(output[id].class_type));
      const seconds = { seconds: took[ON], stock_seconds: took[OFF] };
      const body = { measure: this.number, prompt_id: promptId, ...seconds, workflow, nodes };
      const found = await this.live.post("/resolute/measurements", body);
      if (this.app.graph.id === workflow) this.show(found, new Set(nodes));
      return found;
    } catch (error) {
      await this.live.post("/resolute/measurements", { measure: this.number }).catch(() => null); // forget the pictures
      throw error;
    } finally {
      this.number = undefined;
    }
  }

  // The first prompts tell how many there will be.
  progress(index, count, arm) {
    const { t } = this;
    const name = arm === ON ? t("with Resolute") : t("without Resolute");
    if (index < FIRST) return t("Measuring: the first prompts, {name}.", { name });
    return t("Measuring: prompt {number} of {count}, {name}.", { number: index + 1, count, name });
  }

  // Waits until all is compiled, if the calls of a prompt had to run ComfyUI's own blocks. False if they had not.
  async waited(id, say) {
    const ran = this.live.runs.filter((run) => run.prompt_id === id).flatMap((run) => run.segments);
    if (!ran.some(({ kind }) => kind === "originals")) return false;
    do {
      say(this.t("The blocks are still being compiled. The measurement goes on after that."));
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    } while (this.live.coming && !this.cancelled);
    return true;
  }

  // ids: of the nodes of a prompt that compile a model.
  show(found, ids) {
    for (const [id, node] of nodesById(this.app.graph))
      if (ids.has(id)) showResult(node, { text: [found.text], resolute_words: [found.words] }, this.t);
  }

  async cancel() {
    this.cancelled = true;
    const id = this.promptId;
    if (!id) return;
    await this.live.api.fetchApi("/queue", { method: "POST", body: JSON.stringify({ delete: [id] }) });
    if (this.hasStarted) await this.live.api.fetchApi("/interrupt", { method: "POST", body: JSON.stringify({ prompt_id: id }) });
    this.stop?.(false);
  }

  async once(made, arm, index) {
    const prompt = structuredClone(made.prompt);
    setSwitch(prompt, made.ours, `${arm} ${this.number}.${index}`);
    const taken = { any: made.picture, measure: this.number, arm };
    prompt["resolute-measure"] = { class_type: "ResoluteMeasure", inputs: taken };
    const over = new AbortController();
    let id = crypto.randomUUID?.(); // our own: the first messages may come before the answer
    const seconds = this.watch(new Set(made.timed), () => id, over.signal);
    const ended = Promise.race([this.live.ended(() => id, over.signal), new Promise((resolve) => (this.stop = resolve))]);
    ended.catch(() => null); // awaited later
    try {
      if (!this.cancelled) {
        const extra_data = { resolute_workflow: made.workflow }; // for the texts after a reload
        const answer = await this.live.post("/prompt", { prompt, extra_data, ...(id ? { prompt_id: id } : {}), client_id: this.live.api.clientId });
        this.promptId = id = answer.prompt_id;
        if (arm === OFF) this.live.measured.add(id);
      }
      if (this.cancelled) await this.cancel();
      if (this.cancelled || !(await ended)) throw new Error(this.t("The measurement was cancelled."));
      return { id, seconds: seconds() };
    } finally {
      this.promptId = null;
      over.abort();
    }
  }

  // Returns a function: the seconds of some nodes of a prompt, each from its begin until the next one's.
  watch(timed, id, signal) {
    const listen = (name, act) => this.live.api.addEventListener(name, ({ detail }) => act(detail), { signal });
    let total = 0;
    let current = null;
    const next = (node) => {
      const now = performance.now();
      if (current && timed.has(current.node)) total += (now - current.at) / 1000;
      current = node ? { node, at: now } : null;
    };
    this.hasStarted = false;
    listen("execution_start", (detail) => {
      this.hasStarted = detail.prompt_id === id();
      total = 0;
      current = null;
    });
    listen("executing", (detail) => next(detail && typeof detail === "object" ? detail.node : detail));
    listen("execution_success", () => next(null));
    return () => total;
  }
}
