// One curve: value, error band, marks for skips and for breaks; mouse and keyboard.

import { h } from "./dom.js";
import { number, outcomeName, score, signed, stepName } from "./format.js";
import { valueOf } from "./store.js";

const SYNC_KEY = "evald-steps";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A chart of `metric` over the points of a run. `small`: without an axis of steps, and with a zero line.
export class Curve {
  constructor({ label, small = false, open }) {
    this.small = small;
    this.label = label;
    this.open = open;
    this.points = [];
    this.at = null;
    this.zoomed = false;
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.canvas = h("div", {
      class: small ? "curve small" : "curve",
      tabindex: "0",
      role: "group",
      "aria-label": `${label}: arrow keys go along the points, Enter opens one`,
      onkeydown: (event) => this.#key(event),
    });
    this.canvas.keep = true;
    this.element = h("div", { class: "chart" }, this.readout, this.canvas);
    this.resized = new ResizeObserver(() => this.#resize());
    this.resized.observe(this.canvas);
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }

  redraw() {
    this.plot?.redraw(true, false);
  }

  // Draw a metric of a run; `set` is the one whose breaks are marked.
  show(run, set, metric) {
    const sameRun = this.run === run;
    const same = sameRun && this.metric === metric;
    this.run = run;
    this.metric = metric;
    this.points = run.curve();
    this.set = set;
    const values = this.points.map((point) => valueOf(point, metric));
    const baseline = run.baseline();
    this.baseline = this.small || !baseline ? null : valueOf(baseline, metric)[0];
    const data = [
      this.points.map((point) => point.step),
      ...[0, 1, 2].map((which) => values.map((value) => value[which])),
    ];
    if (this.plot) this.#replace(data, sameRun && this.zoomed);
    else this.data = data;
    this.#resize();
    this.#tell(same ? this.at : null);
  }

  // Show other data; `zoomed`: the steps that were dragged over stay in view.
  #replace(data, zoomed) {
    const { min, max } = this.plot.scales.x;
    this.plot.setData(data, !zoomed);
    if (zoomed) this.plot.setScale("x", { min, max });
  }

  #resize() {
    const width = Math.floor(this.canvas.clientWidth);
    if (width === 0 || (!this.plot && !this.data)) return;
    const height = this.small ? 84 : 190;
    if (this.plot) {
      if (this.plot.width !== width) this.plot.setSize({ width, height });
      return;
    }
    this.plot = new uPlot(this.#options(width, height), this.data, this.canvas);
    this.plot.over.addEventListener("mousedown", (event) => (this.down = event.clientX));
    this.plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - this.down) < 4 && this.at !== null) this.open(this.points[this.at]);
    });
  }

  #options(width, height) {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const line = () => colour(this.small ? "--second" : "--first");
    const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    return {
      width,
      height,
      legend: { show: false },
      padding: [10, 12, this.small ? 4 : 0, 0],
      cursor: {
        sync: { key: SYNC_KEY, setSeries: false },
        drag: { x: true, y: false },
        points: { size: 9, fill: line },
        y: false,
        dataIdx: (_plot, series, at) => at,
      },
      scales: { x: { time: false, range: (plot, low, high) => this.#steps(plot, low, high) }, y: { range: (_plot, low, high) => this.#range(low, high) } },
      axes: [
        { ...axis, show: !this.small, size: 26, values: (_plot, ticks) => ticks.map(tick), incrs: [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((e) => n * 10 ** e)).sort((a, b) => a - b) },
        { ...axis, size: 46, space: this.small ? 24 : 34, values: (_plot, ticks) => ticks.map(tick) },
      ],
      series: [
        {},
        { stroke: line, width: 2, spanGaps: true, points: { show: true, size: 5, stroke: line, fill: line, filter: (plot) => this.#dots(plot) } },
        { ...hidden },
        { ...hidden },
      ],
      bands: [{ series: [3, 2], fill: () => colour(this.small ? "--second-band" : "--first-band") }],
      hooks: {
        drawClear: [(plot) => this.#drawBehind(plot)],
        draw: [(plot) => this.#drawMarks(plot)],
        setCursor: [(plot) => this.#tell(plot.cursor.idx ?? null)],
      },
    };
  }

  // The steps in view: what was dragged over, as it is; else all of them, with some room.
  #steps(plot, low, high) {
    const steps = plot.data[0];
    if (low === null || high === null || steps.length === 0) return [0, 1];
    const [first, last] = [steps[0], steps.at(-1)];
    this.zoomed = steps.length > 1 && (low > first || high < last);
    if (this.zoomed) return [low, high];
    const room = Math.max(0.02 * (last - first), first === last ? 1 : 0);
    return [first - room, last + room];
  }

  #range(low, high) {
    if (this.small) [low, high] = [Math.min(low ?? 0, 0), Math.max(high ?? 0, 0)];
    if (low === null || high === null) return [0, 1];
    if (this.baseline !== null && this.baseline !== undefined) {
      [low, high] = [Math.min(low, this.baseline), Math.max(high, this.baseline)];
    }
    const room = 0.08 * (high - low || Math.abs(high) || 1);
    // scores and ratios do not need room beyond what they can be
    const share = !this.small && low >= 0 && high <= 1;
    return share ? [Math.max(0, low - room), Math.min(1, high + room)] : [low - room, high + room];
  }

  // Dots and rings only where there is room for them.
  #crowded(plot) {
    return this.points.length > plot.bbox.width / devicePixelRatio / 7;
  }

  #dots(plot) {
    if (this.#crowded(plot)) return [];
    return this.points.flatMap((point, at) => (point.outcome === "ok" ? [at] : []));
  }

  #drawBehind(plot) {
    const { ctx, bbox } = plot;
    const horizontal = (value, name, dash) => {
      const y = Math.round(plot.valToPos(value, "y", true)) + 0.5;
      if (y < bbox.top || y > bbox.top + bbox.height) return;
      this.#stroke(ctx, name, dash, () => {
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
      });
    };
    if (this.small) horizontal(0, "--muted", []);
    if (this.baseline !== null && this.baseline !== undefined) horizontal(this.baseline, "--muted", [5, 4]);
    for (const point of this.points) {
      if (!point.curve_breaks.includes(this.set)) continue;
      const x = Math.round(plot.valToPos(point.step, "x", true)) + 0.5;
      this.#stroke(ctx, "--warn", [2, 3], () => {
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
      });
    }
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    const size = 3.2 * devicePixelRatio;
    const bottom = bbox.top + bbox.height - size - devicePixelRatio;
    for (const point of this.points) {
      const x = plot.valToPos(point.step, "x", true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      if (point.outcome === "skipped" && this.#crowded(plot)) {
        this.#stroke(ctx, "--bad", [], () => {
          ctx.moveTo(x, bottom - size);
          ctx.lineTo(x, bottom + size);
        });
      } else if (point.outcome === "skipped") {
        this.#stroke(ctx, "--bad", [], () => {
          ctx.moveTo(x - size, bottom - size);
          ctx.lineTo(x + size, bottom + size);
          ctx.moveTo(x + size, bottom - size);
          ctx.lineTo(x - size, bottom + size);
        }, 1.6);
      } else if (point.outcome !== "ok" && !this.#crowded(plot)) {
        const value = valueOf(point, this.metric)[0];
        if (value === null) continue;
        ctx.save();
        ctx.beginPath();
        ctx.arc(x, plot.valToPos(value, "y", true), size, 0, 2 * Math.PI);
        ctx.fillStyle = colour("--panel");
        ctx.strokeStyle = colour(point.outcome === "partial" ? "--warn" : "--first");
        ctx.lineWidth = 1.6 * devicePixelRatio;
        ctx.fill();
        ctx.stroke();
        ctx.restore();
      }
    }
  }

  #stroke(ctx, name, dash, path, width = 1) {
    ctx.save();
    ctx.beginPath();
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = width * devicePixelRatio;
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    path();
    ctx.stroke();
    ctx.restore();
  }

  // Say what the point under the cursor is; without one, the newest that has a value.
  #tell(at) {
    this.at = at !== null && at < this.points.length ? at : null;
    const point = this.at === null
      ? this.points.findLast((one) => valueOf(one, this.metric)[0] !== null)
      : this.points[this.at];
    this.readout.textContent = point ? this.#words(point) : "no value yet";
    this.readout.classList.toggle("at", this.at !== null);
  }

  #words(point) {
    const [value, low, high] = valueOf(point, this.metric);
    if (value === null) return `${stepName(point)}: ${point.outcome === "skipped" ? outcomeName(point) : "no value"}`;
    const show = this.small ? signed : this.set ? score : number;
    const band = low === null ? "" : ` [${show(low)}, ${show(high)}]`;
    const how = point.outcome === "ok" ? "" : ` (${outcomeName(point)})`;
    return `${stepName(point)}: ${show(value)}${band}${how}`;
  }

  #key(event) {
    const last = this.points.length - 1;
    if (last < 0 || !this.plot || event.ctrlKey || event.altKey || event.metaKey) return;
    let at = this.at ?? last + 1;
    if (event.key === "ArrowLeft") at = Math.max(0, at - 1);
    else if (event.key === "ArrowRight") at = Math.min(last, this.at === null ? 0 : at + 1);
    else if (event.key === "Home") at = 0;
    else if (event.key === "End") at = last;
    else if (event.key === "Enter" && this.at !== null) {
      event.preventDefault();
      this.open(this.points[this.at]);
      return;
    } else return;
    event.preventDefault();
    const left = this.plot.valToPos(this.points[at].step, "x");
    this.plot.setCursor({ left, top: this.plot.over.clientHeight / 2 });
  }
}

function tick(value) {
  return Math.abs(value) >= 10000 ? `${value / 1000}k` : String(Number(value.toPrecision(6)));
}
