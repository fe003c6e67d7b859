// The graph as the browser sees it: a tree of modules, ops with keys, every edge filed under the innermost module that
// holds both of its ends. Pure functions of the messages (see app/view_models/graph_messages.py); nothing here draws.

const PHASES = ["forward", "backward"];
const placementChips = (text) => text.match(/S\(\d+\)|R|P(?:\(\w+\))?/g) ?? [];

/** "layers.3.attention.wq" -> ["layers.3", "attention", "wq"] */
function splitPath(path) {
  const parts = [];
  for (const part of path ? path.split(".") : []) {
    if (/^\d+$/.test(part) && parts.length) parts[parts.length - 1] += `.${part}`;
    else parts.push(part);
  }
  return parts;
}

/** The same rule as Node.key; keys that do not follow it (leaves) are sent as they are. */
function opKey(topology, i) {
  const { ops } = topology;
  const phase = ops.backward[i] ? "bwd" : "fwd";
  const module = topology.modules[ops.module[i]];
  return topology.odd_keys[i] ?? `${module && `${module}/`}${topology.names[ops.name[i]]}/${phase}#${ops.ordinal[i]}`;
}

function buildModel(topology, { hideViews }) {
  const { ops } = topology;
  const model = {
    topology, hideViews, modules: new Map(), home: [], keys: [], indexOf: new Map(), numOps: ops.name.length,
    isView: ops.kind.map((kind) => topology.kinds[kind] === "view"),
  };
  model.root = addModule(model, "", "", null);
  for (let i = 0; i < model.numOps; i++) {
    const phase = PHASES[ops.backward[i] ? 1 : 0];
    let module = addModule(model, phase, phase, model.root);
    const parts = splitPath(topology.modules[ops.module[i]]);
    parts.forEach((part, depth) => {
      const real = parts.slice(0, depth + 1).join(".");
      module = addModule(model, `${phase}/${real}`, part, module);
      module.repeat = topology.repeats[real] ?? null;
    });
    model.home.push(module);
    if (!(hideViews && model.isView[i])) {
      module.ops.push(i);
      for (let m = module; m; m = m.parent) m.numOps++;
    }
    model.keys.push(opKey(topology, i));
    model.indexOf.set(model.keys[i], i);
  }
  for (const module of model.modules.values()) module.children = module.children.filter((child) => child.numOps > 0);
  addEdges(model);
  return model;
}

function addModule(model, path, label, parent) {
  let module = model.modules.get(path);
  if (!module) {
    module = { path, label, parent, children: [], ops: [], links: new Map(), repeat: null, numOps: 0 };
    model.modules.set(path, module);
    parent?.children.push(module);
  }
  return module;
}

/** Edges between the ops drawn. An edge out of a hidden view starts at what the view reads, and keeps the view's own edges. */
function addEdges(model) {
  const { producer, consumer } = model.topology.edges;
  const into = model.keys.map(() => []);
  consumer.forEach((op, e) => into[op].push(e));
  model.incoming = model.keys.map(() => []);
  model.outgoing = model.keys.map(() => []);
  const hidden = (op) => model.hideViews && model.isView[op];
  consumer.forEach((to, e) => {
    if (hidden(to)) return;
    const chain = [e];
    let from = producer[e];
    while (hidden(from) && into[from].length) {
      chain.push(into[from][0]);
      from = producer[into[from][0]];
    }
    if (hidden(from)) return;
    const link = { from, to, edges: chain };
    model.outgoing[from].push(link);
    model.incoming[to].push(link);
    fileLink(model, link);
  });
}

/** Adds a link to the innermost common module, between its two direct members. */
function fileLink(model, { from, to, edges }) {
  const chain = (op) => {
    const members = [op];
    for (let m = model.home[op]; m; m = m.parent) members.push(m);
    return members.reverse(); // root, forward, ..., op
  };
  const [a, b] = [chain(from), chain(to)];
  let depth = 0;
  while (a[depth + 1] === b[depth + 1]) depth++;
  const module = a[depth];
  if (module === model.root) return; // forward -> backward
  const name = (member) => (typeof member === "number" ? `op:${member}` : member.path);
  const [first, second] = [name(a[depth + 1]), name(b[depth + 1])];
  const filed = module.links.get(`${first}|${second}`) ?? { a: first, b: second, edges: [] };
  filed.edges.push(...edges);
  module.links.set(`${first}|${second}`, filed);
}

/** Sums per module that depend on the plan: heat, placement counts per axis, changed and pinned ops. */
function summarise(model, overlay, heat) {
  const sums = new Map();
  const values = overlay[heat];
  const chipsOf = overlay.placements.map(placementChips);
  for (let i = 0; i < model.numOps; i++) {
    const chips = chipsOf[overlay.placement[i]];
    const key = model.keys[i];
    for (let m = model.home[i]; m; m = m.parent) {
      let sum = sums.get(m.path);
      if (!sum) sums.set(m.path, (sum = { value: 0, changed: 0, pinned: 0, kinds: overlay.axes.map(() => ({ S: 0, R: 0, P: 0 })) }));
      sum.value += values[i];
      sum.changed += key in overlay.base ? 1 : 0;
      sum.pinned += key in overlay.pins ? 1 : 0;
      chips.forEach((chip, axis) => { if (sum.kinds[axis]) sum.kinds[axis][chip[0]]++; });
    }
  }
  return sums;
}

/** The op whose output is the module's output: what a pin on the module means. Null for modules that hold modules. */
function outputOp(model, module) {
  if (module.children.length) return null;
  const real = module.ops.filter((i) => model.topology.kinds[model.topology.ops.kind[i]] === "op");
  return real.at(-1) ?? null;
}

/** edge number -> {axis, text, ...} of the redistribution on it. */
function redistributionsByEdge(overlay) {
  const { edge, axis, text } = overlay.redistributions;
  return new Map(edge.map((e, k) => [e, { axis: axis[k], text: overlay.texts[text[k]] }]));
}
