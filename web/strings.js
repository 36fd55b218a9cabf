// Texts of the front end, in the language of ComfyUI's settings. English texts are the keys.
import japanese from "./languages/ja.js";
import taiwanese from "./languages/zh-TW.js";
import chinese from "./languages/zh.js";

const LANGUAGES = { zh: chinese, "zh-TW": taiwanese, ja: japanese };
const ONE = /\b1 (region|size|capture|time|step|attention kernel|image|channel|block|OneDiff node)s\b/g; // as in compile_cache/texts.py

// A function that translates: t("and {count} more", {count: 3}). language: tells the language of the settings.
export function translator(language) {
  const table = () => LANGUAGES[language()];
  const t = (text, values = {}) => {
    const found = table()?.[text];
    const filled = (found ?? text).replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
    return found === undefined ? filled.replace(ONE, "1 $1") : filled;
  };
  t.isEnglish = () => table() === undefined;
  return t;
}
