/**
 * The sandbox, and one-shot runs. A sandbox stays until it is deleted or its time is up: over HTTP no connection belongs to it, so
 * `await using` (or `delete`) is what ends it early.
 */

import { connect, sleep, type CallOptions, type Connection, type ConnectOptions } from "./connection.js";
import { answerQuestions, type Asked } from "./asking.js";
import { Contexts, runCode, runCodeStream, type CodeEvent, type CodeOptions, type CodeResult, type CodeStreamOptions } from "./contexts.js";
import { commandFailed, error, NotFound, refuseUnknown, SandboxLost } from "./errors.js";
import { Files } from "./files.js";
import type {
  AccessToken,
  ClaimInfo,
  CreateBody,
  ExecutionInfo,
  FileChange,
  Isolation,
  Merged,
  NewTokenBody,
  PortInfo,
  Ports,
  SandboxInfo,
  Sandboxes,
  SandboxUsage,
  SnapshotInfo,
} from "./generated.js";
import { listEvents, type JournalEvent } from "./journal.js";
import { Forward } from "./ports.js";
import { commandBody, executions, Process, Processes, streamEvents } from "./processes.js";
import type { ExecOptions, ExecStreamOptions, StartOptions } from "./processes.js";
import { execResult, type ExecResult, type StreamEvent } from "./results.js";
import { read, write } from "./shapes.js";
import { idOf, mounts, Snapshot, type Identified, type ServerOptions, type VolumeMount } from "./stays.js";
import type { Tunnel } from "./websocket.js";

export type NetworkMode = "off" | "rules" | "open";

/** A policy in the words of a policy file: `{ files: { deny: […] }, network: { … } }`. */
export type PolicyFields = Record<string, Record<string, unknown>>;

export interface NetworkOptions {
  network?: NetworkMode;
  /** `pypi.org`, `*.github.com:443`, `10.1.0.0/16:5432`. */
  allow?: readonly string[];
  deny?: readonly string[];
  /** Where a name leads: `{ "api.test:443": "127.0.0.1:18443" }`. */
  resolve?: Record<string, string>;
}

/** What a sandbox is; what is left out is the template's, and then the server's default. */
export interface Shape extends NetworkOptions {
  profile?: string;
  /** Instead of a profile: what the command line of a coding agent needs, by the agent's name. */
  mode?: string;
  template?: string;
  image?: string;
  env?: Record<string, string>;
  memoryMib?: number;
  cpus?: number;
  pids?: number;
  diskMib?: number;
  /** Seconds without use; null is without end. */
  idleTimeoutS?: number | null;
  /** Seconds without use after which it is paused: its memory stays. */
  pauseAfterS?: number;
  /** Seconds without use after which its files only are kept. */
  archiveAfterS?: number;
  /** What the end of its time does: end it, or suspend it. */
  atTimeout?: "delete" | "pause" | "archive";
  /** A directory of the server's host, which its configuration must name. */
  workspace?: string;
  overlay?: boolean;
  /** Unique; makes creation idempotent. */
  name?: string;
  labels?: Record<string, string>;
  policy?: PolicyFields;
  secrets?: readonly string[];
  /** Decides about a connection that no rule decides. */
  ask?: Asked;
  minimumIsolation?: Isolation["level"];
  snapshot?: Identified;
  volumes?: Record<string, VolumeMount>;
}

export interface SandboxOptions extends Shape, ServerOptions {
  /** Its life in seconds, from creation or the last `extend`; null is without end. */
  timeoutS?: number | null;
}

export interface RunOptions extends Omit<Shape, "ask">, ServerOptions {
  stdin?: string | Uint8Array;
  cwd?: string;
  /** Of the command. */
  timeoutS?: number;
  check?: boolean;
  /** Keep the sandbox; `result.sandbox` is its id. */
  detach?: boolean;
}

function createBody(options: Shape & { timeoutS?: number | null }, what: string): CreateBody {
  const {
    profile, mode, template, image, env, memoryMib, cpus, pids, diskMib, idleTimeoutS, workspace, overlay, name, labels, policy, network, allow,
    deny, resolve, secrets, ask, minimumIsolation, snapshot, volumes, timeoutS, pauseAfterS, archiveAfterS, atTimeout, ...unknown
  } = options;
  refuseUnknown(what, unknown);
  // Who gives somebody to ask wants a network, unless something else was said about it.
  const said = network !== undefined || mode !== undefined || profile === "permissive" || policy?.["network"]?.["mode"] !== undefined;
  const ladder = given({ pauseAfterS, archiveAfterS, atTimeout });
  const resources = given({ memory_mib: memoryMib, cpus, pids, disk_mib: diskMib });
  return {
    profile, mode, template, image, env, idleTimeoutS, workspace, overlay, name, labels, timeoutS, minimumIsolation,
    resources: Object.keys(resources).length > 0 ? (resources as Record<string, number>) : undefined,
    policy: policyOf(policy, { network: ask === undefined || said ? network : "rules", allow, deny, resolve }),
    ladder: Object.keys(ladder).length > 0 ? ladder : undefined,
    secrets: secrets === undefined ? undefined : [...secrets],
    snapshot: snapshot === undefined ? undefined : idOf(snapshot),
    volumes: volumes === undefined ? undefined : mounts(volumes),
  };
}

function given(said: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(said).filter(([, value]) => value !== undefined));
}

/** A policy with the network options added to it: they add rules, and `network` replaces the mode. */
export function policyOf(policy: PolicyFields | undefined, options: NetworkOptions): PolicyFields | undefined {
  const said = networkOf(options);
  if (policy === undefined) return Object.keys(said).length > 0 ? { network: said } : undefined;
  if (Object.keys(said).length === 0) return policy;
  const before: Record<string, unknown> = { ...policy["network"] };
  if (options.allow?.length && before["mode"] === "off") delete before["mode"];
  if (options.network === "off") {
    delete before["allow"];
    delete before["ask"];
  }
  for (const [field, value] of Object.entries(said)) {
    const was = before[field];
    if (Array.isArray(value)) said[field] = value.length > 0 ? [...(Array.isArray(was) ? was : []), ...value] : [];
    else if (typeof value === "object") said[field] = { ...(was as object | undefined), ...value };
  }
  return { ...policy, network: { ...before, ...said } };
}

function networkOf({ network, allow, deny, resolve }: NetworkOptions): Record<string, unknown> {
  if (network === "off" && allow?.length) {
    throw error("argument_invalid", "allow gives a network and network: 'off' takes it", { hint: "leave one of them out" });
  }
  for (const [field, value] of Object.entries({ allow, deny })) {
    if (typeof value === "string") {
      throw error("argument_invalid", `${field} is a list of rules, not one text`, { hint: `${field}: ['${value as string}']` });
    }
  }
  return given({ mode: network, allow, deny, resolve });
}

/** What a sandbox may touch. */
export class SandboxPolicy {
  readonly #connection: Connection;
  readonly #place: string;

  /** @internal */
  constructor(connection: Connection, place: string) {
    this.#connection = connection;
    this.#place = `${place}/policy`;
  }

  /** The rules that hold now. */
  async get({ signal }: CallOptions = {}): Promise<Merged> {
    return read("Merged", await this.#connection.call("GET", this.#place, { signal }));
  }

  /**
   * Replace network rules of the live sandbox: each list that is given, as a whole; the others stay. When this resolves the new rules
   * hold, and connections that they refuse have ended.
   */
  async update(options: NetworkOptions & CallOptions): Promise<Merged> {
    const { network, allow, deny, resolve, signal, ...unknown } = options;
    refuseUnknown("policy.update", unknown);
    const json = { network: networkOf({ network, allow, deny, resolve }) };
    return read("Merged", await this.#connection.call("PATCH", this.#place, { json, signal }));
  }
}

export class Sandbox implements AsyncDisposable {
  readonly #connection: Connection;
  readonly #place: string;
  #asking: AbortController | undefined;
  /** Good for `Sandbox.get` from anywhere that reaches the same server. */
  readonly id: string;
  /** The claim that it was bound by, as it was then; null for one that was created. */
  readonly claim: ClaimInfo | null;
  readonly files: Files;
  readonly processes: Processes;
  readonly contexts: Contexts;
  /** What it may touch, and the network rules to change. */
  readonly policy: SandboxPolicy;

  /** @internal */
  constructor(connection: Connection, id: string, claim: ClaimInfo | null = null) {
    this.#connection = connection;
    this.#place = `/v1/sandboxes/${encodeURIComponent(id)}`;
    this.id = id;
    this.claim = claim;
    this.files = new Files(connection, id);
    this.processes = new Processes(connection, id);
    this.contexts = new Contexts(connection, id);
    this.policy = new SandboxPolicy(connection, this.#place);
  }

  /** A running sandbox. */
  static async create(options: SandboxOptions = {}): Promise<Sandbox> {
    const { server, apiKey, requestTimeoutS, retries, signal, ...shape } = options;
    const json = write("Create", createBody(shape, "Sandbox.create"));
    const connection = connect({ server, apiKey, requestTimeoutS, retries });
    const info = read<SandboxInfo>("SandboxInfo", await connection.call("POST", "/v1/sandboxes", { json, signal, repeatable: true }));
    const made = new Sandbox(connection, info.id);
    if (shape.ask === undefined) return made;
    try {
      made.#asking = await answerQuestions(connection, info.id, shape.ask, signal);
    } catch (problem) {
      await made.delete().catch(() => undefined);
      throw problem;
    }
    return made;
  }

  /** A handle of a sandbox that exists, by id or name. */
  static async get(sandbox: string, options: ServerOptions = {}): Promise<Sandbox> {
    const connection = connect(options);
    const answer = await connection.call("GET", `/v1/sandboxes/${encodeURIComponent(sandbox)}`, { signal: options.signal });
    return new Sandbox(connection, read<SandboxInfo>("SandboxInfo", answer).id);
  }

  /** The live sandboxes, oldest first; with `label` (`key=value`), those that have it. `pageSize` is how many are asked for at once. */
  static async list(options: ServerOptions & { label?: string; pageSize?: number } = {}): Promise<SandboxInfo[]> {
    const { label, pageSize, signal } = options;
    return connect(options).list("/v1/sandboxes", "Sandboxes", "sandboxes", { query: { label }, signal }, pageSize);
  }

  /**
   * Run a command to its end: a string is a shell line, a list an argument vector. A failing command is a result; with `check` it
   * throws `CommandFailed`. An aborted call ends the command and all it started.
   */
  async exec(command: string | readonly string[], options: ExecOptions = {}): Promise<ExecResult> {
    const result = await this.#exec(command, options);
    if (options.check && !result.ok && result.process === null) throw commandFailed(command, result);
    return result;
  }

  async #exec(command: string | readonly string[], options: ExecOptions): Promise<ExecResult> {
    const { signal, backgroundAfterS, timeoutS } = options;
    if (signal === undefined && backgroundAfterS === undefined) {
      const json = commandBody(command, options);
      return execResult(await this.#connection.call("POST", `${this.#place}/exec`, { json, waitS: timeoutS ?? null }));
    }
    // In two requests, so that the command is known by its id when the caller gives up.
    const process = await this.#start(commandBody(command, { ...options, backgroundAfterS: undefined }), signal);
    try {
      return await (backgroundAfterS === undefined ? process.wait({ signal }) : this.#waitOrLeave(process, backgroundAfterS, signal));
    } catch (problem) {
      if (signal?.aborted) await process.kill().catch(() => undefined); // the sandbox went, and the command with it
      throw problem;
    }
  }

  async #waitOrLeave(process: Process, patienceS: number, signal: AbortSignal | undefined): Promise<ExecResult> {
    const over = new AbortController();
    const abort = () => over.abort(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    try {
      const leave = sleep(patienceS * 1000, over.signal);
      leave.catch(() => undefined);
      const waiting = process.wait({ signal: over.signal });
      waiting.catch(() => undefined);
      return (await Promise.race([waiting, leave])) ?? (await this.#soFar(process, signal));
    } catch (problem) {
      signal?.throwIfAborted();
      throw problem;
    } finally {
      signal?.removeEventListener("abort", abort);
      over.abort();
    }
  }

  /** The result of a command that goes on: what it has written until now. */
  async #soFar(process: Process, signal: AbortSignal | undefined): Promise<ExecResult> {
    const path = `${executions(this.id)}/${encodeURIComponent(process.id)}/stream`;
    const written: Record<"stdout" | "stderr", Uint8Array[]> = { stdout: [], stderr: [] };
    let truncated = false;
    for await (const event of streamEvents(await this.#connection.events("GET", path, { query: { wait: false }, signal }))) {
      if (event.type === "exited") return event.result; // at the last moment
      if (event.type === "output") written[event.stream].push(event.data);
      truncated ||= event.type === "truncated";
    }
    const [stdoutBytes, stderrBytes] = [joined(written.stdout), joined(written.stderr)];
    return {
      exitCode: null, signal: null, timedOut: false, oomKilled: false, stdoutBytes, stderrBytes, truncated,
      stdout: new TextDecoder("utf-8", { ignoreBOM: true }).decode(stdoutBytes),
      stderr: new TextDecoder("utf-8", { ignoreBOM: true }).decode(stderrBytes),
      stdoutTotal: stdoutBytes.length, stderrTotal: stderrBytes.length, durationMs: 0, cpuMs: 0, maxRssMib: 0, denials: [],
      isolation: (await this.info({ signal })).isolation, execution: process.id, process: process.id, sandbox: null, shellCode: 0, ok: false,
    };
  }

  /** The request itself is not aborted: then a command could run that nobody knows. It is short, and what it started is ended. */
  async #start(json: Record<string, unknown>, signal: AbortSignal | undefined): Promise<Process> {
    signal?.throwIfAborted();
    const answer = await this.#connection.call("POST", executions(this.id), { json, repeatable: true });
    const process = new Process(this.#connection, this.id, read<ExecutionInfo>("ExecutionInfo", answer));
    if (signal?.aborted) {
      await process.kill().catch(() => undefined);
      throw signal.reason;
    }
    return process;
  }

  /**
   * Run a command and yield what it writes as it writes it; the last event is `exited`. Leaving early ends the command, as nobody
   * holds it any more; for one that goes on, use `start`.
   */
  async *execStream(command: string | readonly string[], options: ExecStreamOptions = {}): AsyncGenerator<StreamEvent, void, undefined> {
    const { signal } = options;
    const process = await this.#start(commandBody(command, options), signal);
    let ended = false;
    try {
      for await (const event of process.stream({ signal })) {
        ended = event.type === "exited";
        yield event;
      }
    } finally {
      if (!ended) await process.kill().catch(() => undefined);
    }
  }

  /** Start a command with open input; with `pty`, on a terminal. */
  async start(command: string | readonly string[], options: StartOptions = {}): Promise<Process> {
    const { pty, ...rest } = options;
    return this.#start(commandBody(command, { ...rest, pty, openStdin: true }), options.signal);
  }

  /** Run code in the language's default context, which keeps its state. The code's own error is no exception. */
  runCode(code: string, options: CodeOptions & { language?: string } = {}): Promise<CodeResult> {
    return runCode(this.#connection, this.id, code, options);
  }

  /** Run code and yield what it prints and shows as it does; the last event is `ended`. Leaving early interrupts it. */
  runCodeStream(code: string, options: CodeStreamOptions & { language?: string } = {}): AsyncGenerator<CodeEvent, void, undefined> {
    return runCodeStream(this.#connection, this.id, code, options);
  }

  /** A connection to a TCP port of the sandbox's own loopback, whatever its network is; `port_closed` where nobody listens. */
  connect(port: number, { signal }: CallOptions = {}): Promise<Tunnel> {
    return this.#connection.tunnel(`${this.#place}/ports/${port}/tunnel`, { signal });
  }

  /** Listen on 127.0.0.1 and pass every connection on to a port inside; `forward.port` says where. */
  forward(port: number, { localPort = 0 }: { localPort?: number } = {}): Promise<Forward> {
    return Forward.listen(localPort, () => this.connect(port));
  }

  /** A preview link: an address for a browser that reaches a port inside without a key, until it expires or the sandbox ends. */
  async url(port: number, options: CallOptions & { ttlS?: number } = {}): Promise<string> {
    const { ttlS, signal, ...unknown } = options;
    refuseUnknown("url", unknown);
    const plan = { json: write("MakeLink", { ttlS }), signal, repeatable: true };
    return ((await this.#connection.call("POST", `${this.#place}/ports/${port}/link`, plan)) as { url: string }).url;
  }

  /** The TCP ports that something inside listens on, lowest first. */
  async ports({ signal }: CallOptions = {}): Promise<PortInfo[]> {
    return read<Ports>("Ports", await this.#connection.call("GET", `${this.#place}/ports`, { signal })).ports;
  }

  /** What it is and how it is held: isolation, limits, warnings, when it ends. To look is not to use. */
  async info({ signal }: CallOptions = {}): Promise<SandboxInfo> {
    return read("SandboxInfo", await this.#connection.call("GET", this.#place, { signal }));
  }

  /**
   * A token for this sandbox alone: `Sandbox.get(id, { apiKey: token })` for whoever should work in it. It is good for what `scopes`
   * say, never for more than your own key, until `ttlS` seconds are over or the sandbox ends.
   */
  async token(options: CallOptions & NewTokenBody = {}): Promise<AccessToken> {
    const { scopes, ttlS, signal, ...unknown } = options;
    refuseUnknown("token", unknown);
    const json = write("NewToken", { scopes, ttlS });
    return read("AccessToken", await this.#connection.call("POST", `${this.#place}/tokens`, { json, signal, repeatable: true }));
  }

  /** What it costs now, and has cost. */
  async usage({ signal }: CallOptions = {}): Promise<SandboxUsage> {
    return read("SandboxUsage", await this.#connection.call("GET", `${this.#place}/usage`, { signal }));
  }

  /** Let it live `timeoutS` from now; null is without end. */
  async extend(timeoutS: number | null, { signal }: CallOptions = {}): Promise<SandboxInfo> {
    const plan = { json: { timeout_s: timeoutS }, signal, repeatable: true };
    return read("SandboxInfo", await this.#connection.call("POST", `${this.#place}/extend`, plan));
  }

  /** Put it to sleep; whatever needs the sandbox wakes it. `pause` keeps its memory, `archive` its files only. */
  async suspend(mode: "pause" | "hibernate" | "archive" = "pause", { signal }: CallOptions = {}): Promise<SandboxInfo> {
    const plan = { query: { mode }, signal, repeatable: true };
    return read("SandboxInfo", await this.#connection.call("POST", `${this.#place}/suspend`, plan));
  }

  /** Let it go on. */
  async resume({ signal }: CallOptions = {}): Promise<SandboxInfo> {
    return read("SandboxInfo", await this.#connection.call("POST", `${this.#place}/resume`, { signal, repeatable: true }));
  }

  /** Keep its files as they are now. It stands still for the moment that takes. */
  async snapshot(options: CallOptions & { name?: string; tags?: readonly string[] } = {}): Promise<Snapshot> {
    const { name, tags, signal, ...unknown } = options;
    refuseUnknown("snapshot", unknown);
    const answer = await this.#connection.call("POST", `${this.#place}/snapshots`, { json: { name, tags }, signal, repeatable: true });
    return new Snapshot(this.#connection, read<SnapshotInfo>("SnapshotInfo", answer));
  }

  /** Set its files back to a snapshot. Every process in it ends; id, environment, limits and life stay. */
  async restore(snapshot: Identified, { signal }: CallOptions = {}): Promise<SandboxInfo> {
    const plan = { json: { snapshot: idOf(snapshot) }, signal, repeatable: true };
    return read("SandboxInfo", await this.#connection.call("POST", `${this.#place}/restore`, plan));
  }

  /** Sandboxes that begin with the same files and no processes; all of them, or none. */
  async fork(count = 1, { signal }: CallOptions = {}): Promise<Sandbox[]> {
    const answer = await this.#connection.call("POST", `${this.#place}/fork`, { json: { count }, signal, repeatable: true });
    return read<Sandboxes>("Sandboxes", answer).sandboxes.map((info) => new Sandbox(this.#connection, info.id));
  }

  /** What was changed of a workspace lent with `overlay`. */
  diff({ signal }: CallOptions = {}): Promise<FileChange[]> {
    return this.#connection.list(`${this.#place}/workspace/changes`, "Changes", "changes", { signal });
  }

  /** Take changes of an overlaid workspace over into the directory of the server's host: all, or those at `paths`. */
  async apply(paths?: readonly string[], { signal }: CallOptions = {}): Promise<string[]> {
    const answer = await this.#connection.call("POST", `${this.#place}/workspace/apply`, { json: { paths }, signal, repeatable: true });
    return (answer as { paths: string[] }).paths;
  }

  /** What happened to it, from cursor `after` (an event's `seq`) on. */
  events(after = 0, { signal }: CallOptions = {}): Promise<JournalEvent[]> {
    return listEvents(this.#connection, { after, sandbox: this.id, signal });
  }

  /** End it and everything in it. */
  async delete({ signal }: CallOptions = {}): Promise<void> {
    await this.#connection.call("DELETE", this.#place, { signal });
    this.#asking?.abort();
  }

  /** `await using box = await Sandbox.create()`: it is deleted at the end of the block, if it has not ended by itself. */
  async [Symbol.asyncDispose](): Promise<void> {
    try {
      await this.delete();
    } catch (problem) {
      if (!(problem instanceof NotFound || problem instanceof SandboxLost)) throw problem;
    }
  }
}

function joined(pieces: Uint8Array[]): Uint8Array {
  return new Uint8Array(Buffer.concat(pieces));
}

/**
 * One command in a sandbox of its own, as it writes; the last event is `exited`. The sandbox ends with it, or when you leave, unless
 * `detach`.
 */
export async function* runStream(command: string | readonly string[], options: RunOptions = {}): AsyncGenerator<StreamEvent, void, undefined> {
  const { server, apiKey, requestTimeoutS, retries, signal, stdin, cwd, timeoutS, check: _check, detach, ...shape } = options;
  const connection = connect({ server, apiKey, requestTimeoutS, retries } satisfies ConnectOptions);
  const sandbox = write("Create", { ...createBody(shape, "run"), timeoutS: null });
  const json = { ...commandBody(command, { stdin, cwd, timeoutS }), sandbox, detach };
  yield* streamEvents(await connection.events("POST", "/run/stream", { json, signal, last: "exit" }));
}

/** One command in a sandbox of its own, which lives as long as the command; the rest of the options describes the sandbox. */
export async function run(command: string | readonly string[], options: RunOptions = {}): Promise<ExecResult> {
  for await (const event of runStream(command, options)) {
    if (event.type !== "exited") continue;
    if (options.check && !event.result.ok) throw commandFailed(command, event.result);
    return event.result;
  }
  throw error("internal_error", "the stream had no end"); // a cut one is connection_lost
}
