// The daemon as a source: its stream of events, read by fetch (so that a header can carry the
// token), and what else is asked of it.

const TOKEN_KEY = "evald-token";
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10000;
// the daemon says something each 5 s at least
const SILENCE_MS = 20000;

export class LiveSource {
  constructor({ store, onChange, onStatus, onState }) {
    this.live = true;
    this.store = store;
    this.onChange = onChange;
    this.onStatus = onStatus;
    // "connecting", "live", "lost", "refused" or "full", and a sentence
    this.onState = onState;
    this.token = takeToken();
  }

  useToken(token) {
    this.token = token;
    sessionStorage.setItem(TOKEN_KEY, token);
    this.wake?.();
  }

  async run() {
    let wait = FIRST_WAIT_MS;
    for (;;) {
      let state = "lost";
      let sentence = "The daemon does not answer.";
      try {
        const response = await this.#open();
        if (response.ok) {
          await this.#read(response);
          wait = FIRST_WAIT_MS;
          sentence = "The daemon has closed the stream.";
        } else {
          state = { 401: "refused", 503: "full" }[response.status] ?? "lost";
          sentence = (await response.text()).trim();
        }
      } catch (error) {
        if (!(error instanceof TypeError || error.name === "AbortError")) throw error;
      }
      this.onState(state, sentence);
      await this.#pause(state === "refused" ? null : wait);
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  async page(id, set, { filter, against, offset, limit }) {
    const query = new URLSearchParams({ record_id: id, set, filter, against, offset, limit });
    return this.#json(`samples/page?${query}`);
  }

  async sample(id, set, question, number, against) {
    const query = new URLSearchParams({ record_id: id, set, question, sample: number, against });
    return this.#json(`samples/one?${query}`);
  }

  async log(engine, lines) {
    return this.#json(`engines/${encodeURIComponent(engine)}/log?lines=${lines}`);
  }

  // The whole terminal record; null where the ledger has none at that seq.
  async record(seq) {
    const response = await fetch(`records?after=${seq - 1}&limit=1`, { headers: this.#headers() });
    const text = response.ok ? (await response.text()).trim() : "";
    return text ? JSON.parse(text) : null;
  }

  async #json(path) {
    let response;
    try {
      response = await fetch(path, { headers: this.#headers() });
    } catch {
      throw new Refusal("The daemon does not answer.");
    }
    if (!response.ok) throw new Refusal((await response.text()).trim());
    return response.json();
  }

  #headers() {
    return this.token ? { Authorization: `Bearer ${this.token}` } : {};
  }

  async #open() {
    this.onState("connecting", "");
    this.abort = new AbortController();
    this.#listen();
    return fetch(`events?after=${this.store.lastSeq}`, {
      headers: this.#headers(),
      signal: this.abort.signal,
    });
  }

  // A connection that has died without a word is given up.
  #listen() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.abort.abort(), SILENCE_MS);
  }

  async #read(response) {
    this.store.beginStream();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.#listen();
      buffer += value;
      let end;
      let begin = 0;
      while ((end = buffer.indexOf("\n\n", begin)) >= 0) {
        this.#take(buffer.slice(begin, end));
        begin = end + 2;
      }
      buffer = buffer.slice(begin);
    }
  }

  #take(text) {
    let event = "";
    let data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event: ")) event = line.slice(7);
      else if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (event === "status") {
      this.onStatus(JSON.parse(data));
    } else if (event === "records") {
      this.store.add(JSON.parse(data));
      this.onChange();
    } else if (event === "reset") {
      this.store.clear();
      this.onChange();
    } else if (event === "live") {
      this.onState("live", "");
    }
  }

  // Wait; null: until there is another token.
  #pause(milliseconds) {
    clearTimeout(this.silence);
    return new Promise((resolve) => {
      this.wake = resolve;
      if (milliseconds !== null) setTimeout(resolve, milliseconds);
    });
  }
}

// What the daemon has refused, in its own words.
export class Refusal extends Error {}

// The token comes in the URL's fragment, which is not sent anywhere, and does not stay there.
function takeToken() {
  const match = /^#token=(.+)$/.exec(location.hash);
  if (match) {
    let token = match[1];
    try {
      token = decodeURIComponent(token);
    } catch {
      // not encoded: it is meant as it stands
    }
    sessionStorage.setItem(TOKEN_KEY, token);
    history.replaceState(null, "", location.pathname + location.search + "#/");
  }
  return sessionStorage.getItem(TOKEN_KEY);
}
