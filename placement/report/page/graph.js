"use strict";
// The operator graph, folded by module: every module is a node until it is opened, then a box
// with its own layers inside. So 2,000 operators are a few dozen nodes at a time.

const MOST = 24; // children of a module that are shown as they are; more are bundled
const NODE = { width: 168, height: 42, gapX: 16, gapY: 30, pad: 12, head: 26, gutter: 44 };
const AT_FIRST = 16; // nodes that are shown before anything is opened by hand

// The modules as a tree: {name, path, ops | number, children, parent}; leaves are operators.
class Outline {
  constructor(graph) {
    this.graph = graph;
    const root = { name: "", path: "", children: [], parent: null, byName: new Map() };
    const of = remembered((path) => {
      if (!path) return root;
      const at = path.lastIndexOf(".");
      const parent = of(at < 0 ? "" : path.slice(0, at));
      const node = { name: path.slice(at + 1), path, children: [], parent };
      parent.children.push(node);
      return node;
    });
    graph.ops.forEach((name, op) => {
      const parent = of(graph.modules[graph.module[op]]);
      parent.children.push({ name, op, parent });
    });
    this.root = root;
    this.leaf = new Array(graph.ops.length);
    this.tidy(root);
    this.number(root);
    this.tops = new Map();
  }

  // Modules with one child become one node; too many children become bundles of neighbours.
  tidy(node) {
    node.children = node.children.map((child) => {
      while (child.children && child.children.length === 1 && child.children[0].children) {
        const only = child.children[0];
        child = { ...only, name: `${child.name}.${only.name}`, parent: node };
        for (const below of child.children) below.parent = child;
      }
      return child;
    });
    for (const child of node.children) if (child.children) this.tidy(child);
    this.bundle(node);
  }

  bundle(node) {
    if (node.children.length <= MOST) return;
    const first = (child) => (child.children ? Math.min(...child.children.map(first)) : child.op);
    const sorted = node.children.map((child) => [first(child), child]).sort((a, b) => a[0] - b[0]);
    const size = Math.ceil(sorted.length / Math.min(MOST, Math.ceil(Math.sqrt(sorted.length))));
    const isShort = sorted.every(([, child]) => child.name.length < 9);
    node.children = [];
    for (let i = 0; i < sorted.length; i += size) {
      const part = sorted.slice(i, i + size).map(([, child]) => child);
      if (part.length === 1) {
        node.children.push(part[0]);
        continue;
      }
      const made = { name: this.span(part, isShort), path: node.path, children: part, parent: node };
      for (const child of part) child.parent = made;
      this.bundle(made);
      node.children.push(made);
    }
  }

  // What to call a bundle: by its first and last name, or by numbers where names are long.
  span(part, isShort) {
    if (isShort) return `${part[0].name} … ${part[part.length - 1].name}`;
    const ops = (child) => (child.children ? child.children.flatMap(ops) : [child.op]);
    const all = part.flatMap(ops);
    return `ops ${Math.min(...all)} – ${Math.max(...all)}`;
  }

  // Depth, the operators inside, and their mean number, which orders siblings.
  number(node, depth = 0) {
    node.depth = depth;
    if (!node.children) {
      node.ops = [node.op];
      node.mean = node.op;
      this.leaf[node.op] = node;
      return;
    }
    for (const child of node.children) this.number(child, depth + 1);
    node.ops = node.children.flatMap((child) => child.ops);
    node.mean = node.ops.reduce((a, b) => a + b, 0) / node.ops.length;
    node.children.sort((a, b) => a.mean - b.mean);
  }

  // A colour for the part of the model that an operator is in.
  colourOf(op) {
    let top = this.root;
    while (top.children && top.children.length === 1) top = top.children[0];
    const depth = top.depth + 1;
    let node = this.leaf[op];
    while (node.depth > depth) node = node.parent;
    if (!this.tops.has(node)) this.tops.set(node, this.tops.size);
    return batchColour(this.tops.get(node));
  }
}

class GraphView {
  constructor(workload, state) {
    this.workload = workload;
    this.outline = workload.outline;
    this.graph = workload.graph;
    this.state = state;
    this.open = new Set([this.outline.root]);
    for (let num = this.outline.root.children.length; ;) {
      const closed = [...this.visible()].filter((n) => n.children && !this.open.has(n) && num + n.children.length <= AT_FIRST);
      if (!closed.length) break;
      const largest = closed.reduce((a, b) => (b.ops.length > a.ops.length ? b : a));
      this.open.add(largest);
      num += largest.children.length;
    }
    this.at = { x: 0, y: 0, k: 1 };
    this.layer = svg("g");
    this.svg = svg("svg", { class: "canvas", id: "graph-canvas", role: "group", "aria-label": "Operator graph; arrow keys move between nodes, Enter opens or closes a module" }, this.layer);
    this.focused = null;
    this.listen();
  }

  get decision() {
    const planner = this.workload.planners.find((p) => p.name === this.state.left);
    return this.workload.decisions[planner?.decision ?? 0];
  }

  show() {
    this.devices = this.decision ? devicesOf(this.decision.placement) : null;
    this.paint();
    if (!this.fitted) this.fit();
  }

  device(op) {
    return this.devices ? this.devices[op] : -1;
  }

  // Seconds of each device in a node; where no times are known, its number of operators.
  shares(node) {
    const found = new Map();
    const times = this.graph.compute_s;
    for (const op of node.ops) {
      const d = this.device(op);
      const old = found.get(d) || { ops: 0, seconds: 0 };
      found.set(d, { ops: old.ops + 1, seconds: old.seconds + (times && d >= 0 ? times[op][d] || 0 : 0) });
    }
    return [...found].sort((a, b) => a[0] - b[0]);
  }

  // Which node stands for an operator: the outermost closed module around it.
  standing(op) {
    let node = this.outline.leaf[op];
    for (let above = node; above; above = above.parent) if (!this.open.has(above)) node = above;
    return node;
  }

  links() {
    const found = new Map();
    const { edges } = this.graph;
    const order = new Map();
    const id = (node) => {
      if (!order.has(node)) order.set(node, order.size);
      return order.get(node);
    };
    const stands = this.graph.ops.map((_, op) => this.standing(op));
    for (let i = 0; edges && i < edges.length; i += 3) {
      const [a, b] = [stands[edges[i]], stands[edges[i + 1]]];
      if (a === b) continue;
      const key = id(a) * 1e6 + id(b);
      const link = found.get(key) || { a, b, bytes: 0, cut: 0, num: 0 };
      link.bytes += edges[i + 2];
      link.num += 1;
      if (this.device(edges[i]) !== this.device(edges[i + 1])) link.cut += edges[i + 2] || 1e-9;
      found.set(key, link);
    }
    return [...found.values()];
  }

  // Sizes and places, from the inside out: layers by longest path among siblings.
  place(node, within) {
    if (!this.open.has(node)) {
      node.width = NODE.width;
      node.height = NODE.height;
      return;
    }
    for (const child of node.children) this.place(child, within);
    const rank = new Map(node.children.map((child) => [child, 0]));
    const preds = within.get(node) || new Map();
    for (const child of node.children) {
      for (const before of preds.get(child) || []) {
        if (before.mean < child.mean || (before.mean === child.mean && before.ops[0] < child.ops[0])) {
          rank.set(child, Math.max(rank.get(child), rank.get(before) + 1));
        }
      }
    }
    const layers = [];
    for (const child of node.children) (layers[rank.get(child)] = layers[rank.get(child)] || []).push(child);
    const rows = [];
    const perRow = Math.max(2, Math.min(6, Math.floor((this.svg.clientWidth || 1160) / (NODE.width + NODE.gapX))));
    for (const layer of layers.filter(Boolean)) {
      const centre = (child) => {
        const above = [...(preds.get(child) || [])].filter((p) => known(p.x));
        return above.length ? above.reduce((sum, p) => sum + p.x + p.width / 2, 0) / above.length : child.mean;
      };
      const keys = new Map(layer.map((child) => [child, centre(child)]));
      layer.sort((a, b) => keys.get(a) - keys.get(b));
      for (let i = 0; i < layer.length; i += perRow) {
        const row = layer.slice(i, i + perRow);
        rows.push(row);
        let x = -(row.reduce((sum, c) => sum + c.width, 0) + NODE.gapX * (row.length - 1)) / 2;
        for (const child of row) {
          child.x = x;
          x += child.width + NODE.gapX;
        }
      }
    }
    const isRoot = node === this.outline.root;
    const pad = isRoot ? 0 : NODE.pad;
    const columns = this.columns(rows);
    const head = (isRoot ? 0 : NODE.head + 6) + (columns.length > 1 ? 12 : 0); // for links between columns
    let left = pad;
    let bottom = 0;
    for (const column of columns) {
      let y = head;
      const half = Math.max(...column.flat().flatMap((c) => [-c.x, c.x + c.width]));
      for (const row of column) {
        const high = Math.max(...row.map((c) => c.height));
        for (const child of row) {
          child.y = y + (high - child.height) / 2;
          child.x += left + half;
        }
        y += high + NODE.gapY;
      }
      left += 2 * half + NODE.gutter;
      bottom = Math.max(bottom, y - NODE.gapY);
    }
    node.width = Math.max(left - NODE.gutter + pad, NODE.width);
    node.height = bottom + pad;
  }

  // A long chain goes on in the next column, as text does, so that it has the picture's shape.
  columns(rows) {
    const heights = rows.map((row) => Math.max(...row.map((c) => c.height)) + NODE.gapY);
    const wide = Math.max(...rows.map((row) => row[row.length - 1].x + row[row.length - 1].width - row[0].x));
    const total = heights.reduce((a, b) => a + b, 0);
    const shape = (this.svg.clientWidth || 1160) / (this.svg.clientHeight || 600);
    const num = Math.max(1, Math.min(6, Math.floor(Math.sqrt((total * shape) / (wide + NODE.gutter)))));
    if (rows.length < 7 || num < 2) return [rows];
    const found = [[]];
    let at = 0;
    rows.forEach((row, i) => {
      if (at + heights[i] / 2 > (total / num) * found.length && found.length < num) found.push([]);
      found[found.length - 1].push(row);
      at += heights[i];
    });
    return found;
  }

  // For every open module: which of its children feed which.
  within() {
    const found = new Map();
    const { edges } = this.graph;
    for (let i = 0; edges && i < edges.length; i += 3) {
      let [a, b] = [this.outline.leaf[edges[i]], this.outline.leaf[edges[i + 1]]];
      while (a.depth > b.depth) a = a.parent;
      while (b.depth > a.depth) b = b.parent;
      while (a.parent !== b.parent) [a, b] = [a.parent, b.parent];
      if (a === b || !this.open.has(a.parent)) continue;
      if (!found.has(a.parent)) found.set(a.parent, new Map());
      const preds = found.get(a.parent);
      if (!preds.has(b)) preds.set(b, new Set());
      preds.get(b).add(a);
    }
    return found;
  }

  paint() {
    for (const node of this.visible()) node.x = undefined;
    this.place(this.outline.root, this.within());
    const boxes = svg("g");
    const lines = svg("g");
    const nodes = svg("g");
    const spots = new Map();
    const put = (node, left, top) => {
      spots.set(node, { x: left, y: top, width: node.width, height: node.height });
      const isOpen = this.open.has(node);
      if (node !== this.outline.root) (isOpen ? boxes : nodes).append(this.drawn(node, left, top, isOpen));
      if (isOpen) for (const child of node.children) put(child, left + child.x, top + child.y);
    };
    put(this.outline.root, 0, 0);
    this.spots = spots;
    for (const link of this.links()) lines.append(this.line(link, spots.get(link.a), spots.get(link.b)));
    this.lines = lines;
    this.layer.replaceChildren(boxes, lines, nodes);
    this.svg.dataset.nodes = nodes.childNodes.length;
    this.move();
  }

  *visible(node = this.outline.root) {
    yield node;
    if (this.open.has(node)) for (const child of node.children) yield* this.visible(child);
  }

  line(link, a, b) {
    const isDown = b.y >= a.y + a.height - 1;
    const isNext = !isDown && b.x >= a.x + a.width && link.a.mean < link.b.mean; // in a later column
    const [x1, x2] = [a.x + a.width / 2, b.x + b.width / 2];
    const [y1, y2] = [a.y + a.height, b.y];
    const bend = Math.max(14, (y2 - y1) * 0.45);
    const [s1, s2] = [a.x + a.width, b.x + b.width];
    const side = Math.max(s1, s2) + 26;
    let d = `M${s1} ${y1 - a.height / 2}C${side} ${y1 - a.height / 2} ${side} ${y2 + b.height / 2} ${s2} ${y2 + b.height / 2}`;
    if (isDown) d = `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
    else if (isNext) d = `M${x1} ${y1}v10H${b.x - NODE.gutter / 2}V${y2 - 12}H${x2}V${y2}`;
    const path = svg("path", {
      d, class: `link${link.cut ? " cut" : ""}${isDown || isNext ? "" : " back"}`,
      "stroke-width": 1 + Math.min(3, Math.log10(1 + link.bytes / 1e4)),
    });
    path.ends = [link.a, link.b];
    path.addEventListener("pointermove", (e) => tip.show(e.clientX, e.clientY, "data", [
      ["from", link.a.name || "model"], ["to", link.b.name], ["size", bytes(link.bytes)],
      ["edges", count(link.num)], ["between devices", link.cut >= 1 ? bytes(link.cut) : null],
    ]));
    path.addEventListener("pointerleave", tip.hide);
    return path;
  }

  drawn(node, left, top, isOpen) {
    const fold = Boolean(node.children);
    const shares = this.shares(node);
    const devices = this.workload.devices;
    const where = shares.filter(([d]) => d >= 0).map(([d, s]) => `${devices[d].name} ${plural(s.ops, "operator")}`).join(", ");
    const group = svg("g", {
      class: `node${fold ? " fold" : ""}${isOpen ? " box" : ""}`, transform: `translate(${left} ${top})`, tabindex: -1,
      role: fold ? "button" : "img", "aria-expanded": fold ? String(isOpen) : null,
      "aria-label": `${node.name}: ${where || plural(node.ops.length, "operator")}`,
    });
    group.item = node;
    group.append(svg("rect", { class: "frame", width: node.width, height: node.height, rx: 7 }));
    const total = (key) => shares.reduce((sum, [, s]) => sum + s[key], 0);
    const weigh = total("seconds") > 0 ? "seconds" : "ops";
    let at = 0;
    const high = isOpen ? 4 : 5;
    const room = node.width - 12;
    shares.forEach(([d, s]) => {
      const width = (s[weigh] / (total(weigh) || 1)) * room;
      const colour = d < 0 ? "var(--faint)" : deviceColour(d);
      if (!isOpen && shares.length === 1) group.append(svg("rect", { width: node.width, height: node.height, rx: 7, fill: colour, opacity: 0.16 }));
      group.append(svg("rect", { x: 6 + at, y: isOpen ? 4 : node.height - 9, width: Math.max(width, 1.5), height: high, rx: 2, fill: colour }));
      at += width;
    });
    const letters = Math.floor((node.width - 34) / 6.4);
    const mark = fold ? (isOpen ? "▾ " : "▸ ") : "";
    const kind = this.graph.kind && !fold ? this.graph.kinds[this.graph.kind[node.op]] : "";
    const time = total("seconds") > 0 ? seconds(total("seconds")) : "";
    const small = [fold ? plural(node.ops.length, "op") : shortened(kind, 18), time].filter(Boolean).join(" · ");
    group.append(svg("text", { class: "name", x: 9, y: isOpen ? 22 : small ? 15 : 20 }, mark + shortened(node.name, letters - (isOpen ? 14 : 0))));
    if (small) group.append(svg("text", { class: "small", x: isOpen ? node.width - 9 : 9, "text-anchor": isOpen ? "end" : "start", y: isOpen ? 22 : 28 }, small));
    const pairs = [
      ["in", (fold ? node.path : node.parent?.path) || null],
      ["kind", kind || null],
      ...shares.filter(([d]) => d >= 0).map(([d, s]) => [devices[d].name, `${plural(s.ops, "operator")}${s.seconds ? `, ${seconds(s.seconds)}` : ""}`]),
      ["parameters", this.graph.param_bytes ? bytes(node.ops.reduce((sum, op) => sum + this.graph.param_bytes[op], 0)) : null],
      ...(!fold && this.graph.compute_s ? devices.map((d, i) => [`on ${d.name}`, known(this.graph.compute_s[node.op][i]) ? seconds(this.graph.compute_s[node.op][i]) : "cannot run"]) : []),
    ];
    group.addEventListener("pointermove", (e) => {
      tip.show(e.clientX, e.clientY, node.name, pairs);
      e.stopPropagation();
    });
    group.addEventListener("pointerenter", () => this.near(node, true));
    group.addEventListener("pointerleave", () => {
      tip.hide();
      this.near(node, false);
    });
    group.addEventListener("focus", () => {
      this.focused = node;
      const box = group.getBoundingClientRect();
      if (group.matches(":focus-visible")) tip.show(box.right, box.top, node.name, pairs);
    });
    group.addEventListener("blur", tip.hide);
    return group;
  }

  // The links of a node stand out while it is pointed at.
  near(node, isOn) {
    if (this.open.has(node)) return;
    this.layer.classList.toggle("dim", isOn);
    for (const path of this.lines.children) path.classList.toggle("near", isOn && path.ends.includes(node));
  }

  groupOf(node) {
    for (const group of this.layer.querySelectorAll(".node")) if (group.item === node) return group;
    return null;
  }

  // Open or close a module; it stays where it is on the screen.
  toggle(node) {
    if (!node.children || node === this.outline.root) return;
    const before = this.spots.get(node);
    if (!this.open.delete(node)) this.open.add(node);
    this.repaint(node, before);
  }

  repaint(anchor, before) {
    tip.hide();
    this.paint();
    const after = anchor && this.spots.get(anchor);
    if (before && after) {
      this.at.x += (before.x + before.width / 2 - after.x - after.width / 2) * this.at.k;
      this.at.y += (before.y - after.y) * this.at.k;
      this.move();
      this.focus(anchor);
    }
  }

  focus(node) {
    const group = this.groupOf(node);
    if (!group) return;
    for (const other of this.layer.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", -1);
    group.setAttribute("tabindex", 0);
    group.focus({ preventScroll: true });
    this.reveal(node);
  }

  // Move a node into sight if it is not.
  reveal(node) {
    const spot = this.spots.get(node);
    const { clientWidth: width, clientHeight: height } = this.svg;
    const { at } = this;
    const [left, top] = [spot.x * at.k + at.x, spot.y * at.k + at.y];
    const size = Math.min(spot.height * at.k, height - 20);
    if (left < 8) at.x += 8 - left;
    else if (left + spot.width * at.k > width - 8) at.x -= Math.min(left - 8, left + spot.width * at.k - width + 8);
    if (top < 8) at.y += 8 - top;
    else if (top + size > height - 8) at.y -= top + size - height + 8;
    this.move();
  }

  move() {
    const { x, y, k } = this.at;
    this.layer.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
    this.svg.dataset.scale = k;
  }

  fit() {
    const { width, height } = this.spots.get(this.outline.root);
    const [w, h] = [this.svg.clientWidth || 800, this.svg.clientHeight || 600];
    const whole = Math.min((w - 24) / width, (h - 24) / height);
    const k = Math.min(1.1, Math.max(whole, Math.min(0.62, (w - 24) / width)));
    this.at = { k, x: (w - width * k) / 2, y: Math.max(12, (h - height * k) / 2) };
    this.move();
    this.fitted = true;
    const first = this.layer.querySelector(".node");
    if (first) first.setAttribute("tabindex", 0);
  }

  zoom(factor, x = this.svg.clientWidth / 2, y = this.svg.clientHeight / 2) {
    const k = Math.min(3, Math.max(0.03, this.at.k * factor));
    const by = k / this.at.k;
    this.at = { k, x: x - (x - this.at.x) * by, y: y - (y - this.at.y) * by };
    this.move();
  }

  openWhere(wanted) {
    this.open = new Set([this.outline.root]);
    const visit = (node) => {
      if (!node.children || !(node === this.outline.root || wanted(node))) return;
      this.open.add(node);
      node.children.forEach(visit);
    };
    visit(this.outline.root);
    this.paint();
    this.fit();
  }

  find(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return;
    const names = this.graph.ops;
    const full = (op) => `${this.graph.modules[this.graph.module[op]]}.${names[op]}`.toLowerCase();
    let op = names.findIndex((name) => name.toLowerCase() === wanted);
    if (op < 0) op = names.findIndex((_, i) => full(i).includes(wanted));
    if (op < 0) return announce(`no operator is called ${text}`);
    const leaf = this.outline.leaf[op];
    for (let node = leaf.parent; node; node = node.parent) this.open.add(node);
    this.paint();
    const spot = this.spots.get(leaf);
    const { clientWidth: width, clientHeight: height } = this.svg;
    this.at = { k: 1, x: width / 2 - spot.x - spot.width / 2, y: height / 2 - spot.y - spot.height / 2 };
    this.move();
    this.groupOf(leaf).classList.add("found");
    announce(`${names[op]} found`);
  }

  listen() {
    const node = (e) => e.target.closest?.(".node")?.item;
    let drag = null;
    let moved = 0;
    const pointers = new Map();
    this.svg.addEventListener("pointerdown", (e) => {
      pointers.set(e.pointerId, [e.clientX, e.clientY]);
      drag = true;
      moved = 0;
    });
    for (const what of ["pointerup", "pointercancel"]) {
      on(what, (e) => {
        pointers.delete(e.pointerId);
        if (!pointers.size) drag = null;
      }, window);
    }
    on("pointermove", (e) => {
      if (!drag || !pointers.has(e.pointerId)) return;
      const [x, y] = pointers.get(e.pointerId);
      const other = [...pointers].find(([id]) => id !== e.pointerId)?.[1];
      if (other) {
        const far = (px, py) => Math.hypot(px - other[0], py - other[1]);
        const box = this.svg.getBoundingClientRect();
        this.zoom(far(e.clientX, e.clientY) / (far(x, y) || 1), other[0] - box.left, other[1] - box.top);
      } else {
        this.at.x += e.clientX - x;
        this.at.y += e.clientY - y;
        this.move();
      }
      moved += Math.abs(e.clientX - x) + Math.abs(e.clientY - y);
      pointers.set(e.pointerId, [e.clientX, e.clientY]);
    }, window);
    this.svg.addEventListener("click", (e) => {
      if (moved > 5) return;
      const item = node(e);
      if (item?.children) this.toggle(item);
      else if (item) this.focus(item);
      else this.svg.querySelector('.node[tabindex="0"]')?.focus({ preventScroll: true });
    });
    this.svg.addEventListener("wheel", (e) => {
      if (!(this.svg.contains(document.activeElement) || e.ctrlKey || e.metaKey)) return;
      e.preventDefault();
      const box = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-Math.max(-60, Math.min(60, e.deltaY)) / 250), e.clientX - box.left, e.clientY - box.top);
    }, { passive: false });
    this.svg.addEventListener("keydown", (e) => {
      const item = node(e);
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      const way = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[e.key];
      if (way && item) this.walk(item, way);
      else if ((e.key === "Enter" || e.key === " ") && item) this.toggle(item);
      else if ((e.key === "Escape" || e.key === "Backspace") && item?.parent && item.parent !== this.outline.root) this.toggle(item.parent);
      else if (e.key === "+" || e.key === "=") this.zoom(1.3);
      else if (e.key === "-") this.zoom(1 / 1.3);
      else if (e.key === "0") this.fit();
      else return;
      e.preventDefault();
    });
  }

  // The nearest node in a direction.
  walk(from, [dx, dy]) {
    const middle = (s) => [s.x + s.width / 2, s.y + (s.height > 60 ? 13 : s.height / 2)];
    const [x, y] = middle(this.spots.get(from));
    let best = null;
    let least = Infinity;
    for (const [node, spot] of this.spots) {
      if (node === from || node === this.outline.root) continue;
      const [nx, ny] = middle(spot);
      const along = (nx - x) * dx + (ny - y) * dy;
      const across = Math.abs((nx - x) * dy) + Math.abs((ny - y) * dx);
      if (along > 1 && along + 2.5 * across < least) [best, least] = [node, along + 2.5 * across];
    }
    if (best) this.focus(best);
  }
}

function graphSection(workload, state) {
  if (!workload.graph) return null;
  const picture = new GraphView(workload, state);
  const options = workload.planners.filter((p) => known(p.decision)).map((p) => [p.name, p.name]);
  const planner = options.length ? choice("Placed by", options, state.left, (name) => {
    state.left = name;
    changed("planner");
  }) : null;
  on("planner", () => {
    if (planner) choose(planner, state.left);
    picture.show();
  });
  const search = el("input", { type: "search", placeholder: "Find an operator", "aria-label": "Find an operator", onkeydown: (e) => e.key === "Enter" && picture.find(search.value) });
  const button = (id, text, act, name = text) => el("button", { type: "button", id, "aria-label": name, title: name, onclick: act }, text);
  const split = (node) => picture.shares(node).length > 1;
  const legend = el("div", { class: "legend" }, workload.devices.map((d, i) => el("span", {}, swatch(deviceColour(i)), d.name)),
    workload.graph.edges ? el("span", {}, swatch("var(--cut)"), "between devices") : null);
  queueMicrotask(() => picture.show());
  on("paper", () => picture.fit());
  return card("Operator graph", `${plural(workload.graph.ops.length, "operator")} by module, coloured by device. Click a module, or press Enter, to open it.${workload.graph.edges ? "" : " Only the plan is known, so edges are not."}`,
    el("div", { class: "tools" }, planner, search, el("span", { class: "gap" }),
      button("graph-fold", "Fold all", () => picture.openWhere(() => false)),
      button("graph-split", "Open what is split", () => picture.openWhere(split), "Open every module that is on several devices"),
      el("span", { class: "group", role: "group", "aria-label": "Zoom the graph" },
        button("graph-in", "+", () => picture.zoom(1.3), "Zoom in"),
        button("graph-out", "−", () => picture.zoom(1 / 1.3), "Zoom out"),
        button("graph-fit", "fit", () => picture.fit(), "Fit"))),
    legend, picture.svg,
    el("p", { class: "hint keys" }, "Drag to move; click, then the wheel zooms. Keys: ", ["←", "↑", "→", "↓"].map((k) => [el("kbd", {}, k), " "]),
      "walk, ", el("kbd", {}, "Enter"), " opens or closes, ", el("kbd", {}, "Esc"), " closes the module around, ", el("kbd", {}, "0"), " fits."));
}
