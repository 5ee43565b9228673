"use strict";
// The page: header, table, provenance, and which workload and planners are shown.

const state = { workload: 0, left: "", right: "" };
const isServed = (workload) => ["prefill", "decode", "serve"].includes(workload.objective); // no pipeline
const unitOf = (workload) => (workload.objective === "energy" ? "J" : "s");

function fact(value, what) {
  return el("div", { class: "fact" }, el("b", {}, value), el("span", {}, what));
}

function summarySection() {
  const facts = [];
  const { overall, workloads } = data;
  const planners = new Set(workloads.flatMap((w) => w.planners.filter((p) => !p.single).map((p) => p.name)));
  if (overall && overall.gains.length) {
    const best = overall.gains[0];
    facts.push(fact(times(best.mean), `${best.planner}: speed-up over the best single device, ${overall.measured ? "measured" : "predicted"}${workloads.length > 1 ? ", geometric mean" : ""}`));
  } else if (workloads.length === 1 && workloads[0].planners.length === 1) {
    const p = workloads[0].planners[0];
    facts.push(fact(times(p.speedup), `${p.name}: predicted speed-up over the best single device`));
    const { objective } = workloads[0];
    facts.push(fact(seconds(p.value_s, unitOf(workloads[0])), `predicted ${objective}`));
    const took = p[`measured_${objective}_s`];
    if (known(took)) facts.push(fact(seconds(took), `measured ${objective}, median of ${plural(p.rounds, "run")}`));
  }
  const gaps = workloads.flatMap((w) => {
    const known_ = w.planners.map((p) => p.gap).filter(known);
    return known_.length ? [Math.min(...known_)] : [];
  });
  if (gaps.length) facts.push(fact(percent(Math.max(...gaps)), `above the proved lower bound at most${workloads.length > 1 ? ", of the best answers" : ""}`));
  if (overall?.fidelity) facts.push(fact(percent(overall.fidelity.period_mape), `mean error of the predicted period over ${plural(overall.fidelity.num_placements, "measured placement")}`));
  facts.push(fact(plural(planners.size, "planner"), `on ${plural(workloads.length, "workload")}`));
  $("summary").replaceChildren(el("div", { class: "facts" }, facts));
}

// Columns of the compare table: name, value of a planner, text, and the group they are in.
function columnsOf(workload) {
  const isMeasured = workload.planners.some((p) => known(p.measured_period_s));
  const special = !["period", "latency"].includes(workload.objective);
  const said = (key) => (p) => p[key];
  const all = [
    special && [workload.objective, said("value_s"), (v) => seconds(v, unitOf(workload)), "predicted"],
    !isServed(workload) && ["period", said("period_s"), (v) => seconds(v), "predicted"],
    !isServed(workload) && ["latency", said("latency_s"), (v) => seconds(v), "predicted"],
    workload.planners.some((p) => known(p.energy_j)) && [workload.devices.some((d) => d.power_source === "declared") ? "energy (declared W)" : "energy", said("energy_j"), (v) => seconds(v, "J"), "predicted"],
    ["speed-up", said("speedup"), times, "predicted"],
    workload.planners.some((p) => known(p.gap)) && ["gap", said("gap"), (v) => percent(v), "predicted"],
    isMeasured && ["period", said("measured_period_s"), (v, p) => [seconds(v), known(v) ? el("small", {}, ` ± ${seconds(p.measured_period_iqr_s / 2)}`) : null], "measured"],
    isMeasured && ["error", said("period_error"), signed, "measured"],
    isMeasured && ["latency", said("measured_latency_s"), (v) => seconds(v), "measured"],
    isMeasured && ["error", said("latency_error"), signed, "measured"],
    isMeasured && ["speed-up", said("measured_speedup"), times, "measured"],
    workload.planners.some((p) => known(p.plan_s)) && ["time", (p) => (p.single ? null : p.plan_s), (v) => seconds(v), "planning"],
    workload.planners.some((p) => known(p.evaluations)) && ["evals", said("evaluations"), count, "planning"],
  ];
  return all.filter(Boolean);
}

function compareSection(workload) {
  const columns = columnsOf(workload);
  const holder = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Compare table" });
  let sorted = null; // [column, direction]
  const fastest = Math.max(...workload.planners.flatMap((p) => [p.speedup || 0, p.measured_speedup || 0]), 1);
  const notes = workload.planners.some((p) => p.note);
  function paint() {
    const rows = [...workload.planners];
    if (sorted) {
      const [column, direction] = sorted;
      const value = column < 0 ? (p) => p.name : columns[column][1];
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (!known(x) || !known(y)) return known(y) - known(x);
        return (x < y ? -1 : x > y ? 1 : 0) * direction;
      });
    }
    const groups = [];
    for (const [, , , group] of columns) {
      if (groups.length && groups[groups.length - 1][0] === group) groups[groups.length - 1][1]++;
      else groups.push([group, 1]);
    }
    const head = (text, i) => el("th", { scope: "col", "aria-sort": sorted && sorted[0] === i ? (sorted[1] > 0 ? "ascending" : "descending") : null },
      el("button", {
        type: "button", onclick: () => {
          sorted = sorted && sorted[0] === i ? [i, -sorted[1]] : [i, 1];
          paint();
          holder.querySelectorAll("th button")[i + 1].focus();
        },
      }, text, sorted && sorted[0] === i ? (sorted[1] > 0 ? " ↑" : " ↓") : ""));
    const cell = ([name, value, text], p) => {
      const shown = text(value(p), p);
      if (name !== "speed-up" || !known(value(p))) return el("td", {}, shown);
      const share = (x) => `${(100 * x) / fastest}%`;
      return el("td", { class: "meter" }, el("i", { style: { width: share(value(p)) } }), el("s", { style: { left: share(1) } }), el("em", {}, shown));
    };
    holder.replaceChildren(el("table", { id: "compare-table" },
      el("thead", {},
        el("tr", {}, el("td", {}), groups.map(([group, span]) => el("th", { class: "over", colspan: span, scope: "colgroup" }, group)), notes && el("td", {})),
        el("tr", {}, head("planner", -1), columns.map(([name], i) => head(name, i)), notes && el("th", { scope: "col" }, ""))),
      el("tbody", {}, rows.map((p) => el("tr", { class: [p.single ? "single" : "", p.name === workload.best ? "best" : ""].join(" ").trim() || null },
        el("td", { class: "name", title: p.name }, p.name, p.name === workload.best ? el("span", { class: "tag" }, "best") : null,
          p.pareto ? el("span", { class: "tag", title: "no other is better in latency, period and energy" }, "trade-off") : null,
          p.seeds > 1 ? el("span", { class: "hint" }, ` ${p.seeds} seeds`) : null),
        columns.map((column) => cell(column, p)),
        notes && el("td", { class: "note" }, p.note))))));
  }
  paint();
  const about = [`${plural(workload.num_ops, "operator")} on ${plural(workload.num_devices, "device")}, objective ${workload.objective}`,
    workload.num_microbatches && !isServed(workload) && `${plural(workload.num_microbatches, "micro-batch", "micro-batches")}, ${workload.max_in_flight} in flight`,
    workload.bound_s > 0 && `proved lower bound ${seconds(workload.bound_s, unitOf(workload))}`,
    workload.calibration_error > 0 && `the profile's calibration error is ${percent(workload.calibration_error)}`,
    workload.planners.some((p) => p.rounds) && `measured: medians of ${Math.max(...workload.planners.map((p) => p.rounds))} rounds, ± half their interquartile range`,
    workload.planners.some((p) => p.seeds > 1) && "medians over the seeds"].filter(Boolean).join("; ");
  return card(workload.planners.length > 1 ? "Compare" : "Plan", `${about}. Speed-ups are over the best single device (the mark).`, holder);
}

function overallCard() {
  const { overall } = data;
  if (!overall || data.workloads.length < 2 || !overall.gains.length) return null;
  const rows = overall.gains.map((g) => [g.planner, times(g.mean), `${times(g.low)} to ${times(g.high)}`, count(g.num_cells)]);
  return card("Over all workloads", `Speed-up over the best single device, ${overall.measured ? "measured" : "predicted"}: geometric mean over workloads and seeds, bootstrap 95 % interval over workloads and the seeds of each.`,
    plainTable(["planner", "mean", "interval", "cells"], rows));
}

function searchSection(workload) {
  if (!workload.curves.length) return null;
  return card("What planners find over time", `The best ${workload.objective} so far over the time spent planning; a dot is where a planner ended. Every seed has a line of its own. Click a name to leave it out.`, curvesChart(workload, unitOf(workload)));
}

function fidelitySection(workload) {
  const { fidelity } = data.overall || {};
  if (!fidelity || !data.scatter.length) return null;
  const rank = (x) => (known(x) ? x.toFixed(2) : "unknown");
  const one = (what) => el("div", {}, el("h3", {}, what[0].toUpperCase() + what.slice(1)),
    el("p", { class: "hint", id: `fidelity-${what}` }, `mean absolute error (MAPE) ${percent(fidelity[`${what}_mape`])}, mean Spearman correlation per workload ${rank(fidelity[`${what}_spearman`])}`),
    scatterChart(data.scatter, what, workload.name));
  return card("Prediction against measurement", `${plural(fidelity.num_placements, "measured placement")} of ${plural(new Set(data.scatter.map((p) => p.workload)).size, "workload")}; the band is ± 10 %. Points of ${workload.name} stand out.`,
    el("div", { class: "two" }, one("period"), one("latency")));
}

function trainingSection() {
  const { training } = data;
  if (!training.steps) return null;
  const first = ["greedy_speedup", "best_speedup", "reward_mean", "entropy", "value_loss", "policy_loss", "approx_kl", "clip_fraction", "explained_variance", "learning_rate"];
  const names = first.filter((name) => training[name]);
  const charts = names.map((name) => metricChart(training.steps, training[name], name.replaceAll("_", " "))).filter(Boolean);
  const last = (name) => training[name]?.[training.steps.length - 1];
  const said = [`${count(last("steps"))} steps`, known(last("seconds")) && `in ${seconds(last("seconds"))}`,
    known(last("best_speedup")) && `best placements ${times(last("best_speedup"))} as good as the reference`].filter(Boolean).join(", ");
  return card("Training", `${said}. Speed-ups are over the reference that rewards are relative to.`,
    charts.length ? el("div", { class: "two" }, charts) : el("p", { class: "hint" }, "Too few steps for curves."));
}

function provenanceSection() {
  const copy = (text) => el("button", {
    type: "button", onclick: (e) => {
      navigator.clipboard?.writeText(text).then(() => {
        e.target.textContent = "copied";
        announce("copied");
      }, () => announce("cannot copy"));
    },
  }, "copy");
  const commands = data.commands.map(({ what, command }) => el("div", { class: "command" }, el("span", {}, what), el("pre", { tabindex: 0 }, command), copy(command)));
  const groups = data.provenance.map((group) => el("details", {}, el("summary", {}, group.title),
    group.text ? el("pre", { tabindex: 0 }, group.text)
      : el("dl", { class: "pairs" }, group.facts.map(([what, value]) => [el("dt", {}, what), el("dd", {}, String(value))]))));
  return [card("Commands", "What makes this again.", commands.slice(0, 8),
    commands.length > 8 ? el("details", {}, el("summary", {}, `${commands.length - 8} more`), commands.slice(8)) : null),
  groups.length ? card("Provenance", "Where the numbers come from.", groups) : null];
}

function show(id, ...parts) {
  const found = parts.flat().filter(Boolean);
  $(id).hidden = !found.length;
  $(id).replaceChildren(...found);
}

function showWorkload() {
  const workload = data.workloads[state.workload];
  if (!workload) return;
  shown.abort();
  shown = new AbortController();
  if (workload.graph && !workload.outline) workload.outline = new Outline(workload.graph);
  const names = workload.planners.filter((p) => known(p.decision)).map((p) => p.name);
  const best = workload.planners.find((p) => p.name === workload.best && known(p.decision));
  if (!names.includes(state.left)) state.left = best?.name || names[0] || "";
  if (!names.includes(state.right)) state.right = "";
  show("compare", compareSection(workload), overallCard());
  show("timeline", timelineSection(workload, state));
  show("graph", graphSection(workload, state));
  show("search", searchSection(workload));
  show("fidelity", fidelitySection(workload));
}

function showLinks() {
  const sections = [...document.querySelectorAll("section[data-title]")].filter((s) => !s.hidden);
  $("links").replaceChildren(...sections.map((s) => el("a", { href: `#${s.id}` }, s.dataset.title)));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of $("links").children) {
        if (link.getAttribute("href") === `#${entry.target.id}`) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  sections.forEach((s) => seen.observe(s));
}

function theme() {
  const remember = (value) => {
    try {
      localStorage.setItem("placement-theme", value);
    } catch { /* files may have no storage; then the choice lasts until the page is closed */ }
  };
  let chosen = null;
  try {
    chosen = localStorage.getItem("placement-theme");
  } catch { /* see above */ }
  const root = document.documentElement;
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  const system = matchMedia("(prefers-color-scheme: dark)");
  $("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    remember(root.dataset.theme);
    changed("theme");
  });
  system.addEventListener("change", () => changed("theme"));
}

// On paper there is one width, and no dark side: what is drawn is drawn anew for it.
function paper() {
  for (const [what, isPaper] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(what, () => {
      document.documentElement.classList.toggle("paper", isPaper);
      changed("paper");
    });
  }
}

function begin() {
  theme();
  paper();
  document.querySelectorAll("#stills > section").forEach((s, i) => {
    data.workloads[i].still = s.querySelector("svg");
  });
  $("stills").remove();
  for (const id of ["theme", "bar"]) $(id).hidden = false;
  document.title = `${data.title} · placement report`;
  $("title").textContent = data.title;
  const made = data.made.replace("T", " ").replace(/:\d\d\+00:00$/, " UTC");
  const version = /^\d/.test(data.version) ? ` by version ${data.version}` : "";
  $("subtitle").textContent = `Placement report, made ${made}${version}`;
  $("footer").textContent = "Placement report: one file, no network. Seconds are of one micro-batch unless they say otherwise.";
  if (data.unread.length) {
    $("warnings").replaceChildren(el("div", { class: "card warn" }, el("h2", {}, "Left out"),
      el("ul", {}, data.unread.map((line) => el("li", {}, line)))));
  }
  const select = $("workload");
  select.replaceChildren(...data.workloads.map((w, i) => el("option", { value: i }, w.name)));
  $("workload-label").hidden = data.workloads.length < 2;
  select.addEventListener("change", () => {
    state.workload = Number(select.value);
    showWorkload();
    showLinks();
  });
  summarySection();
  showWorkload();
  show("training", trainingSection());
  show("provenance", provenanceSection());
  showLinks();
  document.documentElement.dataset.ready = "true";
}
begin();
