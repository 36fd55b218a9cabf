// The badge in ComfyUI's top bar: whether sizes are ready, or what is being compiled. It opens the panel.
import { element } from "./dom.js";
import { isOff } from "./switch.js";
import { say } from "./words.js";

const LOOK_MS = 500; // a workflow may be opened in ways of which no event tells

// calm: the text while nothing happens.
export function badgeText(live, t, calm) {
  if (live.working) return say(live.working.text, live.working.words, t);
  if (live.coming) return say(live.coming.text, live.coming.words, t);
  if (live.problem) return t("no answer");
  if (!live.cache) return t("loading");
  return calm;
}

export function addBadge(app, live, t, open) {
  const text = element("span", { class: "resolute-badge-text" });
  const dot = element("span", { class: "resolute-dot", "aria-hidden": "true" });
  const button = element("button", { class: "resolute-badge", type: "button", onclick: open }, dot, text);
  const update = () => {
    const off = isOff(app) && !live.working;
    const shown = off ? t("off for this workflow") : badgeText(live, t, live.readySizes ? t("ready") : t("on"));
    const calm = off || !(live.working || live.coming);
    const full = calm ? `Resolute: ${shown}` : shown;
    if (text.textContent === full) return;
    text.textContent = full;
    button.classList.toggle("resolute-off", off);
    button.classList.toggle("resolute-working", Boolean(live.working));
    button.title = `Resolute: ${shown}`;
    button.setAttribute("aria-label", `Resolute: ${shown}. ${t("Open the panel")}`);
  };
  live.addEventListener("change", update);
  setInterval(update, LOOK_MS);
  update();
  const group = app.menu?.settingsGroup?.element;
  if (group) group.before(button);
  return button;
}
