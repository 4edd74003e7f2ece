/** Stateful interpreters inside a sandbox. */

import type { CallOptions, Connection } from "./connection.js";
import { refuseUnknown } from "./errors.js";
import type { ContextInfo, Contexts as ContextList, Ran } from "./generated.js";
import { read, write } from "./shapes.js";

/** What one run of code gave. The code's own error is data here; it is never thrown. */
export type CodeResult = Ran;

export interface CodeOptions extends CallOptions {
  env?: Record<string, string>;
  timeoutS?: number;
}

export async function runCode(
  connection: Connection,
  sandbox: string,
  code: string,
  { context, language, env, timeoutS, signal, ...unknown }: CodeOptions & { context?: string; language?: string },
): Promise<CodeResult> {
  refuseUnknown("runCode", unknown);
  const json = write("Code", { code, context, language, env, timeoutS });
  return read("Ran", await connection.call("POST", `/v1/sandboxes/${encodeURIComponent(sandbox)}/code`, { json, signal, waitS: timeoutS ?? null }));
}

export class Context {
  readonly #connection: Connection;
  readonly #sandbox: string;
  readonly #place: string;
  readonly id: string;
  /** `python` or `bash`. */
  readonly language: string;

  /** @internal */
  constructor(connection: Connection, sandbox: string, info: ContextInfo) {
    this.#connection = connection;
    this.#sandbox = sandbox;
    this.#place = `${contexts(sandbox)}/${encodeURIComponent(info.id)}`;
    this.id = info.id;
    this.language = info.language;
  }

  /** Run code; its own error is part of the result. Runs of one context queue up. */
  run(code: string, options: CodeOptions = {}): Promise<CodeResult> {
    return runCode(this.#connection, this.#sandbox, code, { ...options, context: this.id, language: this.language });
  }

  /** Interrupt what runs; the context and its state stay. */
  async interrupt({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("POST", `${this.#place}/interrupt`, { signal, repeatable: true });
  }

  /** A fresh interpreter under the same id; the state is gone. */
  async restart({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("POST", `${this.#place}/restart`, { signal, repeatable: true });
  }

  /** Copies of it with everything it has in memory, in the same sandbox; all of them, or none. */
  async fork(count = 1, { signal }: CallOptions = {}): Promise<Context[]> {
    const answer = await this.#connection.call("POST", `${this.#place}/fork`, { json: { count }, signal, repeatable: true });
    return read<ContextList>("Contexts", answer).contexts.map((info) => new Context(this.#connection, this.#sandbox, info));
  }

  /** End the interpreter. */
  async delete({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("DELETE", this.#place, { signal });
  }
}

/** The code contexts of a sandbox. */
export class Contexts {
  readonly #connection: Connection;
  readonly #sandbox: string;

  /** @internal */
  constructor(connection: Connection, sandbox: string) {
    this.#connection = connection;
    this.#sandbox = sandbox;
  }

  /** A fresh interpreter (`python` or `bash`), beside any others. */
  async create(language = "python", options: CallOptions & { cwd?: string } = {}): Promise<Context> {
    const { cwd, signal, ...unknown } = options;
    refuseUnknown("contexts.create", unknown);
    const answer = await this.#connection.call("POST", contexts(this.#sandbox), { json: { language, cwd }, signal, repeatable: true });
    return new Context(this.#connection, this.#sandbox, read("ContextInfo", answer));
  }

  /** The live contexts, the default ones included. */
  async list({ signal }: CallOptions = {}): Promise<ContextInfo[]> {
    return read<ContextList>("Contexts", await this.#connection.call("GET", contexts(this.#sandbox), { signal })).contexts;
  }
}

function contexts(sandbox: string): string {
  return `/v1/sandboxes/${encodeURIComponent(sandbox)}/contexts`;
}
