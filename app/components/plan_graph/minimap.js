// Where the canvas is in a graph larger than itself: all boxes small, and a frame around what is seen. A press moves the camera.
// Keys and the search reach everything too, so it is hidden from screen readers.

const MINIMAP = { width: 168, height: 132 };

class Minimap {
  /** `look(x, y)` is called with the point of the graph that shall be in the middle of the canvas. */
  constructor(look) {
    this.look = look;
    this.element = svg("svg", { class: "minimap", "aria-hidden": "true" });
    for (const type of ["pointerdown", "pointermove", "click", "wheel"]) this.element.addEventListener(type, (event) => event.stopPropagation());
    this.element.addEventListener("pointerdown", (event) => {
      this.element.setPointerCapture(event.pointerId);
      this.lookAt(event);
    });
    this.element.addEventListener("pointermove", (event) => event.buttons && this.lookAt(event));
  }

  lookAt(event) {
    const frame = this.element.getBoundingClientRect();
    this.look((event.clientX - frame.x) / this.scale, (event.clientY - frame.y) / this.scale);
  }

  /** Anew, for boxes (by id) of a graph of this size. */
  draw(boxes, size) {
    this.size = size;
    this.scale = Math.min(MINIMAP.width / size.width, MINIMAP.height / size.height);
    const [width, height] = [size.width * this.scale, size.height * this.scale];
    Object.entries({ width, height, viewBox: `0 0 ${size.width} ${size.height}` }).forEach(([name, value]) => this.element.setAttribute(name, value));
    this.element.replaceChildren();
    this.parts = new Map();
    for (const [id, { x, y, width: w, height: h, element }] of boxes) {
      const kinds = ["open", "pinned", "changed"].filter((kind) => element.classList.contains(kind));
      this.parts.set(id, svg("rect", { x, y, width: w, height: h, class: ["part", ...kinds].join(" ") }, this.element));
    }
    this.seen = svg("rect", { class: "seen" }, this.element);
  }

  select(ids) {
    for (const part of this.element.querySelectorAll(".selected")) part.classList.remove("selected");
    for (const id of ids) this.parts.get(id)?.classList.add("selected");
  }

  /** Shown while part of the graph is outside the canvas. */
  follow({ x, y, scale }, { clientWidth, clientHeight }) {
    const [left, top, width, height] = [-x / scale, -y / scale, clientWidth / scale, clientHeight / scale];
    const slack = 8 / scale;
    const all = left <= slack && top <= slack && left + width >= this.size.width - slack && top + height >= this.size.height - slack;
    this.element.classList.toggle("off", all || clientWidth < 3 * MINIMAP.width);
    Object.entries({ x: left, y: top, width, height }).forEach(([name, value]) => this.seen.setAttribute(name, value));
  }
}
