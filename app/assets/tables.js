// Tables of a comparison: seconds by stage, memory and kernels; and what separates its videos.

import { badge, bytes, h, kernelsOf, labelOf, number, scrolling, seconds } from "./dom.js";

const STAGES = [
  ["Text encoder", (timings) => timings.text_s],
  ["Denoising", (timings) => timings.denoise_s],
  ["a step (median)", (timings) => median(timings.steps_s)],
  ["VAE", (timings) => timings.vae_s],
  ["Text to frames", (timings) => timings.total_s],
  ["mp4", (timings) => timings.encode_s],
];

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function ratio(reference, own) {
  if (!(reference > 0 && own > 0)) return null;
  return h("span", { class: "vq-soft vq-ratio", title: "the reference's time over its own" }, `${(reference / own).toFixed(2)}×`);
}

function kernels(video) {
  return kernelsOf(video).map((receipt) =>
    h("div", { title: receipt.reason }, h("code", {}, receipt.kernel), " ", badge(receipt), h("span", { class: "vq-soft" }, ` ${receipt.recipe}, ${receipt.device}`)),
  );
}

export function timeTable(comparison) {
  const done = comparison.videos.filter((video) => video.status === "completed");
  const reference = done.find((video) => video.id === comparison.reference);
  const cells = (video, own) => {
    const value = own(video.result.timings);
    const compared = reference && video !== reference ? ratio(own(reference.result.timings), value) : null;
    return h("td", {}, seconds(value), compared ? [" ", compared] : null);
  };
  const row = (name, make) => h("tr", {}, h("th", { scope: "row" }, name), done.map(make));
  const table = h(
    "table",
    {},
    h("thead", {}, h("tr", {}, h("td", {}), done.map((video) => h("th", { scope: "col" }, labelOf(video, comparison))))),
    h(
      "tbody",
      {},
      row("Attention kernel", (video) => h("td", { class: "vq-kernels" }, kernels(video))),
      STAGES.map(([name, own]) => row(name, (video) => cells(video, own))),
      row("Peak memory", (video) => h("td", {}, bytes(video.result.peak_memory_bytes))),
    ),
  );
  const emulated = done.some((video) => video.result.receipts.some((receipt) => !receipt.native));
  const notes = ["× is the reference's time over a video's own: above 1 is faster."];
  if (emulated) notes.push("Emulated: the numbers are those of the recipe, computed without 4-bit hardware, so its times say nothing about what that hardware would take.");
  return h("div", {}, scrolling("Time and memory", table), h("p", { class: "vq-soft vq-small" }, notes.join(" ")));
}

function psnr(found) {
  if (found.identical || found.psnr_mean === null || found.psnr_mean === undefined) return "identical";
  return `${number(found.psnr_mean, 1)} dB`;
}

const worst = (text) => h("span", { class: "vq-soft" }, ` worst ${text}`);

function line(comparison, video, measured) {
  const found = measured[video.id];
  const own = measured[comparison.reference];
  const floor = video.id === comparison.floor;
  const name = h("th", { scope: "row" }, floor ? `the floor: ${labelOf(video, comparison)}` : labelOf(video, comparison));
  const times = own?.flicker ? h("span", { class: "vq-soft" }, ` ${(found.flicker / own.flicker).toFixed(2)} times the reference's`) : null;
  return h(
    "tr",
    { class: floor ? "vq-floor" : null },
    name,
    h("td", {}, psnr(found), found.psnr_min !== null && found.psnr_min !== undefined ? worst(number(found.psnr_min, 1)) : null),
    h("td", {}, number(found.ssim_mean, 3), found.ssim_min < 1 ? worst(number(found.ssim_min, 3)) : null),
    h("td", {}, number(found.flicker, 2), times),
  );
}

export function differenceTable(comparison) {
  const { differences } = comparison;
  if (differences === null) return h("p", { class: "vq-soft", role: "status" }, "Being measured…");
  if (differences.error) return h("p", { class: "vq-soft" }, `They could not be measured: ${differences.error}`);
  if (differences.reference !== comparison.reference) return h("p", { class: "vq-soft" }, "The reference is missing, so there is nothing to measure against.");
  const measured = differences.videos;
  const others = comparison.videos.filter((video) => video.id in measured && video.id !== comparison.reference);
  const head = ["Video", "PSNR", "SSIM", "Flicker"].map((name) => h("th", { scope: "col" }, name));
  const table = h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, others.map((video) => line(comparison, video, measured))));
  const known = comparison.floor in measured;
  const floor = known
    ? "The floor is the reference rendered twice: a recipe that comes near it changes no more than chance does. "
    : "Without a floor (the reference rendered twice) it is open how much differs by chance. ";
  const rest =
    "Numbers far from it say that the video is another one, not that it is a worse one: with 40 steps even good 8-bit attention is at about 20 dB. Whether it is worse, a blind vote tells.";
  return h("div", {}, scrolling("Differences from the reference", table), h("p", { class: "vq-soft vq-small" }, floor + rest));
}
