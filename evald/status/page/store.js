// What the ledger says, put in order for curves and tables. Records may come again: they replace.

const OWN = /^eval\/(step|revision|lag_steps|duration_seconds|export_time_seconds|skipped_.*)$/;
const COMPANION = /(\/(stderr|ci95_low|ci95_high)|_(stderr|p|n|up|down|mde))$/;
const Z95 = 1.96;
const MAX_ALERTS = 50;

export class Store {
  constructor() {
    this.clear();
  }

  // Another ledger: nothing of the old one stands.
  clear() {
    this.names = [];
    this.runs = new Map();
    this.alerts = [];
    this.lastSeq = 0;
  }

  // A stream numbers the names of metrics afresh.
  beginStream() {
    this.names = [];
  }

  add(batch) {
    for (const name of batch.names) this.names.push(name);
    for (const record of batch.records) this.#take(record);
    this.lastSeq = batch.last_seq;
  }

  run(name) {
    if (!this.runs.has(name)) this.runs.set(name, new Run(name));
    return this.runs.get(name);
  }

  #take(record) {
    const flat = record.metrics ?? [];
    const metrics = new Map();
    for (let at = 0; at < flat.length; at += 2) metrics.set(this.names[flat[at]], flat[at + 1]);
    const defaults = {
      kind: "step", outcome: "", reason: "", detail: "", counts: {}, timings: {}, sets: [],
      curve_breaks: [], void_sets: [],
    };
    const one = { ...defaults, ...record, metrics };
    if (record.type === "alert") {
      this.alerts.unshift(one);
      this.alerts.length = Math.min(this.alerts.length, MAX_ALERTS);
    } else if (record.type === "run_end") {
      this.run(record.run).ended = true;
    } else {
      this.run(record.run).take(one);
    }
  }
}

export class Run {
  constructor(name) {
    this.name = name;
    this.ended = false;
    // terminal records by id, and points that have only records of sets so far
    this.points = new Map();
    this.sets = [];
    this.metrics = new Set();
    this.changes = 0;
  }

  take(record) {
    this.ended = false;
    this.changes += 1;
    for (const name of record.metrics.keys()) this.metrics.add(name);
    // sets end in any order; a point has them in that of the config
    this.sets = record.type === "set"
      ? [...new Set([...this.sets, record.set])] : [...new Set([...record.sets, ...this.sets])];
    const id = `${record.run}/${record.kind}/${record.step}/r${record.revision}`;
    if (record.type === "point") {
      this.points.set(id, record);
      return;
    }
    const begun = this.points.get(id) ?? {
      ...record, type: "begun", id, outcome: "running", sets: [], metrics: new Map(), seconds: {},
    };
    if (begun.type !== "begun") return;
    for (const [name, value] of record.metrics) begun.metrics.set(name, value);
    begun.sets = [...new Set([...begun.sets, record.set])];
    this.points.set(id, begun);
  }

  // All points, newest step first; of one step the highest revision first.
  all() {
    return this.#once("all", () =>
      [...this.points.values()].sort(
        (a, b) => (b.kind === "step") - (a.kind === "step") || b.step - a.step || b.revision - a.revision,
      ),
    );
  }

  // One point for each step, upwards: the highest revision that was measured, else the highest.
  curve() {
    return this.#once("curve", () => {
      const chosen = new Map();
      for (const point of this.all()) {
        if (point.kind !== "step") continue;
        const known = chosen.get(point.step);
        if (!known || (known.outcome === "skipped" && point.outcome !== "skipped")) {
          chosen.set(point.step, point);
        }
      }
      return [...chosen.values()].sort((a, b) => a.step - b.step);
    });
  }

  baseline() {
    return this.all().find((point) => point.kind === "baseline" && point.outcome !== "skipped") ?? null;
  }

  // The point that `point` was compared with: of those that had ended by then, the newest measured
  // one of a lower step.
  before(point) {
    if (point.kind !== "step") return null;
    return this.all().find((one) =>
      one.kind === "step" && one.step < point.step && (one.outcome === "ok" || one.outcome === "partial") &&
      (point.type !== "point" || one.seq < point.seq)) ?? null;
  }

  // Names that have a curve of their own: eval sets, then aggregates, then what else there is.
  curves() {
    return this.#once("curves", () => {
      const rest = [...this.metrics].filter(
        (name) => !OWN.test(name) && /^eval\/[^/]+$/.test(name) && this.setOf(name) === null,
      );
      return [...this.sets, ...rest.map((name) => name.slice("eval/".length))];
    });
  }

  // The set whose metric this is; the longest name wins ("math" and "math-hard").
  setOf(metric, sets = this.sets) {
    let found = null;
    for (const set of sets) {
      const key = `eval/${set}`;
      const mine = metric === key || metric.startsWith(`${key}/`) || metric.startsWith(`${key}-`);
      if (mine && (found === null || set.length > found.length)) found = set;
    }
    return found;
  }

  // What can be drawn of a set, the headline first.
  metricsOf(set) {
    return this.#once(`metrics ${set}`, () => {
      const curves = this.curves();
      const headline = `eval/${set}`;
      const rest = [...this.metrics].filter((name) => this.setOf(name, curves) === set && name !== headline);
      return [headline, ...rest.filter((name) => !COMPANION.test(name))];
    });
  }

  // What is measured of points themselves.
  ownMetrics() {
    return [...this.metrics].filter((name) => OWN.test(name) && !name.startsWith("eval/skipped_"));
  }

  #once(what, make) {
    if (this.known?.changes !== this.changes) this.known = { changes: this.changes, values: new Map() };
    if (!this.known.values.has(what)) this.known.values.set(what, make());
    return this.known.values.get(what);
  }
}

// Value and error band (95 %) of a metric in a point: [value, low, high], null where there is none.
export function valueOf(point, metric) {
  const value = point.metrics.get(metric) ?? null;
  if (value === null) return [null, null, null];
  const low = point.metrics.get(`${metric}/ci95_low`);
  const high = point.metrics.get(`${metric}/ci95_high`);
  if (low !== undefined && high !== undefined) return [value, low, high];
  const error = point.metrics.get(`${metric}/stderr`) ?? point.metrics.get(`${metric}_stderr`);
  return error === undefined ? [value, null, null] : [value, value - Z95 * error, value + Z95 * error];
}
