// Keeps which lost peers the reader has acknowledged, in this browser only: the page's server accepts nothing.

import { swarm } from "./store.js";

const KEPT = "decentral-acknowledged";
const MOST_KEPT = 4096; // as many peers as the page shows, about 0.5 MB
const known = read();

// Returns the peers that ended or fell silent without a goodbye, have not come back, and were not acknowledged, the latest first.
export function lost() {
  const gone = swarm.lost.map((number) => swarm.peers.get(number)).filter(Boolean);
  return gone.filter((peer) => known.get(key(peer)) !== peer.heard).sort((a, b) => b.since - a.since);
}

export const lostWords = (count) => (count ? `${count} of ${(swarm.totals.live ?? 0) + count} peers lost` : "");

// A peer that comes back and is lost again has been heard at another time, and is shown again.
export function acknowledge(peers) {
  for (const peer of peers) {
    known.delete(key(peer)); // so that it becomes the newest
    known.set(key(peer), peer.heard);
  }
  for (const old of [...known.keys()].slice(0, Math.max(0, known.size - MOST_KEPT))) known.delete(old);
  try {
    localStorage.setItem(KEPT, JSON.stringify([...known]));
  } catch {
    // Without storage, the acknowledgement lasts as long as the page.
  }
}

const key = (peer) => `${swarm.facts.run ?? ""} ${peer.peer}`;

// Reads what was kept; any page that this machine has served at the same port may have written something else.
function read() {
  try {
    return new Map(JSON.parse(localStorage.getItem(KEPT) ?? "[]"));
  } catch {
    return new Map();
  }
}
