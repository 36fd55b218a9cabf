// What a screen reader is told: that a compile begins, that it stops or ended, and an error. Not the seconds between.
import { element } from "./dom.js";
import { say } from "./words.js";

export class Announcer {
  constructor(live, t) {
    Object.assign(this, { live, t, isWorking: false, isStopping: false, isComing: false });
    this.region = element("div", { class: "resolute-announcer", role: "status", "aria-live": "polite" });
    document.body.append(this.region);
    live.addEventListener("message", ({ detail }) => this.hear(detail));
  }

  tell(sentence) {
    this.region.textContent = sentence;
  }

  hear(message) {
    if (message.kind === "working") {
      if (!this.isWorking || (message.stopping && !this.isStopping)) this.tell(say(message.text, message.words, this.t));
      Object.assign(this, { isWorking: true, isStopping: Boolean(message.stopping) });
    }
    if (message.kind === "coming") {
      if (message.left && !this.isComing) this.tell(say(message.text, message.words, this.t));
      this.isComing = message.left > 0;
    }
    // A compile is idle between two nodes too; the run says how it ended.
    if (message.kind === "run" && this.isWorking) {
      const { run } = message;
      this.tell(`${run.size}: ${say(run.lines[0], run.words.lines[0], this.t)}`);
      Object.assign(this, { isWorking: false, isStopping: false });
    }
  }
}
