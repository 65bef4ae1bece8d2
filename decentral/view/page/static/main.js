// Connects to the server, and draws the page once for each update.

import * as charts from "./charts.js";
import { $ } from "./dom.js";
import * as map from "./map.js";
import * as panels from "./panels.js";
import { choose, view } from "./selection.js";
import * as store from "./store.js";
import * as table from "./table.js";
import { wireTheme } from "./theme.js";

const cost = { updates: 0, last_ms: 0, slowest_ms: 0 }; // of drawing updates; the page's footer shows them
window.decentral = { cost };

function draw() {
  const began = performance.now();
  panels.draw();
  table.draw();
  charts.draw();
  map.draw();
  cost.last_ms = performance.now() - began;
}

function receive(apply) {
  return (message) => {
    const began = performance.now();
    apply(JSON.parse(message.data));
    if (document.hidden) panels.title();
    else draw();
    cost.updates += 1;
    cost.last_ms = performance.now() - began;
    cost.slowest_ms = Math.max(cost.slowest_ms, cost.last_ms);
    connected();
    $("cost").textContent = `update ${cost.updates}, drawn in ${cost.last_ms.toFixed(0)} ms (${cost.slowest_ms.toFixed(0)} ms at most)`;
  };
}

function connected() {
  const over = store.swarm.facts.over;
  const past = over || store.swarm.facts.past;
  $("connection").textContent = over ? "ended" : past ? "history" : "live";
  $("connection").dataset.level = past ? "plain" : "good";
}

function lost() {
  if (store.swarm.facts.over) return;
  $("connection").textContent = "connection lost, trying again";
  $("connection").dataset.level = "bad";
}

const source = new EventSource("/stream");
source.addEventListener("everything", receive(store.everything));
source.addEventListener("changes", receive(store.changes));
source.addEventListener("error", () => {
  if (store.swarm.facts.over) source.close();
  lost();
});

document.addEventListener("visibilitychange", () => document.hidden || draw());
document.addEventListener("keydown", (event) => event.key === "Escape" && view.chosen !== null && choose(null));
view.onChange = draw;
wireTheme(() => {
  charts.rebuild();
  draw();
});
map.wire();
table.wire();
charts.wire();
