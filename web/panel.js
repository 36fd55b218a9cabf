// The panel in ComfyUI's sidebar.
import { badgeText } from "./badge.js";
import { element, mebibytes } from "./dom.js";
import { isSampling } from "./live.js";
import { legend, promptRow, prompts } from "./timeline.js";

const STATES = { memory: "ready", captured: "ready", disk: "on disk", unknown: "to compile" };
const SIZES = 12; // of one model

export class Panel {
  constructor(app, live, t) {
    Object.assign(this, { app, live, t });
    this.update = () => this.draw();
  }

  // Called by ComfyUI each time the panel is opened.
  render(container) {
    const t = this.t;
    this.status = element("div", { class: "resolute-headline", role: "status", "aria-live": "polite" });
    this.progress = element("progress", { class: "resolute-progress", "aria-label": t("Compiling") });
    this.said = element("div", { class: "resolute-said", role: "status", "aria-live": "polite" });
    this.memory = element("div", { class: "resolute-memory" });
    this.models = element("div");
    this.timeline = element("ol", { class: "resolute-timeline" });
    container.replaceChildren(
      element(
        "section",
        { class: "resolute-panel", "aria-label": "Resolute" },
        element("h2", {}, "Resolute"),
        this.status,
        this.progress,
        element("div", { class: "resolute-buttons" }, this.buttons()),
        this.said,
        element("h3", {}, t("Memory of captures")),
        this.memory,
        element("h3", {}, t("Sizes")),
        this.models,
        element("h3", {}, t("Latest prompts")),
        legend(t),
        this.timeline,
      ),
    );
    this.live.addEventListener("change", this.update);
    this.draw();
    this.live.refresh();
  }

  destroy() {
    this.live.removeEventListener("change", this.update);
  }

  buttons() {
    const t = this.t;
    const button = (id, text, tip, action) =>
      element("button", { type: "button", class: "resolute-button", title: tip, "data-action": id, onclick: action }, text);
    return [
      button("warm-up", t("Warm up this workflow"), t("Compiles and captures the sizes of this workflow now."), () =>
        this.act(() => this.warmUp()),
      ),
      button("free", t("Free"), t("Frees the memory of all captures; nothing compiles again."), () =>
        this.act(() => this.free()),
      ),
      button("copy", t("Copy report"), t("Copies the report as text, for a bug report."), () => this.act(() => this.copy())),
    ];
  }

  async act(action) {
    this.said.classList.remove("resolute-failed");
    try {
      this.said.textContent = await action();
    } catch (error) {
      this.said.classList.add("resolute-failed");
      this.said.textContent = error.message;
    }
  }

  async warmUp() {
    const { output } = await this.app.graphToPrompt();
    const answer = await this.live.post("/resolute/warm-up", { prompt: output, client_id: this.live.api.clientId });
    return [this.t("Queued: {items}.", { items: answer.items.join("; ") }), ...answer.unknown].join(" ");
  }

  async free() {
    await this.live.post("/resolute/free", { client_id: this.live.api.clientId });
    return this.t("Queued: the captures are freed after the prompts that wait.");
  }

  async copy() {
    const { text } = await this.live.get("/resolute/report");
    await navigator.clipboard.writeText(text);
    return this.t("The report is in the clipboard.");
  }

  draw() {
    const { live, t } = this;
    this.status.textContent = live.problem ? `${t("no answer")}: ${live.problem}` : badgeText(live, t);
    this.progress.hidden = !live.working?.total;
    if (live.working?.total) Object.assign(this.progress, { max: live.working.total, value: live.working.done });
    if (!live.cache) return;
    this.memory.replaceChildren(...this.memoryRow());
    const models = live.cache.models.filter((model) => model.shapes.length);
    const none = element("p", { class: "resolute-faint" }, t("No compiled model has run yet."));
    this.models.replaceChildren(...(models.length ? models.map((model) => this.model(model)) : [none]));
    const rows = prompts(live.runs).map((runs) => promptRow(runs, t));
    const nothing = element("li", { class: "resolute-faint" }, t("No prompt since ComfyUI started."));
    this.timeline.replaceChildren(...(rows.length ? rows : [nothing]));
  }

  memoryRow() {
    const { bytes, budget_bytes: budget, entries, store } = this.live.cache;
    const used = this.t("{used} of {budget}, {count} captures", {
      used: mebibytes(bytes),
      budget: mebibytes(budget),
      count: entries.length,
    });
    const disk = store.regions
      ? this.t("On disk: {count} regions, {size}", { count: store.regions, size: mebibytes(store.bytes) })
      : this.t("Nothing is kept on disk.");
    return [
      element("meter", { min: 0, max: Math.max(budget, 1), value: bytes, "aria-label": used }),
      element("div", {}, used),
      element("div", { class: "resolute-faint" }, disk),
    ];
  }

  model(model) {
    const t = this.t;
    const shapes = [...model.shapes].sort((one, other) => rank(one) - rank(other));
    const head = ["Size", "State", "Memory", "Replays"].map((name) => element("th", { scope: "col" }, t(name)));
    const rows = shapes.slice(0, SIZES).map((shape) =>
      element(
        "tr",
        { class: `resolute-state-${shape.state}` },
        element("td", { title: t("{count} in one call", { count: shape.latent_shape[0] }) }, sizeOf(shape)),
        element("td", {}, t(STATES[shape.state] ?? shape.state)),
        element("td", {}, shape.bytes ? mebibytes(shape.bytes) : "–"),
        element("td", {}, String(shape.hits)),
      ),
    );
    const more = shapes.length > SIZES ? t("and {count} more", { count: shapes.length - SIZES }) : "";
    const table = element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
    const kind = isSampling(model.shapes[0]) ? "" : ` (${t("decoding")})`;
    return element(
      "div",
      { class: "resolute-model" },
      element("h4", {}, `${model.name}${model.shapes[0].role === "vae_decode" ? kind : ""}`),
      table,
      more ? element("p", { class: "resolute-faint" }, more) : null,
    );
  }
}

function rank(shape) {
  return ["memory", "disk", "unknown"].indexOf(shape.state);
}

// As the node shows it: pixels and the user's batch. What an earlier version remembered has only the latent's shape.
function sizeOf(shape) {
  return shape.size || shape.latent_shape.join("x");
}
