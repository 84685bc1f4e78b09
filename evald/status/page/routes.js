// Where things are: #/point/ID, #/point/ID/SET, #/point/ID/SET/QUESTION/NUMBER, #/engine/NAME.

const encode = encodeURIComponent;

export function pointLink(id, set = null, query = {}) {
  const tail = new URLSearchParams(query).toString();
  return `#/point/${encode(id)}${set === null ? "" : `/${encode(set)}`}${tail ? `?${tail}` : ""}`;
}

export function sampleLink(id, set, question, number, query = {}) {
  const tail = new URLSearchParams(query).toString();
  return `#/point/${encode(id)}/${encode(set)}/${encode(question)}/${number}${tail ? `?${tail}` : ""}`;
}

export function engineLink(name) {
  return `#/engine/${encode(name)}`;
}

// What a hash names: { name, parts, query }, and where Escape leads from there.
export function parse(hash) {
  const [path, tail = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...rest] = path.split("/");
  let parts;
  try {
    parts = rest.map(decodeURIComponent);
  } catch {
    return { name: "", parts: [], query: new URLSearchParams(), up: null };
  }
  const query = new URLSearchParams(tail);
  const plain = Object.fromEntries(query);
  let up = name ? "#/" : null;
  if (name === "point" && parts.length >= 4) up = pointLink(parts[0], parts[1], plain);
  else if (name === "point" && parts.length >= 2) up = pointLink(parts[0]);
  return { name, parts, query, up };
}
