// The page: a store of records, a source that fills it, and the view that the URL's hash names.

import { h, render } from "./dom.js";
import { moment, seconds } from "./format.js";
import { LiveSource } from "./live.js";
import { parse } from "./routes.js";
import { Run, Store } from "./store.js";
import { StoredSource } from "./stored.js";
import { applyTheme, nextTheme, themeWords } from "./theme.js";
import { EnginePage } from "./view_engine.js";
import { Overview } from "./view_overview.js";
import { PointPage } from "./view_point.js";
import { SampleList, SamplePage } from "./view_samples.js";

class App {
  constructor() {
    this.store = new Store();
    this.status = null;
    // everything that was in the ledger has been read
    this.ready = false;
    this.state = "connecting";
    this.sentence = "";
    this.chosenRun = null;
    this.none = new Run("");
    this.left = new Map();
    this.header = h("header", { class: "top" });
    this.dialog = h("div", {});
    this.rowKeys = (event) => rowKeys(event);
    this.rowClick = (event) => rowClick(event);
  }

  start(report) {
    applyTheme();
    document.body.append(h("a", { class: "skip", href: "#main", onclick: (event) => {
      event.preventDefault();
      this.view.element.focus();
    } }, "to the content"), this.header, this.dialog);
    if (report) {
      this.source = new StoredSource(report);
      this.source.fill(this.store);
      this.ready = true;
      this.state = "report";
    } else {
      this.source = new LiveSource({
        store: this.store,
        onChange: () => this.#later(),
        onStatus: (status) => this.#takeStatus(status),
        onState: (state, sentence) => this.#takeState(state, sentence),
      });
      this.source.run();
    }
    addEventListener("hashchange", () => this.#route());
    addEventListener("keydown", (event) => this.#keys(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view.restyle());
    this.#route();
  }

  // The run that is shown: the chosen one, else the daemon's, else the newest.
  run() {
    const names = [...this.store.runs.keys()];
    const name = [this.chosenRun, this.status?.run].find((one) => names.includes(one)) ?? names.at(-1);
    if (name) return this.store.run(name);
    if (this.none?.name !== (this.status?.run ?? "")) this.none = new Run(this.status?.run ?? "");
    return this.none;
  }

  go(hash) {
    location.hash = hash;
    this.#route(); // (the browser tells of it later: a second key may come first)
  }

  focusMain() {
    if (!this.wantsFocus || !this.view) return;
    const back = this.left.get(location.hash);
    const target = back && [...this.view.element.querySelectorAll("a")].find((a) => a.getAttribute("href") === back);
    if (back && !target && !this.ready) return;
    (target ?? this.view.element).focus({ preventScroll: !target });
    if (target || !back) this.wantsFocus = false;
  }

  #route() {
    if (location.hash === this.hash) return;
    const route = parse(location.hash);
    // who comes back finds the row from which he went
    if (this.hash !== undefined) this.left.set(this.hash, location.hash);
    this.hash = location.hash;
    this.up = route.up;
    const [id, , question] = route.parts;
    const old = this.view;
    if (route.name === "point" && question !== undefined) this.view = new SamplePage(this, route.parts, route.query);
    else if (route.name === "point" && route.parts.length === 2) this.view = new SampleList(this, route.parts, route.query);
    else if (route.name === "point" && id) this.view = new PointPage(this, id);
    else if (route.name === "engine" && id && this.source.live) this.view = new EnginePage(this, id);
    else this.view = new Overview(this);
    old?.close();
    if (old) old.element.replaceWith(this.view.element);
    else document.body.append(this.view.element);
    if (old) scrollTo(0, 0);
    this.view.show();
    this.wantsFocus = Boolean(old);
    this.focusMain();
    this.#head();
  }

  #keys(event) {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.nodeName)) return;
    if (event.key === "Escape" && this.up) this.go(this.up);
    else if (event.target.closest?.(".curve, pre") || !this.view.keys?.(event)) return;
    event.preventDefault();
  }

  // Many records may come at once: draw them once.
  #later() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (this.ready) this.view.show();
      this.#head();
    });
  }

  #takeStatus(status) {
    this.status = status;
    this.view.showStatus();
    this.#head();
  }

  #takeState(state, sentence) {
    if (state === "live") this.ready = true;
    if (state === "connecting" && this.state !== "refused") {
      if (this.state === "live") this.state = "lost";
    } else if (state !== "connecting") {
      this.state = state;
      this.sentence = sentence;
    }
    render(this.dialog, this.state === "refused" && this.#tokenForm());
    this.dialog.querySelector("input")?.focus();
    this.#later();
  }

  #tokenForm() {
    return h("form", { class: "panel token", onsubmit: (event) => {
      event.preventDefault();
      const token = event.target.querySelector("input").value.trim();
      if (token) {
        this.state = "connecting";
        this.source.useToken(token);
        render(this.dialog);
      }
    } },
    h("h1", {}, "This daemon asks for its token"),
    h("p", {}, "The one in ", h("code", {}, "status.token_file"), ", or in the variable that ",
      h("code", {}, "status.token_env"), " names. It stays in this tab."),
    this.source.token && h("p", { class: "note bad", role: "alert" }, "The token is wrong."),
    h("label", {}, "Token ", h("input", { type: "password", autocomplete: "off", required: true })), " ",
    h("button", { type: "submit" }, "Open"));
  }

  #head() {
    const runs = [...this.store.runs.keys()];
    const run = this.run();
    const words = { connecting: "connecting …", live: this.status?.state ?? "live", lost: "not connected",
      refused: "token needed", full: "too many pages are open", report: "report" };
    document.title = `${run.name || "evald"} – evald`;
    render(this.header,
      h("a", { class: "brand", href: "#/" }, "evald"),
      runs.length > 1 ? h("label", {}, "run ", h("select", {
        onchange: (event) => { this.chosenRun = event.target.value; this.go("#/"); this.view.show(); },
      }, runs.map((name) => h("option", { value: name, selected: name === run.name }, name))))
        : h("span", { class: "run" }, run.name),
      h("span", { class: `state ${this.state === "live" ? this.status?.state : this.state}`, role: "status",
        title: this.sentence }, words[this.state]),
      this.source.live
        ? this.status && h("span", { class: "muted wide" }, `up ${seconds(Math.floor(this.status.uptime_s))}, evald ${this.status.version}`)
        : h("span", { class: "muted" }, `made ${moment(this.source.made)}`),
      this.status?.lag_steps != null && h("span", { class: "muted wide" }, `lag ${this.status.lag_steps} steps`),
      h("button", { type: "button", class: "theme", onclick: () => {
        nextTheme();
        this.view.restyle();
        this.#head();
      } }, themeWords()));
  }
}

// Up and down go along the rows of a table.
function rowKeys(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const links = [...event.currentTarget.querySelectorAll("tbody a")];
  const at = links.indexOf(document.activeElement);
  const next = links[at + step];
  if (at >= 0 && next) {
    event.preventDefault();
    next.focus();
  }
}

// A click anywhere in a row follows its link, unless text is being selected.
function rowClick(event) {
  if (event.target.closest("a") || String(getSelection())) return;
  event.currentTarget.querySelector("a")?.click();
}

const stored = document.getElementById("evald-report");
window.evald = new App();
window.evald.start(stored && JSON.parse(stored.textContent));
