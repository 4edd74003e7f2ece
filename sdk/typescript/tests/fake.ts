/** A server that answers as a test tells it to. */

import http from "node:http";
import type { AddressInfo } from "node:net";

export interface Asked {
  method: string;
  url: string;
  headers: http.IncomingHttpHeaders;
  body: string;
}

export type Answer = (asked: Asked, response: http.ServerResponse, number: number) => void;

export class Fake implements AsyncDisposable {
  readonly asked: Asked[] = [];
  readonly #server: http.Server;

  private constructor(answer: Answer) {
    this.#server = http.createServer((request, response) => {
      const pieces: Buffer[] = [];
      request.on("data", (piece: Buffer) => pieces.push(piece));
      request.on("end", () => {
        const asked = { method: request.method ?? "", url: request.url ?? "", headers: request.headers, body: Buffer.concat(pieces).toString() };
        this.asked.push(asked);
        answer(asked, response, this.asked.length);
      });
    });
  }

  static async open(answer: Answer): Promise<Fake> {
    const made = new Fake(answer);
    await new Promise<void>((resolve) => made.#server.listen(0, "127.0.0.1", resolve));
    return made;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((resolve) => this.#server.close(resolve));
  }
}

export function json(response: http.ServerResponse, status: number, body: unknown, headers: Record<string, string> = {}): void {
  response.writeHead(status, { "Content-Type": "application/json", "X-Request-ID": "r".repeat(20), ...headers });
  response.end(JSON.stringify(body));
}

export function refuse(response: http.ServerResponse, status: number, code: string, headers: Record<string, string> = {}): void {
  json(response, status, { error: { code, message: "no", hint: "try", request_id: "r".repeat(20), details: { a: 1 } } }, headers);
}
