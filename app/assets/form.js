// What the form does: filled from what the service offers, and sent.

import { Refused, ask, getOffer } from "./api.js";

const update = (properties) => ({ __type__: "update", ...properties });
const LEAVE = () => update({});
export const SAME = "the same";

export function tell(text, kind = "error") {
  window.dispatchEvent(new CustomEvent("videoqat:notice", { detail: { text, kind } }));
}

function defaults(model, limits) {
  const given = model.defaults;
  return [
    update({ value: given.size, info: `at most ${limits.max_pixels.toLocaleString()} pixels` }),
    update({ value: given.num_frames, info: `at most ${limits.max_frames}`, maximum: limits.max_frames }),
    update({ value: given.num_inference_steps, maximum: limits.max_steps }),
    update({ value: given.guidance_scale }),
    update({ value: given.negative_prompt ?? "" }),
  ];
}

// The recipe beside the reference: what the model was trained for, or else the service's own pair's second.
function second(model, recipes) {
  const names = recipes.data.map((recipe) => recipe.id);
  if (model.trained_for === null || model.trained_for === recipes.compare[0]) return recipes.compare[1];
  return names.includes(model.trained_for) ? model.trained_for : "checkpoint";
}

// -> model, the second video's model, reference, compared with, size, frames, steps, guidance, negative prompt
export async function load() {
  let models, recipes;
  try {
    [models, recipes] = await getOffer();
  } catch (error) {
    if (error.status !== 401) tell(error.message);
    return Array.from({ length: 9 }, LEAVE);
  }
  const names = models.data.map((model) => model.id);
  const choices = [...recipes.data.map((recipe) => recipe.id), "checkpoint"].map((name) => [name, name]);
  const [first] = models.data;
  return [
    update({ choices: names.map((name) => [name, name]), value: first.id }),
    update({ choices: [SAME, ...names].map((name) => [name, name]), value: SAME, visible: names.length > 1 }),
    update({ choices, value: recipes.compare[0] }),
    update({ choices, value: second(first, recipes) }),
    ...defaults(first, models.limits),
  ];
}

// Another model has been chosen. -> compared with, size, frames, steps, guidance, negative prompt
export async function choose(name) {
  const [models, recipes] = await getOffer();
  const model = models.data.find((one) => one.id === name);
  if (!model) return Array.from({ length: 6 }, LEAVE);
  return [update({ value: second(model, recipes) }), ...defaults(model, models.limits)];
}

// The second video gets a model of its own, or none. -> compared with
export async function chooseOther(other, name) {
  const [models, recipes] = await getOffer();
  const model = models.data.find((one) => one.id === (other === SAME ? name : other));
  return [model ? update({ value: second(model, recipes) }) : LEAVE()];
}

let sending = false;

export async function generate(prompt, left, right, floor, model, other, size, frames, steps, guidance, seed, negative) {
  if (sending) return;
  if (!prompt?.trim()) return tell("Please write a prompt: what the video should show.");
  const compare = [left, !other || other === SAME ? right : { attention: right, model: other }];
  const drawn = !String(seed ?? "").trim();
  if (!drawn && !/^\d{1,16}$/.test(seed.trim())) return tell(`Seed ${seed} is no whole number from 0; leave it empty to have one drawn.`);
  const wanted = { prompt, model, compare, floor, size, num_frames: frames, num_inference_steps: steps, guidance_scale: guidance, seed: drawn ? null : Number(seed) };
  const body = Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  body.negative_prompt = negative ?? "";
  sending = true;
  try {
    const video = await ask("POST", "/v1/videos", body);
    tell("");
    window.dispatchEvent(new CustomEvent("videoqat:open", { detail: video.comparison_id }));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 429) tell(`The queue is full: ${error.message}.`);
    else if (error.status === 401) tell("The service needs a token, above, before it does anything.");
    else tell(error.message);
  } finally {
    sending = false;
  }
}
