import assert from "node:assert/strict";
import { test } from "node:test";

import { EventParser, parseEvents, type ServerEvent } from "../src/sse.js";
import { camel, read, snake, write } from "../src/shapes.js";

const SOURCE = ': hello\r\n\r\nid: 1\r\nevent: stdout\r\ndata: {"text":"grüße 🫙"}\r\n\r\n: still here\n\nid: 2\ndata: a\ndata:b\ndata\n\nevent: lost\n\ndata:  two\r\rdata: half';
const EVENTS = [
  { kind: "stdout", data: '{"text":"grüße 🫙"}', id: "1" },
  { kind: "message", data: "a\nb\n", id: "2" },
  { kind: "message", data: " two", id: undefined },
];

async function parsed(pieces: Uint8Array[]): Promise<ServerEvent[]> {
  const found: ServerEvent[] = [];
  async function* body(): AsyncGenerator<Uint8Array> {
    yield* pieces;
  }
  for await (const event of parseEvents(body())) found.push(event);
  return found;
}

test("events, comments, and what is not whole", async () => {
  assert.deepEqual(await parsed([Buffer.from(SOURCE)]), EVENTS);
});

test("wherever the bytes are cut", async () => {
  const bytes = Buffer.from(SOURCE);
  for (let at = 0; at <= bytes.length; at += 1) assert.deepEqual(await parsed([bytes.subarray(0, at), bytes.subarray(at)]), EVENTS, `cut at ${at}`);
  assert.deepEqual(await parsed([...bytes].map((byte) => Uint8Array.of(byte))), EVENTS);
});

test("an id with a zero byte is ignored", () => {
  assert.equal(new EventParser().feed("id: a\0b\ndata: x\n\n")[0]?.id, undefined);
});

test("names go both ways", () => {
  for (const [wire, ours] of [["timeout_s", "timeoutS"], ["p50_ms", "p50Ms"], ["stdin_base64", "stdinBase64"], ["id", "id"]] as const) {
    assert.equal(camel(wire), ours);
    assert.equal(snake(ours), wire);
  }
});

test("fields are renamed, keys of maps are not", () => {
  const wire = { id: "x", created_at: 1, labels: { a_b: "c_d" }, limits: { memory_mib: { value: 1, enforcement: "none", by: "x" } }, isolation: { landlock_abi: 3 } };
  assert.deepEqual(read("SandboxInfo", wire), {
    id: "x", createdAt: 1, labels: { a_b: "c_d" }, limits: { memory_mib: { value: 1, enforcement: "none", by: "x" } }, isolation: { landlockAbi: 3 },
  });
  assert.deepEqual(read("Contexts", { contexts: [{ id: "a" }], new_one: 1 }), { contexts: [{ id: "a" }], newOne: 1 });
  assert.deepEqual(write("Create", { timeoutS: null, name: undefined, volumes: { "/a_b": { volume: "v", readOnly: true } }, policy: { network: { mode: "off" } } }), {
    timeout_s: null, volumes: { "/a_b": { volume: "v", read_only: true } }, policy: { network: { mode: "off" } },
  });
});
