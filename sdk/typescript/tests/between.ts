/** A server between the SDK and the real one: it hands everything on, remembers what was asked, and can cut connections. */

import http from "node:http";
import type { AddressInfo } from "node:net";

export interface Seen {
  method: string;
  path: string;
  query: Record<string, string>;
  headers: http.IncomingHttpHeaders;
  body: Buffer;
}

export class Between implements AsyncDisposable {
  readonly seen: Seen[] = [];
  /** Cut the answer once it has let this many bytes pass; told of the request. undefined: let it pass. */
  cut: (seen: Seen) => number | undefined = () => undefined;
  readonly #server: http.Server;

  private constructor(readonly target: URL) {
    this.#server = http.createServer((request, response) => void this.#hand(request, response));
  }

  static async open(target: string): Promise<Between> {
    const made = new Between(new URL(target));
    await new Promise<void>((resolve) => made.#server.listen(0, "127.0.0.1", resolve));
    return made;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  async #hand(request: http.IncomingMessage, response: http.ServerResponse): Promise<void> {
    const pieces: Buffer[] = [];
    for await (const piece of request) pieces.push(piece as Buffer);
    const url = new URL(request.url ?? "", "http://x");
    const seen = {
      method: request.method ?? "",
      path: url.pathname,
      query: Object.fromEntries(url.searchParams),
      headers: request.headers,
      body: Buffer.concat(pieces),
    };
    this.seen.push(seen);
    const headers = { ...request.headers, host: this.target.host };
    const onward = http.request(new URL(request.url ?? "", this.target), { method: seen.method, headers, agent: false });
    const left = this.cut(seen);
    let passed = 0;
    onward.on("response", (answer) => {
      if (left === 0) return void response.socket?.destroy();
      response.writeHead(answer.statusCode ?? 502, answer.headers);
      response.flushHeaders();
      answer.on("data", (piece: Buffer) => {
        if (left !== undefined && passed >= left) return;
        const keep = left === undefined ? piece : piece.subarray(0, left - passed);
        passed += keep.length;
        const over = left !== undefined && passed >= left;
        response.write(keep, () => void (over && response.socket?.destroy()));
      });
      answer.on("end", () => void (left !== undefined && passed >= left ? undefined : response.end()));
      answer.on("error", () => response.destroy());
    });
    onward.on("error", () => response.destroy());
    response.on("close", () => onward.destroy());
    onward.end(seen.body);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((resolve) => this.#server.close(resolve));
  }
}
