// Sentences of the server in the language of the settings. It sends each in English and in words: a template with its
// values, or parts in a row, as compile_cache/texts.py makes them. So a language needs the templates only.

// What a run of each role does.
export const ROLES = { unet: "sampling", vae_decode: "decoding", vae_encode: "encoding", controlnet: "ControlNet" };

export function inWords(words, t) {
  if (words === null || typeof words !== "object") return String(words ?? "");
  if (words.parts) return words.parts.map((part) => inWords(part, t)).join(t(words.join));
  const values = Object.entries(words.values ?? {}).map(([name, value]) => [name, inWords(value, t)]);
  return t(words.text, Object.fromEntries(values));
}

export function say(english, words, t) {
  return words === undefined || t.isEnglish() ? String(english ?? "") : inWords(words, t);
}
