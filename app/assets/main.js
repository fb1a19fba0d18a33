// The page's own elements. `history` keeps which comparison is open in the address, so that the address can be passed on.

import "./header.js";
import "./player.js";
import "./comparison.js";
import "./gallery.js";
import "./vote.js";

const open = () => new URL(location.href).searchParams.get("comparison");

window.addEventListener("videoqat:open", (event) => {
  if (open() === event.detail) return;
  const url = new URL(location.href);
  url.searchParams.set("comparison", event.detail);
  history.pushState(null, "", url);
});
window.addEventListener("popstate", () => window.dispatchEvent(new CustomEvent("videoqat:open", { detail: open() })));
