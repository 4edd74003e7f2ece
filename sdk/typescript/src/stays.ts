/** What outlives sandboxes: snapshots and volumes. */

import { connect, type CallOptions, type Connection, type ConnectOptions } from "./connection.js";
import { refuseUnknown } from "./errors.js";
import type { FileChange, MountBody, SnapshotInfo, VolumeInfo } from "./generated.js";
import { read, write } from "./shapes.js";

/** Options of a call that finds its server by itself. */
export type ServerOptions = ConnectOptions & CallOptions;

/** A handle, or its id. */
export type Identified = string | { readonly id: string };

export function idOf(noun: Identified): string {
  return typeof noun === "string" ? noun : noun.id;
}

/** A volume's name, read-only with `:ro` after it, or in full. */
export type VolumeMount = string | MountBody;

export function mounts(volumes: Record<string, VolumeMount>): Record<string, MountBody> {
  const made: Record<string, MountBody> = {};
  for (const [path, what] of Object.entries(volumes)) {
    made[path] = typeof what === "string" ? { volume: what.replace(/:ro$/, ""), readOnly: what.endsWith(":ro") } : what;
  }
  return made;
}

/** A sandbox's files at one moment. Any number of sandboxes start from it: `Sandbox.create({ snapshot })`. */
export class Snapshot {
  readonly #connection: Connection;
  readonly id: string;
  /** Its name, if it was given one. */
  readonly name: string | null;

  /** @internal */
  constructor(connection: Connection, info: SnapshotInfo) {
    this.#connection = connection;
    this.id = info.id;
    this.name = info.name;
  }

  /** A handle of a snapshot that exists, by id or name. */
  static async get(snapshot: string, options: ServerOptions = {}): Promise<Snapshot> {
    const connection = connect(options);
    return new Snapshot(connection, read("SnapshotInfo", await connection.call("GET", place(snapshot), { signal: options.signal })));
  }

  /** The snapshots there are, oldest first; with `tag`, those that have it. */
  static async list(options: ServerOptions & { tag?: string } = {}): Promise<SnapshotInfo[]> {
    const { tag, signal } = options;
    return connect(options).list("/v1/snapshots", "Snapshots", "snapshots", { query: { tag }, signal });
  }

  /** What it is: when and of what it was taken, its size, its tags. */
  async info({ signal }: CallOptions = {}): Promise<SnapshotInfo> {
    return read("SnapshotInfo", await this.#connection.call("GET", place(this.id), { signal }));
  }

  /** What became of its files in another snapshot: added, modified and removed paths. */
  diff(other: Identified, { signal }: CallOptions = {}): Promise<FileChange[]> {
    return this.#connection.list(`${place(this.id)}/diff`, "Changes", "changes", { query: { other: idOf(other) }, signal });
  }

  /** Remove it. Sandboxes that started from it keep their files. */
  async delete({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("DELETE", place(this.id), { signal });
  }
}

function place(snapshot: string): string {
  return `/v1/snapshots/${encodeURIComponent(snapshot)}`;
}

/** A named directory that outlives sandboxes: `Sandbox.create({ volumes: { "/data": "name" } })`, or `"name:ro"` to read it. */
export class Volume {
  readonly #connection: Connection;
  readonly name: string;

  /** @internal */
  constructor(connection: Connection, info: VolumeInfo) {
    this.#connection = connection;
    this.name = info.spec.name;
  }

  /** An empty volume; the same name and size again is the same volume. */
  static async create(name: string, options: ServerOptions & { sizeMib?: number; labels?: Record<string, string> } = {}): Promise<Volume> {
    const { sizeMib, labels, signal, server: _s, apiKey: _k, requestTimeoutS: _t, retries: _r, ...unknown } = options;
    refuseUnknown("Volume.create", unknown);
    const connection = connect(options);
    const json = write("VolumeSpec", { name, sizeMib, labels });
    return new Volume(connection, read("VolumeInfo", await connection.call("POST", "/v1/volumes", { json, signal, repeatable: true })));
  }

  /** A handle of a volume that exists. */
  static async get(name: string, options: ServerOptions = {}): Promise<Volume> {
    const connection = connect(options);
    const answer = await connection.call("GET", `/v1/volumes/${encodeURIComponent(name)}`, { signal: options.signal });
    return new Volume(connection, read("VolumeInfo", answer));
  }

  /** The volumes there are, by name. */
  static async list(options: ServerOptions = {}): Promise<VolumeInfo[]> {
    return connect(options).list("/v1/volumes", "Volumes", "volumes", { signal: options.signal });
  }

  /** Its size and how that is held, what it takes, and which sandboxes have it. */
  async info({ signal }: CallOptions = {}): Promise<VolumeInfo> {
    return read("VolumeInfo", await this.#connection.call("GET", `/v1/volumes/${encodeURIComponent(this.name)}`, { signal }));
  }

  /** Remove it and what is in it; `volume_in_use` while a sandbox has it. */
  async delete({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("DELETE", `/v1/volumes/${encodeURIComponent(this.name)}`, { signal });
  }
}
