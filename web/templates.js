// Resolute's templates: their order and titles in the template browser, and the language of the settings in all of them.

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
const END = ", faster - Resolute compiled speed-up"; // how each title ends, with words that people search for

// ComfyUI lists a pack's templates as the disk lists their files. It shows the names of the files, searches in them, and
// asks for the files by them: a name is translated on its way to the page, and back on its way to the server.
export function listTemplates(api, t) {
  const { getWorkflowTemplates: list, apiURL } = api;
  if (!list) return; // another name in this version
  const pack = decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2));
  const place = (title) => [...FIRST, ""].findIndex((begin) => title.startsWith(begin));
  const model = (title) => title.split(",")[0];
  let end = END;
  api.getWorkflowTemplates = async function () {
    const listed = await list.call(this);
    listed[pack]?.sort((one, other) => place(one) - place(other) || model(one).localeCompare(model(other)));
    end = t(END);
    return { ...listed, [pack]: listed[pack]?.map((title) => title.replace(END, end)) ?? [] };
  };
  api.apiURL = (route) => apiURL.call(api, route.replace(end, END));
}
