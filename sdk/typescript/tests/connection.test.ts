/** What goes wrong between a client and a server, against servers that do it on purpose: refusals first. */

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer, type AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, test } from "node:test";

import * as sdk from "../src/index.js";
import { ClocheError, NotFound, PolicyRefused, Sandbox, SandboxLost, ServerUnavailable, Volume } from "../src/index.js";
import { find } from "../src/finding.js";
import { codes } from "../src/generated.js";
import { Fake, json, refuse, type Answer } from "./fake.js";

const NAMES = ["CLOCHE_URL", "CLOCHE_API_KEY", "CLOCHE_HOME", "XDG_STATE_HOME", "HOME"];
let saved: Record<string, string | undefined>;
let home: string;

beforeEach(() => {
  saved = Object.fromEntries(NAMES.map((name) => [name, process.env[name]]));
  for (const name of NAMES) delete process.env[name];
  home = mkdtempSync(join(tmpdir(), "cl-"));
});
afterEach(() => {
  for (const name of NAMES) {
    if (saved[name] === undefined) delete process.env[name];
    else process.env[name] = saved[name];
  }
  rmSync(home, { recursive: true });
});

async function problemOf(work: Promise<unknown>): Promise<ClocheError> {
  try {
    await work;
  } catch (problem) {
    assert.ok(problem instanceof ClocheError, String(problem));
    return problem;
  }
  throw new Error("it did not fail");
}

const info = { spec: { name: "v", size_mib: 1, labels: {} }, created_at: 1, used_bytes: 0, limit: {}, attached: {} };
const volumeOf = (fake: Fake, more: sdk.ConnectOptions = {}) => Volume.get("v", { server: fake.url, apiKey: "cl_k", ...more });

// ── finding the server ─────────────────────────────────────────────────────────────────────────────

for (const address of ["unix:/run/cloche.sock", "ftp://x", "127.0.0.1:7777", "nonsense", "//x"]) {
  test(`${address} is not an address`, async () => {
    const problem = await problemOf(Sandbox.list({ server: address }));
    assert.equal(problem.code, "server_unavailable");
    assert.ok(problem instanceof ServerUnavailable);
    assert.match(problem.hint ?? "", /http:\/\//);
  });
}

test("a socket's address says what to do instead", async () => {
  process.env["CLOCHE_URL"] = "unix:/run/cloche.sock";
  const problem = await problemOf(Sandbox.list());
  assert.match(problem.message, /does not speak HTTP/);
  assert.match(problem.hint ?? "", /cloche serve/);
});

test("nobody named and nobody here", async () => {
  process.env["CLOCHE_HOME"] = home;
  const problem = await problemOf(Sandbox.list());
  assert.equal(problem.code, "server_unavailable");
  assert.ok(problem.message.includes(join(home, "keys", "default.key")));
  assert.match(problem.hint ?? "", /cloche serve/);
});

test("the server of this machine and its key", () => {
  mkdirSync(join(home, "state/cloche/keys"), { recursive: true });
  writeFileSync(join(home, "state/cloche/keys/default.key"), "cl_local\n");
  process.env["XDG_STATE_HOME"] = join(home, "state");
  assert.deepEqual({ ...find(undefined, undefined), url: undefined }, { url: undefined, apiKey: "cl_local" });
  assert.equal(find(undefined, undefined).url.href, "http://127.0.0.1:7777/");
  process.env["CLOCHE_API_KEY"] = "cl_set";
  assert.equal(find(undefined, undefined).apiKey, "cl_set");
  assert.equal(find(undefined, "cl_given").apiKey, "cl_given");
});

test("the key of this machine's server goes to no other", () => {
  mkdirSync(join(home, "keys"));
  writeFileSync(join(home, "keys/default.key"), "cl_local");
  process.env["CLOCHE_HOME"] = home;
  assert.equal(find("http://elsewhere.example", undefined).apiKey, undefined);
  process.env["CLOCHE_URL"] = "https://elsewhere.example/base";
  assert.equal(find(undefined, undefined).apiKey, undefined);
  assert.equal(find("http://given.example", undefined).url.hostname, "given.example");
});

test("a dead server is an error, never another one", async () => {
  const closed = createServer();
  await new Promise<void>((resolve) => closed.listen(0, "127.0.0.1", resolve));
  const { port } = closed.address() as AddressInfo;
  await new Promise((resolve) => closed.close(resolve));
  const problem = await problemOf(Sandbox.list({ server: `http://127.0.0.1:${port}`, retries: 0 }));
  assert.equal(problem.code, "server_unavailable");
  assert.match(problem.message, /ECONNREFUSED/);
  assert.equal(problem.retryable, true);
});

// ── answers ────────────────────────────────────────────────────────────────────────────────────────

test("what answers is not ours", async () => {
  await using fake = await Fake.open((_, response) => response.writeHead(418).end("<html>teapot</html>"));
  const problem = await problemOf(volumeOf(fake));
  assert.equal(problem.code, "server_unavailable");
  assert.match(problem.message, /418.*teapot/);
});

test("an error arrives whole", async () => {
  await using fake = await Fake.open((_, response) => refuse(response, 404, "volume_not_found"));
  const problem = await problemOf(volumeOf(fake));
  assert.ok(problem instanceof NotFound);
  assert.deepEqual(
    [problem.name, problem.code, problem.message, problem.hint, problem.retryable, problem.details, problem.requestId],
    ["NotFound", "volume_not_found", "no", "try", false, { a: 1 }, "r".repeat(20)],
  );
});

test("a code of a newer server stays readable", async () => {
  await using fake = await Fake.open((_, response) => refuse(response, 400, "moon_phase_wrong"));
  const problem = await problemOf(volumeOf(fake));
  assert.deepEqual([problem.name, problem.code, problem.retryable], ["ClocheError", "moon_phase_wrong", null]);
});

test("every code has its class", () => {
  for (const [code, [name]] of Object.entries(codes)) assert.ok(name in sdk, `${code}: ${name}`);
  assert.ok(new Set(Object.values(codes).map(([name]) => name)).size <= 15);
  assert.ok(SandboxLost.prototype instanceof sdk.SandboxError);
  assert.ok(PolicyRefused.prototype instanceof sdk.InvalidInput);
});

test("fields that a newer server adds pass through", async () => {
  await using fake = await Fake.open((_, response) => json(response, 200, { ...info, new_field: { inner_name: 1 } }));
  const volume = await volumeOf(fake);
  const told = (await volume.info()) as unknown as Record<string, unknown>;
  assert.deepEqual([told["usedBytes"], told["newField"]], [0, { inner_name: 1 }]);
});

// ── repeating ──────────────────────────────────────────────────────────────────────────────────────

const once =
  (first: Answer): Answer =>
  (asked, response, number) =>
    number === 1 ? first(asked, response, number) : json(response, asked.method === "POST" ? 201 : 200, info);
const broken = once((_, response) => void response.socket?.destroy());

test("too many requests: wait as told, then again", async () => {
  await using fake = await Fake.open(once((_, response) => refuse(response, 429, "rate_exceeded", { "Retry-After": "1" })));
  const began = performance.now();
  await volumeOf(fake);
  assert.equal(fake.asked.length, 2);
  assert.ok(performance.now() - began >= 950, "it waited");
});

test("a full server is not asked again", async () => {
  await using fake = await Fake.open((_, response) => refuse(response, 429, "capacity_exceeded"));
  const problem = await problemOf(volumeOf(fake));
  assert.deepEqual([problem.code, problem.retryable, fake.asked.length], ["capacity_exceeded", true, 1]);
});

test("a server that is away for a moment", async () => {
  await using fake = await Fake.open(once((_, response) => refuse(response, 503, "server_unavailable")));
  await volumeOf(fake);
  assert.equal(fake.asked.length, 2);
});

test("a broken connection, where asking twice is asking once", async () => {
  await using fake = await Fake.open(broken);
  await volumeOf(fake);
  assert.equal(fake.asked.length, 2);
});

test("an answer that breaks off is asked for again", async () => {
  await using fake = await Fake.open(
    once((_, response) => {
      response.writeHead(200, { "Content-Length": "1000" });
      response.write("{", () => response.socket?.destroy());
    }),
  );
  await volumeOf(fake);
  assert.equal(fake.asked.length, 2);
});

test("what makes something is repeated under one key", async () => {
  await using fake = await Fake.open(broken);
  await Volume.create("v", { server: fake.url, apiKey: "cl_k" });
  const keys = fake.asked.map((asked) => asked.headers["idempotency-key"]);
  assert.equal(keys.length, 2);
  assert.ok(keys[0] !== undefined && keys[0] === keys[1]);
  await Volume.create("v", { server: fake.url, apiKey: "cl_k" });
  assert.notEqual(fake.asked[2]?.headers["idempotency-key"], keys[0]);
});

test("what runs something is sent once", async () => {
  await using fake = await Fake.open((asked, response) =>
    asked.url.endsWith("/exec") ? void response.socket?.destroy() : json(response, 201, { id: "b" }),
  );
  const box = await Sandbox.create({ server: fake.url, apiKey: "cl_k" });
  const problem = await problemOf(box.exec("rm -r old"));
  assert.equal(problem.code, "connection_lost");
  assert.match(problem.hint ?? "", /may have happened/);
  assert.equal(fake.asked.filter((asked) => asked.url.endsWith("/exec")).length, 1);
});

test("retries: 0 asks once", async () => {
  await using fake = await Fake.open(broken);
  assert.equal((await problemOf(volumeOf(fake, { retries: 0 }))).code, "connection_lost");
  assert.equal(fake.asked.length, 1);
});

test("a deletion whose answer was lost has happened", async () => {
  await using fake = await Fake.open((asked, response) => {
    if (asked.method === "GET") return json(response, 200, info);
    if (fake.asked.filter((one) => one.method === "DELETE").length === 1) return void response.socket?.destroy();
    return refuse(response, 404, "volume_not_found");
  });
  await (await volumeOf(fake)).delete();
  assert.equal(fake.asked.length, 3);
});

// ── patience ───────────────────────────────────────────────────────────────────────────────────────

test("an answer that does not come in time", async () => {
  await using fake = await Fake.open(() => undefined);
  const problem = await problemOf(volumeOf(fake, { requestTimeoutS: 0.2 }));
  assert.equal(problem.code, "server_unavailable");
  assert.match(problem.message, /within 0.2 s/);
  assert.equal(fake.asked.length, 1);
});

test("waiting for a command is not waiting for an answer", async () => {
  await using fake = await Fake.open((asked, response) => {
    if (!asked.url.endsWith("/exec")) return json(response, 201, { id: "b" });
    return void setTimeout(() => json(response, 200, { exit_code: 0, stdout: "", stderr: "", denials: [] }), 2500);
  });
  const box = await Sandbox.create({ server: fake.url, apiKey: "cl_k", requestTimeoutS: 2 });
  assert.equal((await box.exec("sleep")).exitCode, 0);
  assert.equal((await problemOf(box.exec("sleep", { timeoutS: 0.01 }))).code, "server_unavailable");
});

test("an aborted call throws the reason, before and while it runs", async () => {
  let left: () => void;
  const gone = new Promise<void>((resolve) => (left = resolve));
  await using fake = await Fake.open((_, response) => void response.on("close", () => left()));
  const reason = new Error("enough");
  await assert.rejects(Sandbox.list({ server: fake.url, signal: AbortSignal.abort(reason) }), reason);
  assert.equal(fake.asked.length, 0);
  const controller = new AbortController();
  const listing = Sandbox.list({ server: fake.url, signal: controller.signal });
  setTimeout(() => controller.abort(reason), 100);
  await assert.rejects(listing, reason);
  await gone;
  assert.equal(fake.asked.length, 1);
});

// ── streams ────────────────────────────────────────────────────────────────────────────────────────

const head = { "Content-Type": "text/event-stream" };
const line = (seq: number) => `id: ${seq}\nevent: sandbox_created\ndata: {"seq":${seq},"kind":"sandbox_created"}\n\n`;

async function followed(fake: Fake, more: sdk.ConnectOptions = {}): Promise<number[]> {
  const seen: number[] = [];
  for await (const event of sdk.followEvents({ server: fake.url, apiKey: "cl_k", ...more })) seen.push(event.seq);
  return seen;
}

test("a stream goes on after the last event that came", async () => {
  await using fake = await Fake.open((_, response, number) => {
    response.writeHead(200, head);
    if (number === 1) response.write(line(1) + line(2) + line(3).slice(0, 20), () => response.socket?.destroy());
    else response.end(": still here\n\n" + line(3) + line(4));
  });
  assert.deepEqual(await followed(fake), [1, 2, 3, 4]);
  assert.deepEqual(fake.asked.map((asked) => asked.headers["last-event-id"]), [undefined, "2"]);
});

test("a stream that never gets on is given up", async () => {
  await using fake = await Fake.open((_, response) => {
    response.writeHead(200, head);
    response.write(": nothing\n\n", () => response.socket?.destroy());
  });
  assert.equal((await problemOf(followed(fake, { retries: 1 }))).code, "connection_lost");
  assert.equal(fake.asked.length, 2);
});

test("a command's stream that ends without its end goes on too", async () => {
  const result = { exit_code: 0, stdout: "ab", stderr: "", denials: [] };
  await using fake = await Fake.open((asked, response) => {
    if (asked.method === "POST") return json(response, 201, { id: "x", pid: 2 });
    response.writeHead(200, head);
    if (asked.headers["last-event-id"] === undefined) return void response.end('id: 1\nevent: stdout\ndata: {"seq":1,"text":"a"}\n\n');
    return void response.end(`id: 2\nevent: stdout\ndata: {"seq":2,"text":"b"}\n\nid: 3\nevent: exit\ndata: ${JSON.stringify(result)}\n\n`);
  });
  const box = await Sandbox.create({ server: fake.url, apiKey: "cl_k" });
  const seen: string[] = [];
  for await (const event of box.execStream("x")) seen.push(event.type === "output" ? String(event.data) : event.type);
  assert.deepEqual(seen, ["97", "98", "exited"]);
});

test("a one-shot that breaks is lost with its sandbox", async () => {
  await using fake = await Fake.open((_, response) => {
    response.writeHead(200, head);
    response.end('event: start\ndata: {"sandbox":"s","execution":"e"}\n\n');
  });
  assert.equal((await problemOf(sdk.run("true", { server: fake.url, apiKey: "cl_k" }))).code, "connection_lost");
  assert.equal(fake.asked.length, 1);
});

test("an error in a stream is thrown", async () => {
  await using fake = await Fake.open((_, response) => {
    response.writeHead(200, { ...head, "X-Request-ID": "abc" });
    response.end(`event: error\ndata: {"code":"sandbox_lost","message":"gone","hint":null,"details":{}}\n\n`);
  });
  const problem = await problemOf(followed(fake));
  assert.ok(problem instanceof SandboxLost);
  assert.equal(problem.requestId, "abc");
});

test("a watch cannot be resumed, and says so", async () => {
  await using fake = await Fake.open((asked, response) => {
    if (!asked.url.includes("/watch")) return json(response, 201, { id: "b" });
    response.writeHead(200, head);
    return void response.write('event: write\ndata: {"type":"write","path":"a"}\n\n', () => response.socket?.destroy());
  });
  const box = await Sandbox.create({ server: fake.url, apiKey: "cl_k" });
  const seen: string[] = [];
  const problem = await problemOf(
    (async () => {
      for await (const event of await box.files.watch()) seen.push(event.path);
    })(),
  );
  assert.deepEqual([problem.code, seen], ["connection_lost", ["a"]]);
});

test("leaving a stream closes its connection", async () => {
  let left: () => void;
  const gone = new Promise<void>((resolve) => (left = resolve));
  await using fake = await Fake.open((_, response) => {
    response.on("close", () => left());
    response.writeHead(200, head);
    response.write(line(1));
  });
  for await (const event of sdk.followEvents({ server: fake.url, apiKey: "cl_k" })) {
    assert.equal(event.seq, 1);
    break;
  }
  await gone;
});

// ── options ────────────────────────────────────────────────────────────────────────────────────────

test("options that nobody knows are refused before anything is sent", async () => {
  await using fake = await Fake.open((_, response) => json(response, 201, { id: "b" }));
  const there = { server: fake.url, apiKey: "cl_k" };
  const wrong = { memoryMB: 5 } as object;
  for (const work of [() => Sandbox.create({ ...there, ...wrong }), () => sdk.run("true", { ...there, ...wrong }), () => Volume.create("v", { ...there, ...wrong })]) {
    const problem = await problemOf(work());
    assert.deepEqual([problem.code, problem.details["field"]], ["field_unknown", "memoryMB"]);
  }
  assert.equal(fake.asked.length, 0);
  const box = await Sandbox.create(there);
  assert.equal((await problemOf(box.exec("true", { timeout: 5 } as object))).code, "field_unknown");
  assert.equal((await problemOf(box.files.read("a", { encoding: "x" } as object))).code, "field_unknown");
  assert.equal(fake.asked.length, 1);
});

test("a policy and network options are one policy", async () => {
  await using fake = await Fake.open((_, response) => json(response, 201, { id: "b" }));
  await Sandbox.create({
    server: fake.url,
    policy: { files: { deny: ["/x"] }, network: { mode: "off", allow: ["a.example"], resolve: { "a:1": "b:2" } } },
    allow: ["b.example"],
    resolve: { "c:3": "d:4" },
  });
  assert.deepEqual(JSON.parse(fake.asked[0]?.body ?? ""), {
    policy: { files: { deny: ["/x"] }, network: { allow: ["a.example", "b.example"], resolve: { "a:1": "b:2", "c:3": "d:4" } } },
  });
});

test("an address with a path is a prefix", async () => {
  await using fake = await Fake.open((_, response) => json(response, 200, info));
  await Volume.get("a/b ü", { server: `${fake.url}/base/`, apiKey: "cl_k" });
  assert.equal(fake.asked[0]?.url, "/base/v1/volumes/a%2Fb%20%C3%BC");
});
