// What a reader stumbles over in the page as it is laid out now: text that is cut off, overlaps, breaks inside a word or
// is too small to read, things to tap that a finger misses, and a page that must be pushed sideways.
(width) => {
  const LEAST_TEXT = 11, LEAST_TAP = 32, LONG_WORD = 22, SLACK = 1.5;
  const faults = new Set();
  const shown = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const where = (element) => {
    const names = [];
    for (let at = element; at && at !== document.body; at = at.parentElement)
      names.unshift(at.tagName.toLowerCase() + (at.getAttribute("class") ? `.${at.getAttribute("class").replaceAll(" ", ".")}` : ""));
    return names.slice(-4).join(" > ");
  };
  const fault = (what, element, text = element.textContent) =>
    faults.add(`${what}: "${text.trim().replace(/\s+/g, " ").slice(0, 60)}" in ${where(element)}`);
  const overlap = (a, b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > SLACK && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > SLACK;

  if (document.documentElement.scrollWidth > width) faults.add(`the page is ${document.documentElement.scrollWidth} wide on ${width}`);

  const inTheWay = (element) => {   // the nearest box that cuts what leaves it
    for (let at = element; at && at !== document.documentElement; at = at.parentElement)
      if (at.tagName === "svg" || getComputedStyle(at).overflowX !== "visible") return at;
    return null;
  };

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const lines = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || ["SCRIPT", "STYLE", "NOSCRIPT", "title"].includes(element.tagName) || !shown(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const bounds = range.getBoundingClientRect();
    if (!bounds.width) continue;
    const cutter = inTheWay(element);
    const box = cutter ? cutter.getBoundingClientRect() : { left: 0, right: width, top: -Infinity, bottom: Infinity };
    const outside = bounds.left < box.left - SLACK || bounds.right > box.right + SLACK ||
      bounds.top < box.top - SLACK || bounds.bottom > box.bottom + SLACK;
    if (outside) fault("cut off", element);
    const svg = element.closest("svg");
    const scale = svg && element.getScreenCTM ? element.getScreenCTM().a : 1;
    const size = parseFloat(getComputedStyle(element).fontSize) * scale;
    if (size < LEAST_TEXT) fault(`text of ${size.toFixed(1)} pixels`, element);
    lines.push(...[...range.getClientRects()].filter((line) => line.width > 0).map((line) => ({ element, line })));
    if (!svg) for (const word of node.textContent.matchAll(/[\p{L}\p{N}.,_%]+/gu)) {
      if (word[0].length < 2 || word[0].length > LONG_WORD) continue;
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width > 0).map((r) => Math.round(r.top)));
      if (lines.size > 1) fault("a word broken", element, `${word[0]} of ${node.textContent}`);
    }
  }
  lines.sort((a, b) => a.line.top - b.line.top);
  lines.forEach(({ element, line }, n) => {
    for (let k = n + 1; k < lines.length && lines[k].line.top < line.bottom - SLACK; k++)
      if (overlap(line, lines[k].line))
        fault("overlaps", element, `${element.textContent.trim().slice(0, 25)}" and "${lines[k].element.textContent}`);
  });
  if (width <= 600)
    for (const element of document.querySelectorAll("button, summary, label, input, a")) {
      const target = element.closest("label") || element;
      const bounds = target.getBoundingClientRect();
      if (shown(element) && bounds.width && bounds.height < LEAST_TAP) fault(`${bounds.height.toFixed(0)} pixels to tap`, element, element.textContent || element.id);
    }
  return [...faults];
}
