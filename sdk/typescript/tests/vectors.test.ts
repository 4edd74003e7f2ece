/** The shared vectors through this SDK: what it asks of the server, word for word, and what it makes of the answers. */

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { after, before, test } from "node:test";

import { ClocheError, Image, Pool, putTemplate, run, Sandbox, Snapshot, Template, VERSION, Volume } from "../src/index.js";
import type { CodeEvent, StreamEvent } from "../src/index.js";
import { camel } from "../src/shapes.js";
import { Between, type Seen } from "./between.js";
import { compare, fill, find, load, type Names, type Request, type Step } from "./vectors.js";

const url = process.env["CLOCHE_URL"] ?? "";
const key = process.env["CLOCHE_API_KEY"] ?? "";
const all = load(process.env["CLOCHE_VECTORS"] ?? "../vectors");
let between: Between;

before(async () => {
  between = await Between.open(url);
});
after(() => between[Symbol.asyncDispose]());

/** What a call takes by position; the rest are options. */
const POSITIONS: Record<string, string[]> = {
  exec: ["command"], exec_stream: ["command"], start: ["command"], run: ["command", "code"], run_code: ["code"], run_code_stream: ["code"], run_stream: ["code"],
  pull: ["reference"], build: ["recipe"], wait_ready: ["ready"], url: ["port"],
  read: ["path"], stat: ["path"], exists: ["path"], remove: ["path"], make_dir: ["path"], download: ["path"], list: ["path"],
  write: ["path", "data"], move: ["path", "target"], upload: ["path", "archive"],
  get: ["sandbox", "execution", "snapshot", "name", "reference"], signal: ["number"], resize: ["columns", "rows"],
  extend: ["timeout_s"], suspend: ["mode"], restore: ["snapshot"], fork: ["count"], diff: ["other"], scale: ["size"],
  create: ["language"],
};
const NAMED: Record<string, string[]> = { "Volume.create": ["name"], "Pool.create": ["template"], "Sandbox.create": [], "pool.claim": [] };
const NOUNS: Record<string, unknown> = { Sandbox, Snapshot, Volume, Pool, Image };

for (const [name, vector] of all) {
  if (vector.without?.["typescript"] !== undefined) continue;
  test(name, { timeout: 120_000 }, async () => {
    const names: Names = { unique: randomBytes(4).toString("hex") };
    const box = vector.box === false ? undefined : await Sandbox.create(options(fill(vector.box ?? {}, names)));
    if (box !== undefined) names["box"] = box;
    try {
      for (const step of vector.steps) await perform(step, names);
    } finally {
      await box?.[Symbol.asyncDispose]();
    }
  });
}

test("there are as many as there should be", () => assert.ok(all.length >= 60));

async function perform(step: Step, names: Names): Promise<void> {
  const first = between.seen.length;
  const given = fill(step.arguments ?? {}, names) as Record<string, unknown>;
  let outcome: unknown;
  let problem: unknown;
  try {
    outcome = await call(step, given, names);
  } catch (raised) {
    problem = raised;
  }
  if (step.error === undefined) {
    if (problem !== undefined) throw problem;
    if (step.save !== undefined) names[step.save] = outcome;
    if ("result" in step) compare(fill(step.result, names), outcome, step.call);
  } else {
    if (!(problem instanceof ClocheError)) throw problem ?? new Error(`${step.call} did not fail`);
    const { code, name, retryable, details } = problem;
    compare(step.error, { code, class: name, retryable, details }, step.call);
    if (step.wire.length > 0 && code !== "not_text" && code !== "command_failed" && code !== "execution_not_found") {
      assert.match(problem.requestId ?? "", /^[a-z0-9]{20}$/, "the server's name for the request");
    }
  }
  checkWire(step, between.seen.slice(first), names);
}

async function call(step: Step, given: Record<string, unknown>, names: Names): Promise<unknown> {
  const there = { server: between.url, apiKey: key };
  if (step.call === "put_template") {
    const { name, ...fields } = given["template"] as Record<string, unknown>;
    return putTemplate(new Template(String(name), camelled(fields)), there);
  }
  const [, noun, verb] = /^(?:(.*)\.)?(\w+)$/.exec(step.call) as unknown as [string, string | undefined, string];
  const places = NAMED[step.call] ?? (step.call.startsWith("Sandbox.") && verb === "list" ? [] : (POSITIONS[verb] ?? []));
  const positions = step.call === "p.write" ? ["data"] : places.filter((place) => place in given);
  const rest = camelled(Object.fromEntries(Object.entries(given).filter(([field]) => !positions.includes(field))));
  const values = positions.map((place) => given[place]);
  if (noun === undefined) return run(values[0] as string, { ...rest, ...there });
  const known = NOUNS[noun];
  const receiver = (known ?? find(names, noun)) as Record<string, (...given: unknown[]) => unknown>;
  const method = receiver[camel(verb)];
  assert.ok(method !== undefined, `${step.call} is not there`);
    const extra = known === undefined ? rest : { ...rest, ...there };
  const outcome = await method.call(receiver, ...values, ...(Object.keys(extra).length > 0 ? [extra] : []));
  if (verb === "exec_stream" || verb === "stream") return gathered(outcome as AsyncIterable<StreamEvent>, step.take ?? {});
  if (verb === "run_code_stream" || verb === "run_stream") return told(outcome as AsyncIterable<CodeEvent>);
  return given["format"] === "stream" ? joined(outcome as AsyncIterable<Uint8Array>) : outcome;
}

function options(given: unknown): Record<string, unknown> {
  return { ...camelled(given as Record<string, unknown>), server: between.url, apiKey: key };
}

function camelled(given: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(given).map(([name, value]) => [camel(name), value]));
}

async function gathered(events: AsyncIterable<StreamEvent>, take: Record<string, string>): Promise<unknown> {
  const told: Record<string, unknown> = { stdout: new Uint8Array(), stderr: new Uint8Array() };
  const text = (stream: string) => Buffer.from(told[stream] as Uint8Array).toString("latin1");
  for await (const event of events) {
    if (event.type === "output") told[event.stream] = new Uint8Array([...(told[event.stream] as Uint8Array), ...event.data]);
    if (event.type === "exited") told["result"] = event.result;
    if (Object.keys(take).length > 0 && Object.entries(take).every(([stream, wanted]) => text(stream).includes(wanted))) break;
  }
  return told;
}

async function told(events: AsyncIterable<CodeEvent>): Promise<unknown> {
  const all = { stdout: "", stderr: "", shown: [] as unknown[], failed: undefined as unknown, result: undefined as unknown };
  for await (const event of events) {
    if (event.type === "output") all[event.stream] += event.text;
    else if (event.type === "shown") all.shown.push(event.result);
    else if (event.type === "failed") all.failed = event.error;
    else if (event.type === "ended") all.result = event.result;
  }
  return all;
}

async function joined(pieces: AsyncIterable<Uint8Array>): Promise<Uint8Array> {
  const all: number[] = [];
  for await (const piece of pieces) all.push(...piece);
  return new Uint8Array(all);
}

/** Exactly these requests, in this order, with these words. */
function checkWire(step: Step, seen: Seen[], names: Names): void {
  const told = seen.map((one) => `${one.method} ${one.path}`);
  assert.deepEqual(told.length, step.wire.length, `${step.call} sent ${told.join(", ")}`);
  step.wire.forEach((expected, number) => checkRequest(expected, seen[number] as Seen, names, step));
}

function checkRequest(expected: Request, actual: Seen, names: Names, step: Step): void {
  const where = `${step.call}: ${expected.method} ${expected.path}`;
  assert.equal(actual.method, expected.method, where);
  const pattern = known(expected.path, names);
  if (typeof pattern === "string") assert.equal(actual.path, pattern, where);
  else assert.match(actual.path, pattern, where);
  for (const [field, value] of Object.entries(expected.query ?? {})) {
    const wanted = known(value, names);
    if (typeof wanted === "string") assert.equal(actual.query[field], wanted, `${where}?${field}`);
    else assert.match(actual.query[field] ?? "", wanted, `${where}?${field}`);
  }
  assert.deepEqual(Object.keys(actual.query).sort(), Object.keys(expected.query ?? {}).sort(), where);
  if (expected.body !== undefined) assert.deepEqual(JSON.parse(actual.body.toString("utf8")), fill(expected.body, names), where);
  else if (expected.raw !== undefined) {
    const raw = fill(expected.raw, names);
    assert.deepEqual(actual.body, Buffer.from(raw as Uint8Array), where);
    assert.equal(actual.headers["content-type"], "application/octet-stream", where);
  } else assert.equal(actual.body.length, 0, where);
  assert.equal(actual.headers["user-agent"], `cloche-typescript/${VERSION}`, where);
  assert.equal(actual.headers.authorization, `Bearer ${key}`, where);
  assert.equal(actual.headers["idempotency-key"] !== undefined, expected.idempotent === true, `${where}: Idempotency-Key`);
}

/** A text with what is known put in; what only the wire knows (an id between two requests) may be anything. */
function known(text: string, names: Names): string | RegExp {
  const open = [...text.matchAll(/<<([a-z0-9_]+)(?:\.[a-z0-9_.]+)?>>/g)].some(([, name]) => !((name ?? "") in names));
  if (!open) return fill(text, names) as string;
  const escaped = text.split(/(<<[a-z0-9_.]+>>)/).map((part) => {
    const [, path] = /^<<([a-z0-9_.]+)>>$/.exec(part) ?? [];
    if (path === undefined) return part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    return (path.split(".")[0] ?? "") in names ? String(find(names, path)) : "[^/]+";
  });
  return new RegExp(`^${escaped.join("")}$`);
}

