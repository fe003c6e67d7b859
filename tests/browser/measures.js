// Measures of what is drawn, for test_stories_looks.py. Computed styles only; open shadow roots are looked into.
() => {
  const found = { faint: [], outside: [] };
  const parse = (colour) => {
    const parts = (colour.match(/[\d.]+/g) ?? []).map(Number);
    if (colour.startsWith("color(srgb")) return [parts[0] * 255, parts[1] * 255, parts[2] * 255, parts[3] ?? 1];
    return parts.length < 3 ? [0, 0, 0, 0] : [parts[0], parts[1], parts[2], parts[3] ?? 1];
  };
  const over = (top, ground) => [0, 1, 2].map((k) => top[k] * top[3] + ground[k] * (1 - top[3]));
  const luminance = (colour) => {
    const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const parentOf = (element) => element.assignedSlot ?? element.parentElement ?? element.getRootNode().host ?? null;
  const chain = (element) => { const all = []; for (let at = element; at; at = parentOf(at)) all.push(at); return all; };
  const everything = (root) => [...root.querySelectorAll("*")].flatMap((e) => (e.shadowRoot ? [e, ...everything(e.shadowRoot)] : [e]));
  const words = (element) => [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("").trim();
  const name = (element) => `${element.tagName.toLowerCase()}.${element.getAttribute("class") ?? ""} "${(element.innerText ?? element.textContent ?? "").trim().slice(0, 40)}"`;

  /** What the browser paints where a page paints nothing. */
  const scheme = getComputedStyle(document.documentElement).colorScheme;
  const canvas = scheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];

  /** Colour behind an element: what its ancestors paint, composed; the box behind text in a drawing is its `.frame`. */
  const ground = (element, ancestors) => {
    let colour = canvas;
    for (const at of [...ancestors].reverse()) colour = over(parse(getComputedStyle(at).backgroundColor), colour);
    const box = element.closest?.(".box");
    for (const shape of element.ownerSVGElement && box ? [box.querySelector(".frame")] : []) colour = over(parse(getComputedStyle(shape).fill), colour);
    if (element.matches?.(".chip-text") && element.previousElementSibling) colour = over(parse(getComputedStyle(element.previousElementSibling).fill), colour);
    return colour;
  };

  for (const element of everything(document)) {
    if (!words(element) || element.closest("script, style, .js-plotly-plot .infolayer")) continue;
    const style = getComputedStyle(element);
    const frame = element.getBoundingClientRect();
    const ancestors = chain(element);
    if (!frame.width || !frame.height || style.visibility === "hidden") continue;
    if (ancestors.some((at) => at.matches("[aria-hidden=true], :disabled, [aria-disabled=true], [hidden], .px-title, .stTooltipIcon"))) continue;
    const clipped = ancestors.slice(1).some((at) => getComputedStyle(at).overflowX !== "visible" && at.scrollWidth > at.clientWidth + 1 && at !== document.documentElement);
    const drawn = element.ownerSVGElement && !element.closest(".js-plotly-plot"); // a graph that one moves about in
    if (!drawn && !clipped && (frame.left < -1 || frame.right > innerWidth + 1)) found.outside.push(`${name(element)} ${Math.round(frame.left)}..${Math.round(frame.right)}`);
    if (element.closest(".js-plotly-plot") && !element.closest(".xtick, .ytick, .g-xtitle, .g-ytitle, .legend")) continue; // on bars of any colour
    const opacity = ancestors.reduce((product, at) => product * Number(getComputedStyle(at).opacity), 1);
    const text = parse(element.ownerSVGElement ? style.fill : style.color);
    const behind = ground(element, ancestors);
    const seen = contrast(over([text[0], text[1], text[2], text[3] * opacity], behind), behind);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    if (seen < (large ? 3 : 4.5)) found.faint.push(`${name(element)} ${seen.toFixed(2)}`);
  }
  return { ...found, overflow: document.documentElement.scrollWidth - innerWidth };
};
