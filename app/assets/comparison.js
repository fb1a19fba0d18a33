// One comparison: how far it is, and then its videos, times and differences.

import { ask, sleep } from "./api.js";
import { badge, fill, h, kernelsOf, labelOf, seconds, when } from "./dom.js";
import { differenceTable, timeTable } from "./tables.js";

const SOON = 700; // milliseconds between looks
const ENDED = ["completed", "failed", "cancelled"];

const ordinal = (n) => (n === 1 ? "next in the queue" : `number ${n} in the queue`);

// Where a video stands, in words.
export function stateOf(video) {
  const again = video.restarts && !ENDED.includes(video.status) ? " (begun again: its worker was lost)" : "";
  if (video.status === "queued") return (video.queue_position ? ordinal(video.queue_position) : "waiting") + again;
  if (video.status === "completed") return `done in ${seconds(video.result.timings.total_s + video.result.timings.encode_s)}`;
  if (video.status === "cancelled") return "cancelled";
  if (video.status === "failed") return `failed${video.error.code === "worker_lost" ? ", its worker was lost" : ""}: ${video.error.message}`;
  if (video.cancel_requested) return "stopping after this step";
  const { name, step, steps } = video.stage;
  const words = { loading: "loading the model", text: "reading the prompt", denoising: `denoising, step ${step} of ${steps}`, decoding: "decoding the frames" };
  return (words[name] ?? name) + again;
}

class Comparison extends HTMLElement {
  #generation = 0;

  connectedCallback() {
    window.addEventListener("videoqat:open", this);
    this.#open(new URL(location.href).searchParams.get("comparison"));
  }

  disconnectedCallback() {
    window.removeEventListener("videoqat:open", this);
    this.#generation++;
  }

  handleEvent(event) {
    this.#open(event.detail);
    this.scrollIntoView({ block: "nearest" });
  }

  async #open(id) {
    const generation = ++this.#generation;
    this.rows = null;
    this.shown = null;
    this.running = false;
    if (!id) return this.#message("Nothing is open. Write a prompt and press Generate, or open an earlier comparison below.");
    this.#message("Opening…");
    while (generation === this.#generation) {
      let comparison;
      try {
        comparison = await ask("GET", `/v1/comparisons/${encodeURIComponent(id)}`);
      } catch (error) {
        if (generation !== this.#generation) return;
        if (error.status === 404) return this.#message("This comparison isn't there (any more): videos are kept for a while, and anybody may delete them.");
        if (error.status === 401) return this.#message("The service needs a token before it shows anything.");
        this.#lost(error.message);
        await sleep(3 * SOON);
        continue;
      }
      if (generation !== this.#generation) return;
      this.#show(comparison);
      const measured = comparison.status !== "completed" || comparison.differences !== null;
      if (comparison.status !== "in_progress" && measured) return;
      await sleep(document.hidden ? 4 * SOON : SOON);
    }
  }

  #message(text) {
    this.replaceChildren(h("p", { class: "vq-empty", role: "status" }, text));
  }

  #lost(text) {
    if (!this.rows) return this.#message(`${text} Trying again…`);
    this.note.textContent = `${text} Trying again…`;
  }

  #show(comparison) {
    if (!this.rows) this.#frame(comparison);
    this.note.textContent = "";
    const running = comparison.status === "in_progress";
    for (const video of comparison.videos) {
      const row = this.rows.get(video.id);
      if (!row) continue;
      const text = stateOf(video);
      if (row.text.textContent !== text) row.text.textContent = text;
      row.bar.value = video.status === "completed" ? 100 : video.progress;
      row.element.dataset.status = video.status;
      row.label.textContent = labelOf(video, comparison);
    }
    const ended = comparison.videos.filter((video) => ENDED.includes(video.status)).length;
    const heard = `${ended} of ${comparison.videos.length} videos have ended`; // every step, read out, would be too much
    if (this.heard.textContent !== heard) this.heard.textContent = heard;
    this.cancel.hidden = !running;
    if (this.running && !running) window.dispatchEvent(new Event("videoqat:ended"));
    this.running = running;
    this.progress.classList.toggle("ended", comparison.status === "completed" && comparison.videos.every((video) => video.status === "completed"));
    const part = running ? null : comparison.status;
    if (part !== this.shown) {
      this.shown = part;
      if (part !== null) this.#end(comparison);
    }
    if (part === "completed") this.differences.replaceChildren(differenceTable(comparison));
  }

  #frame(comparison) {
    const [first] = comparison.videos;
    this.rows = new Map();
    for (const video of comparison.videos) {
      const label = h("span", { class: "vq-label" }, labelOf(video, comparison));
      const bar = h("progress", { max: 100, value: 0, "aria-label": `progress of ${labelOf(video, comparison)}` });
      const text = h("span", { class: "vq-state" });
      this.rows.set(video.id, { label, bar, text, element: h("li", {}, label, bar, text) });
    }
    this.cancel = h("button", { type: "button", class: "vq-cancel", onclick: () => this.#stop(comparison) }, "Cancel");
    this.heard = h("span", { class: "vq-heard", role: "status" });
    this.note = h("p", { class: "vq-soft", role: "status" });
    this.progress = h("div", { class: "vq-progress" }, h("ul", {}, [...this.rows.values()].map((row) => row.element)), this.cancel);
    this.body = h("div", {});
    const facts = `${first.size.replace("x", " × ")}, ${first.num_frames} frames, ${first.num_inference_steps} steps, guidance ${first.guidance_scale}, seed ${first.seed}, ${first.model}`;
    this.replaceChildren(
      h("h2", { class: "vq-prompt" }, comparison.prompt),
      h("p", { class: "vq-soft vq-facts" }, `${facts}; ${when(comparison.created_at)}`),
      this.progress,
      this.heard,
      this.note,
      this.body,
    );
  }

  async #stop(comparison) {
    this.cancel.disabled = true;
    for (const { id } of comparison.videos) {
      try {
        await ask("POST", `/v1/videos/${id}/cancel`);
      } catch (error) {
        if (error.status !== 409 && error.status !== 404) this.note.textContent = error.message; // 409, 404: it has ended by itself
      }
    }
  }

  // All have ended.
  #end(comparison) {
    const done = comparison.videos.filter((video) => video.status === "completed");
    if (!done.length) return this.body.replaceChildren(h("p", { class: "vq-empty" }, "There is no video to show."));
    const shown = done.map((video) => {
      const [kernel] = kernelsOf(video);
      const note = kernel ? h("span", {}, kernel.kernel, " ", badge(kernel)) : null;
      return { label: labelOf(video, comparison), note, path: video.content_url };
    });
    const warnings = [...new Set(done.flatMap((video) => video.result.warnings))];
    const [first] = comparison.videos;
    const [width, height] = first.size.split("x").map(Number);
    const player = h("vq-player", {});
    this.differences = h("div", {});
    const vote = h("button", { type: "button", onclick: () => window.dispatchEvent(new CustomEvent("videoqat:vote", { detail: comparison })) }, "Vote on it, blind");
    this.link = h("button", { type: "button", onclick: () => this.#copy() }, "Copy the link");
    fill(
      this.body,
      player,
      h("div", { class: "vq-actions" }, this.link, done.length > 1 ? vote : null),
      h("h3", {}, "Time and memory"),
      timeTable(comparison),
      done.length > 1 ? h("h3", {}, "Differences from the reference") : null,
      this.differences,
      warnings.length ? h("div", { class: "vq-warnings" }, warnings.map((text) => h("p", {}, text))) : null,
    );
    player.show(shown.length > 1 ? shown : [shown[0], shown[0]], { width, height, fps: first.fps, frames: first.num_frames });
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      this.link.textContent = "Copied";
    } catch {
      this.link.textContent = "Copy it from the address bar"; // clipboards open only to https and this machine
    }
  }
}

customElements.define("vq-comparison", Comparison);
