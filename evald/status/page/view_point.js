// One point: how it ended, where its time went, its sets, what it was measured with.

import { h, render } from "./dom.js";
import { moment, number, outcomeName, percent, score, seconds, signed, stepName } from "./format.js";
import { pointLink } from "./routes.js";
import { valueOf } from "./store.js";

const STAGES = [
  ["validate_s", "validate"], ["queued_s", "queued"], ["prepare_s", "prepare"], ["pin_s", "pin"],
  ["evaluate_s", "evaluate"],
];
const COUNTS = [
  ["n_truncated", "truncated"], ["n_no_answer", "no answer"], ["n_unfinished_thinking", "unfinished thinking"],
  ["n_error", "errors"], ["n_too_long", "too long"], ["n_grader_error", "grader errors"],
  ["n_timeout", "timed out"], ["n_cut", "cut"], ["n_resumed", "resumed"], ["n_moved", "moved"],
];

export class PointPage {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.full = null;
    this.element = h("main", { id: "main", tabindex: "-1" });
  }

  close() {}

  showStatus() {}

  restyle() {}

  find() {
    return this.app.store.runs.get(this.id.split("/")[0])?.points.get(this.id) ?? null;
  }

  show() {
    const point = this.find();
    if (!point) {
      render(this.element, h("p", {}, this.app.ready
        ? `The ledger knows no point ${this.id}.` : "Reading the ledger …"));
      return;
    }
    if (this.asked !== point.seq && this.app.source.live && point.type === "point") {
      this.asked = point.seq;
      this.app.source.record(point.seq).then((full) => {
        this.full = full;
        this.show();
      }, () => {});
    }
    const run = this.app.store.run(point.run);
    render(this.element, this.#head(run, point), this.#stages(point), this.#sets(run, point),
      this.full && this.#provenance(this.full));
  }

  // Points before and after this one, for links and for the arrow keys.
  neighbours() {
    const point = this.find();
    if (!point) return [null, null];
    const run = this.app.store.run(point.run);
    const steps = run.curve();
    const at = steps.findIndex((one) => one.step === point.step && point.kind === "step");
    const link = (one) => (one ? pointLink(one.id) : null);
    return at < 0 ? [null, link(steps[0])] : [link(steps[at - 1] ?? run.baseline()), link(steps[at + 1])];
  }

  keys(event) {
    const [before, after] = this.neighbours();
    if (event.key === "ArrowLeft" && before) this.app.go(before);
    else if (event.key === "ArrowRight" && after) this.app.go(after);
    else return false;
    return true;
  }

  #head(run, point) {
    const [before, after] = this.neighbours();
    const revisions = run.all().filter((one) => one.step === point.step && one.kind === point.kind && one !== point);
    return h("section", { class: "panel head" },
      h("nav", { class: "along", "aria-label": "points before and after" },
        before ? h("a", { href: before }, "← before") : h("span", { class: "muted" }, "← before"),
        after ? h("a", { href: after }, "after →") : h("span", { class: "muted" }, "after →")),
      h("h1", {}, stepName(point), " ", h("span", { class: `outcome ${point.outcome}` }, outcomeName(point))),
      h("p", { class: "muted" }, `run ${point.run}, ended ${moment(point.time)}`,
        point.metrics.has("eval/lag_steps") && `, lag ${number(point.metrics.get("eval/lag_steps"))}`),
      point.detail && h("p", { class: "detail" }, point.detail),
      point.regraded_from && h("p", {}, "Graded again; before: ",
        h("a", { href: pointLink(point.regraded_from) }, point.regraded_from)),
      point.curve_breaks.length > 0 && h("p", { class: "note warn" },
        `Not measured as earlier points were: ${point.curve_breaks.join(", ")}.`),
      revisions.length > 0 && h("p", {}, "Other revisions: ", revisions.map((one) =>
        [h("a", { href: pointLink(one.id) }, `r${one.revision} (${outcomeName(one)})`), " "])));
  }

  #stages(point) {
    const known = STAGES.filter(([key]) => point.timings[key] !== undefined);
    if (known.length === 0 || !point.timings.total_s) return null;
    const total = Math.max(point.timings.total_s, known.reduce((sum, [key]) => sum + point.timings[key], 0));
    return h("section", { class: "panel", "aria-labelledby": "stages" },
      h("h2", { id: "stages" }, `Time: ${seconds(point.timings.total_s)}`),
      h("div", { class: "stages", "aria-hidden": "true" }, known.map(([key, name]) =>
        h("span", { class: `stage ${name}`, title: `${name}: ${seconds(point.timings[key])}`,
          style: { "flex-grow": String(Math.max(0.004, point.timings[key] / total)) } }))),
      h("ul", { class: "legend" }, known.map(([key, name]) =>
        h("li", {}, h("span", { class: `swatch ${name}` }), `${name} `, h("strong", {}, seconds(point.timings[key]))))));
  }

  #sets(run, point) {
    const rows = run.curves().filter((set) => point.metrics.has(`eval/${set}`));
    const counts = COUNTS.filter(([key]) => point.counts[key]).map(([key, name]) => `${number(point.counts[key])} ${name}`);
    if (rows.length === 0) return null;
    const head = ["set", "score", "95 %", "against the point before", "against the baseline", "truncated", "no answer", "no score"];
    return h("section", { class: "panel", "aria-labelledby": "sets" },
      h("h2", { id: "sets" }, "Eval sets"),
      point.counts.n_total && h("p", { class: "muted" }, `${number(point.counts.n_total)} samples`,
        counts.length > 0 && `: ${counts.join(", ")}`),
      h("div", { class: "scroll" }, h("table", { class: "rows", onkeydown: this.app.rowKeys },
        h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { class: at > 0 ? "n" : "" }, name)))),
        h("tbody", {}, rows.map((set) => this.#set(run, point, set))))));
  }

  #set(run, point, set) {
    const get = (tail) => point.metrics.get(`eval/${set}${tail}`);
    const [value, low, high] = valueOf(point, `eval/${set}`);
    const isSet = run.sets.includes(set);
    const { source } = this.app;
    const has = isSet && (source.live || source.hasSamples(point.id, set));
    return h("tr", { "data-key": set, onclick: has ? this.app.rowClick : null },
      h("td", {}, has ? h("a", { href: pointLink(point.id, set) }, set) : set),
      h("td", { class: "n" }, h("strong", {}, score(value))),
      h("td", { class: "n" }, low === null ? "" : `${score(low)} … ${score(high)}`),
      change(point, set, "delta_prev"), change(point, set, "delta_baseline"),
      h("td", { class: "n" }, percent(get("-truncated_ratio"))),
      h("td", { class: "n" }, percent(get("/no_answer_ratio"))),
      h("td", { class: "n" }, percent(get("-none_reward_ratio"))));
  }

  #provenance(full) {
    const { sets, ...rest } = full.provenance;
    const rows = [
      ["directory", full.directory], ["digest", full.digest],
      ["engines", full.engines.join(", ")], ["weight versions", full.weight_versions.join(", ")],
      ...Object.entries(rest),
    ].filter(([, value]) => value !== null && value !== "");
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
    return h("section", { class: "panel", "aria-labelledby": "with" },
      h("h2", { id: "with" }, "Measured with"),
      h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, text(value))])),
      sets && h("details", {}, h("summary", {}, "settings of the eval sets"),
        h("pre", { tabindex: "0" }, JSON.stringify(sets, null, 2))));
  }
}

// A paired difference; what stands out of its noise is marked. Less perplexity is better.
function change(point, set, which) {
  const name = `eval/${set}/${which}`;
  const sign = point.metrics.has(`eval/${set}/perplexity`) ? -1 : 1;
  const [value, low, high] = valueOf(point, name);
  if (value === null) return h("td", { class: "n muted" }, "–");
  const clear = low !== null && (low > 0 || high < 0);
  const up = point.metrics.get(`${name}_up`);
  const down = point.metrics.get(`${name}_down`);
  return h("td", { class: `n ${clear ? (sign * value > 0 ? "better" : "worse") : ""}` }, signed(value),
    low !== null && h("small", {}, ` ±${((high - low) / 2).toFixed(3)}`),
    up !== undefined && h("small", { class: "muted", title: "questions that rose and fell" }, ` ${number(up)}↑ ${number(down)}↓`));
}
