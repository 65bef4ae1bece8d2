// Keeps the swarm's state from the server's messages: `everything` first, then `changes`.

import { short } from "./format.js";

const EVENTS = 300;

export const swarm = {
  facts: {}, totals: {}, plan: {}, goal: {}, problems: [], lost: [], leaders: [], peers: new Map(), links: new Map(), events: [],
  timeline: { begin: null, width_s: 1, series: {} }, now: 0, row: [], link_row: [], leader_row: [], kinds: [], outcomes: [], live_states: [],
};

export function everything(told) {
  swarm.peers.clear();
  swarm.links.clear();
  swarm.events = [];
  swarm.timeline = { begin: null, width_s: 1, series: {} };
  for (const name of ["row", "link_row", "leader_row", "kinds", "outcomes", "live_states"]) swarm[name] = told[name];
  changes(told);
}

export function changes(told) {
  for (const name of ["facts", "totals", "plan", "goal", "problems", "lost", "now", "uncounted"]) swarm[name] = told[name];
  for (const row of told.peers) {
    const peer = named(swarm.row, row);
    peer.short = short(peer.peer);
    peer.live = swarm.live_states.includes(peer.state);
    swarm.peers.set(peer.number, peer);
  }
  for (const number of told.forgotten ?? []) swarm.peers.delete(number);
  name();
  swarm.leaders = told.leaders.map((row) => named(swarm.leader_row, row));
  for (const row of told.links) {
    const link = named(swarm.link_row, row);
    const key = `${link.low}-${link.high}`;
    swarm.links.delete(key); // so that the link becomes the newest in the map's order
    swarm.links.set(key, link);
  }
  for (const key of [...swarm.links.keys()].slice(0, Math.max(0, swarm.links.size - 1000))) swarm.links.delete(key);
  const newest = swarm.events.at(-1)?.[0] ?? 0;
  swarm.events = [...swarm.events, ...told.events.filter((event) => event[0] > newest)].slice(-EVENTS);
  grow(told.timeline);
}

// Names each peer: by the name that its user chose. The end of its id follows if another peer has that name or id, or if
// the name may look like another one: it is not plain ASCII, or differs from another one only by case. No name has square
// brackets (core/plain_text.py), so none looks like another name with an id.
// Marks the peers whose journals the page reads, so that a reader finds the machine's own peers among the others.
function name() {
  const counts = new Map(), elsewhere = peers().some((peer) => !peer.own);
  for (const peer of swarm.peers.values())
    for (const one of [peer.name, peer.short]) counts.set(one.toLowerCase(), (counts.get(one.toLowerCase()) ?? 0) + 1);
  for (const peer of swarm.peers.values()) {
    const alone = /^[!-~]+( [!-~]+)*$/.test(peer.name) && counts.get(peer.name.toLowerCase()) === 1;
    peer.label = !peer.name ? peer.short : alone ? peer.name : `${peer.name} [${peer.short}]`;
    peer.here = peer.own && elsewhere && !swarm.facts.past;
  }
}

// Replaces the buckets from `first` on; earlier buckets stay. `first` is 0 if the grid has become coarser.
function grow(told) {
  const known = swarm.timeline;
  const series = {};
  for (const [name, values] of Object.entries(told.series)) {
    const before = told.first ? known.series[name] ?? [] : [];
    series[name] = [...before.slice(0, told.first), ...Array(Math.max(0, told.first - before.length)).fill(null), ...values];
  }
  swarm.timeline = { begin: told.begin, width_s: told.width_s, series };
}

function named(names, values) {
  return Object.fromEntries(names.map((name, at) => [name, values[at]]));
}

export const peers = () => [...swarm.peers.values()];
export const label = (number) => swarm.peers.get(number)?.label ?? "?";
