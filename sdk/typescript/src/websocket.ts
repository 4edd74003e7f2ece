/**
 * As much of a WebSocket client as a tunnel needs (RFC 6455): binary messages both ways, as a Node stream. Node 20 has no WebSocket of its
 * own, and a stream with back-pressure is what the callers want. Pieces of messages are passed on as they come: where a message ends means
 * nothing here, but an empty one is the end of its direction.
 */

import { createHash, randomBytes } from "node:crypto";
import { Duplex } from "node:stream";

import { codes, type ErrorCode } from "./generated.js";
import { error } from "./errors.js";

const MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const BINARY = 2;
const CLOSE = 8;
const PING = 9;
const PONG = 10;
const NORMAL = Uint8Array.of(0x03, 0xe8); // 1000
const LINGER_MS = 2000;

/** The headers of an upgrade, and what must come back in `Sec-WebSocket-Accept`. */
export function handshake(): { headers: Record<string, string>; accept: string } {
  const key = randomBytes(16).toString("base64");
  const accept = createHash("sha1").update(key + MAGIC).digest("base64");
  return { headers: { Connection: "Upgrade", Upgrade: "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key }, accept };
}

/** A frame of a client: always masked. */
export function frame(kind: number, data: Uint8Array): Buffer {
  const size = data.length;
  const head = size < 126 ? Buffer.alloc(2) : size < 65536 ? Buffer.alloc(4) : Buffer.alloc(10);
  head[0] = 0x80 | kind;
  if (size < 126) head[1] = 0x80 | size;
  else if (size < 65536) {
    head[1] = 0x80 | 126;
    head.writeUInt16BE(size, 2);
  } else {
    head[1] = 0x80 | 127;
    head.writeBigUInt64BE(BigInt(size), 2);
  }
  const mask = randomBytes(4);
  const masked = Buffer.alloc(size);
  for (let at = 0; at < size; at += 1) masked[at] = (data[at] as number) ^ (mask[at & 3] as number);
  return Buffer.concat([head, mask, masked]);
}

interface Head {
  kind: number;
  last: boolean;
  /** Bytes of the payload that have not come yet. */
  left: number;
}

/** A connection to a TCP port inside a sandbox: bytes both ways, each direction with an end of its own. */
export class Tunnel extends Duplex implements AsyncDisposable {
  readonly #socket: Duplex;
  #bytes: Buffer = Buffer.alloc(0);
  #head: Head | undefined;
  #control: Buffer[] = [];
  #empty = true;
  #ended = false;
  #closed = false;

  /** @internal */
  constructor(socket: Duplex, first: Buffer) {
    super({ allowHalfOpen: true });
    this.#socket = socket;
    socket.on("data", (data: Buffer) => this.#take(data));
    socket.on("error", (problem) => this.destroy(broken(problem.message)));
    socket.on("close", () => {
      if (!this.#closed) this.destroy(broken("it was closed"));
    });
    if (first.length > 0) this.#take(first);
  }

  #take(data: Buffer): void {
    this.#bytes = this.#bytes.length === 0 ? data : Buffer.concat([this.#bytes, data]);
    while (!this.destroyed && this.#step());
  }

  /** One head, or one piece of a payload; false where more must come first. */
  #step(): boolean {
    if (this.#head === undefined) {
      const read = headOf(this.#bytes);
      if (read === undefined) return false;
      this.#bytes = this.#bytes.subarray(read.size);
      this.#head = read;
      if (this.#head.kind === BINARY) this.#empty = true;
    }
    const head = this.#head;
    const piece = this.#bytes.subarray(0, head.left);
    if (piece.length === 0 && head.left > 0) return false;
    this.#bytes = this.#bytes.subarray(piece.length);
    head.left -= piece.length;
    if (head.kind >= CLOSE) this.#control.push(piece);
    else this.#data(piece, head);
    if (head.left === 0) {
      this.#head = undefined;
      if (head.kind >= CLOSE) this.#obey(head.kind);
    }
    return true;
  }

  #data(piece: Buffer, head: Head): void {
    if (piece.length > 0) {
      this.#empty = false;
      if (!this.#ended && !this.push(piece)) this.#socket.pause();
    } else if (head.last && this.#empty) this.#endReading();
  }

  #endReading(): void {
    if (!this.#ended) this.push(null);
    this.#ended = true;
  }

  #obey(kind: number): void {
    const said = Buffer.concat(this.#control);
    this.#control = [];
    if (kind === PING) this.#socket.write(frame(PONG, said));
    if (kind !== CLOSE) return;
    this.#leave(said.subarray(0, 2));
    const code = said.length >= 2 ? said.readUInt16BE(0) : 1005;
    const reason = said.subarray(2).toString("utf8");
    if (code === 1000) return this.#endReading();
    const known = Object.hasOwn(codes, reason) ? (reason as ErrorCode) : "connection_lost";
    this.destroy(error(known, `the tunnel was closed by the server: ${reason || code}`));
  }

  #leave(code: Uint8Array): void {
    if (this.#closed) return;
    this.#closed = true;
    this.#socket.end(frame(CLOSE, code));
  }

  override _read(): void {
    this.#socket.resume();
  }

  override _write(data: Buffer, _encoding: BufferEncoding, done: (problem?: Error | null) => void): void {
    if (this.#closed) return done(broken("it was closed"));
    if (data.length === 0) return done();
    this.#socket.write(frame(BINARY, data), done);
    return undefined;
  }

  /** No more will be written; reading goes on. */
  override _final(done: (problem?: Error | null) => void): void {
    if (this.#closed) return done();
    this.#socket.write(frame(BINARY, Buffer.alloc(0)), () => done());
    return undefined;
  }

  override _destroy(problem: Error | null, done: (problem: Error | null) => void): void {
    this.#leave(NORMAL);
    this.#socket.resume();
    const impatient = setTimeout(() => this.#socket.destroy(), LINGER_MS); // for the server's own word of farewell
    impatient.unref();
    this.#socket.once("close", () => clearTimeout(impatient));
    done(problem);
  }

  /** Leave. Twice is harmless. */
  async close(): Promise<void> {
    if (this.destroyed && this.closed) return;
    const gone = new Promise((resolve) => this.once("close", resolve));
    this.destroy();
    await gone;
  }

  override async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

function headOf(bytes: Buffer): (Head & { size: number }) | undefined {
  const [first, second] = bytes;
  if (first === undefined || second === undefined) return undefined;
  const short = second & 0x7f;
  const size = short < 126 ? 2 : short === 126 ? 4 : 10;
  if (bytes.length < size) return undefined;
  const left = short < 126 ? short : short === 126 ? bytes.readUInt16BE(2) : Number(bytes.readBigUInt64BE(2));
  return { kind: first & 0x0f, last: (first & 0x80) !== 0, left, size };
}

function broken(why: string): Error {
  return error("connection_lost", `the tunnel broke: ${why}`);
}
