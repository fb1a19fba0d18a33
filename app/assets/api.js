// The HTTP API, as this page asks it.

const TOKEN = "videoqat-token"; // of this tab alone, until it is closed

export class Refused extends Error {
  // status 0: the server didn't answer
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN) !== null;
}

async function request(method, path, body) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refused("The server doesn't answer.", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) window.dispatchEvent(new Event("videoqat:token"));
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // no answer of the API's own: a proxy's, say
  }
  throw new Refused(message, answer.status);
}

export async function ask(method, path, body) {
  return (await request(method, path, body)).json();
}

// A video as a URL for an element. It is fetched whole: elements can't send a token, and from memory every frame is at hand at once.
export async function fetchVideo(path) {
  return URL.createObjectURL(await (await request("GET", path)).blob());
}

// What is on offer; asked once.
let offer;
export function getOffer() {
  offer ??= Promise.all([ask("GET", "/v1/models"), ask("GET", "/v1/recipes")]).catch((error) => {
    offer = undefined;
    throw error;
  });
  return offer;
}

export async function sleep(milliseconds) {
  await new Promise((resolve) => setTimeout(resolve, milliseconds));
}
