// The head of the page, which asks for a token where the service wants one; and the notice below the form.

import { ask, hasToken, setToken } from "./api.js";
import { h } from "./dom.js";

class Header extends HTMLElement {
  connectedCallback() {
    this.workers = h("span", { class: "vq-workers", role: "status" });
    this.token = h("div", { hidden: true });
    this.replaceChildren(
      h(
        "header",
        {},
        h("div", {}, h("h1", {}, "videoqat"), h("p", {}, "The same video under two kinds of attention, side by side.")),
        h("p", { class: "vq-soft" }, this.workers, " ", h("a", { href: "/docs" }, "API")),
      ),
      this.token,
    );
    window.addEventListener("videoqat:token", this);
    this.#look();
  }

  disconnectedCallback() {
    window.removeEventListener("videoqat:token", this);
    clearTimeout(this.timer);
  }

  handleEvent() {
    if (!this.token.hidden) return;
    const wrong = hasToken();
    const input = h("input", { type: "password", id: "vq-token", autocomplete: "off", required: true });
    const enter = (event) => {
      event.preventDefault();
      setToken(input.value.trim());
      location.reload();
    };
    const text = wrong ? "That token isn't the right one." : "This service needs a token. Whoever runs it has one for you.";
    this.token.replaceChildren(
      h("form", { class: "vq-token", onsubmit: enter }, h("label", { for: "vq-token" }, text), input, h("button", { type: "submit" }, "Use it")),
    );
    this.token.hidden = false;
  }

  // Who works, now and then.
  async #look() {
    let wait = 5000;
    try {
      const { workers, videos } = await ask("GET", "/v1/queue");
      const count = `${workers.length} ${workers.length === 1 ? "worker" : "workers"}`;
      const starting = workers.filter((worker) => worker.state === "starting").length;
      const state = !workers.length ? "no worker yet" : starting === workers.length ? `${count}, starting` : count;
      this.workers.textContent = videos.queued ? `${state}, ${videos.queued} waiting` : state;
    } catch (error) {
      this.workers.textContent = error.status === 0 ? "the server doesn't answer" : "";
      if (error.status === 401) return;
      wait = 10000;
    }
    if (this.isConnected) this.timer = setTimeout(() => this.#look(), wait);
  }
}

class Notice extends HTMLElement {
  connectedCallback() {
    this.setAttribute("role", "alert");
    window.addEventListener("videoqat:notice", this);
  }

  disconnectedCallback() {
    window.removeEventListener("videoqat:notice", this);
  }

  handleEvent(event) {
    this.textContent = event.detail.text;
    this.className = event.detail.kind;
  }
}

customElements.define("vq-header", Header);
customElements.define("vq-notice", Notice);
