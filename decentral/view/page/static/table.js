// Shows the peers as a table that can be sorted and searched, one page of rows at a time.

import { colorOf } from "./charts.js";
import { $, color, fill, make, split } from "./dom.js";
import { age, bytes, large, number, percent } from "./format.js";
import { choose, view } from "./selection.js";
import { peers, swarm } from "./store.js";

const ROWS = 20;
const HERE = "this machine";
const state = { sort: "number", down: false, from: 0, text: "" };

// Each column: its title, the key to sort by, a function that returns a cell's content, and a style class.
const COLUMNS = [
  ["peer", "number", (peer) => name(peer), "left"],
  ["state", "state", (peer) => peer.state, "left"],
  ["device, region", "device", (peer) => make("span", { class: "place", title: place(peer) }, place(peer)), "left wide-only"],
  ["layers", "first", (peer) => (peer.last ? `${peer.first}–${peer.last - 1}` : "–"), "widest-only"],
  ["loss", "loss", (peer) => number(peer.loss)],
  ["held-out", "held_out", (peer) => number(peer.held_out), "wider-only"],
  ["tokens/s", "tokens_per_s", (peer) => large(peer.tokens_per_s || null)],
  ["MFU", "mfu", (peer) => percent(peer.mfu), "widest-only"],
  ["tokens", "tokens", (peer) => large(peer.tokens || null), "wide-only"],
  ["time", "training", (peer) => (peer.shares ? split(times(peer)) : "–"), "left"],
  ["done/solo/failed", "failed", (peer) => peer.exchanges.join("/")],
  ["sent", "sent_bytes", (peer) => bytes(peer.sent_bytes), "wide-only"],
  ["received", "received_bytes", (peer) => bytes(peer.received_bytes), "widest-only"],
  ["heard", "heard", (peer) => (peer.heard ? `${age(swarm.now - peer.heard)} ago` : "–"), "wide-only"],
];
const DERIVED = { training: (peer) => peer.shares?.[0] ?? 2, failed: (peer) => peer.exchanges[2] };

export function wire() {
  $("filter").addEventListener("input", () => {
    [state.text, state.from] = [$("filter").value.trim().toLowerCase(), 0];
    draw();
  });
  $("earlier").addEventListener("click", () => turn(-ROWS));
  $("later").addEventListener("click", () => turn(ROWS));
  const cells = COLUMNS.map(([title, key, , kind]) => {
    const button = make("button", { type: "button", on: () => sortBy(key) }, title);
    return make("th", { scope: "col", class: kind ?? "", "data-key": key }, button);
  });
  document.querySelector(".peers thead").append(make("tr", {}, ...cells));
}

export function draw() {
  const found = sorted(peers().filter(matches));
  state.from = Math.min(state.from, Math.max(0, Math.floor((found.length - 1) / ROWS) * ROWS));
  const shown = found.slice(state.from, state.from + ROWS);
  const focused = document.activeElement?.dataset?.number;
  fill(document.querySelector(".peers tbody"), ...shown.map(row));
  if (focused) document.querySelector(`.peers [data-number="${CSS.escape(focused)}"]`)?.focus();
  for (const cell of document.querySelectorAll(".peers th")) {
    const sorting = cell.dataset.key === state.sort;
    if (sorting) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  const { totals } = swarm;
  $("peers-note").textContent = `${totals.live ?? 0} live${totals.gone ? `, ${totals.gone} gone` : ""}`;
  $("page").textContent = found.length ? `${state.from + 1} to ${state.from + shown.length} of ${found.length}` : "none";
  $("earlier").disabled = state.from === 0;
  $("later").disabled = state.from + ROWS >= found.length;
  document.querySelector(".pager").hidden = found.length <= ROWS;
}

export const times = (peer) => swarm.kinds.map((kind, at) => [kind, peer.shares[at], color(kind)]);
export const here = (peer) => (peer.here ? make("span", { class: "here", title: "this page reads this peer's journal on the machine that serves the page" }, HERE) : null);
export const place = (peer) => [peer.device, peer.region, peer.throttle > 1 ? `${peer.throttle}x throttled` : ""].filter(Boolean).join(", ");

function row(peer) {
  const kind = [peer.live ? "" : "gone", view.chosen === peer.number ? "chosen" : ""].join(" ").trim();
  return make("tr", { class: kind }, ...COLUMNS.map(([, , content, style]) => make("td", { class: style ?? "" }, content(peer))));
}

function name(peer) {
  const button = make("button", { type: "button", class: "peer", "data-number": peer.number, title: peer.peer, on: () => choose(peer.number) }, peer.label);
  const dot = make("span", { class: `dot ${peer.state}`, title: peer.state });
  if (peer.state === "training" && swarm.timeline.series[`loss ${peer.number}`]) dot.style.background = colorOf(peer.number);
  return make("span", {}, dot, button, here(peer));
}

function matches(peer) {
  return !state.text || [peer.peer, peer.name, peer.device, peer.region, peer.state, peer.why, peer.here ? HERE : ""].join(" ").toLowerCase().includes(state.text);
}

function sorted(found) {
  const value = DERIVED[state.sort] ?? ((peer) => peer[state.sort] ?? -1);
  const order = (one, other) => {
    const [a, b] = [value(one), value(other)];
    return (a < b ? -1 : a > b ? 1 : one.number - other.number) * (state.down ? -1 : 1);
  };
  return found.sort(order);
}

function sortBy(key) {
  state.down = state.sort === key ? !state.down : !["number", "state", "device", "first", "training"].includes(key);
  [state.sort, state.from] = [key, 0];
  draw();
}

function turn(by) {
  state.from = Math.max(0, state.from + by);
  draw();
}
