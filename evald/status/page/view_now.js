// What the daemon does at this moment: the running points, the queue, its engines, its disks.

import { h } from "./dom.js";
import { bytes, number, percent, score, seconds, stepName } from "./format.js";
import { engineLink } from "./routes.js";

export function nowPanels(status) {
  return [
    h("section", { class: "panel", "data-key": "work", "aria-labelledby": "work" },
      h("h2", { id: "work" }, "Now"),
      status.not_written && h("p", { class: "note bad" }, `Evaluation pauses: ${status.not_written}`),
      status.config_fault && h("p", { class: "note warn" }, `The config on disk is not the one in use: ${status.config_fault}`),
      status.running.map(running),
      status.running.length === 0 && h("p", { class: "muted" }, "No point is being measured."),
      status.queued.length > 0 && h("p", {}, `${status.queued.length} queued: `,
        status.queued.slice(0, 8).map(stepName).join(", "), status.queued.length > 8 && " …"),
      disks(status)),
    h("section", { class: "panel", "data-key": "engines", "aria-labelledby": "engines" },
      h("h2", { id: "engines" }, "Engines"), engines(status.engines)),
  ];
}

function running(point) {
  return h("div", { class: "running", "data-key": `${point.run} ${point.kind} ${point.step} ${point.revision}` },
    h("p", {}, h("strong", {}, stepName(point)), ` ${point.state} for ${seconds(point.since_s)}`),
    point.sets.map((set) => {
      const share = set.total ? set.done / set.total : 0;
      return h("div", { class: "progress", "data-key": set.name },
        h("span", { class: "name", title: set.name }, set.name),
        bar(share, `${set.name}: ${percent(share)}`),
        h("span", { class: "figures" }, `${number(set.done)}/${number(set.total)}`),
        h("span", { class: "figures" }, score(set.score)),
        h("span", { class: "figures muted" },
          set.done >= set.total ? "done" : set.left_s == null ? "" : `${seconds(set.left_s)} left`));
    }));
}

export function bar(share, label, kind = "") {
  return h("span", {
    class: `bar ${kind}`, role: "progressbar", "aria-label": label,
    "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100,
  }, h("span", { style: { width: `${Math.min(100, 100 * share)}%` } }));
}

function engines(list) {
  if (list.length === 0) return h("p", { class: "muted" }, "There are none.");
  const head = ["engine", "state", "weights", "in flight", "tokens/s", "KV use", "waiting", "restarts"];
  return h("div", { class: "scroll" }, h("table", { class: "engines" },
    h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { class: at > 2 ? "n" : "" }, name)))),
    h("tbody", {}, list.map((engine) =>
      h("tr", { "data-key": engine.name },
        h("td", {}, h("a", { href: engineLink(engine.name) }, engine.name)),
        h("td", {}, h("span", { class: `state ${engine.state}` }, engine.state)),
        h("td", { title: engine.weight_version ?? "" }, weights(engine.weight_version)),
        h("td", { class: "n" }, number(engine.in_flight)),
        h("td", { class: "n" }, engine.tokens_per_s == null ? "–" : number(Math.round(engine.tokens_per_s))),
        h("td", { class: "n" }, percent(engine.kv_use)),
        h("td", { class: "n" }, number(engine.waiting)),
        h("td", { class: "n" }, number(engine.restarts)))))));
}

// The label without its run and its nonce: points may overlap, so engines may serve different steps.
function weights(version) {
  const parts = (version ?? "–").split(":");
  return parts.length > 3 ? parts.slice(-3, -1).join(":") : parts.join(":");
}

function disks({ staging, disk }) {
  if (!staging && !disk) return null;
  const room = (used, total, words, key) => {
    const share = total > 0 ? used / total : 0;
    return h("div", { class: "progress disk", "data-key": key },
      h("span", { class: "name" }, key), bar(share, `${key}: ${percent(share)} used`, share > 0.9 ? "bad" : ""),
      h("span", { class: "figures wide" }, words));
  };
  const budget = staging && (staging.max_bytes ?? staging.used_bytes + staging.free_bytes);
  const used = disk && disk.results_total_bytes - disk.results_free_bytes;
  return h("div", { class: "disks" },
    staging && room(staging.used_bytes, budget,
      `${number(staging.snapshots)} snapshots, ${bytes(staging.used_bytes)} of ${bytes(budget)}`, "staging"),
    disk && room(used, disk.results_total_bytes,
      `${bytes(disk.results_free_bytes)} free` +
      (disk.samples_bytes == null ? "" : `, samples ${bytes(disk.samples_bytes)}`), "results"));
}
