// Which is better? Asked without telling which is which; and what has been answered so far.

import { ask } from "./api.js";
import { h, scrolling } from "./dom.js";

const SEEN = "videoqat-voted"; // comparisons that this browser has voted on
const CHOICES = [["a", "A is better"], ["tie", "About the same"], ["b", "B is better"]];

const seen = () => new Set(JSON.parse(localStorage.getItem(SEEN) ?? "[]"));

const percent = (value) => `${(100 * value).toFixed(0)} %`;

class Vote extends HTMLElement {
  connectedCallback() {
    this.pair = h("div", {});
    this.results = h("div", {});
    this.status = h("p", { class: "vq-soft", role: "status" });
    this.next = h("button", { type: "button", class: "vq-next", onclick: () => this.#begin() }, "Show me a pair");
    const text = "Two videos of the same prompt and noise, in random order. You learn which is which when you have voted.";
    this.replaceChildren(h("section", {}, h("h2", {}, "Blind vote"), h("p", {}, text), this.pair, this.status, this.next, this.results));
    window.addEventListener("videoqat:vote", this);
    this.#count();
  }

  disconnectedCallback() {
    window.removeEventListener("videoqat:vote", this);
  }

  handleEvent(event) {
    this.#ballot(event.detail);
    this.scrollIntoView({ block: "start" });
  }

  // Any comparison that can be voted on, rather one that this browser hasn't seen.
  async #begin() {
    try {
      const { data } = await ask("GET", "/v1/comparisons?limit=100");
      const can = (one) => one.videos.filter((video) => video.status === "completed" && video.id !== one.floor).length > 1;
      const able = data.filter((one) => one.reference && can(one));
      const old = seen();
      const fresh = able.filter((one) => !old.has(one.id));
      const from = fresh.length ? fresh : able;
      if (!from.length) return (this.status.textContent = "There is no comparison to vote on yet: make one first.");
      await this.#ballot(from[Math.floor(Math.random() * from.length)]);
    } catch (error) {
      this.status.textContent = error.message;
    }
  }

  async #ballot(comparison) {
    try {
      const ballot = await ask("POST", `/v1/comparisons/${comparison.id}/ballots`);
      const [{ size, fps, num_frames: frames }] = comparison.videos;
      const [width, height] = size.split("x").map(Number);
      const player = h("vq-player", {});
      this.buttons = CHOICES.map(([choice, text]) => h("button", { type: "button", "data-choice": choice, onclick: () => this.#vote(ballot, choice, comparison) }, text));
      this.pair.replaceChildren(
        h("p", { class: "vq-prompt" }, ballot.prompt ?? ""),
        player,
        h("div", { class: "vq-choice", role: "group", "aria-label": "Which is better?" }, this.buttons),
      );
      this.status.textContent = "";
      this.next.textContent = "Another pair";
      await player.show([{ label: "A", path: ballot.a }, { label: "B", path: ballot.b }], { width, height, fps, frames }, "side by side");
    } catch (error) {
      this.status.textContent = error.message;
    }
  }

  async #vote(ballot, choice, comparison) {
    this.buttons.forEach((button) => (button.disabled = true));
    try {
      const told = await ask("POST", `/v1/ballots/${ballot.id}/vote`, { choice });
      const yours = choice === "tie" ? "You found them about the same." : `You found ${choice.toUpperCase()} better.`;
      this.status.textContent = `${yours} A was ${told.label_a}; B was ${told.label_b}.`;
      localStorage.setItem(SEEN, JSON.stringify([...seen().add(comparison.id)].slice(-500)));
      this.buttons.forEach((button) => button.classList.toggle("chosen", button.dataset.choice === choice));
      this.#count();
    } catch (error) {
      this.status.textContent = error.message;
      if (error.status === 0) this.buttons.forEach((button) => (button.disabled = false));
    }
  }

  async #count() {
    let data;
    try {
      ({ data } = await ask("GET", "/v1/votes"));
    } catch {
      return; // the rest of the page says so
    }
    if (!data.length) return this.results.replaceChildren();
    const head = ["One", "better", "tie", "better", "Other", "One's share (95 %)"].map((name) => h("th", { scope: "col" }, name));
    const rows = data.map((pair) => {
      const [low, high] = pair.interval_95;
      const share = `${percent(pair.first_share)} (${percent(low)} to ${percent(high)})`;
      return h("tr", {}, [pair.first, pair.first_better, pair.ties, pair.second_better, pair.second, share].map((value) => h("td", {}, String(value))));
    });
    this.results.replaceChildren(
      h("h3", {}, "Votes so far"),
      scrolling("Votes so far", h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))),
      h("p", { class: "vq-soft vq-small" }, "A tie counts half for each. Where the interval holds 50 %, the votes don't tell the two apart."),
    );
  }
}

customElements.define("vq-vote", Vote);
