// Elements and words. Text from the API only ever becomes text, never markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return fill(element, ...children);
}

// These children instead of those that an element has; what is null or false is left out, and lists are laid out.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(1000 * value).toPrecision(3)} ms`;
  return value < 120 ? `${value.toFixed(2)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  return value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(0)} MiB` : `${(value / 2 ** 30).toFixed(2)} GiB`;
}

export function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function when(unix) {
  return new Date(1000 * unix).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

// A wide table scrolls by itself, also by keyboard; the page never does sideways.
export function scrolling(label, table) {
  return h("div", { class: "vq-scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

// What a video is called: its recipe, with the model where those of a comparison differ.
export function labelOf(video, comparison) {
  let label = video.attention === "checkpoint" ? (video.result?.recipe.name ?? "checkpoint") : video.attention;
  if (new Set(comparison.videos.map((one) => one.model)).size > 1) label = `${video.model}: ${label}`;
  return video.id === comparison.floor ? `${label}, again` : label;
}

// The kernels that served a video: that of its recipe first.
export function kernelsOf(video) {
  const found = video.result?.receipts ?? [];
  const own = (receipt) => receipt.recipe === video.result.recipe.name;
  return [...found.filter(own), ...found.filter((receipt) => !own(receipt))];
}

export function badge(receipt) {
  const native = receipt.native;
  return h("span", { class: native ? "vq-badge native" : "vq-badge", title: receipt.reason }, native ? "native" : "emulated");
}
