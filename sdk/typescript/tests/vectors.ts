/**
 * The shared test vectors, and how an outcome is compared with what they expect. sdk/vectors/README.md says what the words mean. Python's
 * suite has a twin of this module, `tests/sdk/vectors.py`: a rule that changes here changes there.
 */

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

import { camel } from "../src/shapes.js";

export interface Request {
  method: string;
  path: string;
  query?: Record<string, string>;
  body?: unknown;
  raw?: unknown;
  idempotent?: boolean;
  save?: Record<string, string>;
}

export interface Step {
  call: string;
  arguments?: Record<string, unknown>;
  save?: string;
  take?: Record<string, string>;
  result?: unknown;
  error?: unknown;
  wire: Request[];
}

export interface Vector {
  name: string;
  box?: Record<string, unknown> | false;
  without?: Record<string, string>;
  steps: Step[];
}

export type Names = Record<string, unknown>;

export function load(place: string): [name: string, vector: Vector][] {
  const files = readdirSync(place).filter((file) => file.endsWith(".json"));
  return files.sort().flatMap((file) => {
    const { vectors } = JSON.parse(readFileSync(join(place, file), "utf8")) as { vectors: Vector[] };
    return vectors.map((vector): [string, Vector] => [`${file.replace(/\.json$/, "")}/${vector.name}`, vector]);
  });
}

/** With what was saved in place of `<<name.path>>`, and bytes in place of `{"$bytes": …}`. */
export function fill(value: unknown, names: Names): unknown {
  if (typeof value === "string") return value.replace(/<<([a-z0-9_.]+)>>/g, (_, path: string) => String(find(names, path)));
  if (Array.isArray(value)) return value.map((item) => fill(item, names));
  if (typeof value !== "object" || value === null) return value;
  if ("$bytes" in value) return new Uint8Array(Buffer.from(String(value.$bytes), "base64"));
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, fill(item, names)]));
}

export function find(whole: unknown, path: string): unknown {
  for (const part of path.split(".")) {
    whole = get(whole, part);
    assert.notEqual(whole, undefined, `there is no ${part} in ${path}`);
  }
  return whole;
}

/** By the wire's name, or by ours. */
function get(whole: unknown, name: string): unknown {
  if (typeof whole !== "object" || whole === null) return undefined;
  const fields = whole as Record<string, unknown>;
  return name in fields ? fields[name] : fields[camel(name)];
}

/** The actual value has everything that is expected; what is not mentioned may be anything. */
export function compare(expected: unknown, actual: unknown, where: string): void {
  if (Array.isArray(expected)) {
    assert.ok(Array.isArray(actual), `${where} is no list`);
    assert.equal(actual.length, expected.length, `${where}: ${show(actual)}`);
    expected.forEach((value, number) => compare(value, actual[number], `${where}[${number}]`));
  } else if (expected instanceof Uint8Array) {
    assert.ok(actual instanceof Uint8Array, `${where} is no bytes`);
    assert.deepEqual([...actual], [...expected], where);
  } else if (typeof expected === "object" && expected !== null) {
    for (const [key, value] of Object.entries(expected)) {
      if (key.startsWith("$")) {
        rule(key, value, actual, where);
      } else {
        const found = get(actual, key);
        assert.notEqual(found, undefined, `${where} has no ${key}: ${show(actual)}`);
        compare(value, found, `${where}.${key}`);
      }
    }
  } else {
    assert.equal(actual, expected, where);
  }
}

function rule(name: string, value: unknown, actual: unknown, where: string): void {
  switch (name) {
    case "$any":
      return;
    case "$match":
      return assert.match(String(actual), new RegExp(String(value)), where);
    case "$min":
      return assert.ok((actual as number) >= (value as number), `${where}: ${show(actual)} is less than ${show(value)}`);
    case "$length":
      return assert.equal((actual as unknown[]).length, value, where);
    case "$type":
      return assert.equal(actual instanceof Uint8Array ? "bytes" : typeof actual, value, where);
    case "$has":
      for (const wanted of value as unknown[]) {
        assert.ok((actual as unknown[]).some((item) => matches(wanted, item)), `${where}: no ${show(wanted)} in ${show(actual)}`);
      }
      return;
    case "$tar":
      return assert.deepEqual(untar(actual as Uint8Array), value, where);
    default:
      throw new Error(`no rule is called ${name}`);
  }
}

function matches(expected: unknown, actual: unknown): boolean {
  try {
    compare(expected, actual, "");
  } catch {
    return false;
  }
  return true;
}

/** The regular files of a tar, by name. */
export function untar(archive: Uint8Array): Record<string, string> {
  const found: Record<string, string> = {};
  const text = (start: number, length: number) => Buffer.from(archive.subarray(start, start + length)).toString("utf8").split("\0")[0] ?? "";
  for (let at = 0; at + 512 <= archive.length && archive[at] !== 0; ) {
    const size = parseInt(text(at + 124, 12).trim() || "0", 8);
    const kind = text(at + 156, 1);
    if (kind === "0" || kind === "") found[text(at, 100).replace(/^\.\//, "")] = Buffer.from(archive.subarray(at + 512, at + 512 + size)).toString("utf8");
    at += 512 + Math.ceil(size / 512) * 512;
  }
  return found;
}

function show(value: unknown): string {
  return JSON.stringify(value)?.slice(0, 500) ?? String(value);
}
