// Small helpers to make and change SVG.

const SPACE = "http://www.w3.org/2000/svg";

export function make(kind, attributes = {}, ...children) {
  const element = document.createElementNS(SPACE, kind);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** Changes only what is not so already: a page is drawn sixty times a second. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) {
      if (element.hasAttribute(name)) element.removeAttribute(name);
    } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

export function text(element, words) {
  if (element.textContent !== words) element.textContent = words;
  return element;
}

/** The children of `parent`, one for each entry, made by `create` and brought up to date by `update`. */
export function match(parent, entries, create, update) {
  while (parent.children.length > entries.length) parent.lastElementChild.remove();
  entries.forEach((entry, i) => {
    const child = parent.children[i] ?? parent.appendChild(create(entry, i));
    update(child, entry, i);
  });
}

export const point = (radius, angle) => [radius * Math.sin(angle), -radius * Math.cos(angle)];

/** A piece of a ring, with rounded looks by its stroke. */
export function sector(inner, outer, from, to) {
  const wide = to - from > Math.PI ? 1 : 0;
  const [a, b, c, d] = [point(outer, from), point(outer, to), point(inner, to), point(inner, from)];
  return `M${a}A${outer} ${outer} 0 ${wide} 1 ${b}L${c}A${inner} ${inner} 0 ${wide} 0 ${d}Z`;
}
