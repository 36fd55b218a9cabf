// Texts of the front end, in the language of ComfyUI's settings. English texts are the keys.
import japanese from "./languages/ja.js";
import taiwanese from "./languages/zh-TW.js";
import chinese from "./languages/zh.js";

const LANGUAGES = { zh: chinese, "zh-TW": taiwanese, ja: japanese };
const NOUNS = "region|size|capture|time|step|attention kernel|image|channel|block|OneDiff node|call|eager call|replay";
const ONE = new RegExp(`(?<![\\d.])1 (${NOUNS}|region compile|region load)s\\b`, "g"); // as in compile_cache/texts.py

const PLACE = /\{(\w+)\}/g;
const LEAST = 20; // characters of a template without its values: a shorter one would fit any sentence

const fixedPart = (template) => template.replace(PLACE, "");

// The values of a template with which it is the sentence, by name; null if it is another sentence.
function valuesOf(template, sentence) {
  const fixed = template.split(/\{\w+\}/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const found = sentence.match(new RegExp(`^${fixed.join("(.+)")}$`));
  return found && Object.fromEntries([...template.matchAll(PLACE)].map(([, name], index) => [name, found[index + 1]]));
}

// A function that translates: t("and {count} more", {count: 3}). language: tells the language of the settings.
export function translator(language) {
  const table = () => LANGUAGES[language()];
  const t = (text, values = {}) => {
    const found = table()?.[text];
    const filled = (found ?? text).replace(PLACE, (whole, name) => (name in values ? values[name] : whole));
    return found === undefined ? filled.replace(ONE, "1 $1") : filled;
  };
  t.isEnglish = () => table() === undefined;
  // A sentence that came without words, as errors do: itself, or else the longest template that fits, with its values.
  const fitted = (sentence) => {
    if (sentence.includes(" ") && table()?.[sentence]) return t(sentence); // names of choices stay
    const long = Object.keys(table() ?? {}).filter((key) => fixedPart(key).length >= LEAST && valuesOf(key, sentence));
    const [key] = long.sort((one, other) => fixedPart(other).length - fixedPart(one).length);
    if (key === undefined) return sentence;
    return t(key, Object.fromEntries(Object.entries(valuesOf(key, sentence)).map(([name, value]) => [name, fitted(value)])));
  };
  // An error in this language, and below it in English, for people who search for it.
  t.error = (english) => [...new Set([fitted(english), english])].join("\n");
  return t;
}
