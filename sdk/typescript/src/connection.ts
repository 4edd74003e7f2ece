/**
 * Requests to one server, on Node's own HTTP client: it has no time-outs of its own, so a command may run for hours.
 *
 * - *A request is repeated only where that is safe*: it was never sent, the server refused it at the door (`rate_exceeded`), or doing it
 *   twice is doing it once (GET, PUT, PATCH and DELETE here; a POST with an `Idempotency-Key`). What runs something without such a key is
 *   sent once: if its connection breaks, nobody knows what became of it, and `connection_lost` says so.
 * - *An aborted call* throws the signal's reason, closes its connection, and the server stops what the request was doing.
 * - *A stream* that breaks goes on after the last event that came (`Last-Event-ID`), where the server numbers them. The server says
 *   something every 15 seconds; a connection that is silent for a minute is taken for broken.
 */

import { randomUUID } from "node:crypto";
import http from "node:http";
import https from "node:https";
import { setTimeout } from "node:timers/promises";

import { ClocheError, error, fromWire, isRecord, NotFound, SandboxLost } from "./errors.js";
import { find } from "./finding.js";
import { VERSION } from "./generated.js";
import { read } from "./shapes.js";
import { parseEvents, type ServerEvent } from "./sse.js";
import { handshake, Tunnel } from "./websocket.js";

/** Where the server is, and how patient to be with it. */
export interface ConnectOptions {
  /** `http://host:port` or `https://host`; otherwise CLOCHE_URL, otherwise the server of this machine. */
  server?: string;
  /** Otherwise CLOCHE_API_KEY, otherwise the key that the server of this machine keeps. */
  apiKey?: string;
  /** Seconds for an answer, 120 by default; waiting for commands and code is not counted. null: without end. */
  requestTimeoutS?: number | null;
  /** How often a request is repeated where that is safe; 2 by default. */
  retries?: number;
}

/** What every call takes. */
export interface CallOptions {
  /** Ends the call; what it was doing on the server ends too. */
  signal?: AbortSignal;
}

type Query = Record<string, string | number | boolean | null | undefined>;

export interface Plan {
  query?: Query;
  /** Sent as JSON. */
  json?: unknown;
  /** Sent as it is. */
  raw?: Uint8Array;
  signal?: AbortSignal | undefined;
  /** A POST that may be repeated: the server remembers what it answered. */
  repeatable?: boolean;
  /** Seconds that the answer may take beside the usual; null is without end. */
  waitS?: number | null;
  headers?: Record<string, string>;
}

/** A stream to follow. */
export interface Follow extends Plan {
  /** A broken connection is made again, after the last event. */
  resume?: boolean;
  /** The kind of the event that ends it; without that one it was cut, however politely. */
  last?: string;
}

interface Sent extends Error {
  /** Whether the request may have reached the server. */
  sent?: boolean;
}

const SILENCE_MS = 60_000;
const IDLE_MS = 30_000;
const CONNECT_MS = 15_000;
const known = new Map<string, Connection>();

/** The connection to a server; programs that name the same one share it. */
export function connect(options: ConnectOptions): Connection {
  const { url, apiKey } = find(options.server, options.apiKey);
  const { requestTimeoutS = 120, retries = 2 } = options;
  const name = JSON.stringify([url.href, apiKey, requestTimeoutS, retries]);
  let found = known.get(name);
  if (found === undefined) {
    found = new Connection(url, apiKey, requestTimeoutS, retries);
    known.set(name, found);
  }
  return found;
}

export class Connection {
  readonly #agent: http.Agent;
  readonly #base: string;

  constructor(
    readonly url: URL,
    readonly apiKey: string | undefined,
    readonly requestTimeoutS: number | null,
    readonly retries: number,
  ) {
    const kind = url.protocol === "https:" ? https.Agent : http.Agent;
    this.#agent = new kind({ keepAlive: true, timeout: IDLE_MS });
    this.#base = url.pathname.replace(/\/+$/, "");
  }

  /** A JSON answer; undefined where there is none (204). */
  async call(method: string, path: string, plan: Plan = {}): Promise<unknown> {
    const body = await this.#whole(method, path, plan);
    return body.length === 0 ? undefined : JSON.parse(body.toString("utf8"));
  }

  /** A list from all its pages, as the interfaces that were generated for `shape`. */
  async list<T>(path: string, shape: string, field: string, plan: Plan = {}, pageSize = 1000): Promise<T[]> {
    const found: T[] = [];
    let cursor: string | null = null;
    do {
      const page: Record<string, unknown> = read(shape, await this.call("GET", path, { ...plan, query: { ...plan.query, limit: pageSize, cursor } }));
      found.push(...(page[field] as T[]));
      cursor = (page["nextCursor"] as string | null | undefined) ?? null;
    } while (cursor !== null);
    return found;
  }

  /** An answer as it is. */
  async bytes(method: string, path: string, plan: Plan = {}): Promise<Uint8Array> {
    return new Uint8Array(await this.#whole(method, path, plan));
  }

  /** An answer in pieces, for one of any size. */
  async pieces(path: string, plan: Plan = {}): Promise<AsyncGenerator<Uint8Array, void, undefined>> {
    return this.#pieces(await this.#begin("GET", path, { ...plan, waitS: null }), plan.signal);
  }

  /** Events as they happen, from when the server has begun to send them. */
  async events(method: string, path: string, plan: Follow = {}): Promise<AsyncGenerator<ServerEvent, void, undefined>> {
    return this.#follow(method, path, plan, await this.#openEvents(method, path, plan));
  }

  /** A connection that carries bytes, once the server has agreed to it. */
  async tunnel(path: string, { signal }: CallOptions = {}): Promise<Tunnel> {
    signal?.throwIfAborted();
    const { headers, accept } = handshake();
    const request = this.#request("GET", path, { signal, headers });
    const timer = this.requestTimeoutS === null ? undefined : globalThis.setTimeout(() => request.destroy(new Error("no answer in time")), this.requestTimeoutS * 1000);
    try {
      return await new Promise<Tunnel>((resolve, reject) => {
        request.on("error", (problem) => reject(signal?.aborted ? signal.reason : this.#unreachable(problem)));
        request.on("response", (response) => void this.#refusal(response).then(reject, reject));
        request.on("upgrade", (response, socket, first) => {
          if (response.headers["sec-websocket-accept"] === accept) return resolve(new Tunnel(socket, first));
          socket.destroy();
          return reject(error("server_unavailable", `${this.url.origin} does not speak WebSocket`));
        });
        request.end();
      });
    } finally {
      clearTimeout(timer);
    }
  }

  #openEvents(method: string, path: string, plan: Plan): Promise<http.IncomingMessage> {
    return this.#begin(method, path, { ...plan, headers: { Accept: "text/event-stream", ...plan.headers } });
  }

  async #begin(method: string, path: string, plan: Plan): Promise<http.IncomingMessage> {
    return (await this.#open(method, path, plan)) as http.IncomingMessage; // only a DELETE has no answer
  }

  async *#follow(
    method: string,
    path: string,
    plan: Follow,
    first: http.IncomingMessage,
  ): AsyncGenerator<ServerEvent, void, undefined> {
    let response = first;
    let last: string | undefined;
    for (let failures = 0; ; ) {
      try {
        for await (const event of parseEvents(this.#pieces(response, plan.signal, SILENCE_MS))) {
          if (event.kind === "error") throw fromWire(record(event.data), header(response, "x-request-id"));
          last = event.id ?? last;
          failures = 0;
          yield event;
          if (event.kind === plan.last) return;
        }
        if (plan.last === undefined) return;
        throw this.#lost(new Error("it ended in the middle of a stream"), header(response, "x-request-id"));
      } catch (problem) {
        if (!isBroken(problem) || !plan.resume || failures >= this.retries) throw problem;
        failures += 1;
        await pause(failures, plan.signal);
      } finally {
        response.destroy();
      }
      const headers = last === undefined ? plan.headers : { ...plan.headers, "Last-Event-ID": last };
      response = await this.#openEvents(method, path, headers === undefined ? plan : { ...plan, headers });
    }
  }

  async *#pieces(
    response: http.IncomingMessage,
    signal: AbortSignal | undefined,
    silenceMs?: number,
  ): AsyncGenerator<Uint8Array, void, undefined> {
    const quiet = () => response.destroy(new Error("the connection was silent for too long"));
    if (silenceMs !== undefined) response.setTimeout(silenceMs, quiet);
    const abort = () => response.destroy();
    signal?.addEventListener("abort", abort, { once: true });
    try {
      for await (const piece of response) yield piece as Uint8Array;
      signal?.throwIfAborted();
    } catch (problem) {
      signal?.throwIfAborted();
      if (problem instanceof ClocheError) throw problem;
      throw this.#lost(problem as Error, header(response, "x-request-id"));
    } finally {
      signal?.removeEventListener("abort", abort);
      response.destroy();
    }
  }

  async #whole(method: string, path: string, plan: Plan): Promise<Buffer> {
    for (let attempt = 0; ; attempt += 1) {
      const response = await this.#open(method, path, plan, attempt);
      if (response === undefined) return Buffer.alloc(0);
      try {
        return await collect(this.#pieces(response, plan.signal));
      } catch (problem) {
        if (!isSafe(method, plan) || !isBroken(problem) || attempt >= this.retries) throw problem;
        await pause(attempt + 1, plan.signal);
      }
    }
  }

  /** The head of a good answer, undefined for a repeated DELETE whose first attempt did its work; a bad answer is thrown. */
  async #open(method: string, path: string, plan: Plan, before = 0): Promise<http.IncomingMessage | undefined> {
    const key = method === "POST" && plan.repeatable ? this.#keyOf(plan) : undefined;
    for (let attempt = before; ; attempt += 1) {
      plan.signal?.throwIfAborted();
      let problem: ClocheError;
      let again: boolean;
      let waitMs = 0;
      try {
        const response = await this.#send(method, path, plan, key);
        if (response.statusCode !== undefined && response.statusCode < 300) return response;
        problem = await this.#refusal(response);
        if (method === "DELETE" && attempt > 0 && (problem instanceof NotFound || problem instanceof SandboxLost)) return undefined;
        again = problem.code === "rate_exceeded" || (response.statusCode === 503 && isSafe(method, plan));
        waitMs = Number(response.headers["retry-after"] ?? 0) * 1000;
      } catch (raised) {
        plan.signal?.throwIfAborted();
        if (raised instanceof ClocheError) throw raised;
        const sent = (raised as Sent).sent === true;
        problem = sent ? this.#lost(raised as Error, null) : this.#unreachable(raised as Error);
        again = !sent || isSafe(method, plan);
      }
      if (!again || attempt >= this.retries) throw problem;
      await pause(attempt + 1, plan.signal, waitMs);
    }
  }

  /** One key per call, whatever the number of attempts. */
  #keyOf(plan: Plan): string {
    const keyed = plan as Plan & { key?: string };
    keyed.key ??= randomUUID();
    return keyed.key;
  }

  #send(method: string, path: string, plan: Plan, key: string | undefined): Promise<http.IncomingMessage> {
    const body = plan.raw ?? (plan.json === undefined ? undefined : Buffer.from(JSON.stringify(plan.json), "utf8"));
    const headers: Record<string, string> = { Accept: "application/json", ...plan.headers };
    if (key !== undefined) headers["Idempotency-Key"] = key;
    if (body !== undefined) {
      headers["Content-Type"] = plan.raw === undefined ? "application/json" : "application/octet-stream";
      headers["Content-Length"] = String(body.length);
    }
    const allowed = this.requestTimeoutS === null || plan.waitS === null ? null : this.requestTimeoutS + (plan.waitS ?? 0);
    return new Promise((resolve, reject) => {
      let sent = false;
      const request = this.#request(method, path, { ...plan, headers });
      const fail = (problem: Error) => {
        clearTimeout(timer);
        clearTimeout(connecting);
        reject(Object.assign(problem, { sent }));
      };
      const cut = (words: string) => () => request.destroy(error("server_unavailable", `${this.url.origin} ${words}`));
      const timer = allowed === null ? undefined : globalThis.setTimeout(cut(`did not answer within ${allowed} s`), allowed * 1000);
      const connecting = globalThis.setTimeout(cut(`cannot be reached within ${CONNECT_MS / 1000} s`), CONNECT_MS);
      const connected = () => {
        sent = true;
        clearTimeout(connecting);
      };
      request.on("socket", (socket) => {
        if (request.reusedSocket) connected();
        else socket.once(this.url.protocol === "https:" ? "secureConnect" : "connect", connected);
      });
      request.on("error", fail);
      request.on("response", (response) => {
        clearTimeout(connecting);
        response.once("close", () => clearTimeout(timer));
        if (plan.waitS === null || isStream(response)) clearTimeout(timer);
        resolve(response);
      });
      request.end(body);
    });
  }

  #request(method: string, path: string, { query, headers, signal }: Plan): http.ClientRequest {
    const known: Record<string, string> = { "User-Agent": `cloche-typescript/${VERSION}` };
    if (this.apiKey !== undefined) known["Authorization"] = `Bearer ${this.apiKey}`;
    return (this.url.protocol === "https:" ? https : http).request({
      protocol: this.url.protocol,
      hostname: this.url.hostname.replace(/^\[|\]$/g, ""),
      port: this.url.port || undefined,
      path: this.#base + path + queryOf(query),
      method,
      headers: { ...known, ...headers },
      agent: this.#agent,
      signal,
    });
  }

  async #refusal(response: http.IncomingMessage): Promise<ClocheError> {
    const id = header(response, "x-request-id");
    const text = (await collect(this.#pieces(response, undefined))).toString("utf8");
    try {
      const fault = record(text)["error"];
      if (isRecord(fault)) return fromWire(fault, id);
    } catch {
      // what answers is not ours, or something stands between
    }
    const parts = { details: { status: response.statusCode }, requestId: id };
    return error("server_unavailable", `${this.url.origin} answered ${response.statusCode}, not as a Cloche server does: ${text.slice(0, 200)}`, parts);
  }

  #unreachable(cause: Error): ClocheError {
    const why = (cause as NodeJS.ErrnoException).code ?? cause.message;
    const hint = "start it with `cloche serve`, or set CLOCHE_URL to the one that you mean";
    return error("server_unavailable", `${this.url.origin}: nothing answers (${why})`, { hint, cause });
  }

  #lost(cause: Error, requestId: string | null): ClocheError {
    const hint = "what was asked for may have happened: look before you ask again";
    return error("connection_lost", `the connection to ${this.url.origin} broke: ${cause.message}`, { hint, cause, requestId });
  }
}

/** Whether doing it twice is doing it once. */
function isSafe(method: string, plan: Plan): boolean {
  return method !== "POST" || plan.repeatable === true;
}

function isBroken(problem: unknown): boolean {
  return problem instanceof ClocheError && problem.code === "connection_lost";
}

async function collect(body: AsyncIterable<Uint8Array>): Promise<Buffer> {
  const pieces: Uint8Array[] = [];
  for await (const piece of body) pieces.push(piece);
  return Buffer.concat(pieces);
}

function isStream(response: http.IncomingMessage): boolean {
  return (response.headers["content-type"] ?? "").startsWith("text/event-stream");
}

function header(response: http.IncomingMessage, name: string): string | null {
  const value = response.headers[name];
  return typeof value === "string" ? value : null;
}

function record(text: string): Record<string, unknown> {
  const value: unknown = JSON.parse(text);
  return isRecord(value) ? value : {};
}

function queryOf(query: Query | undefined): string {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== null) said.set(name, String(value));
  }
  return said.size === 0 ? "" : `?${said}`;
}

function pause(attempt: number, signal: AbortSignal | undefined, waitMs = 0): Promise<void> {
  const backoff = 100 * 2 ** attempt * (0.5 + Math.random() / 2);
  return sleep(Math.min(Math.max(waitMs, backoff), 30_000), signal);
}

/** Wait, or throw the signal's reason. */
export async function sleep(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  try {
    await setTimeout(milliseconds, undefined, signal === undefined ? {} : { signal });
  } catch (problem) {
    signal?.throwIfAborted();
    throw problem;
  }
}
