// Loss over time, steps or tokens, and throughput with the number of peers, by uPlot.

import { $, color, fill, make } from "./dom.js";
import { clock, large, number } from "./format.js";
import { view } from "./selection.js";
import { label, swarm } from "./store.js";

// Okabe and Ito's colours and shifted variants of them, which colour-blind readers can tell apart, too.
const LIGHT = ["#0072b2", "#c05a00", "#00795a", "#a8428a", "#8a7400", "#2f7fb8", "#5b4bb5", "#b3261e", "#47702b", "#7b5136", "#58606b", "#c23b72"];
const DARK = ["#5cb0e8", "#f0934a", "#3fc79f", "#e592cb", "#d9c544", "#9ad2f5", "#a79bf0", "#ff8a80", "#9ccb74", "#c99b7b", "#aab4be", "#f58bb4"];

const state = { axis: "time", loss: null, speed: null, shape: "" };

export function wire() {
  for (const button of document.querySelectorAll("[data-axis]"))
    button.addEventListener("click", () => {
      state.axis = button.dataset.axis;
      for (const one of document.querySelectorAll("[data-axis]")) one.setAttribute("aria-pressed", one === button);
      draw();
    });
  new ResizeObserver(() => {
    for (const [plot, id] of [[state.loss, "loss"], [state.speed, "speed"]]) plot?.setSize(sizeOf(id));
  }).observe($("loss"));
}

export function rebuild() {
  state.loss?.destroy();
  state.speed?.destroy();
  state.loss = state.speed = null;
  state.shape = "";
}

export const colorOf = (peer) => {
  const colors = document.documentElement.dataset.theme === "dark" ? DARK : LIGHT;
  return colors[peer % colors.length];
};

export function draw() {
  const { series } = swarm.timeline;
  if (!series.tokens?.length || !$("loss").clientWidth) return;
  const single = Object.keys(series).filter((name) => name.startsWith("loss "));
  const shape = [state.axis, ...single, ...single.map((name) => label(Number(name.slice(5))))].join();
  if (shape !== state.shape) {
    rebuild();
    state.shape = shape;
    state.loss = new uPlot(lossOptions(single), [[]], $("loss"));
    state.speed = new uPlot(speedOptions(), [[]], $("speed"));
    legend(single);
  }
  const { axis, keep } = abscissa(series);
  const pick = (name) => keep.map((at) => series[name]?.[at] ?? null);
  state.loss.setData([axis, ...["high", "low", "median", "held_out", ...single].map(pick)]);
  for (const [at, name] of single.entries()) {
    const chosen = view.chosen === Number(name.slice(5));
    state.loss.series[5 + at].width = chosen ? 3 : 1.4;
  }
  state.speed.setData([axis, pick("tokens_per_s"), pick("live")]);
}

// Returns the horizontal axis and the buckets on it. Over steps or tokens, buckets whose total is unknown or has not grown are left out.
function abscissa(series) {
  const axis = [], keep = [];
  let most = -1;
  for (let at = 0; at < series.tokens.length; at++) {
    if (state.axis === "time") axis.push(at * swarm.timeline.width_s);
    else if ((series[state.axis]?.[at] ?? -1) > most) axis.push((most = series[state.axis][at]));
    else continue;
    keep.push(at);
  }
  return { axis, keep };
}

function sizeOf(id) {
  return { width: $(id).clientWidth, height: $(id).clientHeight };
}

// Seconds between the ticks of an axis of time, so that a clock shows round figures.
const CLOCK_STEPS_S = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14400, 43200].map((minutes) => 60 * minutes)];

function axes(values, left, right) {
  const common = { stroke: color("soft"), grid: { stroke: color("faint"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
  const x = { ...common, size: 26, gap: 3, ...(state.axis === "time" ? { incrs: CLOCK_STEPS_S } : {}), values: (_, ticks) => ticks.map(values) };
  const y = { ...common, size: 50, gap: 3, values: (_, ticks) => ticks.map(left) };
  return right ? [x, y, { ...common, side: 1, scale: "peers", size: 38, gap: 3, grid: { show: false }, values: (_, ticks) => ticks.map(right) }] : [x, y];
}

const along = () => (state.axis === "time" ? (tick) => clock(tick) : (tick) => large(tick));

function lossOptions(single) {
  const several = single.length === 0;
  const band = color("training");
  const hidden = { stroke: "transparent", points: { show: false }, spanGaps: true, show: several };
  return {
    ...sizeOf("loss"), scales: { x: { time: false } }, legend: { show: false }, axes: axes(along(), (tick) => number(tick, 2)),
    cursor: { y: false, drag: { x: true, y: false } }, hooks: { setCursor: [read] },
    bands: several ? [{ series: [1, 2], fill: `${band}33` }] : [],
    series: [{},
      { ...hidden, label: "high" }, { ...hidden, label: "low" },
      { label: "median of the peers", stroke: band, width: 2.4, points: { show: false }, spanGaps: true, show: several },
      { label: "held-out", stroke: color("ink"), width: 1.8, dash: [6, 4], points: { show: true, size: 5, fill: color("card") }, spanGaps: true },
      ...single.map((name) => ({ label: label(Number(name.slice(5))), stroke: colorOf(Number(name.slice(5))), width: 1.4, points: { show: false }, spanGaps: true })),
    ],
  };
}

function speedOptions() {
  return {
    ...sizeOf("speed"), scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] }, peers: { range: (_, __, most) => [0, Math.max(1, most * 1.15)] } },
    legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
    axes: axes(along(), large, (tick) => (Number.isInteger(tick) ? tick : "")),
    series: [{}, { stroke: color("accent"), fill: `${color("accent")}22`, width: 1.6, points: { show: false }, spanGaps: true },
      { stroke: color("gossip"), width: 1.4, scale: "peers", dash: [3, 3], points: { show: false }, spanGaps: true }],
  };
}

// Writes the values that the reader points at into the legend.
function read(plot) {
  for (const element of $("loss-legend").querySelectorAll("[data-series]")) {
    const value = plot.cursor.idx === null ? null : plot.data[element.dataset.series]?.[plot.cursor.idx];
    element.textContent = value === null || value === undefined ? "" : ` ${number(value)}`;
  }
}

function legend(single) {
  const entries = single.length ? [] : [[3, "median of the peers, and four fifths of them", color("training")]];
  for (const [at, name] of single.entries()) entries.push([5 + at, label(Number(name.slice(5))), colorOf(Number(name.slice(5)))]);
  const items = entries.map(([at, name, shade]) => make("li", {}, make("i", { color: shade }), name, make("span", { "data-series": at })));
  const held = make("i", { class: "dash" });
  items.push(make("li", {}, held, "held-out", make("span", { "data-series": 4 })));
  const dotted = make("i", { class: "dash" });
  dotted.style.color = color("gossip");
  items.push(make("li", {}, dotted, "peers (below)"));
  fill($("loss-legend"), ...items);
}
