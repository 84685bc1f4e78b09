// The samples of one eval set of a point: a filtered list, and one of them with its texts.

import { h, render } from "./dom.js";
import { number, score, signed, stepName } from "./format.js";
import { pointLink, sampleLink } from "./routes.js";

const FILTERS = [
  ["all", "all"], ["wrong", "wrong"], ["truncated", "truncated"], ["no_answer", "no answer"],
  ["failed", "no score"], ["flipped", "flipped"],
];
const LIMIT = 50;

// What a list and a sample have in common: the point, the set, and the point that it is compared with.
class SamplesBase {
  constructor(app, [id, set, question, number_], query) {
    this.app = app;
    this.id = id;
    this.set = set;
    this.question = question;
    this.number = Number(number_);
    this.filter = query.get("filter") ?? "all";
    this.offset = Number(query.get("offset") ?? 0) || 0;
    this.problem = "";
    this.element = h("main", { id: "main", tabindex: "-1" });
  }

  close() {
    this.closed = true;
  }

  showStatus() {}

  restyle() {}

  get query() {
    return { filter: this.filter, offset: this.offset };
  }

  point() {
    return this.app.store.runs.get(this.id.split("/")[0])?.points.get(this.id) ?? null;
  }

  against() {
    const point = this.point();
    const before = point && this.app.store.run(point.run).before(point);
    return before ? before.id : "";
  }

  // Ask once; the ledger must be read, or nobody knows which point came before.
  show() {
    if (this.app.ready && !this.asked) {
      this.asked = true;
      this.load().then(() => this.#draw(), (error) => {
        this.problem = error.message;
        this.#draw();
      });
    }
    this.#draw();
  }

  async pageOf(filter, offset) {
    return this.app.source.page(this.id, this.set, { filter, against: this.against(), offset, limit: LIMIT });
  }

  #draw() {
    if (this.closed) return;
    render(this.element, this.problem ? h("section", { class: "panel" }, this.trail(),
      h("p", { class: "note" }, this.problem)) : this.content());
    this.app.focusMain();
  }

  trail() {
    const point = this.point();
    return h("nav", { class: "trail", "aria-label": "way back" },
      h("a", { href: "#/" }, "overview"), " / ",
      h("a", { href: pointLink(this.id) }, point ? stepName(point) : this.id), " / ",
      this.question === undefined ? h("span", {}, this.set)
        : h("a", { href: pointLink(this.id, this.set, this.query) }, this.set));
  }
}

export class SampleList extends SamplesBase {
  async load() {
    this.page = await this.pageOf(this.filter, this.offset);
  }

  content() {
    if (!this.page) return h("p", { class: "muted" }, "Reading the samples …");
    const { n, note, offset, samples } = this.page;
    const shown = FILTERS.filter(([name]) => n[name] !== undefined);
    const go = (at) => pointLink(this.id, this.set, { filter: this.filter, offset: at });
    const total = n[this.filter] ?? samples.length;
    return [
      h("section", { class: "panel" }, this.trail(), h("h1", {}, `Samples of ${this.set}`),
        note ? h("p", { class: "muted" }, note) : h("nav", { class: "filters", "aria-label": "filter" }, shown.map(([name, words]) =>
          h("a", { href: pointLink(this.id, this.set, { filter: name }), "data-key": name,
            "aria-current": name === this.filter ? "true" : null,
            title: name === "flipped" ? "of questions whose mean is another than in the point before" : null },
            `${words} `, h("small", {}, number(n[name]))))),
        samples.length === 0 ? h("p", { class: "muted" }, "There are none.") : this.#table(samples),
        total > LIMIT && h("p", { class: "along" },
          offset > 0 ? h("a", { href: go(Math.max(0, offset - LIMIT)) }, "← earlier") : h("span", { class: "muted" }, "← earlier"),
          ` ${number(offset + 1)}–${number(offset + samples.length)} of ${number(total)} `,
          offset + LIMIT < total ? h("a", { href: go(offset + LIMIT) }, "further →") : h("span", { class: "muted" }, "further →"))),
    ];
  }

  #table(samples) {
    const some = (key) => samples.some((sample) => sample[key]);
    return h("div", { class: "scroll" }, h("table", { class: "rows samples", onkeydown: this.app.rowKeys },
      h("thead", {}, h("tr", {}, h("th", { class: "question" }, "question"), h("th", { class: "n score" }, "score"),
        some("moved") && h("th", { class: "n moved" }, "change"),
        h("th", {}, "response"), h("th", { class: "reference" }, "reference"), h("th", { class: "grader" }, "grader"))),
      h("tbody", {}, samples.map((sample) =>
        h("tr", { "data-key": `${sample.question} ${sample.sample}`, onclick: this.app.rowClick },
          h("td", {}, h("a", { href: sampleLink(this.id, this.set, sample.question, sample.sample, this.query) },
            sample.sample ? `${sample.question} #${sample.sample}` : sample.question)),
          h("td", { class: "n" }, mark(sample)),
          some("moved") && h("td", { class: `n ${sample.moved > 0 ? "better" : sample.moved < 0 ? "worse" : ""}` },
            sample.moved ? whole(sample.moved, signed) : ""),
          h("td", { class: "text" }, sample.response),
          h("td", { class: "text" }, show(sample.reference)),
          h("td", { class: "text muted" }, sample.grader_reason))))));
  }
}

export class SamplePage extends SamplesBase {
  async load() {
    const { source } = this.app;
    this.detail = await source.sample(this.id, this.set, this.question, this.number, this.against());
    this.page = await this.pageOf(this.filter, this.offset);
    const point = this.point();
    // the prompt is that of the set as the daemon has it now: was it the same then?
    const full = source.live && point?.type === "point" ? await source.record(point.seq) : null;
    const then = full?.provenance?.sets?.[this.set]?.data;
    this.otherData = Boolean(then && this.detail.data_digest && then !== this.detail.data_digest);
  }

  neighbours() {
    const samples = this.page?.samples ?? [];
    const at = samples.findIndex((one) => one.question === this.question && one.sample === this.number);
    const link = (one) => one && sampleLink(this.id, this.set, one.question, one.sample, this.query);
    return at < 0 ? [null, null] : [link(samples[at - 1]), link(samples[at + 1])];
  }

  keys(event) {
    const [before, after] = this.neighbours();
    if (event.key === "ArrowLeft" && before) this.app.go(before);
    else if (event.key === "ArrowRight" && after) this.app.go(after);
    else return false;
    return true;
  }

  content() {
    if (!this.detail) return h("p", { class: "muted" }, "Reading the sample …");
    const { sample, earlier, prompt } = this.detail;
    const [before, after] = this.neighbours();
    const facts = [
      sample.n_tokens && `${number(sample.n_tokens)} tokens`, sample.finish_reason && `ended by ${sample.finish_reason}`,
      sample.latency_s && `${sample.latency_s.toFixed(1)} s`, engines(sample), sample.weight_version,
    ].filter(Boolean);
    return h("section", { class: "panel detail-page" }, this.trail(),
      h("nav", { class: "along", "aria-label": "samples before and after" },
        before ? h("a", { href: before }, "← before") : h("span", { class: "muted" }, "← before"),
        after ? h("a", { href: after }, "after →") : h("span", { class: "muted" }, "after →")),
      h("h1", {}, `${sample.question}${sample.sample ? ` #${sample.sample}` : ""} `, mark(sample)),
      h("p", { class: "muted" }, facts.join(", ")),
      this.otherData ? h("p", { class: "note" }, "The eval set has changed since: its prompt is not shown.")
        : prompt !== null && prompt !== undefined && block("Prompt", messages(prompt)),
      sample.messages && block("Conversation", messages(sample.messages)),
      block("Response", h("pre", { tabindex: "0", class: "response" }, sample.response || "(empty)")),
      h("div", { class: "pair" },
        block("Reference", h("pre", {}, show(sample.reference) || "(none)")),
        block("Grader", h("pre", {}, sample.grader_reason || "(said nothing)"))),
      earlier && block(["The point before ", mark(earlier)],
        h("pre", { tabindex: "0", class: "response" }, earlier.response || "(empty)")));
  }
}

function block(title, ...content) {
  return h("div", { class: "block" }, h("h2", {}, title), content);
}

// A prompt: text, or chat messages.
function messages(prompt) {
  if (typeof prompt === "string") return h("pre", { tabindex: "0" }, prompt);
  return prompt.map((message) => h("div", { class: "message" },
    h("span", { class: "role" }, message?.role ?? ""),
    h("pre", {}, typeof message?.content === "string" ? message.content : JSON.stringify(message, null, 1))));
}

function mark(sample) {
  if (sample.status !== "scored") return h("span", { class: "mark failed" }, sample.status.replace("_", " "));
  const value = sample.score ?? null;
  const kind = value === null ? "" : value >= 1 ? "right" : value <= 0 ? "wrong" : "";
  return [h("span", { class: `mark ${kind}` }, whole(value, score)),
    sample.truncated && h("span", { class: "mark cut" }, "truncated"),
    sample.no_answer && h("span", { class: "mark cut" }, "no answer")];
}

// What is right or wrong is 1 or 0, without digits.
function whole(value, format) {
  return Number.isInteger(value) ? format(value).replace(".000", "") : format(value);
}

// Who has answered; of a sample that was moved, how many tokens each has given.
function engines(sample) {
  return (sample.pieces ?? []).map((piece) => `${piece.engine} (${number(piece.tokens)})`).join(" → ")
    || sample.engine;
}

function show(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}
