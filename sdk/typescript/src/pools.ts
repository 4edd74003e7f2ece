/** What waits: templates, and the pools that keep sandboxes of them warm. */

import { connect, type CallOptions, type Connection } from "./connection.js";
import { NotFound, refuseUnknown, SandboxLost } from "./errors.js";
import type { ClaimInfo, PoolInfo, PoolSpecBody, RequirementsBody, TemplateInfo, TemplateSpecBody } from "./generated.js";
import { base64 } from "./processes.js";
import { policyOf, Sandbox, type NetworkOptions, type PolicyFields } from "./sandbox.js";
import { read, write } from "./shapes.js";
import { mounts, type ServerOptions, type VolumeMount } from "./stays.js";

/** The fields of a template, docs/concepts/templates.md. */
export type TemplateFields = Omit<TemplateSpecBody, "name">;

/** A named, versioned starting point; stored when a pool is made of it, or by `putTemplate`. */
export class Template {
  constructor(
    readonly name: string,
    readonly fields: TemplateFields = {},
  ) {}

  /** A template that the server has. */
  static async get(name: string, options: ServerOptions = {}): Promise<TemplateInfo> {
    return read("TemplateInfo", await connect(options).call("GET", templatePlace(name), { signal: options.signal }));
  }

  /** The templates that the server has, those that come with it too. */
  static async list(options: ServerOptions = {}): Promise<TemplateInfo[]> {
    return connect(options).list("/v1/templates", "Templates", "templates", { signal: options.signal });
  }

  /** Remove a template that no pool uses. */
  static async delete(name: string, options: ServerOptions = {}): Promise<void> {
    await connect(options).call("DELETE", templatePlace(name), { signal: options.signal });
  }
}

/** Store a template; the same content again changes nothing. */
export function putTemplate(template: Template, options: ServerOptions = {}): Promise<TemplateInfo> {
  return store(connect(options), template, options.signal);
}

async function store(connection: Connection, template: Template, signal: AbortSignal | undefined): Promise<TemplateInfo> {
  const json = write("TemplateSpec", { ...template.fields, name: template.name });
  return read("TemplateInfo", await connection.call("PUT", templatePlace(template.name), { json, signal }));
}

function templatePlace(name: string): string {
  return `/v1/templates/${encodeURIComponent(name)}`;
}

export interface PoolOptions extends Omit<PoolSpecBody, "template" | "stay">, ServerOptions {}

export interface ClaimOptions extends Omit<NetworkOptions, "network" | "resolve">, CallOptions {
  /** Makes the claim idempotent: the same name and body give the same sandbox. */
  name?: string;
  env?: Record<string, string>;
  files?: Record<string, string | Uint8Array>;
  secrets?: readonly string[];
  policy?: PolicyFields;
  volumes?: Record<string, VolumeMount>;
  labels?: Record<string, string>;
  memoryMib?: number;
  cpus?: number;
  pids?: number;
  requirements?: RequirementsBody;
  timeoutS?: number | null;
  idleTimeoutS?: number | null;
  /** How long to wait for a sandbox. */
  waitS?: number;
  shutdownTime?: number | null;
  ttlSecondsAfterFinished?: number | null;
  shutdownPolicy?: "Delete" | "Retain";
}

/** Sandboxes kept warm. */
export class Pool implements AsyncDisposable {
  readonly #connection: Connection;
  readonly #place: string;
  /** Good for `Pool.get` from anywhere that reaches the same server. */
  readonly name: string;

  /** @internal */
  constructor(connection: Connection, name: string) {
    this.#connection = connection;
    this.#place = `/v1/pools/${encodeURIComponent(name)}`;
    this.name = name;
  }

  /** A pool that fills itself from now on; `size` is how many unclaimed ready ones are wanted. */
  static async create(template: string | Template, options: PoolOptions = {}): Promise<Pool> {
    const { server, apiKey, requestTimeoutS, retries, signal, ...spec } = options;
    const connection = connect({ server, apiKey, requestTimeoutS, retries });
    if (template instanceof Template) await store(connection, template, signal);
    const source = typeof template === "string" ? template : template.name;
    const name = spec.name ?? source;
    const json = write("PoolSpec", { ...spec, name, template: source, stay: true });
    await connection.call("PUT", `/v1/pools/${encodeURIComponent(name)}`, { json, signal });
    return new Pool(connection, name);
  }

  /** A handle of a pool that exists. */
  static async get(name: string, options: ServerOptions = {}): Promise<Pool> {
    const connection = connect(options);
    const answer = await connection.call("GET", `/v1/pools/${encodeURIComponent(name)}`, { signal: options.signal });
    return new Pool(connection, read<PoolInfo>("PoolInfo", answer).name);
  }

  /** The pools of the server. */
  static async list(options: ServerOptions = {}): Promise<PoolInfo[]> {
    return connect(options).list("/v1/pools", "Pools", "pools", { signal: options.signal });
  }

  /** How many are wanted, ready and in the making; hits, misses, and how long claims took. */
  async info({ signal }: CallOptions = {}): Promise<PoolInfo> {
    return read("PoolInfo", await this.#connection.call("GET", this.#place, { signal }));
  }

  /** Wait until so many are ready; by default, as many as are wanted. */
  async waitReady(ready?: number, options: CallOptions & { timeoutS?: number } = {}): Promise<PoolInfo> {
    const { timeoutS = 60, signal, ...unknown } = options;
    refuseUnknown("waitReady", unknown);
    const plan = { query: { ready, timeout_s: timeoutS }, signal, waitS: timeoutS };
    return read("PoolInfo", await this.#connection.call("GET", `${this.#place}/wait`, plan));
  }

  /** Another size from now on. */
  async scale(size: number, { signal }: CallOptions = {}): Promise<PoolInfo> {
    const plan = { json: { size }, signal, repeatable: true };
    return read("PoolInfo", await this.#connection.call("POST", `${this.#place}/scale`, plan));
  }

  /**
   * One sandbox of the pool, for you alone, with everything that you say bound to it. It is warm unless `box.claim.coldReason` says
   * why not. Deleting it releases the claim.
   */
  async claim(options: ClaimOptions = {}): Promise<Sandbox> {
    const {
      name, env, files, secrets, policy, allow, deny, volumes, labels, memoryMib, cpus, pids, requirements, timeoutS, idleTimeoutS, waitS,
      shutdownTime, ttlSecondsAfterFinished, shutdownPolicy, signal, ...unknown
    } = options;
    refuseUnknown("claim", unknown);
    const resources = Object.entries({ memory_mib: memoryMib, cpus, pids }).filter(([, value]) => value !== undefined);
    const json = write("ClaimSpec", {
      name, pool: this.name, env, secrets, labels, requirements, timeoutS, idleTimeoutS, waitS, shutdownTime, ttlSecondsAfterFinished,
      shutdownPolicy,
      files: files === undefined ? undefined : Object.fromEntries(Object.entries(files).map(([path, data]) => [path, encoded(data)])),
      policy: allow?.length || deny?.length ? policyOf(policy, { network: "rules", allow, deny }) : policy,
      volumes: volumes === undefined ? undefined : mounts(volumes),
      resources: resources.length > 0 ? Object.fromEntries(resources) : undefined,
    });
    const plan = { json, signal, repeatable: true, waitS: waitS ?? 10 };
    const claim = read<ClaimInfo>("ClaimInfo", await this.#connection.call("POST", "/v1/claims", plan));
    if (claim.sandbox === null) throw new SandboxLost(`the sandbox of the claim ${claim.name} has ended`, { code: "sandbox_lost" });
    return new Sandbox(this.#connection, claim.sandbox, claim);
  }

  /** End the pool and what waits in it; what was claimed lives on. */
  async delete({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("DELETE", this.#place, { signal });
  }

  /** `await using pool = await Pool.create(…)`: it is deleted at the end of the block. */
  async [Symbol.asyncDispose](): Promise<void> {
    try {
      await this.delete();
    } catch (problem) {
      if (!(problem instanceof NotFound)) throw problem;
    }
  }
}

function encoded(data: string | Uint8Array): string {
  return base64(typeof data === "string" ? new TextEncoder().encode(data) : data);
}
