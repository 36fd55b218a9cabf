// The panel in ComfyUI's sidebar.
import { Actions } from "./actions.js";
import { stateOf } from "./badge.js";
import { element, mebibytes } from "./dom.js";
import { isUndone, latestStep } from "./graph.js";
import { placesIn } from "./insert.js";
import { modelTable, titled } from "./sizes.js";
import { isIn, isOff } from "./switch.js";
import { hasOneDiff } from "./replace_nodes.js";
import { legend, promptRow, prompts } from "./timeline.js";

const MEMORY_MS = 2000;

export class Panel {
  // category: of a class of node.
  constructor(app, live, t, category) {
    Object.assign(this, { app, live, t, category, actions: new Actions(app, live, t, category) });
    this.update = () => this.draw();
  }

  // Called by ComfyUI each time the panel is opened.
  render(container) {
    const { t } = this;
    this.status = element("div", { class: "resolute-headline" });
    this.switch = element("button", {
      type: "button",
      role: "switch",
      class: "resolute-switch",
      "data-action": "switch",
      title: t("Off runs this workflow as without Resolute. No node changes, and the workflow remembers it."),
      onclick: () => {
        this.actions.turn();
        this.draw();
      },
    });
    this.again = this.button("try-again", t("Try again"), t("What could not be compiled is compiled again."), () =>
      this.act(() => this.actions.tryAgain()),
    );
    this.progress = element("progress", { class: "resolute-progress", "aria-label": t("Compiling") });
    this.row = element("div", { class: "resolute-buttons" }, this.buttons());
    this.said = element("div", { class: "resolute-said", role: "status", "aria-live": "polite" });
    this.memory = element("div", { class: "resolute-memory" });
    this.models = element("div");
    this.heading = element("h3", {}, t("Memory of captures"));
    this.details = element("div", { class: "resolute-faint" });
    this.legend = element("div");
    this.timeline = element("ol", { class: "resolute-timeline" });
    container.replaceChildren(
      element(
        "section",
        { class: "resolute-panel", "aria-label": "Resolute" },
        element("h2", {}, "Resolute"),
        this.status,
        this.again,
        this.progress,
        this.switch,
        this.row,
        this.said,
        this.heading,
        this.memory,
        element("h3", {}, t("Sizes")),
        this.models,
        element("details", {}, element("summary", {}, t("Details")), this.details),
        element("h3", {}, t("Latest prompts")),
        this.legend,
        this.timeline,
      ),
    );
    this.live.addEventListener("change", this.update);
    this.live.api.addEventListener("graphChanged", this.update);
    this.live.api.addEventListener("execution_start", (this.forget = () => this.forgetFailure()));
    // A workflow may be opened in ways of which no event tells.
    this.timer = setInterval(() => this.drawn !== this.state() && this.draw(), 500);
    this.memoryTimer = setInterval(() => this.live.refreshMemory(), MEMORY_MS);
    this.draw();
    this.live.refresh();
  }

  destroy() {
    clearInterval(this.timer);
    clearInterval(this.memoryTimer);
    this.live.removeEventListener("change", this.update);
    this.live.api.removeEventListener("graphChanged", this.update);
    this.live.api.removeEventListener("execution_start", this.forget);
  }

  button(id, text, tip, onclick) {
    return element("button", { type: "button", class: "resolute-button", title: tip, "data-action": id, onclick }, text);
  }

  buttons() {
    const { t, button } = this;
    return [
      button(
        "add",
        t("Add Resolute to this workflow"),
        t("Puts Compile Model before each sampler and Compile VAE Decode before each decode."),
        () => this.act(() => this.actions.add(), true),
      ),
      button(
        "convert",
        t("Convert all OneDiff nodes"),
        t("Puts Resolute's nodes in the place of OneDiff's, with their values and links."),
        () => this.act(() => this.actions.convert(), true),
      ),
      button(
        "measure",
        t("Measure against stock"),
        t("Runs this workflow with and without Resolute, each at least twice, and compares. Nothing is saved."),
        () => {
          const { measuring } = this.actions;
          return measuring.isRunning ? measuring.cancel() : this.act((say) => this.actions.measure(say));
        },
      ),
      button("warm-up", t("Warm up this workflow"), t("Compiles and captures the sizes of this workflow now."), () =>
        this.act((say) => this.actions.warmUp(say)),
      ),
      button("free", t("Free"), t("Frees the memory of all captures; compiled code stays."), () =>
        this.act(() => this.actions.free()),
      ),
      button("copy", t("Copy report"), t("Copies the report as text, for a bug report."), () =>
        this.act(() => this.actions.copy()),
      ),
    ];
  }

  // action: gets a function that shows a sentence meanwhile. A later click's sentence is not replaced by an earlier one's.
  // isStep: its sentence goes when the change of the graph is undone, or another workflow is shown.
  async act(action, isStep = false) {
    const { t } = this;
    const mine = (this.latest = Symbol("action"));
    this.step = undefined;
    const say = (sentence, failed = false) => {
      if (this.latest !== mine || sentence === null) return;
      this.said.classList.toggle("resolute-failed", failed);
      this.said.textContent = sentence;
    };
    say("");
    try {
      const done = action(say);
      this.draw();
      say(await done);
      if (isStep) this.step = latestStep(this.app);
    } catch (error) {
      say(t.error(error.message), true);
    }
    this.draw();
  }

  // A red sentence is about the last prompt: a new one takes it away.
  forgetFailure() {
    if (!this.said.classList.contains("resolute-failed")) return;
    this.said.classList.remove("resolute-failed");
    this.said.textContent = "";
  }

  state() {
    const { all, bare } = placesIn(this.app);
    return `${isOff(this.app)} ${isIn(this.app, this.category)} ${all} ${bare} ${hasOneDiff()} ${this.step && isUndone(this.app, this.step)}`;
  }

  draw() {
    const { live, t } = this;
    if (this.step && isUndone(this.app, this.step)) this.said.textContent = "";
    this.drawn = this.state();
    const calm = live.readySizes ? t("{sizes} sizes ready", { sizes: live.readySizes }) : t("no size is ready yet");
    const { text, look } = stateOf(this.app, live, t, this.category, calm);
    this.status.textContent = text;
    this.again.hidden = look !== "failed" || Boolean(live.problem);
    this.progress.hidden = !live.working?.total;
    if (live.working?.total) Object.assign(this.progress, { max: live.working.total, value: live.working.done });
    const off = isOff(this.app);
    this.switch.hidden = !isIn(this.app, this.category);
    this.switch.setAttribute("aria-checked", String(!off));
    this.switch.textContent = off ? t("Resolute is off for this workflow") : t("Resolute is on for this workflow");
    const { all, bare } = placesIn(this.app);
    const [add, convert, measure] = this.row.children;
    add.hidden = all > 0 && !bare;
    add.classList.toggle("resolute-primary", bare > 0);
    convert.hidden = !hasOneDiff();
    measure.classList.toggle("resolute-primary", add.hidden);
    measure.textContent = this.actions.measuring.isRunning ? t("Cancel measuring") : t("Measure against stock");
    if (!live.cache) return;
    this.memory.replaceChildren(...this.memoryRow());
    const none = element("p", { class: "resolute-faint" }, t("No compiled model has run yet."));
    const { captures } = live.cache.device;
    this.heading.hidden = !captures;
    this.legend.replaceChildren(legend(t, live.runs));
    const said = this.said.textContent;
    const models = titled(live.cache.models, live.runs);
    const tables = models.map((model) => modelTable(model, live.cache.measurements, said, captures, t));
    this.models.replaceChildren(...(tables.length ? tables : [none]));
    const rows = prompts(live.runs, live.plain).map((runs) => promptRow(runs, t));
    const nothing = element("li", { class: "resolute-faint" }, t("No prompt since ComfyUI started."));
    this.timeline.replaceChildren(...(rows.length ? rows : [nothing]));
  }

  memoryRow() {
    const { bytes, budget_bytes: budget, entries, store, device, regions_ready: count } = this.live.cache;
    const used = this.t("{used} of {budget}, {count} captures; {shared} shared by all sizes", {
      used: mebibytes(bytes),
      budget: mebibytes(budget),
      count: entries.length,
      shared: mebibytes(bytes - entries.reduce((sum, entry) => sum + entry.bytes, 0)),
    });
    const disk = store.regions
      ? this.t("On disk: {count} regions, {size}", { count: store.regions, size: mebibytes(store.bytes) })
      : this.t("Nothing is kept on disk.");
    this.details.textContent = `${this.t("{count} compiled regions in memory", { count })}. ${disk}`;
    if (!device.captures) return device.name === "cpu" ? [this.t("On a CPU Resolute brings no speed")] : [];
    const taken = device.total_bytes - device.free_bytes;
    const whole = this.t("{used} of {total} used on {device}", {
      used: mebibytes(taken),
      total: mebibytes(device.total_bytes),
      device: device.name,
    });
    return [
      element("meter", { min: 0, max: Math.max(budget, 1), value: bytes, "aria-label": used }),
      element("div", {}, used),
      element("meter", { min: 0, max: Math.max(device.total_bytes, 1), value: taken, "aria-label": whole }),
      element("div", { class: "resolute-faint" }, whole),
    ];
  }
}
