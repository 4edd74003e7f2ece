/** What happened: the server's journal, as a list and as it grows; and its audit log. */

import { connect, type CallOptions, type Connection } from "./connection.js";
import type { Line } from "./generated.js";
import type { ServerOptions } from "./stays.js";

/** One line of the journal, in the words of docs/reference: its number, its kind, and what belongs to the kind. */
export interface JournalEvent {
  seq: number;
  kind: string;
  [field: string]: unknown;
}

export interface EventOptions {
  /** Only what came after this `seq`. */
  after?: number;
  /** Only what happened to this sandbox. */
  sandbox?: string;
}

export function listEvents(connection: Connection, { after, sandbox, signal }: EventOptions & CallOptions): Promise<JournalEvent[]> {
  return connection.list("/v1/events", "Events", "events", { query: { after, sandbox }, signal });
}

/** What happened until now, oldest first. */
export function events(options: EventOptions & ServerOptions = {}): Promise<JournalEvent[]> {
  return listEvents(connect(options), options);
}

/** What happens, as it happens; a connection that breaks is made again, and nothing is lost or seen twice. */
export async function* followEvents(options: EventOptions & ServerOptions = {}): AsyncGenerator<JournalEvent, void, undefined> {
  const { after, sandbox, signal } = options;
  const stream = await connect(options).events("GET", "/v1/events/stream", { query: { after, sandbox }, signal, resume: true });
  for await (const { data } of stream) yield JSON.parse(data) as JournalEvent;
}

/** A line of the audit log. */
export type AuditLine = Line;

export interface AuditOptions {
  /** Unix time. */
  since?: number;
  until?: number;
  sandbox?: string;
  /** One kind of event, or several. */
  kind?: string | readonly string[];
  actor?: string;
  outcome?: string;
}

/** Who did what, oldest first; the key needs the scope `audit`. */
export function audit(options: AuditOptions & ServerOptions = {}): Promise<AuditLine[]> {
  const { since, until, sandbox, kind, actor, outcome, signal } = options;
  const query = { since, until, sandbox, kind: typeof kind === "string" ? kind : kind?.join(","), actor, outcome };
  return connect(options).list("/v1/audit", "Lines", "lines", { query, signal });
}
