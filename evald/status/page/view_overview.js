// The start page: what runs, the curves, the points, the alerts.

import { Curve } from "./chart.js";
import { h, render } from "./dom.js";
import { moment, outcomeName, score, seconds, stepName } from "./format.js";
import { pointLink } from "./routes.js";
import { valueOf } from "./store.js";
import { nowPanels } from "./view_now.js";

const ROWS = 15;
const COLUMNS = 6;

export class Overview {
  constructor(app) {
    this.app = app;
    this.now = h("div", { class: "now" });
    this.curves = h("div", { class: "curves" });
    this.tables = h("div", {});
    this.cards = new Map();
    this.rows = ROWS;
    this.element = h("main", { id: "main", tabindex: "-1" }, this.now, this.curves, this.tables);
  }

  close() {
    for (const card of this.cards.values()) card.close();
  }

  restyle() {
    for (const card of this.cards.values()) card.restyle();
  }

  showStatus() {
    if (this.app.status) render(this.now, nowPanels(this.app.status));
  }

  show() {
    this.showStatus();
    const run = this.app.run();
    if (this.run !== run) {
      this.close();
      this.cards.clear();
      this.curves.replaceChildren();
      this.run = run;
    }
    for (const set of run.curves()) {
      if (!this.cards.has(set)) {
        const card = new Card(this.app, set, run.metricsOf(set));
        this.cards.set(set, card);
        this.curves.append(card.element);
      }
      this.cards.get(set).show(run, run.metricsOf(set));
    }
    if (!this.cards.has("") && run.ownMetrics().length > 0 && run.curves().length > 0) {
      this.cards.set("", new Card(this.app, "", run.ownMetrics()));
      this.curves.append(this.cards.get("").element);
    }
    // what is measured of points themselves comes last
    const own = this.cards.get("");
    if (own) {
      own.show(run, run.ownMetrics());
      if (own.element !== this.curves.lastElementChild) this.curves.append(own.element);
    }
    render(this.tables, this.cards.size > 0 && h("p", { class: "muted key" },
      "Band: 95 % interval. Ring: partial. Cross: skipped. Dashed: the baseline. Dotted: measured otherwise from here on. ",
      "Click on a point to open it; or use the arrow keys and Enter. Drag to zoom, double-click to see all."), this.#alerts(), this.#points(run));
  }

  #points(run) {
    const points = run.all();
    if (points.length === 0) {
      // (before the token is right, nobody knows)
      return this.app.ready && h("section", { class: "panel" }, h("h2", {}, "Points"),
        h("p", { class: "muted" }, `No point of run ${run.name} has ended yet.`));
    }
    const sets = run.curves().slice(0, COLUMNS);
    return h("section", { class: "panel", "aria-labelledby": "points" },
      h("h2", { id: "points" }, "Points"),
      h("div", { class: "scroll" }, h("table", { class: "rows points", onkeydown: this.app.rowKeys },
        h("thead", {}, h("tr", {},
          h("th", {}, "point"), h("th", {}, "outcome"), sets.map((set) => h("th", { class: "n" }, set)),
          h("th", { class: "n" }, "lag"), h("th", { class: "n" }, "took"), h("th", {}, "ended"))),
        h("tbody", {}, points.slice(0, this.rows).map((point) => this.#row(point, sets))))),
      points.length > this.rows && h("button", {
        type: "button", class: "more", onclick: () => { this.rows += 20 * ROWS; this.show(); },
      }, `Show more (there are ${points.length})`));
  }

  #row(point, sets) {
    return h("tr", { "data-key": point.id, onclick: this.app.rowClick },
      h("td", {}, h("a", { href: pointLink(point.id) }, stepName(point))),
      h("td", {}, h("span", { class: `outcome ${point.outcome}`, title: point.detail }, outcomeName(point))),
      sets.map((set) => scoreCell(point, set)),
      h("td", { class: "n" }, point.metrics.get("eval/lag_steps") ?? ""),
      h("td", { class: "n" }, !point.timings.total_s ? "" : seconds(point.timings.total_s)),
      h("td", { class: "time" }, moment(point.time)));
  }

  #alerts() {
    const { alerts } = this.app.store;
    return alerts.length > 0 && h("section", { class: "panel", "aria-labelledby": "alerts" },
      h("h2", { id: "alerts" }, "Alerts"),
      h("ul", { class: "alerts" }, alerts.slice(0, 8).map((alert) =>
        h("li", { "data-key": alert.seq }, h("span", { class: "time" }, moment(alert.time)), " ",
          h("strong", {}, alert.name), " ", alert.cleared && h("span", { class: "state serving" }, "cleared"),
          alert.cleared && " ", alert.detail))));
  }
}

export function scoreCell(point, set) {
  const [value, low, high] = valueOf(point, `eval/${set}`);
  if (value === null) return h("td", { class: "n muted" }, "");
  return h("td", { class: "n" }, score(value),
    low !== null && h("small", {}, ` ±${((high - low) / 2).toFixed(3)}`));
}

// The charts of one eval set: a metric of choice, and the paired change against the baseline.
class Card {
  constructor(app, set, metrics) {
    this.set = set;
    this.metric = metrics[0];
    const open = (point) => app.go(pointLink(point.id));
    this.curve = new Curve({ label: set || "points", open });
    this.change = set && new Curve({ label: `${set}, change`, small: true, open });
    this.caption = h("p", { class: "caption" });
    this.picker = h("select", {
      "aria-label": `metric of ${set || "points"}`,
      onchange: (event) => { this.metric = event.target.value; this.show(this.run); },
    });
    this.second = h("div", { class: "second" }, this.caption, this.change && this.change.element);
    this.element = h("section", { class: "panel card", "aria-label": `curves of ${set || "points"}` },
      h("header", {}, h("h2", {}, set || "all points"), this.picker), this.curve.element, this.second);
  }

  close() {
    this.curve.close();
    if (this.change) this.change.close();
  }

  restyle() {
    this.curve.redraw();
    if (this.change) this.change.redraw();
  }

  show(run, metrics = null) {
    this.run = run;
    if (metrics !== null) {
      const short = (name) => name.replace(this.set ? `eval/${this.set}` : "eval/", "").replace(/^[/-]/, "") || "score";
      render(this.picker, metrics.map((name) =>
        h("option", { value: name, selected: name === this.metric }, short(name))));
    }
    this.curve.show(run, this.set, this.metric);
    const base = `eval/${this.set}`;
    const change = [`${base}/delta_baseline`, `${base}/delta_prev`].find((name) => run.metrics.has(name));
    this.second.hidden = !this.change || !change || this.metric !== base;
    if (!this.second.hidden) {
      const to = change.endsWith("baseline") ? "the baseline" : "the point before";
      this.caption.textContent = `paired change against ${to}, 95 %`;
      this.change.show(run, this.set, change);
    }
  }
}
