// A report as a source: everything is in the file.

import { Refusal } from "./live.js";

const EXCERPT = 240;

export class StoredSource {
  constructor(data) {
    this.live = false;
    this.made = data.made;
    this.data = data;
  }

  fill(store) {
    store.add(this.data.batch);
  }

  // Whether there are samples of this set of a point.
  hasSamples(id, set) {
    return this.#stored(id, set) !== undefined;
  }

  async page(id, set, { offset, limit }) {
    const found = this.#stored(id, set);
    if (!found) throw new Refusal("This report holds no samples of this point.");
    const { samples, n_found: n } = found;
    const shown = samples.slice(offset, offset + limit);
    return {
      n: { all: samples.length },
      note: `The first ${samples.length} of ${n} samples that are wrong or have no score.`,
      offset,
      samples: shown.map((one) => ({ ...one, response: (one.response ?? "").slice(-EXCERPT) })),
    };
  }

  async sample(id, set, question, number) {
    const found = this.#stored(id, set)?.samples ?? [];
    const one = found.find((sample) => sample.question === question && sample.sample === number);
    if (!one) throw new Refusal("This report does not hold this sample.");
    return { sample: one, prompt: one.prompt ?? null };
  }

  #stored(id, set) {
    return this.data.samples.find((one) => one.id === id && one.set === set);
  }
}
