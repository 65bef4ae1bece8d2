// Formats figures for people; changes nothing on the page.

export const short = (peer) => peer.slice(-6);

export function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function large(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  return Math.round(value).toLocaleString("en-US");
}

export function bytes(value) {
  if (!value) return "0 B";
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return `${(value / size).toFixed(value < 100 * size ? 1 : 0)} ${unit}`;
  return `${Math.round(value)} B`;
}

// In bits per second, as links are sold.
export function rate(bytesPerSecond) {
  const bits = bytesPerSecond * 8;
  if (!bits) return "–";
  return bits >= 1e9 ? `${(bits / 1e9).toFixed(1)} Gb/s` : bits >= 1e6 ? `${(bits / 1e6).toPrecision(3)} Mb/s` : `${Math.round(bits / 1e3)} kb/s`;
}

export function delay(seconds) {
  if (!seconds) return "–";
  return seconds < 0.01 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e3)} ms`;
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)}%`;
}

export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// As short as an age may be: "47 s", "4 min", "2 h", "3 d".
export function age(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  for (const [from, size, unit] of [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"]])
    if (whole >= from) return `${Math.floor(whole / size)} ${unit}`;
  return `${whole} s`;
}

// The reader's clock time; with the day if that was more than half a day before `now`.
export function time(t, now) {
  const at = new Date(t * 1e3);
  const clock = at.toLocaleTimeString("en-GB");
  return now - t > 43200 ? `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}` : clock;
}

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return (parts[0] ? parts : parts.slice(1)).map((part, at) => (at ? String(part).padStart(2, "0") : part)).join(":");
}
