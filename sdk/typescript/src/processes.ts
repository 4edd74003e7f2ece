/** Commands that were started: their streams, their terminals, their ends. */

import type { CallOptions, Connection } from "./connection.js";
import { Conflict, error, refuseUnknown } from "./errors.js";
import type { ExecBody, ExecutionInfo } from "./generated.js";
import { execResult, streamEvent, type ExecResult, type StreamEvent } from "./results.js";
import { write } from "./shapes.js";
import type { ServerEvent } from "./sse.js";

/** What `exec`, `execStream` and `start` share. */
export interface CommandOptions extends CallOptions {
  cwd?: string;
  env?: Record<string, string>;
  /** Past so many seconds the command and all it started is killed. */
  timeoutS?: number;
  user?: string;
  /** Send stderr where stdout goes. */
  merge?: boolean;
}

export interface ExecStreamOptions extends CommandOptions {
  /** Fed to the command and closed. */
  stdin?: string | Uint8Array;
}

export interface ExecOptions extends ExecStreamOptions {
  /** Past so many seconds the command goes on without you; the result has `process`. */
  backgroundAfterS?: number;
  /** Throw `CommandFailed` unless it exits with 0. */
  check?: boolean;
  /** How many bytes of each stream are kept: head and tail. */
  outputLimit?: number;
}

export interface StartOptions extends CommandOptions {
  /** On a terminal, of 80 columns and 24 rows or those given. */
  pty?: boolean | [columns: number, rows: number];
}

/** The body of a command, in the wire's words; options that it does not have are refused. */
export function commandBody(command: string | readonly string[], options: ExecOptions & { pty?: unknown; openStdin?: boolean }): Record<string, unknown> {
  const { cwd, env, timeoutS, user, merge, stdin, outputLimit, backgroundAfterS, pty, openStdin, check: _check, signal: _signal, ...unknown } = options;
  refuseUnknown("a command", unknown);
  const body: ExecBody = {
    command: typeof command === "string" ? command : [...command],
    cwd,
    env,
    timeoutS,
    user,
    merge,
    outputLimit,
    backgroundAfterS,
    openStdin,
  };
  if (typeof stdin === "string") body.stdin = stdin;
  else if (stdin !== undefined) body.stdinBase64 = base64(stdin);
  if (pty) body.pty = pty === true ? [80, 24] : (pty as [number, number]);
  return write("Exec", body);
}

export function base64(data: Uint8Array): string {
  return Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64");
}

/** A command that was started. */
export class Process {
  readonly #connection: Connection;
  readonly #place: string;
  #writing: Promise<unknown> = Promise.resolve();
  /** The execution's id, good for `processes.get` from anywhere. */
  readonly id: string;
  /** The leader's pid inside the sandbox. */
  readonly pid: number;

  /** @internal */
  constructor(connection: Connection, sandbox: string, info: Pick<ExecutionInfo, "id" | "pid">) {
    this.#connection = connection;
    this.#place = `${executions(sandbox)}/${encodeURIComponent(info.id)}`;
    this.id = info.id;
    this.pid = info.pid;
  }

  /** Write to the command's input, or type on its terminal. Writes arrive in the order of their calls. */
  write(data: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    return this.#feed(typeof data === "string" ? { data } : { data_base64: base64(data) }, options);
  }

  /** End the command's input; on a terminal, type the end-of-file character. */
  closeStdin(options: CallOptions = {}): Promise<void> {
    return this.#feed({ end: true }, options);
  }

  #feed(json: Record<string, unknown>, { signal }: CallOptions): Promise<void> {
    const next = this.#writing.then(() => this.#connection.call("POST", `${this.#place}/stdin`, { json, signal, repeatable: true }));
    this.#writing = next.catch(() => undefined);
    return next.then(() => undefined);
  }

  /** Change the size of the terminal; the command gets SIGWINCH. */
  async resize(columns: number, rows: number, { signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("POST", `${this.#place}/resize`, { json: { columns, rows }, signal, repeatable: true });
  }

  /** Signal the command's process group. */
  async signal(number: number, { signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("POST", `${this.#place}/signal`, { json: { signal: number }, signal, repeatable: true });
  }

  /** End the command and everything it started; harmless if it has ended by itself. */
  async kill({ signal }: CallOptions = {}): Promise<void> {
    try {
      await this.#connection.call("POST", `${this.#place}/signal`, { json: { signal: 9, tree: true }, signal, repeatable: true });
    } catch (problem) {
      if (!(problem instanceof Conflict)) throw problem;
    }
  }

  /** The result, when the command has ended. */
  async wait({ signal }: CallOptions = {}): Promise<ExecResult> {
    return execResult(await this.#connection.call("GET", `${this.#place}/result`, { signal, waitS: null }));
  }

  /**
   * What the command writes, from cursor `after` on; the last event is `exited`. A connection that breaks is made again, and nothing
   * is lost or seen twice. Leaving early stops nothing; the command goes on.
   */
  async *stream({ after, signal }: CallOptions & { after?: number } = {}): AsyncGenerator<StreamEvent, void, undefined> {
    const events = await this.#connection.events("GET", `${this.#place}/stream`, { query: { after }, signal, resume: true, last: "exit" });
    yield* streamEvents(events);
  }
}

/** The events of a command; kinds that a newer server adds are passed over. */
export async function* streamEvents(events: AsyncIterable<ServerEvent>): AsyncGenerator<StreamEvent, void, undefined> {
  for await (const { kind, data, id } of events) {
    const event = streamEvent(kind, JSON.parse(data) as Record<string, unknown>, id);
    if (event !== undefined) yield event;
  }
}

/** The commands of a sandbox. */
export class Processes {
  readonly #connection: Connection;
  readonly #sandbox: string;

  /** @internal */
  constructor(connection: Connection, sandbox: string) {
    this.#connection = connection;
    this.#sandbox = sandbox;
  }

  /** A handle of a command that was started before, perhaps by another program, or went to the background. */
  async get(execution: string, options: CallOptions = {}): Promise<Process> {
    const info = (await this.list(options)).find((one) => one.id === execution);
    if (info === undefined) {
      throw error("execution_not_found", `sandbox ${this.#sandbox} has no execution '${execution}'`, {
        hint: "list them; finished ones are kept for a while only",
      });
    }
    return new Process(this.#connection, this.#sandbox, info);
  }

  /** Live ones and those that ended a while ago, the oldest first. */
  list({ signal }: CallOptions = {}): Promise<ExecutionInfo[]> {
    return this.#connection.list(executions(this.#sandbox), "Executions", "executions", { signal });
  }
}

export function executions(sandbox: string): string {
  return `/v1/sandboxes/${encodeURIComponent(sandbox)}/executions`;
}
