// The figures, what is wrong, what happened, and the cards about exchanges, time, layers and the plan.

import { $, color, fill, make, pairs, split } from "./dom.js";
import { age, bytes, clock, delay, large, number, percent, rate, span, time as clockTime } from "./format.js";
import { acknowledge, lost, lostWords } from "./lost.js";
import { choose, view } from "./selection.js";
import { label, peers, swarm } from "./store.js";
import { here, place, times } from "./table.js";

const SIGNS = { bad: "Wrong", warning: "Look at" };
const LOST_SHOWN = 6; // so many lost peers are listed one by one
const EVENTS_SHOWN = 100;
let latest = -1; // number of the newest event on the page
let listed = null; // the problems on the page, as text

export function draw() {
  title();
  heading();
  tiles();
  problems();
  events();
  chosen();
  time();
  exchanges();
  layers();
  plan();
  leaders();
  $("note").textContent = swarm.facts.note ?? "";
}

// Writes the tab's title, which people see while the page is hidden.
export function title() {
  const gone = lostWords(lost().length);
  document.title = `${gone ? `(${gone}) ` : ""}${swarm.facts.run ?? "decentral"}: loss ${number(swarm.totals.loss)}`;
}

function heading() {
  const { facts, totals, timeline } = swarm;
  $("run").textContent = facts.run ?? "decentral";
  const gone = lost().length;
  const model = facts.parameters ? `${large(facts.parameters)} parameters in ${facts.layers} layers` : facts.code ? `model ${facts.code}` : "";
  $("facts").textContent = [model, facts.data, facts.algorithm, facts.optimizer].filter(Boolean).join(" · ");
  const lasted = timeline.begin === null ? "" : `, for ${span(swarm.now - timeline.begin)}`;
  const wrong = swarm.problems.filter(([level]) => level === "bad").length + (gone ? 1 : 0);
  const rest = swarm.problems.filter(([level]) => level === "warning").length;
  const said = wrong ? `${wrong} ${wrong === 1 ? "thing is" : "things are"} wrong` : "Nothing is wrong";
  const doing = facts.over || facts.past ? `This run is over; loss ${number(totals.loss)}, held-out ${number(totals.held_out)}.` : totals.training ? `${totals.training} ${totals.training === 1 ? "peer trains" : "peers train"}${lasted}; loss ${number(totals.loss)}, ${trend(totals.trend)}.` : "No peer trains.";
  const words = `${doing} ${said}${rest ? `, ${rest} to look at` : ""}.`;
  if ($("verdict").textContent !== words) $("verdict").textContent = words;
}

// Returns the clock time of an event; in a simulation, whose clock is virtual, the time since the run began.
function at(t) {
  return swarm.facts.virtual ? clock(t - (swarm.timeline.begin ?? 0)) : clockTime(t, swarm.now);
}

// Returns how long ago a loss was measured, since an old loss beside fresh figures misleads.
function ago(measured) {
  return measured ? `, ${age(swarm.now - measured)} ago` : "";
}

function trend(change) {
  if (change === null || change === undefined) return "too early for a trend";
  if (Math.abs(change) < 0.005) return "steady";
  return `${change < 0 ? "falling" : "rising"} ${percent(Math.abs(change), 1)} a minute`;
}

function tiles() {
  const { totals } = swarm;
  const exchanges = totals.exchanges ?? [0, 0, 0];
  const merged = exchanges[0] / Math.max(1, exchanges[0] + exchanges[1] + exchanges[2]);
  const training = totals.shares?.length ? totals.shares[swarm.kinds.indexOf("training")] : null;
  const level = totals.trend > 0.02 ? "bad" : totals.trend < -0.005 ? "good" : "";
  const entries = [
    ["Loss", number(totals.loss), trend(totals.trend), level],
    ["Held-out loss", number(totals.held_out), totals.evaluated ? `${age(swarm.now - totals.evaluated)} ago, at ${at(totals.evaluated)}` : "latest of any peer"],
    ["Tokens", large(totals.tokens), `${large(totals.tokens_per_s)}/s`],
    ["Peers", `${totals.training ?? 0}`, [totals.live - totals.training ? `${totals.live - totals.training} joining` : "training", totals.gone ? `${totals.gone} gone` : ""].filter(Boolean).join(", ")],
    ...windows(),
    ["Time in training", percent(training), "mean of the training threads"],
    ["Exchanges done", percent(merged), `${large(exchanges[0])} of ${large(exchanges[0] + exchanges[1] + exchanges[2])}`],
    ["Sent", bytes(totals.sent_bytes), `received ${bytes(totals.received_bytes)}`],
    ...checkpoints(),
    ...goal(),
  ];
  fill($("tiles"), ...entries.map(([name, value, more, state]) => make("div", { class: "tile" },
    make("div", { class: "label" }, name), make("div", { class: "value" }, value), make("div", { class: "more", "data-level": state ?? "" }, more))));
}

// Windows of gossip and what bounds them, of the peers that train.
function windows() {
  const known = peers().filter((peer) => peer.state === "training" && peer.window_s);
  if (!known.length) return [];
  const lengths = known.map((peer) => peer.window_s).sort((a, b) => a - b);
  const counts = {};
  for (const peer of known) if (peer.bound) counts[peer.bound] = (counts[peer.bound] ?? 0) + 1;
  const most = Object.keys(counts).sort((a, b) => counts[b] - counts[a])[0];
  return [["Windows", `${lengths[Math.floor(lengths.length / 2)]} s`, most === "nothing" ? "as short as asked" : most ? `bound by ${most} (${counts[most]} of ${known.length})` : "what bounds them: unknown"]];
}

const bound = (by) => (by && by !== "nothing" ? `, bound by ${by}` : "");

function checkpoints() {
  const known = peers().filter((peer) => peer.live && peer.saved).map((peer) => peer.saved);
  if (!known.length) return [];
  const [oldest, newest] = [Math.min(...known), Math.max(...known)];
  return [["Checkpoint age", age(swarm.now - newest), known.length > 1 ? `the oldest of ${known.length}: ${age(swarm.now - oldest)}` : `written at ${at(newest)}`]];
}

function goal() {
  const { text, share, left_s: left } = swarm.goal ?? {};
  if (!text) return [];
  return [["Goal", percent(share), share >= 1 ? `${text}, reached` : left < 0 ? text : `${text}, ${age(left)} left`]];
}

// Says what became of a lost peer, in whole minutes, so that the words change rarely.
function fate(peer) {
  const minutes = Math.floor((swarm.now - peer.heard) / 60);
  return `${peer.label} ${peer.state === "ended" ? "has ended" : "is silent"} (${peer.why}); last heard at ${at(peer.heard)}, ${minutes ? `${age(60 * minutes)} ago` : "just now"}`;
}

function problems() {
  const gone = lost();
  const one = gone.length > 1 ? "" : `: ${gone.map(fate).join()}`;
  const shown = gone.length > 1 && gone.length <= LOST_SHOWN ? gone : [];
  const entries = [
    ...(gone.length ? [["bad", `${lostWords(gone.length)}${one}`, gone]] : []),
    ...shown.map((peer) => ["bad", fate(peer), [peer]]),
    ...swarm.problems.map(([level, peer, words]) => [level, peer < 0 ? words : `${label(peer)} ${words}`, []]),
  ];
  const text = JSON.stringify(entries.map(([level, words]) => [level, words]));
  if (text === listed) return; // a button that is replaced while it is pressed would miss the click
  listed = text;
  $("problems").hidden = entries.length === 0;
  fill($("problems"), make("ul", {}, ...entries.map(([level, words, peers]) => make("li", { "data-level": level },
    make("span", { class: "sign" }, SIGNS[level]), make("span", { class: "words" }, words),
    peers.length ? make("button", { type: "button", on: () => { acknowledge(peers); view.onChange(); } }, peers === gone && gone.length > 1 ? "Acknowledge all" : "Acknowledge") : null))));
}

function events() {
  const newest = swarm.events.at(-1)?.[0] ?? -1;
  if (newest === latest) return;
  latest = newest;
  fill($("events"), ...swarm.events.slice(-EVENTS_SHOWN).reverse().map(([, t, peer, level, words]) => make("li", {},
    make("span", { class: `dot ${level}` }), make("time", { title: `${clock(t - (swarm.timeline.begin ?? 0))} after the beginning` }, at(t)),
    make("button", { type: "button", class: "peer", on: () => choose(peer) }, label(peer)), words)));
}

function chosen() {
  const peer = swarm.peers.get(view.chosen);
  $("one").hidden = !peer;
  if (!peer) return;
  const links = [...swarm.links.values()].filter((link) => link.low === peer.number || link.high === peer.number).sort((a, b) => b.used_at - a.used_at);
  const beside = links.slice(0, 8).map((link) => {
    const [other, from] = link.low === peer.number ? [link.high, link.to_low] : [link.low, link.to_high];
    return [label(other), `${rate(from)} from it, ${delay(link.latency_s)}, ${link.done} done${link.failed ? `, ${link.failed} failed` : ""}`];
  });
  fill($("one"),
    make("div", { class: "head" }, make("h2", { id: "one-title" }, `Peer ${peer.label}`, here(peer)), make("button", { type: "button", on: () => choose(null) }, "Close")),
    make("p", { class: "id" }, peer.peer),
    make("div", { class: "columns" },
      pairs([["state", [peer.state, peer.why].filter(Boolean).join(": ")], ["in this state since", `${at(peer.since)}, ${span(swarm.now - peer.since)}`], ["last heard", peer.heard ? `${at(peer.heard)}${ago(peer.heard)}` : "–"], ["device", place(peer) || "–"], ["software", peer.software || "–"],
        ["memory for the model", peer.memory_bytes ? bytes(peer.memory_bytes) : "–"], ["layers", peer.last ? `${peer.first} to ${peer.last - 1}` : "–"]]),
      pairs([["step", large(peer.step)], ["tokens", large(peer.tokens)], ["tokens/s", large(peer.tokens_per_s)], ["MFU", percent(peer.mfu)], ["loss", number(peer.loss)], ["held-out loss", `${number(peer.held_out)}${ago(peer.evaluated)}`], ["window", peer.window_s ? `${peer.window_s} s${bound(peer.bound)}` : "–"], ["checkpoint", peer.saved ? `${at(peer.saved)}${ago(peer.saved)}` : "–"]]),
      pairs(peer.shares ? times(peer).map(([kind, share, shade]) => [kind, percent(share, 1), shade]) : [["time", "not known"]]),
      pairs([["exchanges", `${peer.exchanges.join("/")} done/solo/failed`], ...Object.entries(peer.reasons), ["sent", bytes(peer.sent_bytes)], ["received", bytes(peer.received_bytes)], ["up, down", `${rate(peer.up)}, ${rate(peer.down)}`]]),
      beside.length ? pairs(beside) : null));
}

function time() {
  const shares = swarm.totals.shares ?? [];
  if (!shares.length) return fill($("time"), make("p", { class: "note" }, "Not known yet."));
  const parts = swarm.kinds.map((kind, at) => [kind, shares[at], color(kind)]);
  fill($("time"), split(parts, true), pairs(parts.map(([kind, share, shade]) => [kind, percent(share, 1), shade])));
}

function exchanges() {
  const counts = swarm.totals.exchanges ?? [0, 0, 0];
  const all = Math.max(1, counts[0] + counts[1] + counts[2]);
  const parts = swarm.outcomes.map((outcome, at) => [outcome, counts[at] / all, color(outcome)]);
  const reasons = Object.entries(swarm.totals.reasons ?? {}).map(([reason, count]) => [`because ${reason}`, large(count)]);
  fill($("exchanges"), split(parts, true), pairs([...parts.map(([outcome, share, shade], at) => [outcome, `${large(counts[at])} (${percent(share)})`, shade]), ...reasons]));
}

function layers() {
  const holders = Array(swarm.facts.layers || Math.max(0, ...peers().map((peer) => peer.last))).fill(0);
  for (const peer of peers()) if (peer.state === "training") for (let at = peer.first; at < Math.min(peer.last, holders.length); at++) holders[at] += 1;
  if (!holders.length) return fill($("layers"), make("p", { class: "note" }, "Not known yet."));
  const [least, most] = [Math.min(...holders), Math.max(...holders)];
  const words = least === most ? `each layer is held by ${most} ${most === 1 ? "peer" : "peers"}` : `a layer is held by ${least} to ${most} peers`;
  const bars = holders.map((count, at) => {
    const bar = make("div", { class: count ? "" : "none", title: `layer ${at}: ${count}` });
    bar.style.height = `${(100 * count) / Math.max(1, most)}%`;
    return bar;
  });
  fill($("layers"), make("div", { class: "layers", role: "img", "aria-label": words }, ...bars), make("p", { class: "note" }, `${holders.length} layers; ${words}.`));
}

function plan() {
  const { plan: known } = swarm;
  if (!known.digest) return fill($("plan"), make("p", { class: "note" }, "No plan: peers plan only if they hold parts of the model."));
  fill($("plan"), pairs([["expected", `${large(known.cost)} tokens/s`], ["adopted by", label(known.peer)], ["adopted", `${span(swarm.now - known.t)} ago`]]), make("p", { class: "reason" }, known.reason));
}

// Ranks the peers by the work that others measured of them; a click chooses the peer if the page knows it.
function leaders() {
  if (!swarm.leaders.length) return fill($("leaders"), make("p", { class: "note" }, "Not known yet: peers write signed records after their first minute."));
  const known = new Map(peers().map((peer) => [peer.peer, peer]));
  const columns = [["peer", "left"], ["share"], ["", "left wide-only"], ["tokens"], ["hours"], ["served", "wide-only"], ["checks passed", "wide-only"], ["failed"], ["witnesses", "wide-only"], ["claims", "wide-only"]];
  const rows = swarm.leaders.map((one, at) => {
    const peer = known.get(one.peer);
    const name = peer ? make("button", { type: "button", class: "peer", title: one.peer, on: () => choose(peer.number) }, peer.label) : make("span", { title: one.peer }, one.title);
    const bar = split([["share", one.share, color("training")]]);
    const cells = [make("span", {}, `${at + 1}. `, name, peer ? here(peer) : null), percent(one.share, 1), bar, large(one.tokens), number(one.hours, 1), bytes(one.served_bytes), large(one.passed), large(one.failed), one.witnesses, large(one.claimed_tokens)];
    return make("tr", {}, ...cells.map((cell, column) => make("td", { class: columns[column][1] ?? "" }, cell)));
  });
  const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", { scope: "col", class: kind ?? "" }, title)));
  fill($("leaders"), make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
}
