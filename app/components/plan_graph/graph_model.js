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
  const homes = PHASES.map(() => []); // phase and number of a module path -> where its ops are drawn
  for (let i = 0; i < model.numOps; i++) {
    const phase = ops.backward[i] ? 1 : 0;
    const module = (homes[phase][ops.module[i]] ??= homeOf(model, PHASES[phase], topology.modules[ops.module[i]]));
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

/** The module of a path in a phase, made with all that it is in. */
function homeOf(model, phase, path) {
  let module = addModule(model, phase, phase, model.root);
  let real = "";
  for (const part of splitPath(path)) {
    real += real ? `.${part}` : part;
    module = addModule(model, `${phase}/${real}`, part, module);
    module.repeat = model.topology.repeats[real] ?? null;
  }
  return module;
}

function addModule(model, path, label, parent) {
  let module = model.modules.get(path);
  if (!module) {
    module = { path, label, parent, depth: parent ? parent.depth + 1 : 0, children: [], ops: [], links: new Map(), repeat: null, numOps: 0 };
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
  let [a, b] = [model.home[from], model.home[to]];
  let [first, second] = [`op:${from}`, `op:${to}`];
  while (a !== b) {
    if (a.depth >= b.depth) [first, a] = [a.path, a.parent];
    else [second, b] = [b.path, b.parent];
  }
  if (a === model.root) return; // forward -> backward
  const name = `${first}|${second}`;
  const filed = a.links.get(name);
  if (filed) filed.edges.push(...edges);
  else a.links.set(name, { a: first, b: second, edges: [...edges] });
}

/** Sums per module that depend on the plan: heat, placement counts per axis, changed and pinned ops. */
function summarise(model, overlay, heat) {
  const sums = new Map();
  for (const { path } of model.modules.values())
    sums.set(path, { value: 0, changed: 0, pinned: 0, kinds: overlay.axes.map(() => ({ S: 0, R: 0, P: 0 })) });
  const values = overlay[heat];
  const kindsOf = overlay.placements.map((text) => placementChips(text).map((chip) => chip[0]));
  for (let i = 0; i < model.numOps; i++) { // first at the module of each op, then from each module to the one around it
    const sum = sums.get(model.home[i].path);
    const key = model.keys[i];
    sum.value += values[i];
    sum.changed += key in overlay.base ? 1 : 0;
    sum.pinned += key in overlay.pins ? 1 : 0;
    kindsOf[overlay.placement[i]].forEach((kind, axis) => { if (sum.kinds[axis]) sum.kinds[axis][kind]++; });
  }
  const inmost = [...model.modules.values()].sort((a, b) => b.depth - a.depth);
  for (const { path, parent } of inmost) {
    if (!parent) continue;
    const [sum, around] = [sums.get(path), sums.get(parent.path)];
    for (const field of ["value", "changed", "pinned"]) around[field] += sum[field];
    sum.kinds.forEach((kinds, axis) => { for (const kind of "SRP") around.kinds[axis][kind] += kinds[kind]; });
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
