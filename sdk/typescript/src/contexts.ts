/** Stateful interpreters inside a sandbox. */

import type { CallOptions, Connection } from "./connection.js";
import { error, refuseUnknown } from "./errors.js";
import type { CodeError, ContextInfo, Contexts as ContextList, Ran } from "./generated.js";
import { read, write } from "./shapes.js";

/** What one run of code gave. The code's own error is data here; it is never thrown. */
export type CodeResult = Ran;

/** One display: mime type → value, and `main` for the last expression's. */
export type Display = Record<string, unknown>;

/** The code runs now; those of its context before it have ended. */
export interface CodeBegan {
  type: "began";
  executionCount: number;
}

export interface CodeOutput {
  type: "output";
  stream: "stdout" | "stderr";
  text: string;
}

export interface CodeShown {
  type: "shown";
  result: Display;
}

/** The code's own error. */
export interface CodeFailed {
  type: "failed";
  error: CodeError;
}

/** The last event: the whole result, as `runCode` gives it. */
export interface CodeEnded {
  type: "ended";
  result: CodeResult;
}

export type CodeEvent = CodeBegan | CodeOutput | CodeShown | CodeFailed | CodeEnded;

export interface CodeStreamOptions extends CallOptions {
  env?: Record<string, string>;
  timeoutS?: number;
}

/** The callbacks are told what the code prints and shows, as it does; one that throws interrupts the code. */
export interface CodeOptions extends CodeStreamOptions {
  onStdout?: (text: string) => unknown;
  onStderr?: (text: string) => unknown;
  onResult?: (result: Display) => unknown;
}

interface Where {
  context?: string;
  language?: string;
}

export async function runCode(connection: Connection, sandbox: string, code: string, options: CodeOptions & Where): Promise<CodeResult> {
  const { onStdout, onStderr, onResult, ...rest } = options;
  if (onStdout === undefined && onStderr === undefined && onResult === undefined) {
    const { path, json } = codeRequest(sandbox, code, rest);
    return read("Ran", await connection.call("POST", path, { json, signal: rest.signal, waitS: rest.timeoutS ?? null }));
  }
  for await (const event of runCodeStream(connection, sandbox, code, rest)) {
    if (event.type === "output") await (event.stream === "stdout" ? onStdout : onStderr)?.(event.text);
    else if (event.type === "shown") await onResult?.(event.result);
    else if (event.type === "ended") return event.result;
  }
  throw error("internal_error", "the stream had no end"); // a cut one is connection_lost
}

export async function* runCodeStream(
  connection: Connection,
  sandbox: string,
  code: string,
  options: CodeStreamOptions & Where,
): AsyncGenerator<CodeEvent, void, undefined> {
  const { path, json } = codeRequest(sandbox, code, options);
  const events = await connection.events("POST", `${path}/stream`, { json, signal: options.signal, last: "exit", waitS: null });
  for await (const { kind, data } of events) {
    const event = codeEvent(kind, JSON.parse(data) as Record<string, unknown>);
    if (event !== undefined) yield event;
  }
}

function codeRequest(sandbox: string, code: string, options: CodeStreamOptions & Where): { path: string; json: unknown } {
  const { context, language, env, timeoutS, signal: _signal, ...unknown } = options;
  refuseUnknown("runCode", unknown);
  return { path: `/v1/sandboxes/${encodeURIComponent(sandbox)}/code`, json: write("Code", { code, context, language, env, timeoutS }) };
}

/** undefined for one that a newer server adds. */
function codeEvent(kind: string, data: Record<string, unknown>): CodeEvent | undefined {
  switch (kind) {
    case "start":
      return { type: "began", executionCount: Number(data["execution_count"]) };
    case "stdout":
    case "stderr":
      return { type: "output", stream: kind, text: String(data["text"]) };
    case "result":
      return { type: "shown", result: data };
    case "failed":
      return { type: "failed", error: read("CodeError", data) };
    case "exit":
      return { type: "ended", result: read("Ran", data) };
    default:
      return undefined;
  }
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

  /** Run code and yield what it prints and shows as it does; the last event is `ended`. Leaving early interrupts it. */
  runStream(code: string, options: CodeStreamOptions = {}): AsyncGenerator<CodeEvent, void, undefined> {
    return runCodeStream(this.#connection, this.#sandbox, code, { ...options, context: this.id, language: this.language });
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
  list({ signal }: CallOptions = {}): Promise<ContextInfo[]> {
    return this.#connection.list(contexts(this.#sandbox), "Contexts", "contexts", { signal });
  }
}

function contexts(sandbox: string): string {
  return `/v1/sandboxes/${encodeURIComponent(sandbox)}/contexts`;
}
