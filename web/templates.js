// Resolute's templates in the language of the settings: their notes, frames and titles, when one is opened.

const KEY = "resolute"; // in the extra data of a workflow, as in scripts/workflows/graph.py
const NOTE = "MarkdownNote";

export function translateTemplate(graph, t) {
  if (!graph?.extra?.[KEY]?.template || t.isEnglish()) return;
  for (const group of graph.groups ?? graph._groups ?? []) group.title = t(group.title);
  for (const node of graph.nodes ?? graph._nodes) {
    const about = node.constructor;
    // A title that is the node's own name in English becomes its name in this language.
    node.title = node.title === about.nodeData?.display_name ? about.title : t(node.title);
    const text = node.type === NOTE ? node.widgets?.[0] : undefined;
    if (text) text.value = text.value.split("\n").map((line) => t(line)).join("\n");
  }
}
