// Layout of one module at a time with dagre, so that opening a module leaves the inside of the others as it was.

const OP = { width: 184, height: 44 };
const MODULE = { width: 224, height: 62 };
const PADDING = 14;
const HEADER = 28;
const COLUMN_GAP = 64;

/** Forward and backward side by side. */
function layoutColumns(items) {
  let x = 0;
  for (const item of items) {
    Object.assign(item, { x, y: 0 });
    x += item.width + COLUMN_GAP;
  }
  return { items, links: [], width: Math.max(0, x - COLUMN_GAP), height: Math.max(0, ...items.map((item) => item.height)) };
}

function layoutLayered(module, items) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 26, marginx: PADDING, marginy: PADDING });
  const shownAs = new Map(); // member -> id of the item that shows it
  for (const item of items) {
    graph.setNode(item.id, { width: item.width, height: item.height });
    if (item.type === "op") shownAs.set(item.id, item.id);
    else for (const member of item.modules) shownAs.set(member.path, item.id);
  }
  for (const { a, b, edges } of module.links.values()) {
    const [from, to] = [shownAs.get(a), shownAs.get(b)];
    if (from === to || from === undefined || to === undefined) continue;
    const kept = graph.edge(from, to);
    if (kept) kept.edges.push(...edges);
    else graph.setEdge(from, to, { edges: [...edges] });
  }
  dagre.layout(graph);
  for (const item of items) {
    const node = graph.node(item.id);
    Object.assign(item, { x: node.x - node.width / 2, y: HEADER + node.y - node.height / 2 });
  }
  const links = graph.edges().map((id) => {
    const { points, edges } = graph.edge(id);
    return { edges, points: points.map((p) => ({ x: p.x, y: p.y + HEADER })) };
  });
  const { width, height } = graph.graph();
  return { items, links, width: Math.max(MODULE.width, width), height: height + HEADER };
}
