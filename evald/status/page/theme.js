// Light or dark: as the system has it, until somebody chooses.

const KEY = "evald-theme";
const WORDS = { auto: "system colours", light: "light", dark: "dark" };

export function themeName() {
  try {
    return localStorage.getItem(KEY) ?? "auto";
  } catch {
    return "auto"; // (a browser may forbid it, in a file)
  }
}

export function themeWords() {
  return WORDS[themeName()] ?? WORDS.auto;
}

export function applyTheme() {
  const name = themeName();
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
}

export function nextTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const order = dark ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
  const next = order[(order.indexOf(themeName()) + 1) % order.length];
  try {
    localStorage.setItem(KEY, next);
  } catch {
    document.documentElement.setAttribute("data-theme", next);
    return;
  }
  applyTheme();
}
