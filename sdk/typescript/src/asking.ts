/**
 * A callback that decides what a sandbox may reach, where no rule does. It is asked from when the sandbox is made until it ends; what it
 * throws, or says that is no answer, is a refusal with that reason. "always" is for the sandbox and for sandboxes to come; where a rule
 * says `ask`, it is for the sandbox only, for such a rule asks every time.
 */

import type { Connection } from "./connection.js";
import { error } from "./errors.js";
import type { Question } from "./generated.js";
import { read } from "./shapes.js";
import type { ServerEvent } from "./sse.js";

export type Answer = "once" | "sandbox" | "always" | "deny";
export type Asked = (question: Question) => Answer | Promise<Answer>;

const ANSWERS: readonly string[] = ["once", "sandbox", "always", "deny"];

/** From when this resolves connections wait for the callback; until the controller is aborted, or the sandbox ends. */
export async function answerQuestions(
  connection: Connection,
  sandbox: string,
  ask: Asked,
  signal: AbortSignal | undefined,
): Promise<AbortController> {
  const over = new AbortController();
  const place = `/v1/sandboxes/${encodeURIComponent(sandbox)}/asks`;
  signal?.throwIfAborted();
  const events = await connection.events("GET", place, { signal: over.signal });
  const first = await events.next();
  if (first.done || first.value.kind !== "ready") throw error("internal_error", "the server does not ask");
  void serve(connection, place, ask, events).catch(() => undefined); // it ended, or nobody is asked any more
  return over;
}

async function serve(connection: Connection, place: string, ask: Asked, events: AsyncIterable<ServerEvent>): Promise<void> {
  for await (const { kind, data } of events) {
    if (kind !== "question") continue;
    void answer(connection, place, ask, read<Question>("Question", JSON.parse(data))).catch(() => undefined); // its time was up
  }
}

async function answer(connection: Connection, place: string, ask: Asked, question: Question): Promise<void> {
  let [said, reason] = await decide(ask, question);
  if (said === "always") {
    said = "sandbox";
    const rule = question.port ? `${question.host}:${question.port}` : question.host;
    if (!question.rule) await connection.call("POST", "/v1/policies/allow", { json: { rule } }).catch(() => undefined); // not every key may
  }
  const json = { answer: said, reason };
  await connection.call("POST", `${place}/${encodeURIComponent(question.id)}`, { json, repeatable: true });
}

async function decide(ask: Asked, question: Question): Promise<[Answer, string]> {
  let said: unknown;
  try {
    said = await ask(question);
  } catch (problem) {
    return ["deny", `the callback that decides failed: ${String(problem)}`];
  }
  if (typeof said === "string" && ANSWERS.includes(said)) return [said as Answer, ""];
  return ["deny", `the callback that decides said ${JSON.stringify(said)}, which is none of ${ANSWERS.join(", ")}`];
}
