// Resolute's templates in the language of the settings: their notes, frames and titles, when one is opened.

const KEY = "resolute"; // in the extra data of a workflow, which scripts/workflows.py knows
const NOTE = "MarkdownNote";

export function translateTemplate(graph, t) {
  const { template, names = {} } = graph?.extra?.[KEY] ?? {};
  if (!template || t.isEnglish()) return;
  for (const group of graph.groups ?? graph._groups ?? []) group.title = t(group.title);
  for (const node of graph.nodes ?? graph._nodes) {
    const title = t(node.title);
    // A title that is the name of its type becomes that name in this language.
    if (title !== node.title) node.title = title;
    else if (title === names[node.type]) node.title = node.constructor.title;
    const text = node.type === NOTE ? node.widgets?.[0] : undefined;
    if (text) text.value = text.value.split("\n").map((line) => t(line)).join("\n");
  }
}
