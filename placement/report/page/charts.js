"use strict";
// Line and scatter charts as SVG.

function ticks(low, high, num) {
  const step = 10 ** Math.floor(Math.log10((high - low) / num || 1));
  const size = [1, 2, 5, 10].map((k) => k * step).find((s) => (high - low) / s <= num) || step;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * size; i++) found.push(i * size + 0); // no -0
  return found;
}
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return ticks(low, high, 4);
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const k of decades < 2.2 ? [1, 2, 5] : [1]) {
      const x = k * 10 ** e;
      if (x >= low * 0.999 && x <= high * 1.001) found.push(x);
    }
  }
  return found;
}
function scale(low, high, from, to, isLog) {
  const f = isLog ? Math.log : (x) => x;
  const [a, b] = [f(low), f(high)];
  return (x) => from + ((f(x) - a) / (b - a || 1)) * (to - from);
}

// Marks of a horizontal axis that have room for their text.
function marks({ low, high, log }, width) {
  const room = Math.max(2, Math.floor(width / 64));
  const found = log ? logTicks(low, high) : ticks(low, high, Math.min(8, room));
  return found.filter((_, i) => i % Math.ceil(found.length / room) === 0);
}

// A frame with axes: {x, y} are {low, high, log, text, label}; draw(toX, toY, layer) fills it.
const chart = (frame) => responsive(frame.height, (width) => framed({ ...frame, width }));

function framed({ x, y, width, height, label, draw }) {
  const [left, right, top, bottom] = [62, 14, y.label ? 24 : 8, 42];
  const toX = scale(x.low, x.high, left, width - right, x.log);
  const toY = scale(y.low, y.high, height - bottom, top, y.log);
  const picture = svg("svg", { class: "picture", width, height, role: "img", "aria-label": label });
  for (const value of marks(x, width - left - right)) {
    picture.append(
      svg("line", { class: "axis", x1: toX(value), x2: toX(value), y1: top, y2: height - bottom }),
      svg("text", { x: toX(value), y: height - bottom + 16, "text-anchor": "middle" }, x.text(value)),
    );
  }
  for (const value of y.log ? logTicks(y.low, y.high) : ticks(y.low, y.high, 6)) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width - right, y1: toY(value), y2: toY(value) }),
      svg("text", { x: left - 8, y: toY(value) + 4, "text-anchor": "end" }, y.text(value)),
    );
  }
  picture.append(
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    svg("text", { x: 2, y: 12 }, y.label || ""),
  );
  draw(toX, toY, picture);
  return picture;
}

function hover(node, title, pairs) {
  node.setAttribute("tabindex", "0");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", [title, ...pairs.map(([k, v]) => `${k} ${v}`)].join(", "));
  node.addEventListener("pointermove", (e) => tip.show(e.clientX, e.clientY, title, pairs));
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    tip.show(box.right, box.bottom, title, pairs);
  });
  for (const what of ["pointerleave", "blur"]) node.addEventListener(what, tip.hide);
  return node;
}

function range(values, margin, isLog) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (isLog) return [low / (1 + margin), high * (1 + margin)];
  // Wide enough that marks, of three digits, differ.
  const room = Math.max((high - low) * margin, 0.02 * Math.max(Math.abs(low), Math.abs(high))) || margin;
  return [low - room, high + room];
}

// Best so far of every planner and seed of a workload, over seconds of planning.
function curvesChart(workload, unit) {
  const lines = workload.curves;
  const names = [...new Set(lines.map((line) => line.planner))];
  const off = new Set();
  const holder = el("div");
  const SHORTEST = 1e-3;
  function paint() {
    const shown = lines.filter((line) => !off.has(line.planner));
    const all = shown.flatMap((line) => line.points.map(([, v]) => v));
    if (workload.bound_s && workload.bound_s > 0) all.push(workload.bound_s);
    const ends = shown.map((line) => line.end_s);
    const legend = el("div", { class: "legend" }, names.map((name, i) =>
      el("button", {
        type: "button", "aria-pressed": String(!off.has(name)),
        onclick: () => {
          if (!off.delete(name)) off.add(name);
          paint();
          holder.querySelectorAll(".legend button")[i].focus();
        },
      }, swatch(lineColour(i)), name)));
    if (!all.length) return holder.replaceChildren(legend);
    const [low, high] = range(all, 0.06, false);
    holder.replaceChildren(chart({
      label: `Best ${workload.objective} so far over seconds of planning`,
      height: 340,
      x: { low: SHORTEST, high: Math.max(10 * SHORTEST, ...ends) * 1.3, log: true, text: (v) => seconds(v), label: "time spent planning" },
      y: { low, high, log: false, text: (v) => seconds(v, unit), label: "" },
      draw(toX, toY, layer) {
        if (workload.bound_s > 0) {
          layer.append(
            svg("line", { x1: toX(SHORTEST), x2: toX(Math.max(10 * SHORTEST, ...ends) * 1.3), y1: toY(workload.bound_s), y2: toY(workload.bound_s), stroke: "var(--good)", "stroke-dasharray": "5 4" }),
            svg("text", { x: toX(SHORTEST) + 6, y: toY(workload.bound_s) - 5 }, `proved lower bound ${seconds(workload.bound_s, unit)}`),
          );
        }
        for (const line of shown) {
          const colour = lineColour(names.indexOf(line.planner));
          const at = line.points.map(([s, v]) => [toX(Math.max(SHORTEST, s)), toY(v)]);
          const end = toX(Math.max(SHORTEST, line.end_s));
          const last = at[at.length - 1];
          const path = at.map(([px, py], i) => (i ? `H${px}V${py}` : `M${px} ${py}`)).join("") + `H${end}`;
          layer.append(svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": 2, opacity: 0.85 }));
          layer.append(hover(svg("circle", { cx: end, cy: last[1], r: 5, fill: colour, stroke: "var(--card)", "stroke-width": 1.5 }),
            line.planner + (known(line.seed) ? `, seed ${line.seed}` : ""),
            [["ends with", seconds(line.points[line.points.length - 1][1], unit)], ["after", seconds(line.end_s)], ["improvements", count(line.points.length)]]));
        }
      },
    }), legend);
  }
  paint();
  return holder;
}

// Predicted against measured, both logarithmic; the diagonal is a perfect prediction.
function scatterChart(points, what, workload) {
  const shown = points.filter((p) => known(p[what][0]) && p[what][0] > 0 && p[what][1] > 0);
  if (!shown.length) return null;
  const [low, high] = range(shown.flatMap((p) => p[what]), 0.15, true);
  const axis = { low, high, log: true, text: (v) => seconds(v) };
  return chart({
    label: `Predicted against measured ${what} of ${shown.length} placements`,
    x: { ...axis, label: `measured ${what}` },
    y: { ...axis, label: `predicted ${what}` },
    height: 400,
    draw(toX, toY, layer) {
      const band = [[low, low * 1.1], [high / 1.1, high], [high, high], [high, high / 1.1], [low * 1.1, low], [low, low]];
      layer.append(
        svg("path", { d: `M${band.map(([a, b]) => `${toX(a)} ${toY(b)}`).join("L")}Z`, fill: "var(--accent)", opacity: 0.1 }),
        svg("line", { x1: toX(low), y1: toY(low), x2: toX(high), y2: toY(high), stroke: "var(--faint)", "stroke-dasharray": "4 4" }),
      );
      const inFront = [...shown].sort((a, b) => (a.workload === workload) - (b.workload === workload));
      for (const p of inFront) {
        const mine = p.workload === workload;
        layer.append(hover(svg("circle", {
          cx: toX(p[what][1]), cy: toY(p[what][0]), r: mine ? 6 : 4,
          fill: mine ? "var(--accent)" : "var(--faint)", opacity: mine ? 0.9 : 0.45, stroke: "var(--card)",
        }), p.workload, [
          ["planners", p.planners.join(", ")],
          ["predicted", seconds(p[what][0])],
          ["measured", seconds(p[what][1])],
          ["error", signed(p[what][0] / p[what][1] - 1)],
        ]));
      }
    },
  });
}

// One column of a training's metrics over its steps.
function metricChart(steps, values, name) {
  const points = steps.map((s, i) => [s, values[i]]).filter(([, v]) => known(v));
  if (points.length < 2) return null;
  const [low, high] = range(points.map(([, v]) => v), 0.08, false);
  const text = (v) => (Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(1) : digits(v, 4));
  return el("div", {}, el("h3", {}, name), chart({
    label: `${name} over steps, ends at ${text(points[points.length - 1][1])}`,
    height: 210,
    x: { low: points[0][0], high: points[points.length - 1][0], text: (v) => count(v), label: "steps" },
    y: { low, high, text },
    draw(toX, toY, layer) {
      const path = points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x)} ${toY(y)}`).join("");
      layer.append(svg("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2 }));
      for (const [x, y] of points.length < 200 ? points : []) {
        const dot = svg("circle", { cx: toX(x), cy: toY(y), r: 6, fill: "transparent" });
        dot.addEventListener("pointermove", (e) => tip.show(e.clientX, e.clientY, name, [["steps", count(x)], ["value", text(y)]]));
        dot.addEventListener("pointerleave", tip.hide);
        layer.append(dot);
      }
    },
  }));
}
