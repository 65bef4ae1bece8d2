// Makes all elements of the page, so that texts which peers chose become text, never markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "color") element.style.background = value;
    else if (name === "on") element.addEventListener("click", value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

// Makes a list of names and values; entries without a known value are left out.
export function pairs(entries) {
  return make("dl", { class: "pairs" }, ...entries.filter(([, value]) => value !== "–").flatMap(([name, value, color]) => [
    make("dt", {}, color ? make("i", { color }) : null, name),
    make("dd", {}, value),
  ]));
}

// Makes a bar of shares. `parts`: [name, share, colour]; the shares add up to at most 1.
export function split(parts, wide = false) {
  const words = parts.filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${(share * 100).toFixed(0)}%`);
  const bar = make("div", { class: wide ? "split wide" : "split", role: "img", "aria-label": words.join(", "), title: words.join(", ") });
  for (const [, share, color] of parts) {
    const piece = make("span", { color });
    piece.style.width = `${share * 100}%`;
    bar.append(piece);
  }
  return bar;
}

// The style sheet's colours, by name, kept because to compute a style while the page changes is slow.
const colors = new Map();

export function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colors.get(name);
}

export const forgetColors = () => colors.clear();
