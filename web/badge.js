// The badge in ComfyUI's top bar: how the open workflow runs, or what is being compiled. It opens the panel.
import { element } from "./dom.js";
import { addToWorkflow, placesIn } from "./insert.js";
import { isIn, isOff } from "./switch.js";
import { say } from "./words.js";

const LOOK_MS = 500; // a workflow may be opened in ways of which no event tells

// {text, look, isWhole} of the badge and of the panel's headline. calm: the text while nothing happens. isWhole: it needs
// no name before it.
export function stateOf(app, live, t, category, calm) {
  const said = ({ text, words }, look) => ({ text: say(text, words, t), look, isWhole: true });
  if (live.problem) return { text: t("ComfyUI does not answer"), look: "failed", isWhole: true };
  if (live.working) return said(live.working, "working");
  if (!isIn(app, category)) return { text: t("not in this workflow"), look: "off" };
  if (isOff(app)) return { text: t("off for this workflow"), look: "off" };
  if (live.coming) return said(live.coming, "coming");
  if (!live.cache) return { text: t("loading"), look: "off" };
  if (live.cache.failed?.regions) return said(live.cache.failed, "failed");
  return { text: calm, look: "ready" };
}

export function addBadge(app, live, t, category, open) {
  const text = element("span", { class: "resolute-badge-text" });
  const dot = element("span", { class: "resolute-dot", "aria-hidden": "true" });
  const button = element("button", { class: "resolute-badge", type: "button", onclick: open }, dot, text);
  const onclick = () =>
    app.extensionManager.toast?.add?.({ severity: "info", summary: "Resolute", detail: addToWorkflow(app, t), life: 6000 });
  const title = t("Add Resolute to this workflow");
  const add = element("button", { class: "resolute-add", type: "button", title, onclick }, t("Add"));
  const update = () => {
    const { text: shown, look, isWhole } = stateOf(app, live, t, category, live.readySizes ? t("ready") : t("on"));
    const full = isWhole ? shown : `Resolute: ${shown}`;
    add.hidden = isIn(app, category) || !placesIn(app).bare;
    button.dataset.look = look;
    if (text.textContent === full) return;
    text.textContent = full;
    button.title = `Resolute: ${shown}`;
    button.setAttribute("aria-label", `Resolute: ${shown}. ${t("Open the panel")}`);
  };
  live.addEventListener("change", update);
  setInterval(update, LOOK_MS);
  update();
  app.menu?.settingsGroup?.element?.before(button, add);
  return button;
}
