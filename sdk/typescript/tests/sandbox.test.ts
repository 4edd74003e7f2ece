/** What vectors cannot say: things that happen at the same time, against a real server. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { get } from "node:http";
import { connect as connectSocket } from "node:net";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { promisify } from "node:util";

import { audit, ClocheError, events, followEvents, NotFound, PolicyRefused, Pool, run, runStream, Sandbox, SandboxLost, Template } from "../src/index.js";
import type { Process } from "../src/index.js";
import { Between } from "./between.js";

const url = process.env["CLOCHE_URL"] ?? "";
const PATIENCE = { timeout: 120_000 };
const unique = () => randomBytes(4).toString("hex");
let box: Sandbox;

before(async () => {
  box = await Sandbox.create({ timeoutS: 600 });
});
after(() => box[Symbol.asyncDispose]());

/** Wait for a state, never for a time. */
async function until(condition: () => Promise<boolean>): Promise<void> {
  const deadline = performance.now() + 60_000;
  while (!(await condition())) {
    assert.ok(performance.now() < deadline, "what was waited for did not come");
    await sleep(20);
  }
}

const isRunning = async (execution: string) => (await box.processes.list()).some((one) => one.id === execution && one.running);

test("a wrong key is refused", PATIENCE, async () => {
  await assert.rejects(Sandbox.list({ apiKey: "cl_" + "0".repeat(40) }), (problem) => problem instanceof PolicyRefused && problem.code === "key_refused");
});

test("await using deletes, also what has ended by itself", PATIENCE, async () => {
  let id: string;
  {
    await using mine = await Sandbox.create();
    id = mine.id;
    assert.equal((await mine.info()).phase, "running");
  }
  await assert.rejects(Sandbox.get(id), (problem) => problem instanceof SandboxLost || problem instanceof NotFound);
  await using gone = await Sandbox.create();
  await gone.delete();
});

test("an aborted exec ends the command and all it started", PATIENCE, async () => {
  const controller = new AbortController();
  const reason = new Error("enough");
  const mark = unique();
  const running = box.exec(`sleep 600 & echo ${mark} > started; wait`, { signal: controller.signal });
  running.catch(() => undefined);
  await until(() => box.files.exists("started"));
  controller.abort(reason);
  await assert.rejects(running, reason);
  await until(async () => !(await box.processes.list()).some((one) => one.running));
  assert.equal((await box.exec("pgrep -c sleep")).stdout, "0\n");
});

test("an abort while a command is being started leaves none", PATIENCE, async () => {
  const reason = new Error("enough");
  for (let round = 0; round < 10; round += 1) {
    const controller = new AbortController();
    const work = [box.exec("sleep 600", { signal: controller.signal }), box.start("sleep 600", { signal: controller.signal })];
    setTimeout(() => controller.abort(reason), round);
    for (const one of await Promise.allSettled(work)) {
      if (one.status === "rejected") assert.equal(one.reason, reason);
      else await (one.value as Process).kill();
    }
  }
  await until(async () => !(await box.processes.list()).some((one) => one.running));
});

test("a signal that is not used changes nothing", PATIENCE, async () => {
  const result = await box.exec(["cat"], { stdin: "in", signal: new AbortController().signal });
  assert.deepEqual([result.exitCode, result.stdout], [0, "in"]);
});

test("a slow command goes on in the background", PATIENCE, async () => {
  const result = await box.exec("echo first; read -t 600 < /dev/zero; sleep 600", { backgroundAfterS: 4 });
  assert.deepEqual([result.exitCode, result.ok, result.stdout, result.isolation.level], [null, false, "first\n", "namespaces"]);
  assert.ok(result.process !== null);
  const process = await box.processes.get(result.process);
  await process.kill();
  assert.equal((await process.wait()).signal, 9);
  const quick = await box.exec("exit 3", { backgroundAfterS: 60 });
  assert.deepEqual([quick.exitCode, quick.process], [3, null]);
});

test("check is for commands that have ended", PATIENCE, async () => {
  const result = await box.exec("sleep 600", { backgroundAfterS: 0.3, check: true });
  await (await box.processes.get(result.process ?? "")).kill();
});

test("leaving a stream early ends its command", PATIENCE, async () => {
  for await (const event of box.execStream("echo $$; sleep 600")) {
    assert.equal(event.type, "output");
    break;
  }
  await until(async () => !(await box.processes.list()).some((one) => one.running));
});

test("leaving what was started does not", PATIENCE, async () => {
  const process = await box.start("echo here; exec sleep 600");
  for await (const event of process.stream()) if (event.type === "output") break;
  assert.ok(await isRunning(process.id));
  await process.kill();
  await process.wait();
});

test("output comes while the command still runs", PATIENCE, async () => {
  const seen: string[] = [];
  for await (const event of box.execStream("echo ready; until [ -e go ]; do sleep 0.05; done; echo done")) {
    if (event.type !== "output") continue;
    seen.push(Buffer.from(event.data).toString());
    if (seen.join("").includes("ready") && !(await box.files.exists("go"))) await box.files.write("go", "");
  }
  assert.equal(seen.join(""), "ready\ndone\n");
});

test("writes arrive in their order", PATIENCE, async () => {
  const process = await box.start(["cat"]);
  const words = Array.from({ length: 50 }, (_, number) => `${number} `);
  await Promise.all([...words.map((word) => process.write(word)), process.closeStdin()]);
  assert.equal((await process.wait()).stdout, words.join(""));
});

test("a terminal", PATIENCE, async () => {
  const process = await box.start("stty size; read line; echo got $line", { pty: [100, 30] });
  await process.write("x\n");
  const { stdout, exitCode } = await process.wait();
  assert.match(stdout, /30 100/);
  assert.match(stdout, /got x/);
  assert.equal(exitCode, 0);
});

test("a stream whose connection breaks again and again loses nothing and repeats nothing", PATIENCE, async () => {
  await using between = await Between.open(url);
  let cuts = 0;
  between.cut = (seen) => (seen.path.endsWith("/stream") && cuts++ < 6 ? 1500 : undefined);
  const far = await Sandbox.get(box.id, { server: between.url, retries: 10 });
  let text = "";
  let last = -1;
  for await (const event of far.execStream("for i in $(seq 1 400); do echo line $i; [ $((i % 20)) = 0 ] && sleep 0.02; done; exit 6")) {
    assert.ok(event.seq >= last);
    last = event.seq;
    if (event.type === "output") text += Buffer.from(event.data).toString();
    if (event.type === "exited") assert.equal(event.result.exitCode, 6);
  }
  assert.equal(text, Array.from({ length: 400 }, (_, number) => `line ${number + 1}\n`).join(""));
  const asked = between.seen.filter((seen) => seen.path.endsWith("/stream"));
  assert.ok(asked.length > 1, "no connection was cut");
  assert.ok(asked.slice(1).every((seen) => seen.headers["last-event-id"] !== undefined));
});

test("what is created once is there once, although the answer was lost", PATIENCE, async () => {
  await using between = await Between.open(url);
  let cuts = 0;
  between.cut = (seen) => (seen.method === "POST" && cuts++ === 0 ? 0 : undefined);
  const mark = unique();
  await using made = await Sandbox.create({ server: between.url, labels: { mark } });
  assert.equal(between.seen.length, 2);
  assert.deepEqual((await Sandbox.list({ label: `mark=${mark}` })).map((info) => info.id), [made.id]);
});

test("a watch sees what happens after it has begun", PATIENCE, async () => {
  await box.files.makeDir("watched");
  const watch = await box.files.watch("watched");
  await box.files.write("watched/new", "x");
  for await (const event of watch) if (event.path === "new") break;
});

test("a big file of any bytes, in pieces", PATIENCE, async () => {
  const data = randomBytes(3 << 20);
  await box.files.write("big", data);
  const pieces: Uint8Array[] = [];
  for await (const piece of await box.files.read("big", { format: "stream" })) pieces.push(piece);
  assert.ok(pieces.length > 1);
  assert.ok(Buffer.concat(pieces).equals(data));
  assert.ok(Buffer.from(await box.files.read("big", { format: "bytes" })).equals(data));
});

test("a tree there and back", PATIENCE, async () => {
  await box.files.write("tree/a", "1");
  const archive = await box.files.download("tree");
  assert.equal(await box.files.upload("copy", archive), 1);
  assert.equal(await box.files.read("copy/a"), "1");
});

test("code that is interrupted leaves its context alive", PATIENCE, async () => {
  const context = await box.contexts.create();
  await context.run("x = 1");
  const running = context.run("open('looping', 'w').close()\nimport time\nwhile True: time.sleep(0.01)");
  await until(() => box.files.exists("looping"));
  await context.interrupt();
  assert.equal((await running).error?.name, "KeyboardInterrupt");
  assert.equal((await context.run("x")).text, "1");
  await context.delete();
});

test("what code prints is told while it runs", PATIENCE, async () => {
  const heard: string[] = [];
  const result = await box.runCode("import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('heard'): time.sleep(0.01)\nprint('over'); 1", {
    onStdout: async (text) => {
      heard.push(text);
      if (text.includes("ready")) await box.files.write("heard", "");
    },
    onResult: (shown) => heard.push(String(shown["text/plain"])),
  });
  assert.deepEqual([heard.join(""), result.text], ["ready\nover\n1", "1"]);
});

test("a callback that throws interrupts the code, and so does leaving its stream", PATIENCE, async () => {
  const reason = new Error("enough");
  const loop = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)";
  await assert.rejects(
    box.runCode(loop, {
      onStdout: () => {
        throw reason;
      },
    }),
    reason,
  );
  for await (const event of box.runCodeStream(loop)) if (event.type === "output") break;
  assert.equal((await box.runCode("6 * 7")).text, "42");
});

test("a token opens one sandbox for what it says", PATIENCE, async () => {
  const { token } = await box.token({ scopes: ["exec", "sandboxes"], ttlS: 300 });
  const mine = await Sandbox.get(box.id, { apiKey: token });
  assert.equal((await mine.exec("echo in")).stdout, "in\n");
  await assert.rejects(mine.files.read("x"), (problem) => problem instanceof PolicyRefused && problem.code === "scope_missing");
  await assert.rejects(Sandbox.create({ apiKey: token }), PolicyRefused);
});

test("who is asked decides", PATIENCE, async () => {
  const asked: string[] = [];
  const fetching = (host: string) => ["python3", "-c", `import urllib.request as u\ntry: u.urlopen('http://${host}/', timeout=30)\nexcept Exception as e: print('refused')`];
  await using careful = await Sandbox.create({
    ask: (question) => {
      asked.push(`${question.host}:${question.port}`);
      if (question.host.startsWith("throws")) throw new Error("no idea");
      return question.host.startsWith("odd") ? ("perhaps" as "deny") : "deny";
    },
  });
  assert.equal((await careful.policy.get()).network.mode, "rules");
  for (const host of ["asked.example", "throws.example", "odd.example"]) {
    const result = await careful.exec(fetching(host));
    assert.equal(result.stdout, "refused\n");
    assert.ok(result.denials.some((denial) => denial.target.includes(host)), host);
  }
  assert.deepEqual(asked, ["asked.example:80", "throws.example:80", "odd.example:80"]);
});

test("a one-shot that is aborted leaves no sandbox", PATIENCE, async () => {
  const mark = unique();
  const controller = new AbortController();
  const reason = new Error("enough");
  const work = (async () => {
    for await (const event of runStream("echo up; sleep 600", { labels: { mark }, signal: controller.signal })) {
      if (event.type === "output") controller.abort(reason);
    }
  })();
  await assert.rejects(work, reason);
  await until(async () => (await Sandbox.list({ label: `mark=${mark}` })).length === 0);
});

test("a one-shot that is told to stay", PATIENCE, async () => {
  const result = await run("echo kept > /workspace/x", { detach: true });
  assert.ok(result.sandbox !== null);
  await using stayed = await Sandbox.get(result.sandbox);
  assert.equal(await stayed.files.read("x"), "kept\n");
});

test("the journal, as a list and as it grows", PATIENCE, async () => {
  await using between = await Between.open(url);
  let cuts = 0;
  between.cut = (seen) => (seen.path.endsWith("/stream") && cuts++ < 1 ? 400 : undefined);
  const before = (await events()).at(-1)?.seq ?? 0;
  const controller = new AbortController();
  const kinds: string[] = [];
  const following = (async () => {
    for await (const event of followEvents({ after: before, server: between.url, signal: controller.signal })) {
      kinds.push(`${event.seq}`);
      if (kinds.length >= 6) return;
    }
  })();
  for (let round = 0; round < 3; round += 1) await (await Sandbox.create()).delete();
  await following;
  assert.equal(new Set(kinds).size, kinds.length);
  assert.deepEqual(kinds, (await events({ after: before })).slice(0, 6).map((event) => `${event.seq}`));
});

test("the audit log, in pages and by what is asked for", PATIENCE, async () => {
  await assert.rejects(audit({ kind: "nonsense" }), (problem) => problem instanceof ClocheError && problem.code === "argument_invalid");
  await using made = await Sandbox.create();
  const lines = await audit({ sandbox: made.id, kind: ["created", "deleted"] });
  assert.deepEqual(lines.map((line) => [line.kind, line.sandbox]), [["created", made.id]]);
  assert.match(lines[0]?.actor ?? "", /./);
});

test("a pool: waiting for it, claiming, and its end", PATIENCE, async () => {
  const name = `pool-${unique()}`;
  {
    await using pool = await Pool.create(new Template(name, { env: { FROM: "template" }, timeoutS: 60 }), { size: 1 });
    await assert.rejects(pool.waitReady(50, { timeoutS: 0.1 }), (problem) => problem instanceof ClocheError && problem.code === "wait_timeout");
    assert.ok((await pool.waitReady()).ready >= 1);
    await using claimed = await pool.claim({ env: { A: "1" }, files: { "/workspace/f": "text" }, labels: { a_b: "c" } });
    assert.equal(claimed.claim?.warm, true);
    assert.equal(claimed.claim?.spec.labels["a_b"], "c");
    assert.equal((await claimed.exec("echo $FROM $A; cat f")).stdout, "template 1\ntext");
    assert.equal((await Template.get(name)).spec.env["FROM"], "template");
    await assert.rejects(Template.delete(name), (problem) => problem instanceof ClocheError && problem.code === "template_in_use");
  }
  await Template.delete(name);
  assert.ok(!(await Template.list()).some((one) => one.spec.name === name));
  await assert.rejects(Pool.get(name), NotFound);
});

// Echoes what comes, and says how much it was when the other side has ended.
const ECHO = `
import socket
server = socket.create_server(("127.0.0.1", 7000))
open("listening", "w").close()
while True:
    peer, _ = server.accept()
    total = 0
    while data := peer.recv(65536):
        total += len(data)
        peer.sendall(data)
    peer.sendall(b"|%d" % total)
    peer.close()
`;

test("ports: nobody there, then an echo, with ends of their own", PATIENCE, async () => {
  await using inner = await Sandbox.create({ timeoutS: 300 });
  await assert.rejects(inner.connect(7000), (problem) => problem instanceof ClocheError && problem.code === "port_closed" && problem.requestId !== null);
  await assert.rejects(inner.connect(99999), (problem) => problem instanceof ClocheError && problem.code === "argument_invalid");
  assert.deepEqual(await inner.ports(), []);
  await inner.start(["python3", "-c", ECHO]);
  await until(() => inner.files.exists("listening"));
  assert.deepEqual(await inner.ports(), [{ port: 7000, address: "127.0.0.1" }]);

  const sent = randomBytes(300_000);
  const tunnel = await inner.connect(7000);
  tunnel.end(sent);
  const pieces: Buffer[] = [];
  for await (const piece of tunnel) pieces.push(piece as Buffer);
  assert.ok(Buffer.concat(pieces).equals(Buffer.concat([sent, Buffer.from("|300000")])));

  await using forward = await inner.forward(7000);
  const talk = async (text: string) => {
    const socket = connectSocket({ port: forward.port, host: "127.0.0.1", allowHalfOpen: true });
    socket.end(text);
    let heard = "";
    for await (const piece of socket) heard += String(piece);
    return heard;
  };
  assert.deepEqual(await Promise.all([talk("one"), talk("three")]), ["one|3", "three|5"]);
  await assert.rejects(inner.forward(7000, { localPort: forward.port }), (problem) => problem instanceof ClocheError && problem.code === "address_unavailable");

  await using open = await inner.connect(7000);
  open.write("x");
  assert.equal(String((await once(open, "data"))[0]), "x");
  const failed = once(open, "error");
  await inner.delete();
  assert.ok((await failed)[0] instanceof ClocheError);
});

test("a preview link needs no key", PATIENCE, async () => {
  await using inner = await Sandbox.create({ timeoutS: 300 });
  await inner.files.write("index.html", "a page");
  await inner.start(["python3", "-m", "http.server", "8000"]);
  await until(async () => (await inner.ports()).some((one) => one.port === 8000));
  const link = new URL(await inner.url(8000, { ttlS: 60 }));
  const answer = await new Promise<string>((resolve, reject) => {
    const headers = { Host: link.host };
    const ask = get({ host: "127.0.0.1", port: link.port, path: link.pathname + link.search, headers }, (response) => {
      let text = `${response.statusCode} ${response.headers.location ?? ""} `;
      response.on("data", (piece) => (text += String(piece)));
      response.on("end", () => resolve(text));
    });
    ask.on("error", reject);
  });
  assert.match(answer, /a page|^30\d/);
  await assert.rejects(inner.url(8000, { ttlS: -1 }), (problem) => problem instanceof ClocheError && problem.code === "limit_invalid");
});

test("many at once", PATIENCE, async () => {
  const results = await Promise.all(Array.from({ length: 20 }, (_, number) => box.exec(["echo", `${number}`])));
  assert.deepEqual(results.map((result) => result.stdout.trim()), results.map((_, number) => `${number}`));
});

test("a program ends when its work is done", PATIENCE, async () => {
  const program = `const { run, Sandbox } = await import(${JSON.stringify(new URL("../src/index.js", import.meta.url).href)});
    console.log((await run("echo over")).stdout.trim()); await Sandbox.list();`;
  const { stdout } = await promisify(execFile)(process.execPath, ["--input-type=module", "-e", program], { timeout: 20_000 });
  assert.equal(stdout, "over\n");
});
