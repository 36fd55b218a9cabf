// What the panel's buttons do. Each returns the sentence that the panel shows when it is done.
import { addToWorkflow } from "./insert.js";
import { mebibytes, seconds } from "./dom.js";
import { Measure } from "./measure.js";
import { convertOneDiff } from "./replace_nodes.js";
import { say as inLanguage } from "./words.js";

export class Actions {
  constructor(app, live, t, category) {
    Object.assign(this, { app, live, t });
    this.measuring = new Measure(app, live, t, category);
  }

  async warmUp(say) {
    const { t, live } = this;
    const { output } = await this.app.graphToPrompt();
    const answer = await live.post("/resolute/warm-up", { prompt: output, client_id: live.api.clientId });
    say([t("Queued: {items}.", { items: answer.items.join("; ") }), ...answer.unknown].join(" "));
    const end = await ended(live.api, answer.prompt_id);
    if (end.name === "execution_interrupted") return t("The warm-up was cancelled.");
    if (end.name === "execution_error") throw new Error(String(end.detail.exception_message ?? "").trim().split("\n")[0]);
    const { sizes, took } = live.warmed ?? {};
    return sizes ? t("Ready: {sizes}, {seconds}", { sizes: sizes.join(", "), seconds: seconds(took) }) : t("Ready.");
  }

  async free() {
    const { t } = this;
    const answer = await this.live.post("/resolute/free", {});
    if (answer.state === "later") return t("The captures are freed when this prompt ends.");
    return answer.state === "freed" ? t("Freed {size}.", { size: mebibytes(answer.bytes) }) : t("Nothing was held.");
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

function ended(api, promptId) {
  return new Promise((resolve) => {
    const names = ["execution_success", "execution_error", "execution_interrupted"];
    const heard = names.map((name) => [
      name,
      ({ detail }) => {
        if (detail.prompt_id !== promptId) return;
        heard.forEach(([each, act]) => api.removeEventListener(each, act));
        resolve({ name, detail });
      },
    ]);
    heard.forEach(([name, act]) => api.addEventListener(name, act));
  });
}
