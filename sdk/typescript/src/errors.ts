/**
 * What goes wrong, as classes: one where a caller would do something different, and a stable `code` for the rest. The table of codes
 * is generated from the server's own, so an error has the same class here and in Python.
 */

import { codes, type ErrorCode } from "./generated.js";
import type { ExecResult } from "./results.js";

export interface ErrorParts {
  code?: string;
  hint?: string | null;
  details?: Record<string, unknown>;
  requestId?: string | null;
  cause?: unknown;
}

/** Anything that Cloche reports; never a failing command, which is a result. */
export class ClocheError extends Error {
  /** Stable, snake_case, noun first: `sandbox_not_found`. */
  readonly code: string;
  /** What to do about it. */
  readonly hint: string | null;
  /** Whether the same request may succeed later; null where nobody knows. */
  readonly retryable: boolean | null;
  readonly details: Record<string, unknown>;
  /** The server's log has it under this id. */
  readonly requestId: string | null;

  constructor(message: string, parts: ErrorParts = {}) {
    super(message, parts.cause === undefined ? undefined : { cause: parts.cause });
    this.name = new.target.name;
    this.code = parts.code ?? "internal_error";
    this.hint = parts.hint ?? null;
    this.retryable = Object.hasOwn(codes, this.code) ? codes[this.code as ErrorCode][1] : null;
    this.details = parts.details ?? {};
    this.requestId = parts.requestId ?? null;
  }
}

/** The request itself is wrong; sending it again is useless. */
export class InvalidInput extends ClocheError {}
/** The request is well formed, a rule forbids it. */
export class PolicyRefused extends InvalidInput {}
/** The named thing is not there, or not yours. */
export class NotFound extends ClocheError {}
/** It exists, in a state or with a body that forbids this. */
export class Conflict extends ClocheError {}
/** The sandbox failed; what ran in it is gone. */
export class SandboxError extends ClocheError {}
/** It ended while in use: killed, expired, or its engine died. */
export class SandboxLost extends SandboxError {}
/** A limit of the server or its host; later may work. */
export class CapacityExceeded extends ClocheError {}
/** The server's host, driver or platform cannot do it. */
export class NotSupported extends ClocheError {}
/** The server does not answer. */
export class ServerUnavailable extends ClocheError {}
/** A command failed and the caller asked for `check`; `result` holds everything. */
export class CommandFailed extends ClocheError {
  declare readonly result: ExecResult;
}
/** A defect of ours. */
export class InternalError extends ClocheError {}

const classes = {
  ClocheError,
  InvalidInput,
  PolicyRefused,
  NotFound,
  Conflict,
  SandboxError,
  SandboxLost,
  CapacityExceeded,
  NotSupported,
  ServerUnavailable,
  CommandFailed,
  InternalError,
} satisfies Record<string, typeof ClocheError>;

/** The error of a code, in the class that belongs to it. */
export function error(code: ErrorCode, message: string, parts: Omit<ErrorParts, "code"> = {}): ClocheError {
  return new classes[codes[code][0]](message, { ...parts, code });
}

/** An error that crossed the wire. A code that this version does not know (a newer server's) stays readable in `code`. */
export function fromWire(fault: Record<string, unknown>, requestId: string | null): ClocheError {
  const code = String(fault["code"]);
  const message = String(fault["message"]);
  const parts: ErrorParts = {
    code,
    hint: typeof fault["hint"] === "string" ? fault["hint"] : null,
    details: isRecord(fault["details"]) ? fault["details"] : {},
    requestId: typeof fault["request_id"] === "string" ? fault["request_id"] : requestId,
  };
  if (!Object.hasOwn(codes, code)) return new ClocheError(message, parts);
  return new classes[codes[code as ErrorCode][0]](message, parts);
}

export function commandFailed(command: string | readonly string[], result: ExecResult): CommandFailed {
  const shown = (typeof command === "string" ? command : command.join(" ")).slice(0, 200);
  const made = new CommandFailed(`'${shown}' ended with ${result.shellCode}`, {
    code: "command_failed",
    hint: result.stderr.slice(-500) || null,
    details: { exit_code: result.exitCode, signal: result.signal, timed_out: result.timedOut },
  });
  Object.defineProperty(made, "result", { value: result });
  return made;
}

/** Options that nobody knows are an error, as unknown fields are everywhere: types are not there at run time. */
export function refuseUnknown(what: string, unknown: object): void {
  const names = Object.keys(unknown);
  if (names.length > 0) {
    throw error("field_unknown", `${what} has no option ${names.map((name) => `'${name}'`).join(", ")}`, {
      hint: "docs/reference/typescript.md lists them",
      details: { field: names[0] },
    });
  }
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
