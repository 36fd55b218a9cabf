// Resolute in ComfyUI's front end: texts on nodes, the badge, the panel and the settings.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addText, showError, showResult } from "./node_text.js";

const PREFIX = "Resolute";

function isOurs(node) {
  return node?.comfyClass?.startsWith(PREFIX);
}

function loadStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./style.css", import.meta.url).href;
  document.head.append(link);
}

// ComfyUI's own message says only that the node threw an error, so put the sentence on the node and into a message.
function reportError(error) {
  if (!error.node_type?.startsWith(PREFIX)) return;
  const sentence = String(error.exception_message ?? "").trim().split("\n")[0];
  const node = app.graph.getNodeById(error.node_id);
  if (node) showError(node, sentence);
  app.extensionManager.toast?.add({
    severity: "error",
    summary: node?.title ?? error.node_type,
    detail: sentence,
    life: 20_000,
  });
}

app.registerExtension({
  name: "Resolute",
  async setup() {
    loadStyle();
    api.addEventListener("execution_error", ({ detail }) => reportError(detail));
  },
  nodeCreated(node) {
    if (!isOurs(node)) return;
    addText(node, (text) => text);
    const before = node.onExecuted;
    node.onExecuted = function (output) {
      before?.call(this, output);
      showResult(this, output);
    };
  },
});
