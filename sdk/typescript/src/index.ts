/** The public names of `@cloche/sdk`, and nothing else. */

export { VERSION } from "./generated.js";
export type {
  AccessToken,
  ClaimInfo,
  CodeError,
  Condition,
  ContextInfo,
  Denial,
  ErrorCode,
  ExecutionInfo,
  FileChange,
  FileEvent,
  FileInfo,
  ImageInfo,
  ImageProgress,
  Isolation,
  Limit,
  Merged,
  PoolInfo,
  PortInfo,
  Question,
  SandboxInfo,
  SandboxUsage,
  SnapshotInfo,
  TemplateInfo,
  VolumeInfo,
} from "./generated.js";
export type { CallOptions, ConnectOptions } from "./connection.js";
export type { Answer, Asked } from "./asking.js";
export { Context, Contexts } from "./contexts.js";
export type {
  CodeBegan,
  CodeEnded,
  CodeEvent,
  CodeFailed,
  CodeOptions,
  CodeOutput,
  CodeResult,
  CodeShown,
  CodeStreamOptions,
  Display,
} from "./contexts.js";
export {
  CapacityExceeded,
  ClocheError,
  CommandFailed,
  Conflict,
  InternalError,
  InvalidInput,
  NotFound,
  NotSupported,
  PolicyRefused,
  SandboxError,
  SandboxLost,
  ServerUnavailable,
} from "./errors.js";
export { Files, type FileOptions, type ReadOptions } from "./files.js";
export { Image, type MakeOptions } from "./images.js";
export { audit, events, followEvents, type AuditLine, type AuditOptions, type EventOptions, type JournalEvent } from "./journal.js";
export { Pool, putTemplate, Template, type ClaimOptions, type PoolOptions, type TemplateFields } from "./pools.js";
export { Forward } from "./ports.js";
export { Process, Processes, type CommandOptions, type ExecOptions, type ExecStreamOptions, type StartOptions } from "./processes.js";
export type { Denied, ExecResult, Exited, Output, StreamEvent, Truncated } from "./results.js";
export {
  run,
  runStream,
  Sandbox,
  SandboxPolicy,
  type NetworkMode,
  type NetworkOptions,
  type PolicyFields,
  type RunOptions,
  type SandboxOptions,
  type Shape,
} from "./sandbox.js";
export { Snapshot, Volume, type Identified, type ServerOptions, type VolumeMount } from "./stays.js";
export { Tunnel } from "./websocket.js";
