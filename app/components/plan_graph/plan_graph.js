// The plan graph: modules as nested boxes, ops with one placement chip per mesh axis, redistributions as thick edges.
//
// data.topology  what does not change with the plan; data.overlay  placements, costs, pins, base plan
// data.focus     {key, count}: show this op; count tells a repeated request from an old one
// back to Python: the states selected (key or null) and group (list of keys)
//
// Edges from forward to backward (saved activations) take no part in the layout; they are drawn for the selected op.
// Names come from user models: they are only ever written with textContent or setAttribute.

const MAX_BOXES = 1500;
const AXIS_HUES = ["#4f46e5", "#ea580c", "#059669", "#c026d3", "#0891b2", "#a16207"]; // mesh axes, then flattened groups of them
const HEATS = { comm: "comm_us", compute: "compute_us", memory: "memory_mib" };
const KEYS = [
  ["/", "find"], ["Enter, Shift+Enter", "next, previous match"], ["arrows", "move between boxes"], ["Enter", "open or select"],
  ["Shift+click", "select several ops"], ["e", "open all inside"], ["f", "show the selection"],
  [". and ,", "next, previous redistribution"], ["p", "go to the pin control"], ["Home", "collapse all"], ["Esc", "clear the selection"],
];
const MEANINGS = [["S", "S(d) split along dim d"], ["R", "R whole on every rank"], ["P", "P parts still to be added up"]];
const PIN_PATH = "M0,0h10v2l-2,1v5l3,3v2h-5v5h-2v-5h-5v-2l3,-3v-5l-2,-1z";

const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function formatHeat(value, heat) {
  if (heat === "memory") return value >= 1024 ? `${(value / 1024).toFixed(1)} GiB` : `${value.toFixed(value < 10 ? 1 : 0)} MiB`;
  return value >= 1000 ? `${(value / 1000).toFixed(1)} ms` : `${value.toFixed(0)} µs`;
}

function svg(tag, attributes = {}, parent = null, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  parent?.appendChild(element);
  return element;
}

function html(tag, className, parent, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.appendChild(element);
  return element;
}

/** Open modules, camera and selection per graph, kept while the browser tab lives: a page switch makes the element anew. */
const savedViews = () => (window.__planGraphViews ??= new Map());

class PlanGraphView {
  constructor(host) {
    this.host = host;
    this.open = new Set();
    this.group = [];
    this.heat = "comm";
    this.groupRepeats = true;
    this.hideViews = true;
    this.layouts = new Map(); // module path -> {signature, layout}
    this.buildFrame();
  }

  /** Called on every rerun; redraws only what changed. */
  update({ data, setStateValue }) {
    this.send = setStateValue;
    this.listen();
    const newGraph = this.topology?.hash !== data.topology.hash;
    if (newGraph) {
      this.topology = data.topology;
      const kept = savedViews().get(data.topology.hash);
      this.open = new Set(kept?.open ?? PHASES);
      this.camera = kept ? { ...kept.camera } : null;
      this.group = kept?.group ?? [];
      this.lastFocus = kept?.lastFocus;
      this.rebuild();
    }
    if (newGraph || this.overlay?.hash !== data.overlay.hash) {
      this.overlay = data.overlay;
      this.moves = redistributionsByEdge(data.overlay);
      this.draw();
    }
    if (data.focus.count !== this.lastFocus) {
      this.lastFocus = data.focus.count;
      const index = this.model.indexOf.get(data.focus.key);
      if (index !== undefined) this.reveal(index, { notify: data.focus.key !== this.group.at(-1) });
    }
  }

  rebuild() {
    this.model = buildModel(this.topology, { hideViews: this.hideViews });
    this.layouts.clear();
  }

  buildFrame() {
    this.host.textContent = "";
    this.host.style.position = "relative";
    const bar = html("div", "bar", this.host);
    this.search = html("input", "search", bar);
    this.search.placeholder = "Find op, module, placement ( / )";
    this.search.setAttribute("aria-label", "Find op, module or placement");
    const heat = html("label", "", bar, "Heat");
    this.heatSelect = html("select", "heat-select", heat);
    for (const name of Object.keys(HEATS)) html("option", "", this.heatSelect, name).value = name;
    this.repeatsBox = this.addCheckbox(bar, "group layers");
    this.viewsBox = this.addCheckbox(bar, "hide views");
    this.collapseButton = html("button", "", bar, "Collapse all");
    this.helpButton = html("button", "", bar, "Keys");
    this.info = html("span", "info", bar);
    this.info.setAttribute("role", "status");
    this.help = html("div", "help", this.host);
    this.help.hidden = true;
    for (const [keys, what] of KEYS) {
      html("kbd", "", this.help, keys);
      html("span", "", this.help, what);
    }
    this.canvas = html("div", "canvas", this.host);
    this.canvas.tabIndex = 0;
    this.minimap = new Minimap((x, y) => this.lookAt(x, y));
    new ResizeObserver(() => this.resized()).observe(this.canvas); // lives as long as the canvas
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", "Plan graph. Arrows move, Enter opens or selects. The op table below holds the same data.");
    this.legend = html("div", "legend", this.host);
    new ResizeObserver(() => this.onResize()).observe(this.canvas);
    this.bindEvents();
  }

  addCheckbox(parent, text) {
    const label = html("label", "", parent);
    const box = html("input", "", label);
    Object.assign(box, { type: "checkbox", checked: true });
    label.append(text);
    return box;
  }

  drawLegend() {
    this.legend.textContent = "";
    const kinds = new Set(this.overlay.placements.flatMap(placementChips));
    for (const chip of [...kinds].sort()) html("span", `key ${chipClass(chip)}`, this.legend, chip);
    const meanings = MEANINGS.filter(([start]) => [...kinds].some((chip) => chip.startsWith(start)));
    html("span", "note", this.legend, `${meanings.map(([, meaning]) => meaning).join(", ")}; one chip per mesh axis: ${this.overlay.axes.join(", ")}`);
    const used = new Set([...this.moves.values()].map((move) => move.axis));
    this.overlay.groups.forEach((group, k) => {
      if (used.has(k)) html("span", "line", this.legend, `redistribution over ${group}`).style.setProperty("--hue", AXIS_HUES[k % AXIS_HUES.length]);
    });
    html("span", "heat-key", this.legend, `${this.heat} heat`);
    if (Object.keys(this.overlay.pins).length) html("span", "pin-key", this.legend, "pinned");
    if (Object.keys(this.overlay.base).length) html("span", "changed-key", this.legend, "changed against the base plan");
  }

  // -------------------------------------------------------------- what is visible

  /** Direct members of a module as drawn: open or single modules, runs of repeated ones, then ops. */
  itemsOf(module) {
    const items = [];
    for (const child of module.children) {
      const last = items.at(-1);
      const groupable = this.groupRepeats && child.repeat && !this.open.has(child.path);
      if (groupable && last?.type === "run" && last.modules[0].repeat === child.repeat) last.modules.push(child);
      else if (groupable) items.push({ type: "run", id: `run:${child.path}`, modules: [child] });
      else items.push({ type: "module", id: child.path, modules: [child] });
    }
    for (const item of items)
      if (item.type === "run" && item.modules.length === 1) Object.assign(item, { type: "module", id: item.modules[0].path });
    return items.concat(module.ops.map((index) => ({ type: "op", id: `op:${index}`, index })));
  }

  countBoxes(module) {
    let count = 0;
    for (const item of this.itemsOf(module)) {
      count++;
      if (item.type === "module" && this.open.has(item.id)) count += this.countBoxes(item.modules[0]);
    }
    return count;
  }

  layout(module) {
    const items = this.itemsOf(module);
    const inner = new Map();
    for (const item of items) {
      if (item.type === "op") Object.assign(item, OP);
      else if (item.type === "module" && this.open.has(item.id)) {
        const layout = this.layout(item.modules[0]);
        inner.set(item.id, layout);
        Object.assign(item, { width: layout.width, height: layout.height });
      } else Object.assign(item, MODULE);
    }
    const signature = items.map((item) => `${item.id}:${item.modules?.length}:${item.width}x${item.height}`).join();
    const kept = this.layouts.get(module.path);
    const layout = kept?.signature === signature ? kept.layout : module.path === "" ? layoutColumns(items) : layoutLayered(module, items);
    this.layouts.set(module.path, { signature, layout });
    return { ...layout, inner };
  }

  // -------------------------------------------------------------- drawing

  draw() {
    const start = performance.now();
    this.host.classList.toggle("dark", isDark(this.host));
    this.sumUp();
    const layout = this.layout(this.model.root);
    this.boxes = new Map(); // item id -> {x, y, width, height, element, item}
    const scene = svg("svg", { class: "scene", width: "100%", height: "100%" });
    this.viewport = svg("g", {}, scene);
    this.drawModule(layout, 0, 0);
    this.selectionLayer = svg("g", { class: "selection-edges" }, this.viewport);
    const hadFocus = this.canvas.contains(this.host.getRootNode().activeElement);
    this.canvas.replaceChildren(scene, this.minimap.element);
    if (hadFocus) (this.boxes.get(this.cursor)?.element ?? this.canvas).focus({ preventScroll: true }); // or the keys stop working
    this.size = layout;
    this.minimap.draw(this.boxes, layout);
    if (!this.camera) this.goHome();
    this.drawLegend();
    this.markSelection();
    this.applyCamera();
    this.drawMs = performance.now() - start;
    this.host.dataset.drawMs = this.drawMs.toFixed(0);
    this.say(`${this.model.numOps.toLocaleString("en")} ops, ${this.boxes.size.toLocaleString("en")} boxes`);
  }

  /** What depends on plan, heat and model alone: opening a module leaves it as it is. */
  sumUp() {
    const { model, overlay, heat } = this;
    if (this.summed?.model === model && this.summed.overlay === overlay && this.summed.heat === heat) return;
    this.summed = { model, overlay, heat };
    this.sums = summarise(model, overlay, HEATS[heat]);
    const values = overlay[HEATS[heat]];
    this.hottest = { op: values.reduce((a, b) => Math.max(a, b), 1), module: this.hottestModule() };
  }

  /** Show everything. `home` remembers where that was, so that a canvas that grows or shrinks keeps showing everything. */
  goHome() {
    this.home = this.homeCamera();
    this.camera = { ...this.home };
  }

  resized() {
    const { camera, home } = this;
    if (!camera || !home || camera.x !== home.x || camera.y !== home.y || camera.scale !== home.scale) return;
    this.goHome();
    this.applyCamera();
  }

  /** A graph drawn before its element had a size is looked at anew. */
  onResize() {
    if (!this.unseen || !this.canvas.clientWidth) return;
    this.unseen = false;
    this.camera = this.homeCamera();
    this.applyCamera();
    const index = this.model.indexOf.get(this.group.at(-1));
    if (index !== undefined) this.centre(this.boxFor(index), Math.max(this.camera.scale, 0.85));
  }

  homeCamera() {
    this.unseen = !this.canvas.clientWidth;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const scale = Math.min(1, Math.max(0.4, width / (this.size.width + 40)), Math.max(0.7, height / (this.size.height + 28)));
    return { x: Math.max(16, (this.canvas.clientWidth - this.size.width * scale) / 2), y: 14, scale };
  }

  hottestModule() {
    const tops = this.model.root.children.flatMap((phase) => phase.children);
    return Math.max(1, ...tops.map((module) => this.sums.get(module.path).value));
  }

  drawModule(layout, x0, y0) {
    for (const link of layout.links) this.drawLink(link, x0, y0);
    for (const item of layout.items) {
      const [x, y] = [x0 + item.x, y0 + item.y];
      const element = item.type === "op" ? this.drawOp(item) : this.drawModuleBox(item, layout.inner.has(item.id));
      element.setAttribute("transform", `translate(${x},${y})`);
      this.boxes.set(item.id, { x, y, width: item.width, height: item.height, element, item });
      if (layout.inner.has(item.id)) this.drawModule(layout.inner.get(item.id), x, y);
    }
  }

  drawLink({ points, edges }, x0, y0) {
    const moves = edges.map((e) => this.moves.get(e)).filter(Boolean);
    const loud = moves.find((move) => move.axis >= 0);
    const d = "M" + points.map((p) => `${(x0 + p.x).toFixed(1)},${(y0 + p.y).toFixed(1)}`).join("L");
    const path = svg("path", { d, class: loud ? "edge move" : moves.length ? "edge local" : "edge" }, this.viewport);
    if (loud) path.style.stroke = AXIS_HUES[loud.axis % AXIS_HUES.length];
    if (!moves.length) return;
    const texts = [...new Set(moves.map((move) => move.text))];
    svg("title", {}, path, texts.slice(0, 6).join("\n") + (texts.length > 6 ? `\nand ${texts.length - 6} more` : ""));
  }

  drawOp({ id, index }) {
    const { topology, keys } = this.model;
    const key = keys[index];
    const name = topology.names[topology.ops.name[index]];
    const chips = placementChips(this.overlay.placements[this.overlay.placement[index]]);
    const before = this.overlay.base[key];
    const pin = this.overlay.pins[key];
    const value = this.overlay[HEATS[this.heat]][index];
    const classes = ["box", "op", `kind-${topology.kinds[topology.ops.kind[index]]}`, before && "changed", pin && "pinned"];
    const group = svg("g", { class: classes.filter(Boolean).join(" "), role: "button", tabindex: -1, "data-id": id, "data-key": key }, this.viewport);
    const spoken = chips.map((chip, k) => `${chip} on ${this.overlay.axes[k]}`).join(", ");
    group.setAttribute("aria-label", `${name}, ${spoken}${pin ? `, ${pin}` : ""}${before ? `, was ${before}` : ""}`);
    svg("title", {}, group, `${key}\n${spoken}${pin ? `\n${pin}` : ""}${before ? `\nwas ${before}` : ""}`);
    svg("rect", { ...OP, rx: 6, class: "frame" }, group);
    this.drawHeat(group, value / this.hottest.op, OP.height);
    svg("text", { x: 12, y: 17, class: "name" }, group, shorten(name, pin ? 19 : 22));
    chips.forEach((chip, k) => this.drawChip(group, chip, 12 + k * 35));
    if (before) svg("text", { x: OP.width - 8, y: 35, class: "was" }, group, `was ${before}`);
    else if (value >= 0.5) svg("text", { x: OP.width - 8, y: 35, class: "small end" }, group, formatHeat(value, this.heat));
    if (pin) svg("path", { d: PIN_PATH, class: "pin", transform: `translate(${OP.width - 18},4) scale(.8)` }, group);
    return group;
  }

  drawChip(group, chip, x) {
    const kind = chipClass(chip);
    svg("rect", { x, y: 24, width: 32, height: 14, rx: 3, class: `chip ${kind}` }, group);
    svg("text", { x: x + 16, y: 34.5, class: `chip-text ${kind}` }, group, chip === "P(max)" ? "Pmax" : chip);
  }

  drawModuleBox({ id, type, modules, width, height }, isOpen) {
    const sums = modules.map((module) => this.sums.get(module.path));
    const total = (field) => sums.reduce((sum, s) => sum + s[field], 0);
    const name = type === "run" ? `${modules[0].label} … ${modules.at(-1).label}` : modules[0].label;
    const times = type === "run" ? ` ×${modules.length}` : "";
    const [changed, pinned] = [total("changed"), total("pinned")];
    const classes = ["box", "module", isOpen && "open", type === "run" && "run", !isOpen && changed && "changed", !isOpen && pinned && "pinned"];
    const group = svg("g", { class: classes.filter(Boolean).join(" "), role: "button", tabindex: -1, "data-id": id, "aria-expanded": isOpen }, this.viewport);
    const numOps = modules.reduce((sum, module) => sum + module.numOps, 0);
    const uneven = sums.some((sum) => JSON.stringify(sum.kinds) !== JSON.stringify(sums[0].kinds));
    const facts = [
      numOps === 1 ? "1 op" : `${numOps.toLocaleString("en")} ops`, `${formatHeat(total("value"), this.heat)} ${this.heat}`,
      pinned && `${pinned} pinned`, changed && `${changed} changed`, uneven && "layers differ",
    ].filter(Boolean);
    group.setAttribute("aria-label", `${name}${times}, ${facts.join(", ")}`);
    if (type === "run") svg("rect", { x: 5, y: 5, width, height, rx: 8, class: "frame shadow" }, group);
    svg("rect", { width, height, rx: 8, class: "frame" }, group);
    svg("text", { x: 12, y: 19, class: "name" }, group, (isOpen ? "▾ " : "▸ ") + shorten(name, 24) + times);
    if (isOpen) return group;
    this.drawHeat(group, total("value") / modules.length / this.hottest.module, height);
    svg("title", {}, group, `${name}${times}\n${facts.join("\n")}`);
    svg("text", { x: 12, y: 35, class: "small" }, group, shorten(facts.join(" · "), 44));
    this.drawShares(group, sums, width);
    return group;
  }

  /** One stacked bar per mesh axis: how many ops are sharded, replicated, pending. */
  drawShares(group, sums, width) {
    const pitch = this.overlay.axes.length > 2 ? 15 / this.overlay.axes.length : 7;
    this.overlay.axes.forEach((_, axis) => {
      const counts = { S: 0, R: 0, P: 0 };
      for (const sum of sums) for (const kind of "SRP") counts[kind] += sum.kinds[axis][kind];
      const all = counts.S + counts.R + counts.P || 1;
      let x = 12;
      for (const kind of "SRP") {
        const share = (counts[kind] / all) * (width - 24);
        if (share > 0) svg("rect", { x, y: 43 + axis * pitch, width: share, height: pitch - Math.min(2, pitch / 4), class: `bar-${kind}` }, group);
        x += share;
      }
    });
  }

  drawHeat(group, share, height) {
    if (share > 0.004) svg("rect", { x: 0, y: 5, width: 5, height: height - 10, rx: 2, class: "heat", opacity: Math.min(1, 0.15 + share).toFixed(2) }, group);
  }

  // -------------------------------------------------------------- selection

  /** The box that stands for an op: the op itself, or the closed module or run that contains it. */
  boxFor(index) {
    const own = this.boxes.get(`op:${index}`);
    if (own) return own;
    for (let m = this.model.home[index]; m; m = m.parent) {
      const box = this.boxes.get(m.path) ?? [...this.boxes.values()].find((b) => b.item.type === "run" && b.item.modules.includes(m));
      if (box) return box;
    }
    return null;
  }

  select(keys, { notify = true } = {}) {
    this.group = keys;
    this.keep();
    this.markSelection();
    if (!notify) return;
    this.send("selected", keys.at(-1) ?? null);
    this.send("group", keys);
  }

  markSelection() {
    for (const element of this.viewport.querySelectorAll(".selected")) element.classList.remove("selected");
    const ids = this.group.map((key) => `op:${this.model.indexOf.get(key)}`);
    for (const id of ids) this.boxes.get(id)?.element.classList.add("selected");
    this.minimap.select(ids);
    this.selectionLayer.replaceChildren();
    const index = this.model.indexOf.get(this.group.at(-1));
    if (index === undefined || !this.boxes.has(`op:${index}`)) return;
    const said = new Set(); // several links can pass one redistribution: its text is written once
    for (const link of this.model.incoming[index]) this.drawSelectionEdge(link, said);
    for (const link of this.model.outgoing[index]) this.drawSelectionEdge(link, said);
  }

  drawSelectionEdge({ from, to, edges }, said) {
    const [source, target] = [this.boxFor(from), this.boxFor(to)];
    if (!source || !target || source === target) return;
    const [x1, y1, x2, y2] = [source.x + source.width / 2, source.y + source.height, target.x + target.width / 2, target.y];
    const bend = Math.max(12, Math.abs(y2 - y1) / 2);
    const saved = this.topology.ops.backward[from] !== this.topology.ops.backward[to];
    svg("path", { d: `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`, class: saved ? "saved" : "" }, this.selectionLayer);
    const moved = edges.filter((e) => this.moves.has(e) && !said.has(e));
    const texts = moved.map((e) => this.moves.get(e).text);
    if (texts.length && !saved) moved.forEach((e) => said.add(e));
    if (texts.length && !saved) svg("text", { x: (x1 + x2) / 2 + 6, y: (y1 + y2) / 2 + 3 }, this.selectionLayer, shorten(texts.join(", "), 64));
  }

  /** Opens every ancestor of an op, centres it and selects it. */
  reveal(index, { notify = true } = {}) {
    if (this.hideViews && this.model.isView[index]) this.setHideViews(false);
    const ancestors = [];
    for (let m = this.model.home[index]; m.path; m = m.parent) ancestors.push(m.path);
    for (const path of ancestors) this.open.add(path);
    if (this.countBoxes(this.model.root) > MAX_BOXES) this.open = new Set([...PHASES, ...ancestors]); // keep only the way to this op
    this.cursor = `op:${index}`;
    this.draw();
    this.centre(this.boxes.get(`op:${index}`), Math.max(this.camera.scale, 0.85));
    this.select([this.model.keys[index]], { notify });
  }

  // -------------------------------------------------------------- opening and closing

  toggle(id) {
    const before = this.boxes.get(id);
    const path = id.replace(/^run:/, ""); // a run opens its first layer
    const opens = !this.open.has(path);
    if (!opens) this.open.delete(path);
    else if (!this.tryOpen([path])) return;
    this.draw();
    const after = this.boxes.get(path) ?? this.boxFor(this.firstOp(path));
    if (before && after) { // keep the clicked box under the pointer
      this.camera.x -= (after.x - before.x) * this.camera.scale;
      this.camera.y -= (after.y - before.y) * this.camera.scale;
      if (opens) this.bringIn(after);
      this.applyCamera();
    }
    const output = opens ? outputOp(this.model, this.model.modules.get(path)) : null;
    if (output !== null) this.select([this.model.keys[output]]); // a module without modules stands for its output
  }

  firstOp(path) {
    let module = this.model.modules.get(path);
    while (!module.ops.length) module = module.children[0];
    return module.ops[0];
  }

  openAllInside(id) {
    const top = this.model.modules.get(id.replace(/^run:/, ""));
    if (!top) return;
    const pathsInside = (module) => [module.path, ...module.children.flatMap(pathsInside)];
    if (this.tryOpen(pathsInside(top))) this.draw();
  }

  /** Opens the modules unless that would draw too many boxes. */
  tryOpen(paths) {
    const kept = this.open;
    this.open = new Set([...this.open, ...paths]);
    const count = this.countBoxes(this.model.root);
    if (count <= MAX_BOXES) return true;
    this.open = kept;
    this.say(`That would draw ${count.toLocaleString("en")} boxes (limit ${MAX_BOXES.toLocaleString("en")}). Open a smaller module.`);
    return false;
  }

  setHideViews(hide) {
    const keys = this.group;
    this.hideViews = this.viewsBox.checked = hide;
    this.rebuild();
    this.group = keys;
  }

  // -------------------------------------------------------------- camera

  applyCamera() {
    const { x, y, scale } = this.camera;
    this.viewport.setAttribute("transform", `translate(${x},${y}) scale(${scale})`);
    this.minimap.follow(this.camera, this.canvas);
    this.keep();
  }

  keep() {
    const { group, lastFocus } = this;
    savedViews().set(this.topology.hash, { open: [...this.open], camera: { ...this.camera }, group, lastFocus });
  }

  centre(box, scale = this.camera.scale) {
    if (!box) return;
    this.camera = {
      scale,
      x: this.canvas.clientWidth / 2 - (box.x + box.width / 2) * scale,
      y: this.canvas.clientHeight / 2 - (box.y + Math.min(box.height, 200) / 2) * scale,
    };
    this.applyCamera();
  }

  /** Puts a point of the graph in the middle. */
  lookAt(x, y) {
    const { scale } = this.camera;
    this.camera = { scale, x: this.canvas.clientWidth / 2 - x * scale, y: this.canvas.clientHeight / 2 - y * scale };
    this.applyCamera();
  }

  /** Moves as little as needed to show a box; of a box larger than the canvas its top left part. */
  bringIn(box) {
    const { x, y, scale } = this.camera;
    const [left, top] = [x + box.x * scale, y + box.y * scale];
    const over = (start, size, room) => Math.max(0, Math.min(start + size * scale - room + 24, start - 36));
    this.camera.x -= over(left, box.width, this.canvas.clientWidth);
    this.camera.y -= over(top, box.height, this.canvas.clientHeight);
  }

  fit() {
    const index = this.model.indexOf.get(this.group.at(-1));
    if (index !== undefined) return this.centre(this.boxFor(index), 1);
    this.goHome();
    this.applyCamera();
  }

  say(text) {
    this.info.textContent = text;
  }

  // -------------------------------------------------------------- events

  bindEvents() {
    this.bindPointer();
    this.canvas.onkeydown = (event) => this.onKey(event);
    this.canvas.addEventListener("focusin", (event) => { this.cursor = event.target.closest(".box")?.dataset.id ?? this.cursor; });
    this.search.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter") this.findNext(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.canvas.focus();
    };
    this.heatSelect.onchange = () => { this.heat = this.heatSelect.value; this.draw(); };
    this.repeatsBox.onchange = () => { this.groupRepeats = this.repeatsBox.checked; this.draw(); };
    this.viewsBox.onchange = () => { this.setHideViews(this.viewsBox.checked); this.draw(); };
    this.collapseButton.onclick = () => this.collapseAll();
    this.helpButton.onclick = () => this.toggleHelp();
  }

  listen() {
    if (this.listeners && !this.listeners.signal.aborted) return;
    this.listeners = new AbortController();
    document.addEventListener("keydown", (event) => {
      const typing = event.composedPath()[0].matches?.("input, textarea, select, [contenteditable]");
      if (event.key !== "/" || typing) return;
      event.preventDefault();
      this.search.focus();
    }, { signal: this.listeners.signal });
  }

  bindPointer() {
    let drag = null;
    let moved = false;
    this.canvas.onpointerdown = (event) => {
      drag = { x: event.clientX, y: event.clientY, camera: { ...this.camera } };
      moved = false;
    };
    this.canvas.onpointermove = (event) => {
      if (!drag) return;
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      moved ||= Math.abs(dx) + Math.abs(dy) > 4;
      if (!moved) return;
      this.canvas.classList.add("dragging");
      Object.assign(this.camera, { x: drag.camera.x + dx, y: drag.camera.y + dy });
      this.applyCamera();
    };
    this.canvas.onpointerup = this.canvas.onpointerleave = () => {
      drag = null;
      this.canvas.classList.remove("dragging");
    };
    this.canvas.onwheel = (event) => {
      event.preventDefault();
      const frame = this.canvas.getBoundingClientRect();
      const scale = Math.min(3, Math.max(0.05, this.camera.scale * Math.exp(-event.deltaY * 0.0015)));
      const [px, py] = [event.clientX - frame.x, event.clientY - frame.y];
      const ratio = scale / this.camera.scale;
      this.camera = { scale, x: px - (px - this.camera.x) * ratio, y: py - (py - this.camera.y) * ratio };
      this.applyCamera();
    };
    this.canvas.onclick = (event) => {
      const box = event.target.closest(".box");
      if (box && !moved) this.activate(box.dataset.id, event.shiftKey || event.ctrlKey || event.metaKey);
    };
  }

  dispose() {
    this.listeners.abort();
  }

  toggleHelp() {
    this.help.hidden = !this.help.hidden;
    this.helpButton.setAttribute("aria-expanded", String(!this.help.hidden));
  }

  activate(id, several) {
    this.cursor = id;
    if (!id.startsWith("op:")) return this.toggle(id);
    const key = this.model.keys[Number(id.slice(3))];
    if (!several) return this.select([key]);
    this.select(this.group.includes(key) ? this.group.filter((k) => k !== key) : [...this.group, key]);
  }

  /** Streamlit keeps the keys c and r for itself, so they are not used here. */
  onKey(event) {
    const arrows = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    const actions = {
      Escape: () => (this.help.hidden ? this.select([]) : this.toggleHelp()),
      Home: () => this.collapseAll(),
      f: () => this.fit(),
      e: () => this.cursor && this.openAllInside(this.cursor),
      p: () => document.querySelector("[class*='st-key-place'] button, [class*='st-key-place'] input")?.focus(),
      ".": () => this.stepRedistribution(1),
      ",": () => this.stepRedistribution(-1),
      "?": () => this.toggleHelp(),
      Enter: () => this.cursor && this.activate(this.cursor, event.shiftKey),
      " ": () => this.cursor && this.activate(this.cursor, event.shiftKey),
    };
    const action = arrows[event.key] ? () => this.moveCursor(arrows[event.key]) : actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  /** Moves keyboard focus to the nearest box in a direction. */
  moveCursor([dx, dy]) {
    const here = this.boxes.get(this.cursor) ?? this.boxes.values().next().value;
    if (dy > 0 && here.item.type === "module" && this.open.has(here.item.id)) return this.focusBox(this.firstInside(here));
    let best = null;
    for (const box of this.boxes.values()) {
      const [vx, vy] = [box.x + box.width / 2 - here.x - here.width / 2, box.y - here.y];
      const along = vx * dx + vy * dy;
      const cost = along + 3 * Math.abs(vx * dy + vy * dx);
      if (along > 1 && (!best || cost < best.cost)) best = { cost, box };
    }
    this.focusBox(best?.box ?? here);
  }

  /** The topmost box inside an open module. */
  firstInside(module) {
    const inside = [...this.boxes.values()].filter((box) => box !== module && box.x >= module.x && box.y > module.y
      && box.x + box.width <= module.x + module.width && box.y + box.height <= module.y + module.height);
    return inside.reduce((top, box) => (box.y < top.y ? box : top), inside[0] ?? module);
  }

  focusBox(box) {
    this.cursor = box.item.id;
    this.centre(box);
    box.element.focus({ preventScroll: true });
  }

  collapseAll() {
    this.open = new Set(PHASES);
    this.draw();
    this.goHome();
    this.applyCamera();
  }

  findNext(step) {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return;
    const text = (i) => `${this.model.keys[i]} ${this.overlay.placements[this.overlay.placement[i]]}`.toLowerCase();
    const matches = this.model.keys.map((_, i) => i).filter((i) => words.every((word) => text(i).includes(word)));
    if (!matches.length) return this.say(`Nothing matches "${this.search.value}".`);
    const same = this.lastSearch?.query === this.search.value;
    const at = same ? (this.lastSearch.at + step + matches.length) % matches.length : 0;
    this.lastSearch = { query: this.search.value, at };
    this.reveal(matches[at]);
    this.say(`match ${at + 1} of ${matches.length.toLocaleString("en")}`);
  }

  stepRedistribution(step) {
    const loud = [...this.moves].filter(([, move]) => move.axis >= 0);
    const consumers = [...new Set(loud.map(([e]) => this.topology.edges.consumer[e]))].sort((a, b) => a - b);
    if (!consumers.length) return this.say("This plan has no redistributions.");
    const here = this.model.indexOf.get(this.group.at(-1)) ?? -1;
    const next = step > 0 ? consumers.find((i) => i > here) ?? consumers[0] : consumers.findLast((i) => i < here) ?? consumers.at(-1);
    this.reveal(next);
    const at = consumers.indexOf(next) + 1;
    this.say(`redistribution ${at} of ${consumers.length.toLocaleString("en")}`);
  }
}

const chipClass = (chip) => (chip[0] === "S" ? `s${Number(chip.match(/\d+/)[0]) % 4}` : chip[0].toLowerCase());

/** Whether the theme is dark, judged by the text colour that Streamlit sets. */
function isDark(host) {
  const [red, green, blue] = (getComputedStyle(host).color.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
  return red + green + blue > 380;
}

// ---------------------------------------------------------------- entry point, called by Streamlit on every rerun

export default function (component) {
  const host = component.parentElement.querySelector(".plan-graph");
  try {
    host.view ??= new PlanGraphView(host);
    host.view.update(component);
  } catch (error) {
    host.textContent = `The graph could not be drawn (${error.message}). The op table below still selects and pins.`;
    host.classList.add("broken");
    host.view = null;
    console.error(error);
  }
  return () => host.view?.dispose(); // also called before a rerun: `update` listens again
}
