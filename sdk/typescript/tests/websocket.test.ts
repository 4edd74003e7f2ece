import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import http from "node:http";
import type { AddressInfo } from "node:net";
import { Duplex } from "node:stream";
import { test } from "node:test";

import { ClocheError, Sandbox, Tunnel } from "../src/index.js";
import { frame } from "../src/websocket.js";

/** A pair of streams, each of which reads what the other writes. */
function pair(): [Duplex, Duplex] {
  const make = (other: () => Duplex): Duplex =>
    new Duplex({
      read() {},
      write(data, _, done) {
        other().push(data);
        done();
      },
      final(done) {
        other().push(null);
        done();
      },
    });
  const one: Duplex = make(() => two);
  const two: Duplex = make(() => one);
  return [one, two];
}

/** A frame as servers send it: without a mask. */
function told(kind: number, data: Uint8Array, last = true): Buffer {
  const size = data.length;
  const head = size < 126 ? [size] : size < 65536 ? [126, size >> 8, size & 255] : [127, 0, 0, 0, 0, size >>> 24, (size >> 16) & 255, (size >> 8) & 255, size & 255];
  return Buffer.concat([Buffer.from([(last ? 0x80 : 0) | kind, ...head]), data]);
}

async function heard(tunnel: Tunnel): Promise<string> {
  let text = "";
  for await (const piece of tunnel) text += String(piece);
  return text;
}

const END = told(2, Buffer.alloc(0));
const big = Buffer.alloc(70_000, "b");
const STREAM = Buffer.concat([told(2, Buffer.from("a")), told(2, Buffer.alloc(300, "x")), told(9, Buffer.from("?")), told(2, Buffer.from("fr"), false), told(0, Buffer.from("ag")), told(2, big), END]);
const TEXT = "a" + "x".repeat(300) + "frag" + String(big);

test("messages in any pieces, and a ping between them", async () => {
  for (const cut of [1, 2, 3, 5, 7, 100, 310, 5000, STREAM.length]) {
    const [here, there] = pair();
    const tunnel = new Tunnel(here, STREAM.subarray(0, cut));
    const said: Buffer[] = [];
    there.on("data", (piece: Buffer) => said.push(piece));
    for (let at = cut; at < STREAM.length; at += cut) there.write(STREAM.subarray(at, at + cut));
    assert.equal(await heard(tunnel), TEXT, `cut every ${cut}`);
    assert.equal((Buffer.concat(said)[0] ?? 0) & 0x0f, 10, "a ping is answered");
    await tunnel.close();
  }
});

test("what is written is masked and whole, whatever its size", async () => {
  for (const size of [0, 1, 125, 126, 65535, 65536]) {
    const data = Buffer.alloc(size, "z");
    const made = frame(2, data);
    const head = size < 126 ? 2 : size < 65536 ? 4 : 10;
    assert.equal(made.length, head + 4 + size);
    assert.ok(((made[1] ?? 0) & 0x80) !== 0);
    const mask = made.subarray(head, head + 4);
    assert.ok(made.subarray(head + 4).every((byte, at) => (byte ^ (mask[at & 3] ?? 0)) === 0x7a));
  }
});

test("a close with a reason is an error of that code", async () => {
  const [here, there] = pair();
  const tunnel = new Tunnel(here, Buffer.alloc(0));
  there.write(told(8, Buffer.concat([Buffer.from([(4410 >> 8) & 255, 4410 & 255]), Buffer.from("sandbox_lost")])));
  await assert.rejects(heard(tunnel), (problem) => problem instanceof ClocheError && problem.code === "sandbox_lost" && problem.name === "SandboxLost");
});

test("a connection that breaks is connection_lost, and one that was closed is not", async () => {
  const [here, there] = pair();
  const tunnel = new Tunnel(here, Buffer.alloc(0));
  here.destroy();
  await assert.rejects(heard(tunnel), (problem) => problem instanceof ClocheError && problem.code === "connection_lost");
  there.destroy();
  const [near, far] = pair();
  const polite = new Tunnel(near, END);
  assert.equal(await heard(polite), "");
  far.write(told(8, Buffer.from([0x03, 0xe8])));
  await polite.close();
  await polite.close();
});

test("a server that accepts wrongly is none", async () => {
  const server = http.createServer((_, response) => response.writeHead(201, { "Content-Type": "application/json" }).end('{"id": "b"}'));
  server.on("upgrade", (_, socket) => {
    const accept = createHash("sha1").update("wrong").digest("base64");
    socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const box = await Sandbox.create({ server: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, apiKey: "cl_k" });
  await assert.rejects(box.connect(80), (problem) => problem instanceof ClocheError && problem.code === "server_unavailable");
  server.closeAllConnections();
  server.close();
});
