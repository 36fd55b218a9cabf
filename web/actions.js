// What the panel's buttons do. Each returns the sentence that the panel shows when it is done.
import { addToWorkflow } from "./insert.js";
import { seconds } from "./dom.js";
import { Measure } from "./measure.js";
import { fillTexts } from "./node_text.js";
import { convertOneDiff } from "./replace_nodes.js";
import { isOff, turn } from "./switch.js";
import { say as inLanguage } from "./words.js";

export class Actions {
  constructor(app, live, t, category) {
    Object.assign(this, { app, live, t, category });
    this.measuring = new Measure(app, live, t, category);
  }

  async warmUp(say) {
    const { t, live } = this;
    const { output } = await this.app.graphToPrompt();
    if (!Object.keys(output).length) throw new Error(t("This workflow has no sampler and no decode to compile."));
    const answer = await live.post("/resolute/warm-up", { prompt: output, client_id: live.api.clientId });
    say([t("Queued."), ...answer.unknown].join(" "));
    const over = new AbortController();
    const isDone = await live.ended(() => answer.prompt_id, over.signal).finally(() => over.abort());
    if (!isDone) return t("The warm-up was cancelled.");
    const ran = live.runs.filter((run) => run.prompt_id === answer.prompt_id);
    const sizes = [...new Set(ran.map((run) => run.size))].join(", ");
    return t("Ready: {sizes}, {seconds}", { sizes, seconds: seconds(ran.reduce((sum, run) => sum + run.seconds, 0)) });
  }

  turn() {
    turn(this.app, !isOff(this.app));
    fillTexts(this.app, this.live, this.t, this.category);
  }

  async free() {
    const { text, words } = await this.live.post("/resolute/free", {});
    return inLanguage(text, words, this.t);
  }

  async tryAgain() {
    await this.live.post("/resolute/free", {});
    return this.t("Press Run: what failed is compiled again.");
  }

  async copy() {
    const { text } = await this.live.get("/resolute/report");
    await navigator.clipboard.writeText(text);
    return this.t("The report is in the clipboard.");
  }

  async measure(say) {
    const found = await this.measuring.run(say);
    await this.live.refresh();
    return inLanguage(found.text, found.words, this.t);
  }

  add() {
    return addToWorkflow(this.app, this.t);
  }

  convert() {
    return convertOneDiff(this.t);
  }
}
