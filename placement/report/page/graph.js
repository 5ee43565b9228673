"use strict";
// The modules of a model as an outline: closed at first; what each part takes, and where it runs.

const AT_FIRST = 40; // rows of a level that is open before anything is opened by hand

// A tree {name, path, ops, children, parent}; leaves are operators {name, op, ops, parent}.
function outlineOf(graph) {
  const root = { name: "", path: "", children: [] };
  const of = remembered((path) => {
    if (!path) return root;
    const at = path.lastIndexOf(".");
    const node = { name: path.slice(at + 1), path, children: [], parent: of(path.slice(0, Math.max(at, 0))) };
    node.parent.children.push(node);
    return node;
  });
  graph.ops.forEach((name, op) => {
    const parent = of(graph.modules[graph.module[op]]);
    parent.children.push({ name, op, ops: [op], parent });
  });
  finish(root);
  return root;
}

// What is inside; a module with nothing but one module in it becomes one row with it.
function finish(node) {
  while (node.parent && node.children.length === 1 && node.children[0].children) {
    const [only] = node.children;
    Object.assign(node, { name: `${node.name}.${only.name}`, path: only.path, children: only.children });
    for (const child of node.children) child.parent = node;
  }
  for (const child of node.children) if (child.children) finish(child);
  node.ops = node.children.flatMap((child) => child.ops);
}

class Outline {
  constructor(workload) {
    this.workload = workload;
    this.graph = workload.graph;
    this.root = outlineOf(this.graph);
    this.node = el("div", { class: "outline", id: "outline" });
  }

  // Rows for the placement of a planner; those that were open are closed.
  async show(planner) {
    const decision = this.workload.decisions[this.workload.planners.find((p) => p.name === planner)?.decision ?? 0];
    this.device = decision ? new Uint16Array(await inflate(decision.placement)) : null;
    const { ops, edges } = this.graph;
    this.received = edges && this.device ? new Float64Array(ops.length) : null;
    for (let i = 0; this.received && i < edges.length; i += 3) {
      if (this.device[edges[i]] !== this.device[edges[i + 1]]) this.received[edges[i + 1]] += edges[i + 2];
    }
    this.open((node, level) => level.flatMap((n) => n.children || []).length <= AT_FIRST);
  }

  // Close everything, then open the modules that are wanted, level by level.
  open(wanted) {
    const head = ["module", "devices", "operators", "seconds", "parameters", this.received && "from other devices"];
    this.node.replaceChildren(el("div", { class: "row head" }, head.filter(Boolean).map((text) => el("span", {}, text))),
      ...this.root.children.map((child) => this.row(child)));
    for (let nodes = this.root.children; nodes.length;) {
      const chosen = nodes.filter((node) => node.children && wanted(node, nodes));
      for (const node of chosen) this.unfold(node);
      nodes = chosen.flatMap((node) => node.children);
    }
    this.node.dataset.rows = this.node.querySelectorAll(".row").length - 1;
  }

  unfold(node) {
    node.row.open = true;
    const inside = node.row.lastChild;
    if (!inside.childNodes.length) inside.append(...node.children.map((child) => this.row(child)));
  }

  row(node) {
    if (!node.children) return (node.row = el("div", { class: "row", title: this.said(node.op), tabindex: -1 }, this.cells(node)));
    node.row = el("details", { ontoggle: (e) => e.target === node.row && node.row.open && this.unfold(node) },
      el("summary", { class: "row" }, this.cells(node)), el("div", { class: "inside" }));
    return node.row;
  }

  // Operators and seconds of each device in a node.
  shares(node) {
    const found = this.workload.devices.map(() => ({ ops: 0, seconds: 0 }));
    for (const op of this.device ? node.ops : []) {
      found[this.device[op]].ops += 1;
      found[this.device[op]].seconds += this.graph.compute_s?.[op][this.device[op]] || 0;
    }
    return found;
  }

  cells(node) {
    const shares = this.shares(node);
    const sum = (numbers) => numbers && node.ops.reduce((total, op) => total + numbers[op], 0);
    const taken = shares.reduce((total, s) => total + s.seconds, 0);
    const parts = shares.map((s, d) => el("i", { style: { background: deviceColour(d), flexGrow: taken ? s.seconds / taken : s.ops } }));
    const said = shares.map((s, d) => s.ops && `${this.workload.devices[d].name}: ${plural(s.ops, "operator")}`).filter(Boolean);
    return [el("span", {}, node.name), el("span", { class: "share", role: "img", title: said.join(", "), "aria-label": said.join(", ") }, parts),
      el("span", {}, node.children ? count(node.ops.length) : this.kind(node.op)), el("span", {}, taken ? seconds(taken) : "–"),
      el("span", {}, bytes(sum(this.graph.param_bytes))), this.received && el("span", {}, bytes(sum(this.received)))];
  }

  kind(op) {
    return this.graph.kind ? this.graph.kinds[this.graph.kind[op]] : "";
  }

  // All that is known of an operator.
  said(op) {
    const times = this.workload.devices.map((d, i) => {
      const took = this.graph.compute_s?.[op][i];
      return `on ${d.name}: ${known(took) ? seconds(took) : "cannot run"}`;
    });
    return [this.graph.modules[this.graph.module[op]], ...(this.graph.compute_s ? times : [])].filter(Boolean).join("\n");
  }

  // Open the modules around the operator that is called so, or has it in its path; show it.
  find(text) {
    const wanted = text.trim().toLowerCase();
    const paths = this.graph.ops.map((name, op) => `${this.graph.modules[this.graph.module[op]]}.${name}`.toLowerCase());
    let op = this.graph.ops.findIndex((name) => name.toLowerCase() === wanted);
    if (op < 0) op = paths.findIndex((path) => path.includes(wanted));
    if (!wanted || op < 0) return;
    let node = this.root;
    while (node.children) {
      node = node.children.find((child) => child.ops.includes(op));
      if (node.children) this.unfold(node);
    }
    this.node.querySelector(".found")?.classList.remove("found");
    node.row.classList.add("found");
    node.row.scrollIntoView({ block: "center" });
    node.row.focus({ preventScroll: true });
  }
}

function graphSection(workload, state) {
  if (!workload.graph) return null;
  const outline = new Outline(workload);
  const options = workload.planners.filter((p) => known(p.decision)).map((p) => [p.name, p.name]);
  const planner = options.length ? choice("Placed by", options, state.left, (name) => {
    state.left = name;
    changed("planner");
  }) : null;
  on("planner", () => {
    if (planner) choose(planner, state.left);
    outline.show(state.left);
  });
  const search = el("input", { type: "search", placeholder: "Find an operator", "aria-label": "Find an operator", onkeydown: (e) => e.key === "Enter" && outline.find(search.value) });
  const button = (id, text, wanted) => el("button", { type: "button", id, onclick: () => outline.open(wanted) }, text);
  outline.show(state.left);
  return card("Operator graph", `${plural(workload.graph.ops.length, "operator")} by module; bars and colours say on which devices.${workload.graph.edges ? "" : " Only the plan is known, so what devices send each other is not."}`,
    el("div", { class: "tools" }, planner, search, el("span", { class: "gap" }),
      button("graph-fold", "Fold all", () => false),
      button("graph-split", "Open what is split", (node) => outline.shares(node).filter((s) => s.ops).length > 1)),
    el("div", { class: "legend" }, workload.devices.map((d, i) => el("span", {}, swatch(deviceColour(i)), d.name))),
    outline.node);
}
