// Small helpers to build elements. Texts are set as text, never as HTML: they may come from another pack or a file.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function seconds(value) {
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  return value < 1 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

export function mebibytes(bytes) {
  if (bytes > 0 && bytes < 2 ** 19) return "< 1 MiB";
  return `${Math.round(bytes / 2 ** 20)} MiB`;
}
