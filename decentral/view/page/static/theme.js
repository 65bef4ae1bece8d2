// Sets the light or dark theme: the system's, until the reader chooses one.

import { $, forgetColors } from "./dom.js";

const KEPT = "decentral-theme";

export function wireTheme(onChange) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const dark = (localStorage.getItem(KEPT) ?? (system.matches ? "dark" : "light")) === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", dark);
    forgetColors();
    onChange();
  };
  $("theme").addEventListener("click", () => {
    localStorage.setItem(KEPT, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    show();
  });
  system.addEventListener("change", show);
  show();
}
