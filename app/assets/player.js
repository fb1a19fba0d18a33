// Two videos in step, under one set of controls: one over the other with a line to wipe between them, or side by side.

import { fetchVideo } from "./api.js";
import { calm, fill, h } from "./dom.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2];
const PULL = 4; // by how much of its distance, in a second, the second video's speed is bent to come back in step
const SMALL = 160; // pixels: below it pixels are shown as such

class Player extends HTMLElement {
  static count = 0;
  #group = `vq-mode-${Player.count++}`; // radio buttons of one player
  #urls = [];
  #generation = 0;
  #request = 0; // of the next animation frame

  connectedCallback() {
    this.#follow();
  }

  disconnectedCallback() {
    this.#generation++;
    cancelAnimationFrame(this.#request);
    this.#release();
  }

  // videos: [{ label, note (element or text, optional), path }], of which two are shown; clip: { width, height, fps, frames }
  async show(videos, clip, mode = "wipe") {
    const generation = ++this.#generation;
    this.clip = clip;
    this.videos = videos;
    this.rate = 1;
    this.loop = true;
    this.#build(mode);
    this.#say("Fetching the videos…");
    try {
      const urls = await Promise.all(videos.map((video) => fetchVideo(video.path)));
      if (generation !== this.#generation) return urls.forEach((url) => URL.revokeObjectURL(url));
      this.#release();
      this.#urls = urls;
      await Promise.all([this.#put(0, 0), this.#put(1, 1)]);
      if (generation !== this.#generation) return;
      this.#say("");
      this.#seek(0);
      if (!calm()) await this.#play();
    } catch (error) {
      if (generation === this.#generation) this.#say(`The videos can't be shown: ${error.message}`);
    }
  }

  #release() {
    this.#urls.forEach((url) => URL.revokeObjectURL(url));
    this.#urls = [];
  }

  #say(text) {
    this.message.textContent = text;
    this.message.hidden = !text;
  }

  #build(mode) {
    const { width, height, frames } = this.clip;
    const video = () => h("video", { muted: true, playsinline: true, preload: "auto", disablepictureinpicture: true, class: width <= SMALL ? "small" : null });
    this.elements = [video(), video()];
    this.elements.forEach((element) => (element.muted = true));
    this.captions = [h("figcaption"), h("figcaption")];
    this.message = h("p", { class: "vq-message", role: "status" });
    this.wipe = h("input", { type: "range", class: "vq-wipe", min: 0, max: 100, step: 1, value: 50, "aria-label": "Wipe between the two videos" });
    this.wipe.addEventListener("input", () => this.stage.style.setProperty("--wipe", `${this.wipe.value}%`));
    const figures = this.elements.map((element, i) => h("figure", { class: i ? "second" : "first" }, element, this.captions[i]));
    this.stage = h("div", { class: "vq-stage" }, ...figures, h("div", { class: "vq-line", "aria-hidden": "true" }), this.wipe, this.message);
    this.stage.style.setProperty("--ratio", `${width} / ${height}`);
    this.stage.style.setProperty("--widest", `calc(60vh * ${width / height})`);
    this.stage.style.setProperty("--wipe", "50%");
    this.button = h("button", { type: "button", class: "vq-play", onclick: () => this.#toggle() }, "Play");
    this.slider = h("input", { type: "range", class: "vq-seek", min: 0, max: frames - 1, step: 1, value: 0, "aria-label": "Frame" });
    this.slider.addEventListener("input", () => this.#halt(Number(this.slider.value)));
    this.time = h("output", { class: "vq-time" });
    const step = (by, text, label) => h("button", { type: "button", "aria-label": label, title: label, onclick: () => this.#halt(this.frame + by) }, text);
    const speed = h("select", { "aria-label": "Speed", onchange: (event) => this.#setRate(Number(event.target.value)) });
    speed.append(...SPEEDS.map((value) => h("option", { value, selected: value === 1 }, `${value}×`)));
    const loop = h("input", { type: "checkbox", checked: true, onchange: (event) => (this.loop = event.target.checked) });
    const modes = ["wipe", "side by side"].map((name) =>
      h("label", {}, h("input", { type: "radio", name: this.#group, value: name, checked: name === mode, onchange: () => this.#setMode(name) }), name),
    );
    const controls = h(
      "div",
      { class: "vq-controls" },
      h("div", { class: "vq-track" }, this.slider, this.time),
      h("div", { class: "vq-buttons" }, this.button, step(-1, "‹", "One frame back"), step(1, "›", "One frame on"), speed, h("label", {}, loop, "loop")),
      h("div", { class: "vq-modes", role: "radiogroup", "aria-label": "Layout" }, modes),
    );
    const chosen = this.videos.length > 2 ? this.#choices() : null;
    fill(this, h("div", { class: "vq-player", onkeydown: (event) => this.#key(event) }, chosen, this.stage, controls));
    this.#setMode(mode);
  }

  // With more than two videos: which are shown.
  #choices() {
    const select = (side) => {
      const options = this.videos.map((video, i) => h("option", { value: i, selected: i === side }, video.label));
      const change = async (event) => {
        const playing = !this.elements[0].paused;
        this.#halt(this.frame);
        await this.#put(side, Number(event.target.value));
        this.#seek(this.frame);
        if (playing) await this.#play();
      };
      return h("label", {}, side ? "Right" : "Left", h("select", { onchange: change }, options));
    };
    return h("div", { class: "vq-choices" }, select(0), select(1));
  }

  async #put(side, index) {
    const element = this.elements[side];
    const video = this.videos[index];
    this.captions[side].replaceChildren(h("strong", {}, video.label), ...(video.note ? [" ", video.note.cloneNode?.(true) ?? video.note] : []));
    element.setAttribute("aria-label", video.label);
    await new Promise((resolve, reject) => {
      element.onloadeddata = resolve;
      element.onerror = () => reject(new Error(`${video.label}: the browser can't play it`));
      element.src = this.#urls[index];
      element.load();
    });
    element.playbackRate = this.rate;
  }

  get frame() {
    const last = this.clip.frames - 1;
    return Math.max(0, Math.min(last, Math.floor(this.elements[0].currentTime * this.clip.fps + 1e-3)));
  }

  // To the middle of a frame, where no rounding leads to its neighbour.
  #seek(frame) {
    const time = (Math.max(0, Math.min(this.clip.frames - 1, frame)) + 0.5) / this.clip.fps;
    this.elements.forEach((element) => (element.currentTime = time));
    this.#show();
  }

  #halt(frame) {
    this.playing = false;
    this.elements.forEach((element) => element.pause());
    this.#seek(frame);
  }

  async #play() {
    if (this.frame === this.clip.frames - 1) this.#seek(0);
    this.playing = true;
    this.elements[1].currentTime = this.elements[0].currentTime;
    await Promise.all(this.elements.map((element) => element.play().catch(() => {}))); // refused, or paused again before it began
    this.#show();
  }

  #toggle() {
    if (this.playing) this.#halt(this.frame);
    else this.#play();
  }

  #setRate(rate) {
    this.rate = rate;
    this.elements.forEach((element) => (element.playbackRate = rate));
  }

  #setMode(mode) {
    this.stage.dataset.mode = mode === "wipe" ? "wipe" : "side";
  }

  #key(event) {
    const steps = { ",": -1, ".": 1 };
    if (event.target.matches("select")) return;
    if (event.key === " " && !event.target.matches("button, [type=checkbox], [type=radio]")) this.#toggle();
    else if (event.key in steps) this.#halt(this.frame + steps[event.key]);
    else return;
    event.preventDefault();
  }

  // With every frame on the screen: the second video is brought back in step with the first, and both begin again together.
  #follow() {
    this.#request = requestAnimationFrame(() => this.#follow());
    if (!this.playing || this.restarting) return;
    const [first, second] = this.elements;
    if (first.ended) {
      if (this.loop) this.#again();
      else this.#halt(this.clip.frames - 1);
      return;
    }
    if (first.seeking || second.seeking) return;
    const ahead = second.currentTime - first.currentTime;
    if (Math.abs(ahead) > 2 / this.clip.fps) second.currentTime = first.currentTime;
    else if (second.paused && !second.ended) second.play().catch(() => {});
    const bent = Math.abs(ahead) < 0.25 / this.clip.fps ? 1 : Math.max(0.5, Math.min(1.5, 1 - PULL * ahead));
    if (second.playbackRate !== this.rate * bent) second.playbackRate = this.rate * bent;
    this.#show();
  }

  #again() {
    const both = this.elements.map((element) => new Promise((resolve) => element.addEventListener("seeked", resolve, { once: true })));
    const generation = this.#generation;
    this.restarting = true;
    this.#seek(0);
    Promise.all(both).then(() => {
      this.restarting = false;
      if (generation === this.#generation && this.playing) this.#play(); // nobody has pressed pause meanwhile
    });
  }

  #show() {
    const { frames } = this.clip;
    const text = this.playing ? "Pause" : "Play";
    if (this.button.textContent !== text) this.button.textContent = text;
    this.slider.value = this.frame;
    this.slider.setAttribute("aria-valuetext", `frame ${this.frame + 1} of ${frames}`);
    this.time.textContent = `frame ${this.frame + 1} / ${frames}`;
  }
}

customElements.define("vq-player", Player);
