// What the badge and the panel show: read from the server, and kept current by its messages over the websocket.

const LEAST_SECONDS = 0.1; // of a prompt that ran anything worth a line
const PAUSE_MS = 400; // several messages in a row cause one request

export class Live extends EventTarget {
  constructor(api) {
    super();
    this.api = api;
    this.cache = null; // of GET /resolute/cache
    this.runs = []; // of GET /resolute/runs
    this.begun = {}; // seconds since 1970 at which a prompt of this page began, by its id
    this.plain = []; // prompts of this page in which nothing ran through Resolute: {prompt_id, started, seconds, measured}
    this.measured = new Set(); // ids of those that a measurement ran without it
    this.working = null; // {text, words, done, total} while something compiles or loads
    this.coming = null; // {text, words, left} while regions are compiled behind the picture
    this.problem = ""; // why the server does not answer
    this.timer = 0;
    api.addEventListener("resolute", ({ detail }) => this.receive(detail));
    api.addEventListener("execution_start", ({ detail }) => (this.begun = { [detail.prompt_id]: Date.now() / 1000 }));
    api.addEventListener("execution_success", ({ detail }) => this.noteEnd(detail));
    api.addEventListener("reconnecting", () => {
      this.problem = "reconnecting";
      this.changed();
    });
    api.addEventListener("reconnected", () => this.refresh());
  }

  // The messages of a prompt's runs came before that of its end. What ComfyUI had cached is no prompt to show.
  noteEnd({ prompt_id: id }) {
    const started = this.begun[id];
    const seconds = Date.now() / 1000 - started;
    if (!(seconds >= LEAST_SECONDS) || this.runs.some((run) => run.prompt_id === id)) return;
    this.plain = [...this.plain, { prompt_id: id, started, seconds, measured: this.measured.delete(id) }].slice(-60);
    this.changed();
  }

  receive(message) {
    this.dispatchEvent(new CustomEvent("message", { detail: message }));
    if (message.kind === "text") return;
    this.heard = (this.heard ?? 0) + 1;
    if (message.kind === "working") {
      this.working = message;
      this.changed();
      return;
    }
    if (message.kind === "coming") {
      this.coming = message.left ? message : null;
      this.changed();
      if (message.left) return;
    }
    this.working = null;
    if (message.kind === "run") this.runs = [...this.runs, message.run].slice(-60);
    this.changed();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), PAUSE_MS);
  }

  async refresh(heard = this.heard) {
    try {
      const [cache, runs] = await Promise.all([this.get("/resolute/cache"), this.get("/resolute/runs")]);
      Object.assign(this, { cache, runs: runs.runs, problem: "" });
      const { working, coming } = cache; // a page that is loaded anew has heard no message of them; one of meanwhile is newer
      if (heard === this.heard) Object.assign(this, { working, coming: coming.left ? coming : null });
    } catch (error) {
      this.problem = error.message;
    }
    this.changed();
  }

  // The GPU's memory between two messages, from a route of ComfyUI's that costs little.
  async refreshMemory() {
    const { device } = this.cache ?? {};
    if (!device?.captures) return;
    const found = (await this.get("/system_stats").catch(() => null))?.devices?.[0];
    if (!found) return;
    Object.assign(device, { total_bytes: found.vram_total, free_bytes: found.vram_free });
    this.changed();
  }

  async get(path) {
    return this.answer(await this.api.fetchApi(path));
  }

  async post(path, body) {
    const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return this.answer(await this.api.fetchApi(path, request));
  }

  // Waits for a prompt: true if it ended, false if it was cancelled. Throws its failure, in one line. id: tells the prompt's id, which may
  // be known later than the first messages come. signal: nothing is heard after it.
  ended(id, signal) {
    return new Promise((resolve, reject) => {
      const hear = (name, act) =>
        this.api.addEventListener(name, ({ detail }) => detail.prompt_id === id() && act(detail), { signal });
      hear("execution_success", () => resolve(true));
      hear("execution_interrupted", () => resolve(false));
      hear("execution_error", (detail) => reject(new Error(failure(detail))));
    });
  }

  // The JSON of an answer. Throws the server's sentence if it refused.
  async answer(response) {
    const json = await response.json().catch(() => null);
    if (!response.ok) throw new Error(refusal(json) ?? `${response.status} ${response.statusText}`);
    return json;
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  get readySizes() {
    return this.cache?.sizes_ready ?? 0;
  }
}

// Why a request was refused. Of a prompt ComfyUI says only that it is wrong, and names the node beside that.
function refusal(json) {
  const [node] = Object.values(json?.node_errors ?? {});
  const [wrong] = node?.errors ?? [];
  if (!wrong) return json?.error?.message;
  const file = wrong.type === "value_not_in_list" && String(wrong.extra_info?.received_value ?? "");
  const title = window.LiteGraph.registered_node_types[node.class_type]?.title ?? node.class_type;
  if (/\.\w{2,11}$/.test(file)) return `Missing file: ${file}. ${title} needs it.`;
  return `${title}: ${wrong.message}: ${(wrong.details ?? "").split(" not in ")[0]}`; // without the list of all files
}

// The first line of what a node threw.
export function failure({ exception_message: message }) {
  return String(message ?? "").trim().split("\n")[0];
}
