// Resolute in ComfyUI's front end: texts on nodes, the badge, the panel and the settings.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addBadge } from "./badge.js";
import { element } from "./dom.js";
import { failure, Live } from "./live.js";
import { Announcer } from "./announcer.js";
import { addText, endWaiting, fillTexts, hearWords, showError, showResult } from "./node_text.js";
import { nodesById } from "./graph.js";
import { Panel } from "./panel.js";
import { applyDefaultBackend, BACKEND, settings } from "./settings.js";
import { sizeText } from "./sizes.js";
import { translator } from "./strings.js";
import { addSwitch } from "./switch.js";
import { listTemplates, translateTemplate } from "./templates.js";
import { say } from "./words.js";

const PREFIX = "Resolute";
const TAB = "resolute";
const live = new Live(api);

const setting = (name) => app.extensionManager?.setting?.get(name);
const t = translator(() => setting("Comfy.Locale"));
let announcer = null;

const categories = new Map(); // of our nodes by their class, those of OneDiff's names included

const category = (name) => categories.get(name);
const isOurs = (name) => categories.has(name);

// ComfyUI's own message says only that the node threw an error, so put the sentence in its place, and on the node. Where
// there is no such message (older front ends open a dialog), show one of ours.
async function replaceMessage(sentence) {
  for (let attempt = 0; attempt < 10; attempt++) {
    const message = document.querySelector("[data-testid=error-overlay-messages] p");
    if (message) {
      message.textContent = message.title = sentence;
      return true;
    }
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  return false;
}

async function reportError(error) {
  if (!isOurs(error.node_type)) return;
  const sentence = t.error(failure(error));
  const node = new Map(nodesById(app.graph)).get(String(error.node_id));
  if (node) showError(node, sentence);
  announcer?.tell(sentence);
  if (await replaceMessage(sentence)) return;
  const toast = app.extensionManager.toast;
  const title = node?.title ?? error.node_type;
  if (toast?.add) toast.add({ severity: "error", summary: title, detail: sentence, life: 20_000 });
  else toast?.error?.(`${title}: ${sentence}`);
}

// Once, when a run was the first that ran compiled code; after the next one if that was cancelled.
let isDue = false;
function reportSuccess({ kind, run }) {
  if (kind !== "run" || run.role !== "unet") return;
  isDue ||= run.came;
  if (!isDue || run.stopped) return;
  isDue = false;
  const detail = `${sizeText(run.size, t)}: ${say(run.lines[0], run.words.lines[0], t)}`;
  app.extensionManager.toast?.add?.({ severity: "success", summary: "Resolute", detail, life: 10_000 });
}

function iconBadge() {
  return live.working ? "…" : live.readySizes ? String(live.readySizes) : null;
}

// ComfyUI asks for the text of an icon's badge once, and again when the tab's function changes.
function followBadge() {
  let shown = iconBadge();
  live.addEventListener("change", () => {
    const text = iconBadge();
    const tab = app.extensionManager.sidebarTab?.sidebarTabs?.find((each) => each.id === TAB);
    if (!tab || text === shown) return;
    shown = text;
    tab.iconBadge = () => text;
  });
}

function addPanel() {
  addSwitch(app, category);
  const panel = new Panel(app, live, t, category);
  app.extensionManager.registerSidebarTab({
    id: TAB,
    icon: "pi pi-bolt",
    title: "Resolute",
    tooltip: "Resolute",
    iconBadge: () => iconBadge(),
    type: "custom",
    render: (container) => panel.render(container),
    destroy: () => panel.destroy(),
  });
  followBadge();
  addBadge(app, live, t, category, () => app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`));
}

const fixed = await live.get("/resolute/settings").then(
  (answer) => answer.fixed,
  () => ({}), // without an answer every setting can be changed here
);

app.registerExtension({
  name: "Resolute",
  settings: settings(fixed, setting, (name, value) => app.extensionManager.setting.set(name, value)),
  async setup() {
    document.head.append(element("link", { rel: "stylesheet", href: new URL("./style.css", import.meta.url).href }));
    listTemplates(api, t);
    addPanel();
    announcer = new Announcer(live, t);
    live.addEventListener("message", ({ detail }) => (hearWords(detail), reportSuccess(detail)));
    api.addEventListener("status", ({ detail }) => detail?.exec_info?.queue_remaining === 0 && endWaiting(app, t));
    api.addEventListener("execution_error", ({ detail }) => reportError(detail));
    await live.refresh();
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.category?.split("/")[0] !== PREFIX) return;
    categories.set(nodeData.name, nodeData.category);
    applyDefaultBackend(nodeData, setting(BACKEND));
  },
  afterConfigureGraph() {
    translateTemplate(app.graph, t);
    fillTexts(app, live, t, category);
  },
  nodeCreated(node) {
    if (!isOurs(node.comfyClass)) return;
    addText(node, categories.get(node.comfyClass), t);
    const before = node.onExecuted;
    node.onExecuted = function (output) {
      before?.call(this, output);
      showResult(this, output, t);
    };
  },
});
