// Earlier comparisons, the newest first, a page at a time.

import { ask, fetchVideo } from "./api.js";
import { calm, h, labelOf, when } from "./dom.js";

const PAGE = 8;

// A first frame that moves under the pointer or the focus. It is fetched when it comes into sight.
function thumbnail(comparison) {
  const video = comparison.videos.find((one) => one.status === "completed");
  const frame = h("div", { class: "vq-thumbnail" });
  const [width, height] = comparison.videos[0].size.split("x").map(Number);
  frame.style.setProperty("--ratio", `${width} / ${height}`);
  if (!video) {
    frame.append(h("span", {}, comparison.status === "in_progress" ? "in progress" : "no video"));
    return frame;
  }
  const element = h("video", { muted: true, playsinline: true, loop: true, tabindex: "-1", "aria-hidden": "true", class: width <= 160 ? "small" : null });
  element.muted = true;
  frame.append(element);
  const seen = new IntersectionObserver(async ([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    try {
      const url = await fetchVideo(video.content_url);
      element.addEventListener("loadeddata", () => URL.revokeObjectURL(url), { once: true });
      element.src = url;
    } catch {
      frame.replaceChildren(h("span", {}, "gone"));
    }
  });
  seen.observe(frame);
  return frame;
}

function card(comparison) {
  const names = comparison.videos.filter((video) => video.id !== comparison.floor).map((video) => labelOf(video, comparison));
  const link = h(
    "a",
    { href: `?comparison=${encodeURIComponent(comparison.id)}` },
    thumbnail(comparison),
    h("span", { class: "vq-card-prompt" }, comparison.prompt),
    h("span", { class: "vq-soft vq-small" }, names.join(" · ")),
    h("span", { class: "vq-soft vq-small" }, when(comparison.created_at)),
  );
  const play = () => !calm() && link.querySelector("video")?.play().catch(() => {});
  const pause = () => link.querySelector("video")?.pause();
  for (const name of ["pointerenter", "focus"]) link.addEventListener(name, play);
  for (const name of ["pointerleave", "blur"]) link.addEventListener(name, pause);
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // in a tab of its own
    event.preventDefault();
    window.dispatchEvent(new CustomEvent("videoqat:open", { detail: comparison.id }));
  });
  return h("li", {}, link);
}

class Gallery extends HTMLElement {
  connectedCallback() {
    this.list = h("ul", { class: "vq-cards" });
    this.note = h("p", { class: "vq-soft", role: "status" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#load(this.last) }, "Show older ones");
    const fresh = h("button", { type: "button", onclick: () => this.#load(null) }, "Look again");
    this.replaceChildren(h("section", {}, h("div", { class: "vq-bar" }, h("h2", {}, "Earlier comparisons"), fresh), this.note, this.list, this.more));
    window.addEventListener("videoqat:ended", this);
    this.#load(null);
  }

  disconnectedCallback() {
    window.removeEventListener("videoqat:ended", this);
  }

  handleEvent() {
    this.#load(null);
  }

  async #load(after) {
    let page;
    try {
      page = await ask("GET", `/v1/comparisons?limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    } catch (error) {
      if (error.status === 422 && after) return this.#load(null); // the one it would go on from has been deleted
      this.note.textContent = error.status === 401 ? "" : error.message;
      return;
    }
    const cards = page.data.map(card);
    if (after) this.list.append(...cards);
    else this.list.replaceChildren(...cards);
    this.last = page.last_id;
    this.more.hidden = !page.has_more;
    this.note.textContent = this.list.children.length ? "" : "None yet.";
    if (after) cards[0]?.querySelector("a").focus();
  }
}

customElements.define("vq-gallery", Gallery);
