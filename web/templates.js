// Resolute's templates: their order in the template browser, and the language of the settings when one is opened.

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

// How the titles of today's models begin, in the order in which they are listed.
const FIRST = ["Z-Image", "Qwen", "FLUX", "Wan", "Hunyuan", "LTX", "MiniMax", "SDXL"];

// ComfyUI lists a pack's templates as the disk lists their files, by which it knows them.
export function orderTemplates(api) {
  const list = api.getWorkflowTemplates;
  if (!list) return; // another name in this version
  const pack = decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2));
  const place = (title) => [...FIRST, ""].findIndex((begin) => title.startsWith(begin));
  const model = (title) => title.split(",")[0];
  api.getWorkflowTemplates = async function () {
    const listed = await list.call(this);
    listed[pack]?.sort((one, other) => place(one) - place(other) || model(one).localeCompare(model(other)));
    return listed;
  };
}
