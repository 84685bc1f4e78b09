// Numbers, times and names, for people.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replaceAll(",", "\u202f");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");
  if (size >= 100) return value.toFixed(1);
  if (size >= 10) return value.toFixed(2);
  if (size >= 0.001 || size === 0) return value.toFixed(3);
  return value.toExponential(1);
}

export function score(value) {
  return value === null || value === undefined ? "–" : Number.isInteger(value) && Math.abs(value) > 1
    ? number(value) : Math.abs(value) < 10 ? value.toFixed(3) : number(value);
}

export function signed(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "\u2212" : "\u00b1") + score(Math.abs(value));
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return value > 0 && value < 1 ? "<1 %" : `${Math.round(value)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

// Seconds since the epoch, as a time of day with its date.
export function moment(time) {
  if (!time) return "–";
  const date = new Date(1000 * time);
  const two = (value) => String(value).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
  );
}

export function stepName(point) {
  return (point.kind === "baseline" ? "baseline" : `step ${point.step}`) +
    (point.revision ? ` (revision ${point.revision})` : "");
}

export function outcomeName(point) {
  return point.outcome === "skipped" ? `skipped: ${point.reason}` : point.outcome;
}
