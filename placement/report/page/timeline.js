"use strict";
// Predicted and measured timelines of one or two planners, on one time axis: lanes of operators,
// busy share and memory of every device. Wheel, keys, buttons, drag and pinch move the axis.

const AXIS = 24;
const TITLE = 26;

// The bars of a timeline in ticks, and for every device its bars by start.
const bars = remembered(async ({ timeline, placement }) => {
  const buffer = await inflate(timeline.bars);
  const devices = devicesOf(placement);
  const [m, n, x] = [timeline.num_shown, timeline.num_ops, timeline.num_transfers];
  const cut = (from, length) => new Uint32Array(buffer, 4 * from, length);
  const start = cut(0, m * n);
  for (let i = n; i < m * n; i++) start[i] += start[i - n]; // differences; arithmetic modulo 2^32
  const took = cut(m * n, m * n);
  const lanes = timeline.utilisation.map(() => []);
  for (let i = 0; i < m * n; i++) lanes[devices[i % devices.length]].push(i);
  const transfers = cut(2 * m * n, 4 * x);
  const sent = cut(2 * m * n + 4 * x, x);
  const sending = cut(2 * m * n + 5 * x, x);
  const arriving = timeline.utilisation.map(() => []);
  for (let i = 0; i < x; i++) arriving[transfers[4 * i + 3]].push(i);
  const by = (times) => (a, b) => times[a] - times[b];
  return {
    tick: timeline.tick_s, num: n, start, took, transfers, sent, sending,
    lanes: lanes.map((lane) => Uint32Array.from(lane).sort(by(start))),
    arriving: arriving.map((lane) => Uint32Array.from(lane).sort(by(sent))),
  };
});

// The first of ``order`` (by start) that ends after ``tick``: bars of a lane follow each other.
function firstAfter(order, start, took, tick) {
  let [low, high] = [0, order.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[order[middle]] + took[order[middle]] <= tick) low = middle + 1;
    else high = middle;
  }
  return low;
}

// What all panels share: which part of the time is seen.
const view = {
  from: 0, to: 1, extent: 1,
  set(from, to) {
    const least = this.extent * 1e-6;
    const width = Math.min(Math.max(to - from, least), this.extent * 1.04);
    const margin = this.extent * 0.02;
    this.from = Math.min(Math.max(from, -margin), this.extent + margin - width);
    this.to = this.from + width;
    changed("view");
  },
  zoom(factor, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) * factor, at + (this.to - at) * factor);
  },
  pan(share) {
    const by = (this.to - this.from) * share;
    this.set(this.from + by, this.to + by);
  },
  reset() {
    this.set(-this.extent * 0.005, this.extent * 1.005);
  },
};

class Panel {
  constructor(workload, planner, number) {
    this.workload = workload;
    this.decision = workload.decisions[workload.planners.find((p) => p.name === planner).decision];
    this.colour = "batch";
    this.cursor = null; // {track, position} of the bar that keys point at
    this.hovered = null;
    this.canvas = el("canvas", {
      id: `gantt-${number}`, tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": `Timeline of ${planner}. Plus and minus zoom, left and right move, up and down choose a device, comma and full stop choose an operator, 0 shows everything.`,
    });
    const facts = ["predicted", "measured"].filter((kind) => this.decision[kind]).map((kind) => {
      const t = this.decision[kind];
      return el("span", { class: "hint" }, `${kind === "measured" ? "measured, one run" : kind}: ${plural(t.num_microbatches, "micro-batch", "micro-batches")} in ${seconds(t.makespan_s)}, period ${seconds(t.period_s)}`);
    });
    const row = workload.planners.find((p) => p.name === planner);
    if (this.decision.measured && known(row.measured_period_s)) {
      facts.push(el("span", { class: "hint" }, `median period of ${plural(row.rounds, "run")}: ${seconds(row.measured_period_s)}`));
    }
    const others = this.decision.planners.filter((name) => name !== planner);
    this.node = el("div", { class: "panel" },
      el("div", { class: "who" },
        el("h3", {}, planner, others.length ? el("span", { class: "hint" }, ` same placement as ${others.join(", ")}`) : null), facts),
      this.canvas, workload.still, this.summary());
    this.listen();
    this.ready = this.load();
  }

  async load() {
    this.parts = {};
    for (const kind of ["predicted", "measured"]) {
      const timeline = this.decision[kind];
      if (timeline) this.parts[kind] = await bars(this.keys(kind));
    }
    this.tracks = this.layout();
    this.draw();
    this.workload.still?.remove();
    this.workload.still = null;
  }

  keys(kind) {
    const d = this.decision;
    d.keys = d.keys || {};
    d.keys[kind] = d.keys[kind] || { timeline: d[kind], placement: d.placement };
    return d.keys[kind];
  }

  // Rows from top to bottom: {kind, y, height, ...}.
  layout() {
    const tracks = [];
    let y = 0;
    const add = (track) => {
      tracks.push({ y, ...track });
      y += track.height;
    };
    const devices = this.workload.devices;
    const high = devices.length > 4 ? 22 : 30;
    for (const source of Object.keys(this.parts)) {
      const t = this.decision[source];
      const cut = t.num_shown < t.num_microbatches ? `, the first ${t.num_shown} of ${t.num_microbatches} micro-batches` : "";
      add({ kind: "title", height: TITLE, text: `${source === "measured" ? "measured, one run" : source}${cut}` });
      devices.forEach((_, device) => add({ kind: "lane", height: high, source, device }));
    }
    const both = Object.keys(this.parts).length > 1 ? "area predicted, line measured" : "";
    add({ kind: "title", height: TITLE, text: "busy share", more: both });
    devices.forEach((_, device) => add({ kind: "busy", height: high + 4, device }));
    if (Object.keys(this.parts).some((source) => this.decision[source].memory)) {
      add({ kind: "title", height: TITLE, text: "memory held", more: both });
      devices.forEach((_, device) => add({ kind: "memory", height: high + 4, device }));
    }
    this.height = y + AXIS;
    this.canvas.style.height = `${this.height}px`;
    return tracks;
  }

  get gutter() {
    return this.canvas.clientWidth < 500 ? 66 : 96;
  }
  x(time) {
    const width = this.canvas.clientWidth - this.gutter;
    return this.gutter + ((time - view.from) / (view.to - view.from)) * width;
  }
  time(x) {
    const width = this.canvas.clientWidth - this.gutter;
    return view.from + ((x - this.gutter) / width) * (view.to - view.from);
  }

  draw() {
    if (!this.tracks || !this.canvas.isConnected) return;
    const ratio = devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    this.canvas.width = width * ratio;
    this.canvas.height = this.height * ratio;
    const c = this.canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.textBaseline = "middle";
    const theme = themeColours();
    this.grid(c, theme, width);
    for (const track of this.tracks) {
      if (track.kind === "title") this.title(c, theme, track);
      else {
        this.name(c, theme, track);
        c.save();
        c.beginPath();
        c.rect(this.gutter, track.y, width - this.gutter, track.height);
        c.clip();
        if (track.kind === "lane") this.lane(c, theme, track, width);
        else this.curve(c, theme, track, width);
        c.restore();
      }
    }
    this.canvas.dataset.from = view.from;
    this.canvas.dataset.to = view.to;
  }

  grid(c, theme, width) {
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    const num = Math.max(2, Math.floor((width - this.gutter) / 90));
    const marks = ticks(view.from, view.to, num);
    // Enough digits to tell neighbouring marks from each other.
    const step = marks.length > 1 ? marks[1] - marks[0] : view.to - view.from;
    const largest = Math.max(Math.abs(view.from), Math.abs(view.to));
    const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find(([, s]) => largest >= s) || ["ns", 1e-9];
    const decimals = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / size) - 1e-9)));
    for (const mark of marks) {
      const x = Math.round(this.x(mark)) + 0.5;
      if (x < this.gutter) continue;
      c.strokeStyle = theme.line;
      c.beginPath();
      c.moveTo(x, 0);
      c.lineTo(x, this.height - AXIS + 4);
      c.stroke();
      c.fillStyle = theme.faint;
      if (x < width - 24) c.fillText(`${(mark / size).toFixed(decimals)} ${unit}`, x, this.height - AXIS / 2 + 2);
    }
  }

  title(c, theme, track) {
    c.textAlign = "left";
    c.font = "600 12px system-ui, sans-serif";
    c.fillStyle = theme.card;
    const text = track.text;
    const size = c.measureText(text).width;
    c.fillRect(0, track.y + 4, size + 8, track.height - 6);
    c.fillStyle = theme.ink;
    c.fillText(text, 0, track.y + track.height / 2 + 2);
    if (track.more) {
      c.font = "11px system-ui, sans-serif";
      c.fillStyle = theme.faint;
      c.fillText(track.more, size + 10, track.y + track.height / 2 + 2);
    }
  }

  name(c, theme, track) {
    const device = this.workload.devices[track.device];
    c.textAlign = "right";
    c.font = "11px system-ui, sans-serif";
    const right = this.gutter - 8;
    const middle = track.y + track.height / 2;
    let text = "";
    if (track.kind === "lane") text = percent(this.decision[track.source].utilisation[track.device], 0);
    if (track.kind === "memory") text = bytes(Math.max(...this.largest(track.device)));
    const limit = this.gutter < 80 ? 9 : 13;
    c.fillStyle = theme.ink;
    if (track.height > 24 && text) {
      c.fillText(shortened(device.name, limit), right, middle - 6);
      c.fillStyle = theme.faint;
      c.font = "10px system-ui, sans-serif";
      c.fillText(text, right, middle + 7);
    } else c.fillText(shortened(device.name, limit), right, middle);
    c.fillStyle = deviceColour(track.device);
    c.fillRect(this.gutter - 4, track.y + 3, 3, track.height - 6);
  }

  largest(device) {
    return ["predicted", "measured"].filter((s) => this.decision[s]?.memory).map((s) => Math.max(...this.decision[s].memory[device]));
  }

  fill(bar, parts) {
    if (this.colour === "batch") return batchColour(Math.floor(bar / parts.num));
    return this.workload.outline.colourOf(bar % parts.num);
  }

  lane(c, theme, track, width) {
    const parts = this.parts[track.source];
    const { start, took, tick } = parts;
    const order = parts.lanes[track.device];
    const [top, height] = [track.y + 2, track.height - 8];
    c.fillStyle = theme.lane;
    c.fillRect(this.gutter, top, width - this.gutter, height);
    const until = view.to / tick;
    let solid = null; // bars below a few pixels that touch are painted as one
    const flush = () => {
      if (!solid) return;
      c.fillStyle = solid.colour;
      c.fillRect(solid.left, top, Math.max(solid.right - solid.left, 0.8), height);
      solid = null;
    };
    const runs = []; // neighbouring bars of one micro-batch, for its number
    for (let i = firstAfter(order, start, took, view.from / tick); i < order.length; i++) {
      const bar = order[i];
      if (start[bar] > until) break;
      const left = this.x(start[bar] * tick);
      const right = this.x((start[bar] + took[bar]) * tick);
      const batch = Math.floor(bar / parts.num);
      const run = runs[runs.length - 1];
      if (run && run.batch === batch && left - run.right < 3) run.right = right;
      else runs.push({ batch, left, right, single: null });
      if (right - left > 46) runs[runs.length - 1].single = true;
      const colour = this.fill(bar, parts);
      if (right - left < 4) {
        if (solid && solid.colour === colour && left - solid.right < 0.8) solid.right = Math.max(solid.right, right);
        else if (!solid || right > solid.right + 0.2 || right - left > 1) {
          flush();
          solid = { left, right, colour };
        }
        continue;
      }
      flush();
      c.fillStyle = colour;
      c.fillRect(left, top, right - left, height);
      c.fillStyle = theme.card;
      c.fillRect(right - 0.6, top, 0.6, height); // tells neighbours from each other
      if (right - left > 46) this.label(c, bar, parts, left, right, top + height / 2);
    }
    flush();
    c.textAlign = "center";
    c.font = "600 11px system-ui, sans-serif";
    for (const run of runs) {
      const [left, right] = [Math.max(run.left, this.gutter), Math.min(run.right, width)];
      if (run.single || right - left < 15 || this.colour !== "batch") continue;
      c.fillStyle = isDark(batchColour(run.batch)) ? "#fff" : "#1f2328";
      c.fillText(String(run.batch), (left + right) / 2, top + height / 2 + 0.5);
    }
    this.arrivals(c, theme, track, parts);
    for (const marked of [this.hovered, this.cursor]) {
      if (marked?.track !== track) continue;
      const left = this.x(start[marked.bar] * tick);
      const right = Math.max(this.x((start[marked.bar] + took[marked.bar]) * tick), left + 2);
      c.strokeStyle = theme.ink;
      c.lineWidth = 2;
      c.strokeRect(left, top, right - left, height);
      c.lineWidth = 1;
    }
  }

  label(c, bar, parts, left, right, middle) {
    const [from, to] = [Math.max(left, this.gutter), right];
    const room = Math.floor((Math.min(to, this.canvas.clientWidth) - from - 8) / 6.2);
    if (room < 4) return;
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "left";
    const colour = this.fill(bar, parts);
    c.fillStyle = isDark(colour) ? "#fff" : "#1f2328";
    c.fillText(shortened(this.op(bar % parts.num), room), from + 4, middle + 0.5);
  }

  arrivals(c, theme, track, parts) {
    const { sent, sending, tick } = parts;
    const order = parts.arriving[track.device];
    c.fillStyle = theme.cut;
    let painted = -Infinity;
    for (let i = firstAfter(order, sent, sending, view.from / tick); i < order.length; i++) {
      if (sent[order[i]] * tick > view.to) break;
      const left = this.x(sent[order[i]] * tick);
      const right = Math.max(this.x((sent[order[i]] + sending[order[i]]) * tick), left + 1);
      if (right < painted) continue;
      c.fillRect(left, track.y + track.height - 5, right - left, 3);
      painted = right;
    }
  }

  curve(c, theme, track, width) {
    const [top, bottom] = [track.y + 3, track.y + track.height - 3];
    c.fillStyle = theme.lane;
    c.fillRect(this.gutter, top, width - this.gutter, bottom - top);
    const most = track.kind === "busy" ? 1 : Math.max(1, ...this.workload.devices.flatMap((_, d) => this.largest(d)));
    for (const source of ["predicted", "measured"]) {
      const timeline = this.decision[source];
      const values = timeline?.[track.kind]?.[track.device];
      if (!values) continue;
      const size = timeline.makespan_s / values.length;
      const asArea = source === "predicted" || !this.decision.predicted;
      c.beginPath();
      if (asArea) c.moveTo(this.x(0), bottom);
      for (let i = 0; i < values.length; i++) {
        const y = bottom - (values[i] / most) * (bottom - top - 1);
        c.lineTo(this.x(i * size), y);
        c.lineTo(this.x((i + 1) * size), y);
      }
      if (asArea) {
        c.lineTo(this.x(timeline.makespan_s), bottom);
        c.fillStyle = deviceColour(track.device);
        c.globalAlpha = 0.45;
        c.fill();
        c.globalAlpha = 1;
      } else {
        c.strokeStyle = theme.ink;
        c.globalAlpha = 0.75;
        c.stroke();
        c.globalAlpha = 1;
      }
    }
  }

  op(number) {
    return this.workload.graph ? this.workload.graph.ops[number] : `operator ${number}`;
  }

  // What is at a point: {track, bar | transfer, position}.
  hit(x, y) {
    const track = this.tracks?.find((t) => y >= t.y && y < t.y + t.height && t.kind !== "title");
    if (!track || x < this.gutter) return null;
    if (track.kind !== "lane") return { track };
    const parts = this.parts[track.source];
    const slack = this.time(x + 3) - this.time(x);
    const near = (order, start, took) => {
      const at = this.time(x);
      const i = firstAfter(order, start, took, (at - slack) / parts.tick);
      if (i >= order.length) return null;
      return start[order[i]] * parts.tick <= at + slack ? i : null;
    };
    if (y > track.y + track.height - 7) {
      const i = near(parts.arriving[track.device], parts.sent, parts.sending);
      if (i !== null) return { track, transfer: parts.arriving[track.device][i] };
    }
    const i = near(parts.lanes[track.device], parts.start, parts.took);
    return i === null ? { track } : { track, bar: parts.lanes[track.device][i], position: i };
  }

  // Title and pairs of what a hit is about.
  explain(hit, time) {
    const { workload } = this;
    const device = workload.devices[hit.track.device].name;
    if (known(hit.bar)) {
      const parts = this.parts[hit.track.source];
      const op = hit.bar % parts.num;
      const other = this.parts[hit.track.source === "predicted" ? "measured" : "predicted"];
      const graph = workload.graph;
      return [this.op(op), [
        ["kind", graph?.kind ? graph.kinds[graph.kind[op]] : null],
        ["module", graph ? graph.modules[graph.module[op]] || null : null],
        ["micro-batch", String(Math.floor(hit.bar / parts.num))],
        ["device", `${device}, ${hit.track.source}`],
        ["starts at", seconds(parts.start[hit.bar] * parts.tick)],
        ["takes", seconds(parts.took[hit.bar] * parts.tick)],
        [hit.track.source === "predicted" ? "measured" : "predicted",
          other && hit.bar < other.took.length ? seconds(other.took[hit.bar] * other.tick) : null],
      ]];
    }
    if (known(hit.transfer)) {
      const { transfers, sent, sending, tick } = this.parts[hit.track.source];
      const [tensor, batch, from] = transfers.subarray(4 * hit.transfer, 4 * hit.transfer + 3);
      const source = workload.graph?.tensor_src?.[tensor];
      return ["transfer", [
        ["of", known(source) ? (source < 0 ? "an input of the model" : this.op(source)) : `tensor ${tensor}`],
        ["size", bytes(workload.graph?.tensor_bytes?.[tensor])],
        ["from", workload.devices[from].name],
        ["to", device],
        ["micro-batch", String(batch)],
        ["starts at", seconds(sent[hit.transfer] * tick)],
        ["takes", seconds(sending[hit.transfer] * tick)],
      ]];
    }
    const shown = hit.track.kind === "memory" ? bytes : (v) => percent(v, 0);
    const at = (source) => {
      const timeline = this.decision[source];
      const values = timeline?.[hit.track.kind]?.[hit.track.device];
      if (!values || time < 0 || time > timeline.makespan_s) return null;
      return shown(values[Math.min(values.length - 1, Math.floor((time / timeline.makespan_s) * values.length))]);
    };
    if (hit.track.kind === "lane") return [`${device}: idle`, [["at", seconds(time)]]];
    return [`${device}: ${hit.track.kind === "memory" ? "memory held" : "busy share"}`,
      [["at", seconds(time)], ["predicted", at("predicted")], ["measured", at("measured")],
        ["limit", hit.track.kind === "memory" ? bytes(workload.devices[hit.track.device].memory_bytes) : null]]];
  }

  listen() {
    const { canvas } = this;
    const pointers = new Map();
    canvas.addEventListener("wheel", (e) => {
      const focused = document.activeElement === canvas;
      if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || (e.shiftKey && focused)) {
        e.preventDefault();
        view.pan((e.deltaX || e.deltaY) / 800);
      } else if (focused || e.ctrlKey || e.metaKey) {
        e.preventDefault();
        view.zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) / 250), this.time(e.offsetX));
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (e) => {
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(e.pointerId);
      pointers.set(e.pointerId, e.offsetX);
    });
    for (const what of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(what, (e) => pointers.delete(e.pointerId));
    }
    canvas.addEventListener("pointermove", (e) => {
      if (pointers.has(e.pointerId)) {
        const [before, after] = [pointers.get(e.pointerId), e.offsetX];
        const other = [...pointers].find(([id]) => id !== e.pointerId)?.[1];
        if (other === undefined) {
          const by = this.time(before) - this.time(after);
          view.set(view.from + by, view.to + by);
        } else if (Math.abs(after - other) > 4) {
          view.zoom(Math.abs(before - other) / Math.abs(after - other), this.time(other));
        }
        pointers.set(e.pointerId, after);
        tip.hide();
        return;
      }
      const hit = this.hit(e.offsetX, e.offsetY);
      const bar = hit && known(hit.bar) ? hit : null;
      if (bar?.bar !== this.hovered?.bar || bar?.track !== this.hovered?.track) {
        this.hovered = bar;
        this.draw();
      }
      if (hit) tip.show(e.clientX, e.clientY, ...this.explain(hit, this.time(e.offsetX)));
      else tip.hide();
    });
    canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.draw();
      tip.hide();
    });
    canvas.addEventListener("dblclick", (e) => view.zoom(0.4, this.time(e.offsetX)));
    canvas.addEventListener("blur", () => {
      this.cursor = null;
      tip.hide();
      this.draw();
    });
    canvas.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      const acts = {
        "+": () => view.zoom(0.7), "=": () => view.zoom(0.7), "-": () => view.zoom(1 / 0.7),
        0: () => view.reset(), Home: () => view.reset(),
        ArrowLeft: () => view.pan(-0.15), ArrowRight: () => view.pan(0.15),
        ArrowUp: () => this.step(-1, 0), ArrowDown: () => this.step(1, 0),
        ".": () => this.step(0, 1), ",": () => this.step(0, -1),
        Escape: () => {
          this.cursor = null;
          tip.hide();
          this.draw();
        },
      };
      if (!acts[e.key]) return;
      e.preventDefault();
      acts[e.key]();
    });
  }

  // Move the keys' cursor over lanes or along one, and say what is there.
  step(lanes, along) {
    const all = this.tracks.filter((t) => t.kind === "lane");
    const index = this.cursor ? all.indexOf(this.cursor.track) : -1;
    const track = all[Math.min(Math.max(index + lanes, 0), all.length - 1)];
    const parts = this.parts[track.source];
    const order = parts.lanes[track.device];
    if (!order.length) return announce("this device runs nothing");
    let position = firstAfter(order, parts.start, parts.took, view.from / parts.tick);
    if (this.cursor && !lanes) position = this.cursor.position + along;
    position = Math.min(Math.max(position, 0), order.length - 1);
    const bar = order[position];
    this.cursor = { track, position, bar };
    const [from, to] = [parts.start[bar] * parts.tick, (parts.start[bar] + parts.took[bar]) * parts.tick];
    if (from < view.from || to > view.to) {
      const width = view.to - view.from;
      view.set((from + to) / 2 - width / 2, (from + to) / 2 + width / 2);
    } else this.draw();
    const [title, pairs] = this.explain(this.cursor, from);
    const box = this.canvas.getBoundingClientRect();
    tip.show(box.left + this.x(Math.max(from, view.from)), box.top + track.y + track.height, title, pairs);
    announce([title, ...pairs.filter(([, v]) => v).map(([k, v]) => `${k} ${v}`)].join(", "));
  }

  summary() {
    const { predicted, measured } = this.decision;
    const columns = [["busy", predicted && ((d) => percent(predicted.utilisation[d], 0))],
      ["measured", measured && ((d) => percent(measured.utilisation[d], 0))],
      ["peak memory", predicted?.peak_bytes && ((d) => bytes(predicted.peak_bytes[d]))],
      ["measured", measured?.peak_bytes && ((d) => bytes(measured.peak_bytes[d]))],
      ["memory", (d) => (known(this.workload.devices[d].memory_bytes) ? bytes(this.workload.devices[d].memory_bytes) : "no limit")],
    ].filter(([, text]) => text);
    return plainTable(["device", ...columns.map(([name]) => name)], this.workload.devices.map((device, d) =>
      [[swatch(deviceColour(d)), device.name], ...columns.map(([, text]) => text(d))]));
  }
}

// The section: which planners, how coloured, and the buttons.
function timelineSection(workload, state) {
  const usable = workload.decisions.map((d, i) => [d, i]).filter(([d]) => d.predicted || d.measured);
  if (!usable.length) return null;
  const options = workload.planners
    .filter((p) => known(p.decision) && usable.some(([, i]) => i === p.decision))
    .map((p) => [p.name, p.name]);
  let panels = [];
  const show = (made) => {
    panels = onPage.panels = made;
  };
  let colour = "batch";
  const holder = el("div", { class: "panels" });
  const valid = (name) => (options.some(([n]) => n === name) ? name : options[0][0]);

  function paint(keepView) {
    const chosen = [valid(state.left), state.right && valid(state.right)].filter(Boolean);
    show(chosen.map((name, i) => new Panel(workload, name, i)));
    for (const panel of panels) panel.colour = colour;
    holder.classList.toggle("pair", panels.length > 1);
    holder.replaceChildren(...panels.map((p) => p.node));
    const spans = panels.flatMap((p) => [p.decision.predicted, p.decision.measured]).filter(Boolean).map((t) => t.makespan_s);
    view.extent = Math.max(...spans, 1e-12);
    if (keepView) view.set(view.from, view.to);
    else view.reset();
  }
  const first = choice("Planner", options, valid(state.left), (name) => {
    state.left = name;
    changed("planner");
  });
  const second = choice("beside", [["", "nothing"], ...options], state.right || "", (name) => {
    state.right = name;
    changed("planner");
  });
  first.querySelector("select").id = "planner-left";
  second.querySelector("select").id = "planner-right";
  const button = (id, text, name, act) => el("button", { type: "button", id, "aria-label": name, title: name, onclick: act }, text);
  const colours = choice("colour by", [["batch", "micro-batch"], ["module", "module"]], colour, (value) => {
    colour = value;
    for (const panel of panels) {
      panel.colour = value;
      panel.draw();
    }
  });
  const period = () => {
    const t = panels[0].decision.predicted || panels[0].decision.measured;
    const at = t.makespan_s * 0.5;
    view.set(at, at + 2.2 * t.period_s);
  };
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      for (const panel of panels) panel.draw();
    });
  };
  const act = {
    view: redraw, theme: redraw, paper: () => panels.forEach((panel) => panel.draw()),
    planner: () => {
      choose(first, valid(state.left));
      choose(second, state.right || "");
      paint(true);
    },
  };
  for (const [what, does] of Object.entries(act)) on(what, does);
  const resize = new ResizeObserver(redraw);
  resize.observe(holder);
  paint(false);
  return card("Timeline", "When every operator runs, as the simulator predicts it and as the devices ran it. Orange marks under a lane are tensors that arrive from other devices.",
    el("div", { class: "tools" }, first, second, colours, el("span", { class: "gap" }),
      el("span", { class: "group", role: "group", "aria-label": "Zoom" },
        button("zoom-in", "+", "Zoom in", () => view.zoom(0.6)),
        button("zoom-out", "−", "Zoom out", () => view.zoom(1 / 0.6)),
        button("pan-left", "←", "Move left", () => view.pan(-0.25)),
        button("pan-right", "→", "Move right", () => view.pan(0.25)),
        button("zoom-period", "2 periods", "Two periods in the middle of the run", period),
        button("zoom-all", "all", "Show everything", () => view.reset()))),
    holder,
    el("p", { class: "hint keys" }, "Drag to move. Click, then the wheel zooms (or Ctrl and the wheel). Keys: ",
      ["+", "−", "←", "→", "0"].map((k) => [el("kbd", {}, k), " "]), "move, ", ["↑", "↓"].map((k) => [el("kbd", {}, k), " "]), "choose a device, ",
      [",", "."].map((k) => [el("kbd", {}, k), " "]), "step through its operators."));
}
