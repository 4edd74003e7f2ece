/** What a command gave, and what a stream of it carries. */

import type { Denial, Isolation, Result } from "./generated.js";
import { read } from "./shapes.js";

/** A finished command; or, where `process` is set, one that went on in the background. */
export interface ExecResult {
  /** null where a signal ended it, and while it goes on. */
  exitCode: number | null;
  signal: number | null;
  timedOut: boolean;
  oomKilled: boolean;
  /** As UTF-8; what is not valid is replaced. The bytes are exact. */
  stdout: string;
  stderr: string;
  stdoutBytes: Uint8Array;
  stderrBytes: Uint8Array;
  /** The middle of the output was left out: `stdoutTotal` and `stderrTotal` say how much there was. */
  truncated: boolean;
  stdoutTotal: number;
  stderrTotal: number;
  durationMs: number;
  cpuMs: number;
  maxRssMib: number;
  denials: Denial[];
  isolation: Isolation;
  execution: string;
  /** For `processes.get`, where the command went on in the background. */
  process: string | null;
  /** Where it ran, if the sandbox of `run` was told to stay. */
  sandbox: string | null;
  /** One number as shells say it: 124 for a time-out, 128+N for signal N. */
  shellCode: number;
  /** Whether it exited with 0. */
  ok: boolean;
}

export interface Output {
  type: "output";
  stream: "stdout" | "stderr";
  data: Uint8Array;
  seq: number;
}

export interface Denied {
  type: "denied";
  denial: Denial;
  seq: number;
}

/** Bytes of a stream that this follower does not get. */
export interface Truncated {
  type: "truncated";
  stream: "stdout" | "stderr";
  skipped: number;
  seq: number;
}

export interface Exited {
  type: "exited";
  result: ExecResult;
  seq: number;
}

export type StreamEvent = Output | Denied | Truncated | Exited;

export function execResult(value: unknown): ExecResult {
  const { code, stdoutBase64, stderrBase64, ...rest } = read<Result>("Result", value);
  return {
    ...rest,
    stdoutBytes: bytes(rest.stdout, stdoutBase64),
    stderrBytes: bytes(rest.stderr, stderrBase64),
    shellCode: code,
    ok: rest.exitCode === 0,
  };
}

/** An event of `/run/stream` or of an execution's stream; undefined for one that is not output (`start`, or a newer server's). */
export function streamEvent(kind: string, data: Record<string, unknown>, id: string | undefined): StreamEvent | undefined {
  const seq = Number(data["seq"] ?? id ?? 0);
  switch (kind) {
    case "stdout":
    case "stderr":
      return { type: "output", stream: kind, data: bytes(String(data["text"] ?? ""), data["data"]), seq };
    case "denied":
      return { type: "denied", denial: read("Denial", data["denial"]), seq };
    case "truncated":
      return { type: "truncated", stream: data["stream"] as "stdout" | "stderr", skipped: Number(data["skipped"]), seq };
    case "exit":
      return { type: "exited", result: execResult(data), seq };
    default:
      return undefined;
  }
}

function bytes(text: string, base64: unknown): Uint8Array {
  return typeof base64 === "string" ? plain(Buffer.from(base64, "base64")) : new TextEncoder().encode(text);
}

/** Bytes that belong to nobody else: small Buffers share one allocation. */
export function plain(data: Uint8Array): Uint8Array {
  return new Uint8Array(data);
}
