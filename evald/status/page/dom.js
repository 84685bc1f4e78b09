// Elements without a framework. Text is only ever set as text: prompts and responses are hostile.

// Make an element. Properties: "class", "style" (an object), on* handlers, else attributes;
// children: elements, text, numbers, arrays of these; null and false are left out.
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  node.handlers = {};
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      node.handlers[name] = value;
      node[name] = value;
    } else if (name === "style") {
      for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Make the children of `target` look like these, and keep those nodes that can stay: whoever has
// the focus keeps it, and a text that is selected stays selected.
export function render(target, ...children) {
  const fresh = document.createElement("div");
  append(fresh, children);
  patchChildren(target, fresh);
}

function patchChildren(old, fresh) {
  let at = old.firstChild;
  for (const want of [...fresh.childNodes]) {
    if (at === null) {
      old.append(want);
    } else if (alike(at, want)) {
      const next = at.nextSibling;
      if (at !== want) patch(at, want);
      at = next;
    } else {
      const next = at.nextSibling;
      at.replaceWith(want);
      at = next;
    }
  }
  while (at !== null) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function alike(one, other) {
  return (
    one.nodeType === other.nodeType &&
    one.nodeName === other.nodeName &&
    (one.nodeType !== Node.ELEMENT_NODE ||
      (one.getAttribute("data-key") === other.getAttribute("data-key") && !one.keep && !other.keep))
  );
}

function patch(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    // (the policy of the page forbids style attributes, not styles that are set one by one)
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const name of Object.keys(old.handlers ?? {})) old[name] = null;
  for (const [name, one] of Object.entries(fresh.handlers ?? {})) old[name] = one;
  old.handlers = fresh.handlers;
  if (old.nodeName === "SELECT") {
    const chosen = fresh.querySelector("option[selected]")?.value;
    patchChildren(old, fresh);
    if (chosen !== undefined && document.activeElement !== old) old.value = chosen;
    return;
  }
  patchChildren(old, fresh);
}
