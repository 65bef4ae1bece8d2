// The figures, what is wrong, what happened, and the cards about exchanges, time, layers and the plan.

import { $, color, fill, make, pairs, split } from "./dom.js";
import { bytes, clock, delay, large, number, percent, rate, span } from "./format.js";
import { choose, view } from "./selection.js";
import { label, peers, swarm } from "./store.js";
import { place, times } from "./table.js";

const SIGNS = { bad: "Wrong", warning: "Warning" };
const EVENTS_SHOWN = 100;
let latest = -1; // number of the newest event on the page

export function draw() {
  heading();
  tiles();
  problems();
  events();
  chosen();
  time();
  exchanges();
  layers();
  plan();
  $("note").textContent = swarm.facts.note ?? "";
}

function heading() {
  const { facts, totals, timeline } = swarm;
  $("run").textContent = facts.run ?? "decentral";
  document.title = `${facts.run ?? "decentral"}: loss ${number(totals.loss)}`;
  const model = facts.parameters ? `${large(facts.parameters)} parameters in ${facts.layers} layers` : facts.code ? `model ${facts.code}` : "";
  $("facts").textContent = [model, facts.data, facts.algorithm, facts.optimizer].filter(Boolean).join(" · ");
  const lasted = timeline.begin === null ? "" : `, for ${span(swarm.now - timeline.begin)}`;
  const wrong = swarm.problems.length ? `${swarm.problems.length} ${swarm.problems.length === 1 ? "thing is" : "things are"} wrong.` : "Nothing is wrong.";
  const doing = facts.over || facts.past ? `This run is over; loss ${number(totals.loss)}, held-out ${number(totals.held_out)}.` : totals.training ? `${totals.training} ${totals.training === 1 ? "peer trains" : "peers train"}${lasted}; loss ${number(totals.loss)}, ${trend(totals.trend)}.` : "No peer trains.";
  const words = `${doing} ${wrong}`;
  if ($("verdict").textContent !== words) $("verdict").textContent = words;
}

// Returns how long ago a loss was measured, since an old loss beside fresh figures misleads.
function ago(measured) {
  return measured ? `, ${span(swarm.now - measured)} ago` : "";
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
    ["Held-out loss", number(totals.held_out), `latest of any peer${ago(totals.evaluated)}`],
    ["Tokens", large(totals.tokens), `${large(totals.tokens_per_s)}/s`],
    ["Peers", `${totals.training ?? 0}`, [totals.live - totals.training ? `${totals.live - totals.training} joining` : "training", totals.gone ? `${totals.gone} gone` : ""].filter(Boolean).join(", ")],
    ["Time in training", percent(training), "mean of the training threads"],
    ["Exchanges done", percent(merged), `${large(exchanges[0])} of ${large(exchanges[0] + exchanges[1] + exchanges[2])}`],
    ["Sent", bytes(totals.sent_bytes), `received ${bytes(totals.received_bytes)}`],
  ];
  fill($("tiles"), ...entries.map(([name, value, more, state]) => make("div", { class: "tile" },
    make("div", { class: "label" }, name), make("div", { class: "value" }, value), make("div", { class: "more", "data-level": state ?? "" }, more))));
}

function problems() {
  $("problems").hidden = swarm.problems.length === 0;
  fill($("problems"), make("ul", {}, ...swarm.problems.map(([level, peer, words]) => make("li", { "data-level": level },
    make("span", { class: "sign" }, SIGNS[level]), make("span", {}, peer < 0 ? words : `${label(peer)} ${words}`)))));
}

function events() {
  const newest = swarm.events.at(-1)?.[0] ?? -1;
  if (newest === latest) return;
  latest = newest;
  const begin = swarm.timeline.begin ?? 0;
  fill($("events"), ...swarm.events.slice(-EVENTS_SHOWN).reverse().map(([, t, peer, level, words]) => make("li", {},
    make("span", { class: `dot ${level}` }), make("time", {}, clock(t - begin)),
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
    make("div", { class: "head" }, make("h2", { id: "one-title" }, `Peer ${peer.short}`), make("button", { type: "button", on: () => choose(null) }, "Close")),
    make("p", { class: "id" }, peer.peer),
    make("div", { class: "columns" },
      pairs([["state", [peer.state, peer.why].filter(Boolean).join(": ")], ["in this state for", span(swarm.now - peer.since)], ["device", place(peer) || "–"], ["software", peer.software || "–"],
        ["memory for the model", peer.memory_bytes ? bytes(peer.memory_bytes) : "–"], ["layers", peer.last ? `${peer.first} to ${peer.last - 1}` : "–"]]),
      pairs([["step", large(peer.step)], ["tokens", large(peer.tokens)], ["tokens/s", large(peer.tokens_per_s)], ["loss", number(peer.loss)], ["held-out loss", `${number(peer.held_out)}${ago(peer.evaluated)}`], ["window", peer.window_s ? `${peer.window_s} s` : "–"]]),
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
