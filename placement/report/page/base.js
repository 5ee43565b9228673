"use strict";
// What all parts share: elements, numbers as text, colours, the tooltip, packed arrays.
// Text from files is only ever set as text (textContent, createTextNode), never as markup.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

const known = (x) => x !== null && x !== undefined;

function made(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (!known(value) || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => known(child) && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

// Numbers as text

function digits(x, n = 3) {
  if (x === 0) return "0";
  return Math.abs(x) >= 10 ** (n - 1) ? x.toFixed(0) : Number(x.toPrecision(n)).toString();
}
function seconds(x, unit = "s") {
  if (!known(x)) return "–";
  if (x === 0) return `0 ${unit}`;
  const size = Math.abs(x);
  if (size >= 0.9995) return `${digits(x)} ${unit}`;
  if (size >= 0.9995e-3) return `${digits(x * 1e3)} m${unit}`;
  if (size >= 0.9995e-6) return `${digits(x * 1e6)} µ${unit}`;
  return `${digits(x * 1e9)} n${unit}`;
}
function bytes(x) {
  if (!known(x)) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (x >= size) return `${digits(x / size)} ${unit}`;
  }
  return `${digits(x, 4)} B`;
}
const percent = (x, n = 1) => (known(x) ? `${(100 * x).toFixed(n)} %` : "–");
const signed = (x) => (known(x) ? `${x >= 0 ? "+" : "−"}${Math.abs(100 * x).toFixed(1)} %` : "–");
const times = (x) => (known(x) ? `${x.toFixed(2)}×` : "–");
const count = (x) => (known(x) ? Math.round(x).toLocaleString("en") : "–");
const plural = (n, word, words = `${word}s`) => `${count(n)} ${n === 1 ? word : words}`;

function shortened(text, limit) {
  if (text.length <= limit) return text;
  const tail = Math.ceil((limit - 1) * 0.6); // the end of a path says more than its begin
  return `${text.slice(0, limit - 1 - tail)}…${text.slice(-tail)}`;
}

// Colours: neighbours differ in hue and in lightness; the same in light and dark

const BATCH = ["#3b6fb6", "#f2a541", "#4aa57c", "#c8553d", "#7fb7d9", "#8a5a9e", "#b7c454", "#d98ab0"];
const DEVICE = ["#4477cc", "#ee8f3b", "#2fa084", "#c2528b", "#8d6fd1", "#a8a11f", "#4fb3d9", "#b0664a"];
const cycled = (colours, i) =>
  i < colours.length ? colours[i] : `hsl(${(i * 137.5) % 360} 52% ${i % 2 ? 48 : 60}%)`;
const batchColour = (i) => BATCH[i % BATCH.length];
const deviceColour = (i) => cycled(DEVICE, i);
const lineColour = (i) => cycled(DEVICE, i);

function isDark(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return colour[0] !== "#" || 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

// A canvas knows no CSS variables: a probe resolves them.
function themeColours() {
  const probe = el("span", { hidden: true });
  document.body.append(probe);
  const found = {};
  for (const name of ["card", "lane", "ink", "faint", "line", "accent", "cut", "bad"]) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

// Tooltip: a title and pairs of text

const tip = {
  show(x, y, title, pairs) {
    const box = $("tip");
    box.replaceChildren(
      el("b", {}, title),
      el("dl", {}, pairs.filter(([, value]) => known(value)).map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])),
    );
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth - 8 ? Math.max(8, x - width - 12) : x + 16;
    const top = y + 16 + height > innerHeight - 8 ? Math.max(8, y - height - 12) : y + 16;
    box.style.left = `${left}px`;
    box.style.top = `${top}px`;
  },
  hide() {
    $("tip").hidden = true;
  },
};
const announce = (text) => {
  $("live").textContent = text;
};

// Arrays in base64; large ones were deflated

const decoded = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const devicesOf = (placement) => new Uint16Array(decoded(placement).buffer);
async function inflate(text) {
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function remembered(make) {
  const kept = new Map();
  return (key) => {
    if (!kept.has(key)) kept.set(key, make(key));
    return kept.get(key);
  };
}

// The one selection of the page; parts listen to what concerns them.

const data = JSON.parse($("data").textContent);
const page = new EventTarget();
const onPage = {}; // for whoever looks at the page from outside, e.g. a test
let shown = new AbortController(); // what listens for the workload that is shown
const changed = (what) => page.dispatchEvent(new Event(what));
const on = (what, act, target = page) => target.addEventListener(what, act, { signal: shown.signal });

function card(title, lead, ...children) {
  return el("div", { class: "card" }, title && el("h2", {}, title), lead && el("p", { class: "lead" }, lead), ...children);
}
// Text, or elements; the first column is names, the others are figures.
function plainTable(header, rows) {
  const cells = (tag, row, more) => row.map((cell, i) => el(tag, i ? more : { ...more, class: "name" }, cell));
  return el("div", { class: "sideways", tabindex: 0, role: "group", "aria-label": header[0] }, el("table", {},
    el("thead", {}, el("tr", {}, cells("th", header, { scope: "col" }))),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells("td", row, {}))))));
}
function swatch(colour) {
  return el("span", { class: "swatch", style: { background: colour }, "aria-hidden": "true" });
}
function choice(label, options, chosen, act) {
  const select = el("select", { onchange: () => act(select.value) },
    options.map(([value, text]) => el("option", { value }, text)));
  select.value = chosen;
  return el("label", { class: "pick" }, label, " ", select);
}
// What is drawn anew, in a fixed height, whenever it gets another width.
function responsive(height, make) {
  const holder = el("div", { style: { height: `${height}px` } });
  let drawn = 0;
  const draw = () => {
    const width = holder.clientWidth;
    if (!width || width === drawn) return;
    drawn = width;
    holder.replaceChildren(make(width, height));
  };
  new ResizeObserver(draw).observe(holder);
  on("paper", draw);
  return holder;
}
function choose(select, value) {
  select.querySelector("select").value = value;
}
