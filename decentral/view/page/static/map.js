// The swarm as a map: regions, peers, the layers that they hold, links, and exchanges as they happen.
//
// A peer's place depends on its region and its number only, so that few peers move when others come and go. A large
// swarm's map has the links that were used lately, a small swarm's map all links, with their rates and delays.

import { colorOf } from "./charts.js";
import { $, color, fill, make } from "./dom.js";
import { delay, large, number, rate } from "./format.js";
import { lost } from "./lost.js";
import { choose, view } from "./selection.js";
import { peers, swarm } from "./store.js";

const FEW = 24; // a map of at most this many peers names each peer and draws all links
const REGIONS = 24; // most regions; further ones, the smallest, share one place: peers choose their regions' names
const MORE_ROOM = 56; // a second line below a name needs a region of this radius, in pixels
const WRITTEN = 8; // a map of at most this many links has each link's figures
const USED_S = 6; // an exchange is shown for this time
const GONE_S = 60; // a peer that is gone is shown for this time, a lost one until it is acknowledged
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");

const state = { spots: new Map(), seen: new Map(), moving: false, hover: null };

export function wire() {
  const canvas = $("map");
  new ResizeObserver(draw).observe(canvas.parentElement);
  canvas.addEventListener("mousemove", (event) => point(at(event)));
  canvas.addEventListener("mouseleave", () => point(null));
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (found !== null) choose(found);
  });
}

export function draw() {
  const all = peers(), past = !all.some((peer) => peer.live), missed = new Set(lost());
  const shown = all.filter((peer) => past || peer.live || missed.has(peer) || (peer.state !== "left" && swarm.now - peer.since < GONE_S));
  place(shown);
  paint();
  explain(shown);
  if (!state.moving && !STILL.matches && state.spots.size <= FEW) {
    state.moving = true;
    requestAnimationFrame(move);
  }
}

// Moves the dots of exchanges between updates, while the page is visible.
function move() {
  const active = !document.hidden && state.spots.size <= FEW && [...swarm.links.values()].some((link) => age(link) < USED_S);
  state.moving = active;
  if (!active) return;
  paint();
  setTimeout(() => requestAnimationFrame(move), 50);
}

// Returns the seconds since a link was used, by the page's clock: the swarm's time jumps from update to update.
function age(link) {
  const key = `${link.low}-${link.high}`;
  const seen = state.seen.get(key);
  if (!seen || seen.used_at !== link.used_at) {
    const old = swarm.now - link.used_at;
    state.seen.set(key, { used_at: link.used_at, at: performance.now() - 1000 * Math.min(old, 60) });
    if (state.seen.size > 3000) state.seen.clear();
    return old;
  }
  return (performance.now() - seen.at) / 1000;
}

function place(shown) {
  const canvas = $("map");
  const [width, height] = [canvas.parentElement.clientWidth, canvas.parentElement.clientHeight];
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const regions = largest(Map.groupBy ? Map.groupBy(shown, (peer) => peer.region) : grouped(shown));
  const names = [...regions.keys()].sort();
  state.regions = [];
  state.spots = new Map();
  const most = Math.max(1, ...shown.map((peer) => peer.tokens_per_s));
  const columns = Math.ceil(Math.sqrt((names.length * width) / height));
  const rows = Math.ceil(names.length / Math.max(1, columns));
  names.forEach((name, index) => {
    const across = index < columns * (rows - 1) ? columns : names.length - columns * (rows - 1);
    const cell = { w: width / across, h: height / rows };
    const center = { x: ((index % columns) + 0.5) * cell.w, y: (Math.floor(index / columns) + 0.5) * cell.h };
    const members = regions.get(name).sort((a, b) => a.number - b.number);
    const room = Math.max(2, Math.min(cell.w, cell.h) / 2 - (names.length > 1 ? 16 : 10)); // a canvas draws no negative radius
    state.regions.push({ name: `${name || "no region named"} (${members.length})`, most: cell.w - 6, ...center, wide: room * stretched(cell), radius: room });
    members.forEach((peer, position) => state.spots.set(peer.number, { peer, room, wide: members.length === 1 ? cell.w : cell.w / 2, ...spot(center, room, cell, position, members.length), r: size(peer, most, members.length, room) }));
  });
}

// Returns a peer's place in its region: on a ring if there are few, else on a sunflower's even spiral.
function spot(center, room, cell, position, count) {
  if (count === 1) return center;
  const [stretch, ring] = [stretched(cell), count <= FEW];
  const angle = ring ? (2 * Math.PI * position) / count - Math.PI / (count === 2 ? 1 : 2) : position * 2.399963;
  const far = ring ? room * 0.68 : room * 0.92 * Math.sqrt((position + 0.5) / count);
  return { x: center.x + far * Math.cos(angle) * stretch, y: center.y + far * Math.sin(angle) };
}

const stretched = (cell) => Math.max(1, Math.min(1.5, cell.w / cell.h));

function size(peer, most, count, room) {
  if (count > FEW) return Math.max(1.6, Math.min(7, (0.62 * room) / Math.sqrt(count)));
  return 7 + 9 * Math.sqrt(peer.tokens_per_s / most);
}

function largest(regions) {
  if (regions.size <= REGIONS) return regions;
  const ordered = [...regions].sort(([a, some], [b, others]) => others.length - some.length || (a < b ? -1 : 1));
  const rest = ordered.slice(REGIONS - 1);
  return new Map([...ordered.slice(0, REGIONS - 1), [`${rest.length} other regions`, rest.flatMap(([, members]) => members)]]);
}

function grouped(shown) {
  const found = new Map();
  for (const peer of shown) found.set(peer.region, [...(found.get(peer.region) ?? []), peer]);
  return found;
}

function paint() {
  const canvas = $("map"), pen = canvas.getContext("2d"), scale = window.devicePixelRatio || 1;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const colors = Object.fromEntries(["ink", "soft", "line", "faint", "card", "training", "solo", "bad", "gone", "done", "failed", "focus"].map((name) => [name, color(name)]));
  const few = state.spots.size <= FEW;
  if (state.regions.length > 1) regions(pen, colors);
  const links = drawn(few);
  for (const link of links) line(pen, colors, link, few);
  if (few && links.length <= WRITTEN) figures(pen, colors, links);
  for (const one of state.spots.values()) disc(pen, colors, one, few);
}

function regions(pen, colors) {
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "center";
  for (const region of state.regions) {
    pen.beginPath();
    pen.ellipse(region.x, region.y, region.wide * 1.04, region.radius * 1.04, 0, 0, 2 * Math.PI);
    pen.fillStyle = colors.faint;
    pen.fill();
    pen.fillStyle = colors.soft;
    pen.fillText(fitting(pen, region.name, region.most), region.x, region.y + region.radius + 14);
  }
}

function drawn(few) {
  const chosen = view.chosen ?? state.hover;
  return [...swarm.links.values()].filter((link) => {
    if (!state.spots.has(link.low) || !state.spots.has(link.high)) return false;
    return few || link.low === chosen || link.high === chosen || age(link) < USED_S;
  });
}

function line(pen, colors, link, few) {
  const [a, b] = [state.spots.get(link.low), state.spots.get(link.high)];
  const chosen = [view.chosen, state.hover].some((one) => one !== null && (one === link.low || one === link.high));
  const since = age(link), fresh = Math.max(0, 1 - since / USED_S);
  const measured = Math.max(link.to_low, link.to_high);
  pen.beginPath();
  pen.moveTo(a.x, a.y);
  pen.lineTo(b.x, b.y);
  pen.lineWidth = few ? 1 + Math.min(4, Math.max(0, Math.log10(measured * 8 + 1) - 5)) : 1;
  pen.strokeStyle = link.outcome === "failed" && fresh ? colors.failed : chosen ? colors.focus : few ? colors.line : colors.done;
  pen.globalAlpha = few || chosen ? 1 : 0.05 + 0.3 * fresh;
  pen.stroke();
  pen.globalAlpha = 1;
  if (!few || !fresh || STILL.matches) return;
  const along = (since * 0.8) % 1;
  for (const part of [along, 1 - along]) {
    pen.beginPath();
    pen.arc(a.x + (b.x - a.x) * part, a.y + (b.y - a.y) * part, 3, 0, 2 * Math.PI);
    pen.fillStyle = link.outcome === "failed" ? colors.failed : colors.done;
    pen.globalAlpha = fresh;
    pen.fill();
    pen.globalAlpha = 1;
  }
}

// Writes each link's figures where they hide neither a peer nor other figures; without such a place, writes none.
function figures(pen, colors, links) {
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  const taken = [...state.spots.values()].map(({ peer, x, y, r }) => [x - r - 18, y - r, x + r + 18, y + r + (peer.here || !peer.live ? 30 : 18)]);
  if (state.regions.length > 1) for (const { x, y, radius, most } of state.regions) taken.push([x - most / 3, y + radius + 2, x + most / 3, y + radius + 18]);
  for (const link of links) {
    const [a, b] = [state.spots.get(link.low), state.spots.get(link.high)];
    const best = Math.max(link.to_low, link.to_high);
    const words = [best ? rate(best) : "", link.latency_s ? delay(link.latency_s) : ""].filter(Boolean).join(", ");
    const half = pen.measureText(words).width / 2 + 3;
    for (const part of words ? [0.4, 0.6, 0.5, 0.32, 0.68, 0.25, 0.75] : []) {
      const [x, y] = [a.x + (b.x - a.x) * part, a.y + (b.y - a.y) * part];
      const box = [x - half, y - 9, x + half, y + 8];
      if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      pen.fillStyle = colors.card;
      pen.globalAlpha = 0.85;
      pen.fillRect(box[0], box[1], 2 * half, 17);
      pen.globalAlpha = 1;
      pen.fillStyle = colors.soft;
      pen.fillText(words, x, y + 4);
      break;
    }
  }
}

function disc(pen, colors, { peer, x, y, r, room, wide }, few) {
  const single = swarm.timeline.series[`loss ${peer.number}`] !== undefined;
  pen.beginPath();
  pen.arc(x, y, r, 0, 2 * Math.PI);
  pen.fillStyle = peer.state === "training" ? (single ? colorOf(peer.number) : colors.training) : peer.state === "joining" ? colors.solo : colors.card;
  pen.fill();
  if (!peer.live) cross(pen, colors, x, y, r);
  if (few && swarm.facts.layers && peer.last - peer.first < swarm.facts.layers && peer.last) layersHeld(pen, colors, peer, x, y, r);
  if (view.chosen === peer.number) {
    pen.beginPath();
    pen.arc(x, y, r + 4, 0, 2 * Math.PI);
    pen.lineWidth = 2;
    pen.strokeStyle = colors.focus;
    pen.stroke();
  }
  if (!few) return;
  pen.font = "600 11px ui-monospace, monospace";
  pen.textAlign = "center";
  pen.fillStyle = peer.live ? colors.ink : colors.bad;
  const most = Math.min(wide, 2 * x, 2 * ($("map").parentElement.clientWidth - x)) - 4;
  pen.fillText(fitting(pen, peer.label, most), x, y + r + 14);
  const more = peer.live ? (peer.here ? "(this machine)" : "") : `(${peer.state})`;
  if (room >= MORE_ROOM) pen.fillText(fitting(pen, more, most), x, y + r + 26);
}

// Returns a text that is cut so that it is at most so many pixels wide.
function fitting(pen, text, most) {
  if (pen.measureText(text).width <= most) return text;
  let cut = text;
  while (cut && pen.measureText(`${cut}…`).width > most) cut = cut.slice(0, -1);
  return `${cut}…`;
}

function cross(pen, colors, x, y, r) {
  pen.lineWidth = 2;
  pen.strokeStyle = colors.bad;
  pen.stroke();
  pen.beginPath();
  for (const side of [1, -1]) {
    pen.moveTo(x - r * 0.5, y - r * 0.5 * side);
    pen.lineTo(x + r * 0.5, y + r * 0.5 * side);
  }
  pen.stroke();
}

// Draws a ring around a peer; its dark part shows which of the layers the peer holds.
function layersHeld(pen, colors, peer, x, y, r) {
  const turn = (layer) => (2 * Math.PI * layer) / swarm.facts.layers - Math.PI / 2;
  pen.lineWidth = 3;
  pen.strokeStyle = colors.faint;
  pen.beginPath();
  pen.arc(x, y, r + 5, 0, 2 * Math.PI);
  pen.stroke();
  pen.strokeStyle = colors.ink;
  pen.beginPath();
  pen.arc(x, y, r + 5, turn(peer.first), turn(peer.last));
  pen.stroke();
}

function at(event) {
  const box = $("map").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  let [best, found] = [14, null];
  for (const [peer, one] of state.spots) {
    const far = Math.hypot(one.x - x, one.y - y) - one.r;
    if (far < best) [best, found] = [far, peer];
  }
  return found;
}

function point(peer) {
  if (peer === state.hover) return;
  state.hover = peer;
  const tip = $("tip"), one = state.spots.get(peer);
  tip.hidden = !one;
  $("map").style.cursor = one ? "pointer" : "";
  if (one) {
    const known = one.peer;
    tip.textContent = [`${known.label}: ${known.state}`, known.here ? "on this machine" : "", [known.device, known.region].filter(Boolean).join(", "), `loss ${number(known.loss)}, ${large(known.tokens_per_s)} tokens/s`, known.last ? `layers ${known.first} to ${known.last - 1}` : ""].filter(Boolean).join("\n");
    tip.style.left = `${Math.min(one.x + 12, $("map").clientWidth - 180)}px`;
    tip.style.top = `${Math.max(0, one.y - 60)}px`;
  }
  paint();
}

function explain(shown) {
  const few = shown.length <= FEW;
  const regions = new Set(shown.map((peer) => peer.region)).size;
  const active = [...swarm.links.values()].filter((link) => swarm.now - link.used_at < USED_S).length;
  $("map-note").textContent = `${shown.length} peers${regions > 1 ? ` in ${regions} regions` : ""}; ${active} pairs exchanged in the last ${USED_S} s`;
  const dot = (name, words) => make("li", {}, make("i", { color: color(name) }), words);
  fill($("map-legend"), ...(few ? [] : [dot("training", "training")]), dot("solo", "joining"), dot("bad", "silent or ended"), dot("done", few ? "exchange" : "pair that exchanged just now"),
    few ? make("li", {}, "size: tokens/s; width: measured rate; ring: layers held") : null);
}
