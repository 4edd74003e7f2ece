/** The files of a sandbox, touched as its user. Relative paths mean the working directory. */

import type { CallOptions, Connection } from "./connection.js";
import { error, NotFound, refuseUnknown } from "./errors.js";
import type { FileEvent, FileInfo } from "./generated.js";
import { read } from "./shapes.js";

export interface FileOptions extends CallOptions {
  /** As whom; `user` by default. */
  user?: string;
}

export interface ReadOptions<F extends string> extends FileOptions {
  format?: F;
}

export class Files {
  readonly #connection: Connection;
  readonly #place: string;

  /** @internal */
  constructor(connection: Connection, sandbox: string) {
    this.#connection = connection;
    this.#place = `/v1/sandboxes/${encodeURIComponent(sandbox)}/files`;
  }

  /** A file's content: as text (`not_text` if it is not UTF-8), as bytes, or in pieces for a file of any size. */
  read(path: string, options?: ReadOptions<"text">): Promise<string>;
  read(path: string, options: ReadOptions<"bytes">): Promise<Uint8Array>;
  read(path: string, options: ReadOptions<"stream">): Promise<AsyncIterable<Uint8Array>>;
  async read(path: string, options: ReadOptions<string> = {}): Promise<string | Uint8Array | AsyncIterable<Uint8Array>> {
    const { format = "text", user, signal, ...unknown } = options;
    refuseUnknown("files.read", unknown);
    const plan = { query: { path, user }, signal };
    if (format === "stream") return this.#connection.pieces(this.#place, plan);
    if (format !== "text" && format !== "bytes") {
      throw error("argument_invalid", `the format is '${format}'`, { hint: "use 'text', 'bytes' or 'stream'" });
    }
    const data = await this.#connection.bytes("GET", this.#place, plan);
    if (format === "bytes") return data;
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
    } catch (cause) {
      throw error("not_text", `${path} is not UTF-8 text`, { hint: 'read it with format: "bytes"', cause });
    }
  }

  /** Replace a file, atomically, making missing directories. Its mode stays, unless one is given. */
  async write(path: string, data: string | Uint8Array, options: FileOptions & { mode?: number } = {}): Promise<FileInfo> {
    const { user, mode, signal, ...unknown } = options;
    refuseUnknown("files.write", unknown);
    const raw = typeof data === "string" ? new TextEncoder().encode(data) : data;
    return read("FileInfo", await this.#connection.call("PUT", this.#place, { query: { path, user, mode }, raw, signal }));
  }

  /** A directory's entries, by name; with `depth`, those of so many levels. */
  async list(path = ".", options: FileOptions & { depth?: number } = {}): Promise<FileInfo[]> {
    const { user, depth, signal, ...unknown } = options;
    refuseUnknown("files.list", unknown);
    return this.#connection.list(`${this.#place}/list`, "WireFiles", "files", { query: { path, depth, user }, signal });
  }

  /** One entry; a symlink is not followed. */
  async stat(path: string, options: FileOptions = {}): Promise<FileInfo> {
    const { user, signal, ...unknown } = options;
    refuseUnknown("files.stat", unknown);
    return read("FileInfo", await this.#connection.call("GET", `${this.#place}/stat`, { query: { path, user }, signal }));
  }

  /** Whether there is such an entry, be it a dangling symlink. */
  async exists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
    } catch (problem) {
      if (problem instanceof NotFound && problem.code === "file_not_found") return false;
      throw problem;
    }
    return true;
  }

  /** Rename a file or directory, making missing directories above the target. */
  async move(path: string, target: string, options: FileOptions & { overwrite?: boolean } = {}): Promise<void> {
    const { user, overwrite, signal, ...unknown } = options;
    refuseUnknown("files.move", unknown);
    await this.#connection.call("POST", `${this.#place}/move`, { query: { user }, json: { path, target, overwrite }, signal, repeatable: true });
  }

  /** Remove a file, an empty directory or, with `recursive`, a tree. */
  async remove(path: string, options: FileOptions & { recursive?: boolean } = {}): Promise<void> {
    const { user, recursive, signal, ...unknown } = options;
    refuseUnknown("files.remove", unknown);
    await this.#connection.call("DELETE", this.#place, { query: { path, recursive, user }, signal });
  }

  /** Make a directory and its parents; false if it was there. */
  async makeDir(path: string, options: FileOptions = {}): Promise<boolean> {
    const { user, signal, ...unknown } = options;
    refuseUnknown("files.makeDir", unknown);
    const plan = { query: { user }, json: { path }, signal, repeatable: true };
    return ((await this.#connection.call("POST", `${this.#place}/directories`, plan)) as { made: boolean }).made;
  }

  /**
   * Changes beneath a directory, as they happen; ends with the sandbox, or when you leave. What happens after this has resolved is
   * seen: `for await (const event of await box.files.watch("src")) …`.
   */
  async watch(path = ".", options: FileOptions & { recursive?: boolean } = {}): Promise<AsyncGenerator<FileEvent, void, undefined>> {
    const { user, recursive, signal, ...unknown } = options;
    refuseUnknown("files.watch", unknown);
    const events = await this.#connection.events("GET", `${this.#place}/watch`, { query: { path, recursive, user }, signal });
    return fileEvents(events);
  }

  /** Unpack a tar below `path`; the number of files. */
  async upload(path: string, archive: Uint8Array, options: FileOptions = {}): Promise<number> {
    const { user, signal, ...unknown } = options;
    refuseUnknown("files.upload", unknown);
    const plan = { query: { path, user }, raw: archive, signal };
    return ((await this.#connection.call("PUT", `${this.#place}/tree`, plan)) as { count: number }).count;
  }

  /** A directory (or one file) as a tar. Its names come from inside: unpack it with care. */
  async download(path = ".", options: FileOptions = {}): Promise<Uint8Array> {
    const { user, signal, ...unknown } = options;
    refuseUnknown("files.download", unknown);
    return this.#connection.bytes("GET", `${this.#place}/tree`, { query: { path, user }, signal });
  }
}

async function* fileEvents(events: AsyncIterable<{ data: string }>): AsyncGenerator<FileEvent, void, undefined> {
  for await (const { data } of events) yield read<FileEvent>("FileEvent", JSON.parse(data));
}
