// One engine: what it does, and the last lines of its log.

import { h, render } from "./dom.js";
import { number, percent } from "./format.js";

const REFRESH_MS = 3000;
const LINES = 300;

export class EnginePage {
  constructor(app, name) {
    this.app = app;
    this.name = name;
    this.facts = h("section", { class: "panel" });
    this.lines = h("pre", { class: "log", tabindex: "0", "aria-label": "log" });
    this.file = h("p", { class: "muted" });
    this.element = h("main", { id: "main", tabindex: "-1" }, this.facts,
      h("section", { class: "panel" }, h("h2", {}, "Log"), this.file, this.lines));
    this.timer = null;
    this.#read();
  }

  close() {
    clearTimeout(this.timer);
    this.closed = true;
  }

  restyle() {}

  show() {
    this.showStatus();
  }

  showStatus() {
    const engine = this.app.status?.engines.find((one) => one.name === this.name);
    const rows = engine && [
      ["state", h("span", { class: `state ${engine.state}` }, engine.state)], ["detail", engine.detail],
      ["weight version", engine.weight_version], ["in flight", number(engine.in_flight)],
      ["tokens/s", engine.tokens_per_s == null ? null : number(Math.round(engine.tokens_per_s))],
      ["KV use", engine.kv_use == null ? null : percent(engine.kv_use)],
      ["waiting", engine.waiting == null ? null : number(engine.waiting)],
      ["restarts", number(engine.restarts)], ["pid", engine.pid === null ? null : String(engine.pid)],
    ].filter(([, value]) => value !== null && value !== "");
    render(this.facts,
      h("nav", { class: "trail", "aria-label": "way back" }, h("a", { href: "#/" }, "overview"), " / ", h("span", {}, "engine")),
      h("h1", {}, this.name),
      rows ? h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))
        : h("p", { class: "muted" }, this.app.status ? "The daemon has no such engine." : "Asking the daemon …"));
  }

  async #read() {
    try {
      const { file, lines } = await this.app.source.log(this.name, LINES);
      if (this.closed) return;
      const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 30;
      const text = lines.join("\n");
      if (this.lines.textContent !== text) this.lines.textContent = text;
      this.file.textContent = `the last ${number(lines.length)} lines of ${file}`;
      if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
    } catch (error) {
      this.file.textContent = error.message;
    }
    if (!this.closed) this.timer = setTimeout(() => this.#read(), REFRESH_MS);
  }
}
